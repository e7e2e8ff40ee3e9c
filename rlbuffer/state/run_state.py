"""What is known of a run at one moment: the one record that text, JSON, web pages, live views and metrics are made of.

A number of the run is a field here with `metric(...)`, and the line that computes it: `rlbuffer/client/run_state.py`
for what stands on the server, `rlbuffer/daemon/env_stats.py` for what the leader's heartbeat says of pool and steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypedDict

from rlbuffer.records.waiting import Problem, Waiting
from rlbuffer.state.heartbeats import GATEWAY, LEADER, Process
from rlbuffer.state.metric import AGES, LENGTHS, REWARDS, SECONDS, SHORT_SECONDS, Kind, Metric, metric, metrics, said_in
from rlbuffer.state.step_record import StepRecord

SCHEMA = "rlbuffer.run/2"


class HistogramRecord(TypedDict):
    """What has been counted; {} where nothing is known."""

    buckets: dict[str, int]
    """Bound -> values up to it."""
    sum: float
    count: int


class Amount(NamedTuple):
    """What the ledger counts."""

    rollouts: int = 0
    tokens: int = 0


ACCOUNTS = ("pushed", "pending", "packed", "trained", "reused")
"""Amounts of an env's account."""


def _units(name: str, kind: Kind, meaning: str, *labels: str) -> list[Metric]:
    """A metric for each unit of an amount."""
    return [Metric(f"{unit}_{name}", kind, meaning, labels, item=unit) for unit in Amount._fields]


def _said(name: str, meaning: str, kind: Kind = "gauge", *, labels: str = "", bounds: Sequence[float] = ()) -> Any:
    """A number of the leader's heartbeat. The trainer puts those of an env into the record of a step."""
    kind, default = ("histogram" if bounds else kind), (dict if labels or bounds else None)
    return metric(name, kind, meaning, default, labels=labels, bounds=bounds, is_said=True)


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
    # -- of agents before a gateway; None where none has begun
    agent_rollouts: int | None = metric("agent_rollouts_total", "counter", "Begun for agents.", None)
    open_rollouts: int | None = metric("open_rollouts", "gauge", "Under way in agents.", None)
    ended_rollouts: int | None = metric(
        "ended_rollouts", "gauge", "Ended, and waiting for the others of their group or for its push.", None
    )
    agent_calls: int | None = metric("agent_calls_total", "counter", "Recorded calls of agents.", None)
    agent_tokens: int | None = metric("agent_tokens_total", "counter", "Sampled in these calls.", None)
    # -- by the leader's last heartbeat: the pool
    budget: float | None = _said("budget_ratio", "Share of a step's tokens that the settings promise.")
    groups_ready: int | None = _said("groups_ready", "In the pool, whole.")
    groups_forming: int | None = _said("groups_forming", "In the pool, waiting for more of their rollouts.")
    rollouts_ready: int | None = _said("rollouts_ready", "Of the groups that are ready.")
    tokens_ready: int | None = _said("tokens_ready", "Of the groups that are ready.")
    tokens_forming: int | None = _said("tokens_forming", "Of the groups that are forming.")
    ages: Mapping[str, int] = _said("groups_by_age", "Groups in the pool, by age in policy versions.", labels="age")
    # -- what came between the last two steps
    new_groups: int | None = _said("new_groups", "Groups, or parts of one, that came between the last two steps.")
    new_rollouts: int | None = _said("new_rollouts", "Rollouts of the same.")
    new_generated_tokens: int | None = _said("new_generated_tokens", "Tokens of the same that can be trained.")
    reward_mean: Mapping[str, float] = _said(
        "reward_mean", "Of the same rollouts; name reward: the whole one.", labels="name"
    )
    reward_std: Mapping[str, float] = _said("reward_std", "Of the same, with n - 1.", labels="name")
    frac_on_policy: float | None = _said("on_policy_ratio", "Of the same, all tokens by the newest version.")
    frac_truncated: float | None = _said("truncated_ratio", "Of the same, ended at a length limit.")
    frac_flat: float | None = _said("flat_ratio", "Whole groups among the same that teach nothing.")
    # -- the last step
    frac_used_in_batch: float | None = _said(
        "used_in_batch_ratio", "Groups that were ready at the last step, and went into it."
    )
    frac_used: float | None = _said("batch_used_ratio", "Share of the last step's tokens.")
    batch_age: float | None = _said("batch_age_mean", "Mean age of the last step's rollouts.")
    batch_age_max: int | None = _said("batch_age_max", "Age of the oldest one.")
    batch_reward: float | None = _said("batch_reward_mean", "Mean reward of the last step's rollouts.")
    batch_response_tokens: float | None = _said(
        "batch_response_tokens_mean", "Mean length of the last step's responses."
    )
    # -- since the leader leads, up to the last step
    groups_received: int | None = _said("groups_received_total", "Groups, or parts of one.", "counter")
    tokens_generated: int | None = _said("tokens_generated_total", "Tokens of the same that can be trained.", "counter")
    groups_dropped: Mapping[str, int] = _said(
        "groups_dropped_total", "Dropped, or refused as late.", "counter", labels="reason"
    )
    rollouts_failed: Mapping[str, int] = _said(
        "rollouts_failed_total", "Failed attempts among what was pushed.", "counter", labels="kind"
    )
    age: HistogramRecord = _said(
        "age_versions", "Age of each trained rollout, in the step that trains it.", bounds=AGES
    )
    wait: HistogramRecord = _said(
        "wait_seconds", "From the push to the step, of each push that a step took.", bounds=SECONDS
    )
    response_tokens: HistogramRecord = _said(
        "response_tokens", "Tokens behind the prompt, of each rollout that a step took.", bounds=LENGTHS
    )
    packed_tokens: HistogramRecord = _said(
        "packed_rollout_tokens", "Length of each rollout that a step took.", bounds=LENGTHS
    )
    dropped_tokens: HistogramRecord = _said(
        "dropped_rollout_tokens", "Length of each rollout of a push that was dropped whole.", bounds=LENGTHS
    )
    length_distance: float | None = _said(
        "length_distance",
        "Of the lengths trained from those sampled (Kolmogorov-Smirnov, 0-1), of the last 1,000 groups that were "
        "trained or came too late.",
    )
    long_trained: float | None = _said("long_trained_ratio", "Trained of the longest tenth of the same groups.")
    prompt_reward: HistogramRecord = _said(
        "prompt_reward", "Mean reward of each pushed group: how hard prompts are.", bounds=REWARDS
    )


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
    is_led: bool = metric("leader", "gauge", "1 while a batcher holds the lease.", False)
    stepped_at: float | None = _said("last_step_time_seconds", "When the last step was committed, in Unix seconds.")
    batch_tokens: int | None = _said("batch_tokens", "Of the last step.")
    batch_rollouts: int | None = _said("batch_rollouts", "Of the last step.")
    batch_groups: int | None = _said("batch_groups", "Of the last step.")
    batch_fill: float | None = _said("batch_fill_ratio", "Share of the last step's capacity that holds tokens.")
    batches: Mapping[str, int] = _said(
        "batches_total", "Steps since the leader leads, by the rule that closed them.", "counter", labels="closed_by"
    )
    build: HistogramRecord = _said(
        "batch_build_seconds", "From the first look at the pool to the commit.", bounds=SHORT_SECONDS
    )
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
            return Amount(*(sum(part) for part in zip(Amount(), *amounts, strict=True)))

        reasons = dict.fromkeys(reason for env in self.envs for reason in env.dropped)
        amounts: dict[str, Any] = {name: add(getattr(env, name) for env in self.envs) for name in ACCOUNTS}
        return EnvState(
            name="",
            **amounts,
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

    @property
    def has_agents(self) -> bool:
        """A gateway has served it."""
        return any(env.agent_rollouts for env in self.envs) or any(p.is_alive for p in self.of_kind(GATEWAY))

    def of_kind(self, kind: str) -> tuple[Process, ...]:
        """The processes of a kind."""
        return tuple(process for process in self.processes if process.kind == kind)

    def as_object(self) -> dict[str, Any]:
        """``rlbuffer.run/2``, as JSON may hold it: the fields, and the sentences of what is waited for and to cure."""
        derived: dict[str, Any] = {
            "waiting": None if self.waiting is None else _with_sentence(self.waiting),
            "problems": [_with_sentence(problem) for problem in self.problems],
        }
        written: dict[str, Any] = _json(asdict(self))
        return {"schema": SCHEMA} | written | derived


def _json(value: Any) -> Any:
    """Values as JSON has them: what somebody wrote as bytes becomes text."""
    if isinstance(value, Mapping):
        return {name: _json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json(inner) for inner in value]
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def _with_sentence(record: Waiting | Problem) -> dict[str, Any]:
    return record.record() | {"sentence": str(record)}


def env_said(record: Any) -> dict[str, Any]:
    """The fields of :class:`EnvState` in what the leader's heartbeat says of an env."""
    found = said_in(EnvState, record)
    return found | {"ages": {age: n for age, n in found.get("ages", {}).items() if age.isdecimal()}}


def buffer_record(beat: Mapping[str, Any]) -> dict[str, Any]:
    """What the leader's heartbeat says of every env, by field, as the record of a trained step has it; {} of another
    heartbeat. `step` is the last one that was committed."""
    record: dict[str, Any] = {}
    envs = beat.get("envs")
    for env, of_env in envs.items() if isinstance(envs, Mapping) else ():
        for name, value in env_said(of_env).items():
            record.setdefault(name, {})[env] = value
    return {"step": beat.get("step")} | record if record else {}
