"""The plan of a seed: the settings of the run, its processes, and how often what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from rlbuffer.config.batcher import BatcherConfig
from simulation.mutations import Mutation

CONSTANTS: dict[tuple[str, str], float] = {
    ("rlbuffer.daemon.leadership", "LEADER_POLL_SECONDS"): 0.15,
    ("rlbuffer.daemon.leadership", "TELEMETRY_SECONDS"): 3.0,
    ("rlbuffer.daemon.memory_watch", "TELEMETRY_SECONDS"): 3.0,
    ("rlbuffer.daemon.reporter", "TELEMETRY_SECONDS"): 3.0,
    ("rlbuffer.daemon.pending", "POOL_PAGE"): 5,
    ("rlbuffer.daemon.strays", "PAUSE_SECONDS"): 0.1,
    ("rlbuffer.daemon.strays", "LIFE_SECONDS"): 0.2,
    ("rlbuffer.daemon.strays", "REST_SECONDS"): 0.3,
    ("rlbuffer.client.writer", "TICKET_SECONDS"): 3.0,
    ("rlbuffer.client.reader", "READER_BLOCK_SECONDS"): 1.0,
    ("rlbuffer.client.reader", "HEARTBEAT_SECONDS"): 0.8,
    ("rlbuffer.client.ranks", "LOST_SECONDS"): 2.0,
    ("rlbuffer.process.heartbeat", "BEAT_SECONDS"): 0.4,
    ("rlbuffer.scorer.heartbeat", "CLAIM_SECONDS"): 1.2,
    ("rlbuffer.scorer.loop", "CLAIM_SECONDS"): 1.2,
    ("rlbuffer.scorer.loop", "RETRY_SECONDS"): 0.3,
    ("rlbuffer.scorer.loop", "ENTRIES_PER_READ"): 5,
    ("rlbuffer.store.pool", "DROP_ENTRIES"): 2,
    ("rlbuffer.store.worker", "_LONGEST_MS"): 3000,
    ("rlbuffer.store.producer", "BATCH_PUSHES"): 3,
    ("rlbuffer.store.member", "FORGOTTEN_AFTER_MS"): 3500,
    ("rlbuffer.client.producer", "SPOOL_PUSHES"): 3,
    ("rlbuffer.store.leader", "SWEEP"): 4,
    ("rlbuffer.daemon.watches", "FORGET_SECONDS"): 0.3,
    ("rlbuffer.store.leader", "OPEN_KEPT_MS"): 600,
    ("rlbuffer.store.gateway", "MOST_CALLS"): 5,
    ("rlbuffer.store.gateway", "MAX_SEQUENCES"): 2,
    ("rlbuffer.store.gateway", "_GRACE_MS"): 500,
    ("rlbuffer.store.gateway", "_LONGEST_IDLE_MS"): 2500,
    ("rlbuffer.store.gateway", "ABANDONED_AT_ONCE"): 2,
    ("rlbuffer.store.gateway", "SHARE_SECONDS"): 0.1,
}
"""Times and sizes that are made smaller, so that what they are for happens within seconds and with few groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One seed's settings."""

    seed: int
    profile: str
    faults: Mapping[str, float]
    slow: float
    """Share of round trips that take up to 200 ms."""
    config: BatcherConfig
    fault_seconds: float
    """Virtual time in which things go wrong."""
    lease_seconds: float
    patience_seconds: float
    batchers: int
    writers: int
    world_sizes: tuple[int, ...]
    train_seconds: float
    sample_seconds: float
    checkpoint_every: int
    tickets: bool
    """Writers take tickets; else they number their groups themselves."""
    parts: float
    """Share of groups that come in parts."""
    careless: float
    """Share of groups of which a part is pushed twice, or comes late."""
    small: float
    """Share of groups of which a part never comes."""
    operator: bool
    """Somebody drops pending groups by hand."""
    reset: bool
    """The run is deleted and begun again."""
    full: bool
    """The server is at its memory limit for a while."""
    rollback: bool
    """The server loses acknowledged writes."""
    releaser: bool
    """Somebody takes groups back that wait for another use."""
    late: float
    """Seconds after which batchers begin."""
    taken_back: float
    """Time at which the operator makes steps void, as a share of the time of faults; 0: not at all."""
    damages: tuple[float, ...]
    """Times at which a payload is damaged, as shares of the time of faults."""
    refusal: str
    """The error with which the server refuses writes for a while (LOADING: everything); "" for none."""
    tombstone_seconds: float
    clock_steps: tuple[tuple[float, float], ...]
    """Times at which the server's clock is set, as shares of the time of faults, and by how many seconds: nobody did
    anything for so long, or somebody has set it; below 0 it goes back."""
    ends: int
    """Tickets that each env has in all, after which the run must end; 0: there is no end."""
    scorers: int
    """Processes that add what some of the groups need before they can train; 0: no group needs anything."""
    memory: bool = field(default=False)
    """The server's memory is short for a while: trained steps retire before a checkpoint holds them."""
    planning: float = field(default=0.0)
    """Share of plans, and of looks at their payloads, that take about as long as a lease."""
    adapters: tuple[str, ...] = field(default=())
    """Adapters whose rollouts the writers sample, "" being all weights; () for all weights alone."""
    stops: bool = field(default=False)
    """An operator stops batchers, and a function of the user's own fails."""
    failover: str = field(default="")
    """Answer of a demoted server to those who are connected to it; "" for no failover."""
    too_large: float = field(default=0.0)
    """Share of groups that are larger than the server takes."""
    strangers: bool = field(default=False)
    """Somebody writes where workers may, without the client."""
    said: bool = field(default=False)
    """People and producers say that envs are done, and take it back; in the end all are."""
    together: bool = field(default=False)
    """True when the end of the trainer ends the server, too: it is started again while the next one trains steps
    again."""
    batches: bool = field(default=False)
    """Writers push several groups at once."""
    left: bool = field(default=False)
    """True when the meta of a run that is deleted goes first, and the rest a while later."""
    spread: bool = field(default=False)
    """Payloads lie on shards of their own, where no script reaches them."""
    away: float = field(default=0.0)
    """Seconds for which no trainer is there: it ends, and the server is started again soon after."""
    own: bool = field(default=False)
    """The trainer's loop is somebody's own: the ranks compare nothing before they exchange gradients. What the server
    loses, it loses while one rank has a step and another has not."""
    beside: bool = field(default=False)
    """Versions are on their way while the next step trains, which is acknowledged behind them."""
    gateways: int = field(default=0)
    """Processes of gateways, each of which serves every agent."""
    agents: int = field(default=0)
    """Agents that sample through them."""
    clocks: tuple[tuple[str, float, float, float], ...] = field(default=())
    """Clocks that are far off for a while: whose ("server", or the first word of processes' names), from when and until
    when, as shares of the time of faults, and by how many seconds; below 0 it is behind."""
    stream: bool = field(default=False)
    """The trainer packs for itself: its run is a stream."""
    mutation: Mutation | None = field(default=None)

    def constants(self) -> dict[tuple[str, str], float]:
        """Values in the real modules that this seed replaces."""
        return CONSTANTS | {
            ("rlbuffer.store.session", "MINIMUM_TOMBSTONE_MS"): round(1000 * self.tombstone_seconds),
            ("rlbuffer.store.viewer", "MINIMUM_TOMBSTONE_MS"): round(1000 * self.tombstone_seconds),
            ("rlbuffer.batcher.pool", "TOMBSTONE_SECONDS"): self.tombstone_seconds,
            ("rlbuffer.config.batcher", "REMEMBERED_STEPS"): 3,
        }

    def may_die(self, name: str) -> bool:
        return name.split(" ")[0] in ("batcher", "writer", "scorer", "rank", "gateway")

    def stop_seconds(self, dice: random.Random) -> float:
        """Mostly longer than a lease."""
        low, high = dice.choice(((0.3, 0.95), (0.95, 1.4), (0.95, 1.4), (1.4, 3.0)))
        return self.lease_seconds * dice.uniform(low, high)

    def broken(self, text: str) -> str:
        """A Lua file as it is, or as the mutation leaves it."""
        return text if self.mutation is None else self.mutation.applied(text)

    def describe(self) -> str:
        left_out = ("seed", "faults", "config", "mutation")
        on = {part.name: getattr(self, part.name) for part in fields(self) if part.name not in left_out}
        config = self.config
        closed = config.step_groups or config.step_rollouts or "capacity"
        return (
            f"step {closed}, lookahead {config.lookahead}, max_age {config.max_age}, max_uses {config.max_uses}, "
            f"{', '.join(f'{name} {value}' for name, value in on.items() if value)}"
        )
