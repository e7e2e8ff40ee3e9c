"""What is known of a run at one moment: the one record that text, JSON, web pages, live views and metrics are made of.

A number of the run is a field here with `metric(...)`, and the line that computes it: `rlbuffer/client/run_state.py`
for what stands on the server, the leader's heartbeat for the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from rlbuffer.records.waiting import Problem, Waiting
from rlbuffer.state.heartbeats import LEADER, Process
from rlbuffer.state.metric import Metric, metric, metrics
from rlbuffer.state.step_record import StepRecord

SCHEMA = "rlbuffer.run/2"


class Amount(NamedTuple):
    """What the ledger counts."""

    rollouts: int = 0
    tokens: int = 0


def _units(name: str, kind: Literal["gauge", "counter"], meaning: str, *labels: str) -> list[Metric]:
    """A metric for each unit of an amount."""
    return [Metric(f"{unit}_{name}", kind, meaning, labels, item=unit) for unit in Amount._fields]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvState:
    """One env. The account comes from the ledger; what follows it is by the leader's last heartbeat, None before any
    leader has said it."""

    name: str
    pushed: Amount = metrics(Amount(), *_units("received_total", "counter", "Pushed, by the ledger."))
    pending: Amount = metrics(Amount(), *_units("pending", "gauge", "In the pool, by the ledger."))
    packed: Amount = metrics(Amount(), *_units("packed", "gauge", "In steps that are not trained yet, by the ledger."))
    trained: Amount = metrics(Amount(), *_units("trained_total", "counter", "Trained, by the ledger."))
    reused: Amount = metrics(Amount(), *_units("reused_total", "counter", "Further uses of it, by the ledger."))
    dropped: Mapping[str, Amount] = metrics(
        dict, *_units("dropped_total", "counter", "Dropped, by the ledger.", "reason")
    )
    tickets: int = metric("tickets_out", "gauge", "Tickets that workers hold.")
    is_paused: bool = False
    is_done: bool = False
    """Nothing more comes of it."""
    budget: float | None = metric("budget_ratio", "gauge", "Share of a step's tokens that the settings promise.", None)
    groups_ready: int | None = metric("groups_ready", "gauge", "In the pool, whole.", None)
    groups_forming: int | None = metric(
        "groups_forming", "gauge", "In the pool, waiting for more of their rollouts.", None
    )
    rollouts_ready: int | None = metric("rollouts_ready", "gauge", "Of the groups that are ready.", None)
    tokens_ready: int | None = metric("tokens_ready", "gauge", "Of the groups that are ready.", None)
    tokens_forming: int | None = metric("tokens_forming", "gauge", "Of the groups that are forming.", None)
    ages: Mapping[str, int] = metric(
        "groups_by_age", "gauge", "Groups in the pool, by age in policy versions.", dict, labels="age"
    )


LEADER_FIELDS = ("groups_ready", "groups_forming", "rollouts_ready", "tokens_ready", "tokens_forming")
"""Numbers of the pool that the leader's heartbeat has for each env, beside `ages`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """The server; of a cluster the shard that has the control keys."""

    address: str
    name: str = ""
    version: str = ""
    memory: int = metric("server_memory_bytes", "gauge", "Memory of the server that counts against its limit.")
    memory_limit: int = metric("server_memory_limit_bytes", "gauge", "The server's maxmemory; 0: none.")

    @property
    def memory_share(self) -> float | None:
        """None without a limit."""
        return self.memory / self.memory_limit if self.memory_limit else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run at one moment of the server's clock."""

    run: str
    at: float
    """Unix seconds, the server's."""
    server: ServerState
    epoch: int = 0
    step: int = metric("step", "gauge", "Last committed step.")
    trained_step: int = metric("trained_step", "gauge", "Last step that the trainer has trained.")
    policy_version: int = metric("policy_version", "gauge", "Newest version that workers can sample from.", -1)
    world_size: int = 0
    damaged: int = metric(
        "rollouts_damaged_total", "counter", "Missing or damaged when they were pulled, by the ledger."
    )
    lost: int = metric("pushes_lost_total", "counter", "Pushes that producers know are missing, by the ledger.")
    error: str = ""
    """The batcher's fatal one."""
    revision: int = 0
    """Of the batcher's settings."""
    is_revision_asked: bool = False
    """Other settings are asked for and not taken yet."""
    draining_since: float | None = None
    ended_step: int | None = None
    """The step after which the run has ended."""
    retired_early: int = 0
    """Last step that retired because the server's memory was short; 0: none did."""
    adapters: Mapping[str, int] = field(default_factory=dict)
    """LoRA adapter -> its policy version."""
    evaluations: tuple[Mapping[str, Any], ...] = ()
    """The newest results, by env, then by version."""
    envs: tuple[EnvState, ...] = ()
    processes: tuple[Process, ...] = ()
    is_led: bool = False
    """A batcher holds the lease."""
    waiting: Waiting | None = None
    """Why no step comes; None while the batcher works."""
    problems: tuple[Problem, ...] = ()
    """What somebody must cure."""
    history: tuple[Mapping[str, Any], ...] = ()
    """The newest records, the newest first; as many as were asked for."""
    trained: StepRecord | None = None
    """The newest step as the trainer measured it; None of a trainer that sends none."""

    @property
    def leader(self) -> Process | None:
        """The batcher that leads, or led last."""
        return next((p for p in self.processes if (p.kind, p.name) == ("batcher", LEADER)), None)

    @property
    def total(self) -> EnvState:
        """The account of all envs."""

        def add(amounts: Iterable[Amount]) -> Amount:
            rollouts, tokens = 0, 0
            for amount in amounts:
                rollouts, tokens = rollouts + amount.rollouts, tokens + amount.tokens
            return Amount(rollouts, tokens)

        reasons = dict.fromkeys(reason for env in self.envs for reason in env.dropped)
        return EnvState(
            name="",
            pushed=add(env.pushed for env in self.envs),
            pending=add(env.pending for env in self.envs),
            packed=add(env.packed for env in self.envs),
            trained=add(env.trained for env in self.envs),
            reused=add(env.reused for env in self.envs),
            dropped={reason: add(e.dropped.get(reason, Amount()) for e in self.envs) for reason in reasons},
            tickets=sum(env.tickets for env in self.envs),
        )

    def share(self, env: EnvState) -> float:
        """Of all packed and trained tokens."""
        total = sum(each.packed.tokens + each.trained.tokens for each in self.envs)
        return (env.packed.tokens + env.trained.tokens) / total if total else 0.0

    @property
    def rollouts_per_second(self) -> float:
        """Rollouts that workers push, by their own count."""
        return sum(p.rollouts_per_second for p in self.of_kind("worker") if p.is_alive)

    def of_kind(self, kind: str) -> tuple[Process, ...]:
        """The processes of a kind."""
        return tuple(process for process in self.processes if process.kind == kind)

    def as_object(self) -> dict[str, Any]:
        """``rlbuffer.run/2``, as JSON may hold it: the fields, and the sentences of what is waited for and to cure."""
        said: dict[str, Any] = {
            "waiting": None if self.waiting is None else _with_sentence(self.waiting),
            "problems": [_with_sentence(problem) for problem in self.problems],
        }
        written: dict[str, Any] = _json(asdict(self))
        return {"schema": SCHEMA} | written | said


def _json(value: Any) -> Any:
    """Values as JSON has them: what somebody wrote as bytes becomes text."""
    if isinstance(value, Mapping):
        return {name: _json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json(inner) for inner in value]
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def _with_sentence(record: Waiting | Problem) -> dict[str, Any]:
    return record.record() | {"sentence": str(record)}


def pool_of(said: Any) -> dict[str, Any]:
    """The fields of :class:`EnvState` in what a heartbeat says of an env's pool. Anybody may have written it."""
    if not isinstance(said, Mapping):
        return {}
    numbers = {name: said[name] for name in LEADER_FIELDS if type(said.get(name)) is int}
    ages = said.get("ages")
    ages = ages.items() if isinstance(ages, Mapping) else ()
    return numbers | {"ages": {a: n for a, n in ages if isinstance(a, str) and a.isdecimal() and type(n) is int}}
