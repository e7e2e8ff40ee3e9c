"""The plan that a seed draws before anything runs: settings of the run, its processes, and the rates of faults."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlbuffer.config.batcher import BatcherConfig
from simulation.mutations import Mutation

FAULTS = ("lost request", "lost reply", "late", "twice", "killed", "stopped", "restart", "cut")

PROFILES: dict[str, Mapping[str, float]] = {
    "calm": {},
    "network": {"lost request": 0.01, "lost reply": 0.015, "late": 0.006, "twice": 0.03},
    "deaths": {"killed": 0.01, "lost reply": 0.005},
    "late": {"late": 0.03, "lost reply": 0.005},
    "stops": {"stopped": 0.004, "lost reply": 0.003, "late": 0.002},
    "halts": {"stopped": 0.02},
    "server": {"restart": 0.002, "cut": 0.002, "lost reply": 0.004},
    "all": {
        "lost request": 0.004,
        "lost reply": 0.006,
        "late": 0.003,
        "twice": 0.012,
        "killed": 0.003,
        "stopped": 0.002,
        "restart": 0.0005,
        "cut": 0.001,
    },
}
"""Chance of each fault at a round trip."""

REFUSALS = (
    "MISCONF Errors writing to the AOF file: No space left on device",
    "READONLY You can't write against a read only replica.",
    "LOADING Redis is loading the dataset in memory",
    "CLUSTERDOWN The cluster is down",
)

DEMOTED = ("READONLY", "MOVED 1234 127.0.0.1:7001", "MASTERDOWN Link with MASTER is down and no primary is known")
"""Refusals of a server that is no primary any more."""

ROLLBACKS = 0.2
"""Share of seeds in which the server forgets what came after its last fsync."""

CALMER = 0.6
"""Share of those, and of seeds in which steps are made void or ends are said, in which less goes wrong otherwise: where
hardly a step is trained there is little to lose, and little to end."""
CALMER_RATE = 0.15
"""Factor on the other faults in those seeds."""

CLOCK_STEPS = 0.2
"""Share of seeds in which the server's clock is set forward."""
CLOCK_STEP_SECONDS = (1.0, 30.0, 3700.0, 8 * 86_400.0)
"""Seconds that it is set forward: longer than a lease, a tombstone of this simulation, an hour, a week."""
CLOCK_STEPS_BACK = 0.1
"""Share of seeds in which the server's clock is set back."""
CLOCK_STEP_BACK_SECONDS = (-0.2, -1.0, -4.0)
"""Seconds that it is set back: shorter and longer than a lease. Timed events wait as much longer."""

ODD = {
    "memory": 0.1,
    "planning": 0.12,
    "adapters": 0.1,
    "backups": 0.05,
    "stops": 0.1,
    "strangers": 0.08,
    "failover": 0.1,
    "too_large": 0.08,
    "said": 0.12,
    "together": 0.15,
}
"""Circumstance that is not in every seed -> its share of the seeds."""

LATER = ("said", "together")
"""Circumstances that are drawn apart, so that the other draws of a seed stay what they were."""

SHOWN_DRAWS = (
    *("tickets", "operator", "releaser", "reset", "full", "rollback", "taken_back", "damages", "refusal"),
    *(
        "memory",
        "planning",
        "adapters",
        "backups",
        "stops",
        "strangers",
        "failover",
        "too_large",
        "clock_steps",
        "ends",
        "said",
        "together",
        "left",
    ),
)
"""Draws that a plan names when they are on."""

CONSTANTS: dict[tuple[str, str], float] = {
    ("rlbuffer.daemon.leadership", "LEADER_POLL_SECONDS"): 0.15,
    ("rlbuffer.daemon.leadership", "TELEMETRY_SECONDS"): 3.0,
    ("rlbuffer.daemon.memory_watch", "TELEMETRY_SECONDS"): 3.0,
    ("rlbuffer.daemon.teller", "TELEMETRY_SECONDS"): 3.0,
    ("rlbuffer.daemon.pending", "POOL_PAGE"): 5,
    ("rlbuffer.client.writer", "TICKET_SECONDS"): 3.0,
    ("rlbuffer.client.reader", "READER_BLOCK_SECONDS"): 1.0,
    ("rlbuffer.client.reader", "HEARTBEAT_SECONDS"): 0.8,
    ("rlbuffer.process.heartbeat", "BEAT_SECONDS"): 0.4,
    ("rlbuffer.scorer.heartbeat", "CLAIM_SECONDS"): 1.2,
    ("rlbuffer.scorer.loop", "CLAIM_SECONDS"): 1.2,
    ("rlbuffer.scorer.loop", "RETRY_SECONDS"): 0.3,
    ("rlbuffer.scorer.loop", "ENTRIES_PER_READ"): 5,
    ("rlbuffer.store.moves.pool", "DROP_ENTRIES"): 2,
    ("rlbuffer.store.moves.telemetry", "FORGOTTEN_AFTER_MS"): 1500,
    ("rlbuffer.client.writer", "SPOOL_PUSHES"): 3,
    ("rlbuffer.store.moves.steps", "SWEEP"): 4,
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
    """The run is deleted and begun anew."""
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
    backups: bool = field(default=False)
    """Somebody copies the run while it goes on, and puts the copy beside it under another name."""
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
    left: bool = field(default=False)
    """True when the meta of a run that is deleted goes first, and the rest a while later."""
    mutation: Mutation | None = field(default=None)

    def constants(self) -> dict[tuple[str, str], float]:
        """Values in the real modules that this seed replaces."""
        return CONSTANTS | {
            ("rlbuffer.store.session", "MINIMUM_TOMBSTONE_MS"): round(1000 * self.tombstone_seconds),
            ("rlbuffer.store.moves.lease", "MINIMUM_TOMBSTONE_MS"): round(1000 * self.tombstone_seconds),
            ("rlbuffer.batcher.pool_index", "TOMBSTONE_SECONDS"): self.tombstone_seconds,
            ("rlbuffer.config.batcher", "REMEMBERED_STEPS"): 3,
        }

    def may_die(self, name: str) -> bool:
        return name.split(" ")[0] in ("batcher", "writer", "scorer", "rank")

    def stop_seconds(self, dice: random.Random) -> float:
        """Mostly longer than a lease."""
        low, high = dice.choice(((0.3, 0.95), (0.95, 1.4), (0.95, 1.4), (1.4, 3.0)))
        return self.lease_seconds * dice.uniform(low, high)

    def broken(self, text: str) -> str:
        """A Lua file as it is, or as the mutation leaves it."""
        return text if self.mutation is None else self.mutation.applied(text)

    def describe(self) -> str:
        on = [name for name in SHOWN_DRAWS if getattr(self, name)]
        closed = self.config.step_groups or self.config.step_rollouts or "capacity"
        return (
            f"profile {self.profile}, {self.batchers} batchers, {self.writers} writers, {self.scorers} scorers, "
            f"world sizes {self.world_sizes}, step {closed}, "
            f"lookahead {self.config.lookahead}, max_age {self.config.max_age}, max_uses {self.config.max_uses}"
            f"{', ' if on else ''}{', '.join(on)}"
        )


def draw(seed: int, *, mutation: Mutation | None = None, rollback: bool = False) -> Plan:
    """The plan of a seed; a mutation may ask for the circumstances in which it matters."""
    dice = random.Random(f"plan {seed}")
    profile = dice.choice([*PROFILES, "all", "network"])
    closing = dice.choice(("capacity", "groups", "rollouts"))
    config = BatcherConfig(
        row_tokens=48,
        micro_batches_per_rank=2,
        step_groups=dice.choice((2, 3)) if closing == "groups" else None,
        step_rollouts=dice.choice((5, 8)) if closing == "rollouts" else None,
        close_fill=dice.choice((0.7, 0.95)),
        lookahead=dice.choice((0, 1, 1)),
        max_age=dice.choice((0, 1, 1, 2)),
        group_timeout_seconds=dice.choice((0.5, 1.5)),
        min_group_size=dice.choice((1, 2)),
        flat=dice.choice(("keep", "drop")),
        order=dice.choice(("newest_first", "oldest_first")),
    )
    # Drawn apart, so that the other draws of a seed stay what they were.
    reuse = random.Random(f"reuse {seed}")
    asks = dict(mutation.asks) if mutation is not None else {}
    if mutation is None and random.Random(f"rollback {seed}").random() < ROLLBACKS:
        rollback = True
    if asks.pop("reuse", False) | (reuse.random() < (0.5 if rollback else 0.3)):
        config = replace(config, max_uses=reuse.choice((2, 3)), replay_fraction=reuse.choice((0.5, 1.0)))
        if rollback:  # a group is used again soon, so that the server may lose just that use
            config = replace(config, max_age=2, replay_fraction=1.0)
    tail = random.Random(f"tail {seed}")
    ends = tail.choice((2, 5, 9)) if tail.random() < 0.15 else 0
    if tail.random() < 0.3:
        config = replace(config, fill_timeout_seconds=tail.choice((0.3, 1.5)))
    scoring = random.Random(f"scoring {seed}")
    people = random.Random(f"people {seed}")
    draws = [people.random() for _ in range(4)]
    rest: dict[str, Any] = {
        "releaser": draws[0] < 0.5 and config.max_uses > 1 and not rollback,
        "taken_back": people.uniform(0.3, 0.95) if draws[1] < 0.12 and not (rollback or asks.get("rollback")) else 0.0,
        "damages": tuple(people.uniform(0.2, 1.0) for _ in range(3)) if draws[2] < 0.15 else (),
        "refusal": people.choice(REFUSALS) if draws[3] < 0.1 else "",
    }
    clock = random.Random(f"clock {seed}")
    steps = clock.choice((1, 1, 2, 3)) if clock.random() < CLOCK_STEPS else 0
    rest["clock_steps"] = tuple((clock.uniform(0.1, 1.0), clock.choice(CLOCK_STEP_SECONDS)) for _ in range(steps))
    back = random.Random(f"clock back {seed}")
    if back.random() < CLOCK_STEPS_BACK:
        rest["clock_steps"] += ((back.uniform(0.1, 1.0), back.choice(CLOCK_STEP_BACK_SECONDS)),)
    odd = random.Random(f"odd {seed}")
    later = random.Random(f"later {seed}")
    is_odd = {name: (later if name in LATER else odd).random() < share for name, share in ODD.items()}
    rest |= {
        "memory": is_odd["memory"],
        "planning": odd.choice((0.3, 1.0)) if is_odd["planning"] else 0.0,
        "adapters": odd.choice((("", "a1"), ("a1", "a2"), ("", "a1", "a2"))) if is_odd["adapters"] else (),
        "backups": is_odd["backups"],
        "too_large": 0.1 if is_odd["too_large"] else 0.0,
        "stops": is_odd["stops"],
        "strangers": is_odd["strangers"] or (rest["taken_back"] > 0.0 and odd.random() < 0.8),
        "late": 0.0,
    }
    quiet = not (rollback or rest["taken_back"])
    rest["failover"] = odd.choice(DEMOTED) if is_odd["failover"] and quiet else ""
    if rest["taken_back"] and odd.random() < 0.15:
        rest |= {"taken_back": 0.01, "late": odd.uniform(0.0, 0.5)}
    lost = random.Random(f"lost {seed}")
    if rollback and mutation is None and lost.random() < 0.6:
        # What a trainer has published and the server has forgotten differs by adapter.
        rest["adapters"] = lost.choice((("", "a1"), ("a1", "a2"), ("", "a1", "a2")))
    if rest["adapters"]:
        config = replace(config, adapter_batch_size=odd.choice((2, 5)))
    rest["scorers"] = scoring.choice((1, 2, 2)) if scoring.random() < 0.2 else 0
    values: dict[str, Any] = {
        "batchers": dice.choice((1, 2, 2)),
        "writers": dice.choice((1, 2, 3)),
        "world_sizes": dice.choice(((1,), (1, 2), (2,), (2, 1))),
        "tickets": dice.random() < 0.6,
        "operator": dice.random() < 0.3,
        "reset": dice.random() < 0.1,
        "full": dice.random() < 0.15,
    }
    # Prompts of groups that a person throws away are not given again, and who numbers groups alone has no end.
    is_spoilt = not values["tickets"] or values["reset"] or rest["taken_back"]
    values["ends"] = 0 if is_spoilt or mutation is not None else ends
    values["said"] = is_odd["said"] and not is_spoilt and mutation is None
    # A server that has lost a reset has the old run again: a person must reset it again.
    values["reset"] = values["reset"] and not (rollback or rest["failover"])
    values["left"] = values["reset"] and later.random() < 0.5
    values["together"] = is_odd["together"]
    if mutation is not None:
        profile = mutation.profile or profile
    faults = PROFILES[profile]
    is_calmer = random.Random(f"calmer {seed}").random() < CALMER and mutation is None
    if is_calmer and (rollback or rest["taken_back"] or values["said"]):
        faults = {name: CALMER_RATE * chance for name, chance in faults.items()}
    plan = Plan(
        seed=seed,
        profile=profile,
        faults=faults,
        slow=dice.choice((0.0, 0.02, 0.1)),
        config=config,
        fault_seconds=dice.uniform(2.5, 5.0),
        lease_seconds=dice.choice((0.6, 1.0)),
        patience_seconds=dice.choice((0.4, 2.0)),
        train_seconds=dice.choice((0.1, 0.4)),
        sample_seconds=dice.choice((0.1, 0.3)),
        checkpoint_every=dice.choice((1, 2, 4) if rollback else (1, 2, 3)),
        parts=dice.choice((0.1, 0.5)),
        careless=dice.choice((0.0, 0.2)),
        small=dice.choice((0.0, 0.1)),
        rollback=rollback,
        tombstone_seconds=dice.choice((4.0, 20.0)),
        mutation=mutation,
        **values,
        **rest,
    )
    return replace(plan, **asks)
