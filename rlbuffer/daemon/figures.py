"""The leader's figures for whoever asks: counts of what it has read, dropped and committed, and what is in its memory.

The leader only notes what happened, a reference each; sums are made when somebody asks, in that one's thread, and for
the leader's heartbeat: from there the trainer puts them into `metrics.jsonl`.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.fractions import budgets_at
from rlbuffer.metrics.histogram import AGES, LENGTHS, REWARDS, SECONDS, SHORT_SECONDS, Histogram, as_json
from rlbuffer.metrics.labels import MOST_ENVS, MOST_REWARDS, Labels
from rlbuffer.metrics.moments import Moments, merged, moments_of, spread
from rlbuffer.metrics.registry import FOLDER, SERVE, Values
from rlbuffer.records.info import IS_TRUNCATED, ROW, GroupInfo
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Drop, StepPlan
from rlbuffer.store.planned import Planned
from rlbuffer.store.records import PoolEntry
from rlbuffer.wire.metadata_pages import names_of

WINDOW = 256
"""Pushes of an env that its means and shares are taken over."""
MOST_NOTES = 4096
"""Notes that are kept for the next one who asks. Beyond, the leader sums them up itself."""
NEW_UNITS = ("groups", "rollouts", "generated_tokens")
"""Units that pushes are counted in."""
REWARD = "reward"
"""Name of the whole reward among the named ones."""


@dataclass(frozen=True, slots=True)
class _Push:
    """A push that the leader has read."""

    info: GroupInfo
    newest: int
    """Newest version that could be sampled from then."""
    is_new: bool
    """A scorer did not put it into the place of another."""
    teaches: bool | None
    """None of a part of a group, and of one that waits for a scorer."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that the leader has committed."""

    plan: StepPlan
    entries: Mapping[str, PoolEntry]
    header: StepHeader
    seconds: float
    ready: Mapping[str, int]
    """env -> groups that were ready and stayed."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """A push of the window, summed up."""

    rollouts: int
    on_policy: int
    truncated: int
    teaches: bool | None
    rewards: Mapping[str, Moments]
    """Label of a named reward -> its moments; ``reward`` is the whole one."""


@dataclass(slots=True)
class _Env:
    """One env's figures."""

    window: deque[_Sums] = field(default_factory=lambda: deque(maxlen=WINDOW))
    came: Counter[str] = field(default_factory=Counter)
    """Groups (pushes), rollouts and trainable tokens."""
    before: Counter[str] = field(default_factory=Counter)
    """The same at the last step."""
    new: Mapping[str, int] = field(default_factory=dict)
    """The same between the last two steps."""
    prompts: Histogram = field(default_factory=lambda: Histogram(REWARDS))
    ages: Histogram = field(default_factory=lambda: Histogram(AGES))
    waits: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    packed: Histogram = field(default_factory=lambda: Histogram(LENGTHS))
    dropped: Histogram = field(default_factory=lambda: Histogram(LENGTHS))
    responses: Histogram = field(default_factory=lambda: Histogram(LENGTHS))
    rewards: Labels = field(default_factory=lambda: Labels(MOST_REWARDS))


class Figures:
    """Takes notes from the leader's thread, and sums them up in any. Thread-safe."""

    def __init__(self) -> None:
        self.labels = Labels(MOST_ENVS)
        """The envs that have a label of their own."""
        self.published: Mapping[str, int] = {}
        """Adapter -> newest version that can be sampled from."""
        self._summing = threading.Lock()
        self._notes: deque[_Push | _Step | GroupInfo] = deque()
        """What was read, committed, or (as it was pushed) dropped."""
        self._batcher: Batcher | None = None
        self._config: BatcherConfig | None = None
        self._envs: dict[str, _Env] = {}
        self._drops: Counter[tuple[str, str]] = Counter()
        self._closed: Counter[str] = Counter()
        self._builds = Histogram(SHORT_SECONDS)
        self._last: tuple[StepHeader, Mapping[str, int]] | None = None
        """Header of the last step; env -> groups that were ready and stayed."""
        self._responses: dict[str, float] = {}
        """env -> mean tokens behind the prompt, in the last step."""

    # -- from the leader's thread ------------------------------------------------------------------------------------
    @property
    def leads(self) -> bool:
        """This process leads, and has read the whole pool."""
        return self._batcher is not None

    def lead(self, batcher: Batcher | None, config: BatcherConfig | None = None) -> None:
        """The leader has taken over with this batcher and its config, or (None) leads no more."""
        self._config, self._batcher = config, batcher

    def arrived(self, entry: PoolEntry) -> None:
        """A push was read while this process leads. What a takeover reads was counted by the leader before."""
        if self._batcher is not None and entry.info is not None:
            newest = self.published.get(entry.info.adapter, -1)
            self._note(_Push(entry.info, newest, not entry.replaces, self._batcher.teaching.of_push(entry.info)))

    def dropped(self, entries: Iterable[PoolEntry]) -> None:
        """Pushes will not be trained."""
        if self.leads:
            for entry in entries:
                if entry.info is not None:
                    self._note(entry.info)

    def committed(self, plan: StepPlan, entries: Mapping[str, PoolEntry], header: StepHeader, seconds: float) -> None:
        """A step was committed, `seconds` after the first look at the pool."""
        if self._batcher is not None:
            ready = {env: pool.ready_groups for env, pool in self._batcher.pools.items()}
            self._closed[header.closed_by] += 1
            self._note(_Step(plan, entries, header, seconds, ready))

    def drop(self, drop: Drop) -> None:
        """A group was dropped."""
        self._drops[drop.env, drop.reason] += 1

    def _note(self, note: _Push | _Step | GroupInfo) -> None:
        self._notes.append(note)
        if len(self._notes) > MOST_NOTES and self._summing.acquire(blocking=False):
            try:
                self._sum_up()
            finally:
                self._summing.release()

    # -- for whoever asks --------------------------------------------------------------------------------------------
    def values(self) -> Values:
        """Everything that is known here, without asking the server."""
        batcher = self._batcher
        values: dict[str, Any] = {
            "leader": int(batcher is not None),
            "groups_dropped_total": self._drops_by_reason(),
        }
        if batcher is None:
            return values
        with self._summing:
            self._sum_up()
            return values | self._pools(batcher) | self._pushed() | self._batches()

    def record(self) -> dict[str, Any]:
        """The figures that `metrics.jsonl` has, under their names there, as JSON may hold them; `step` is the last one
        that they know of. {} while nobody leads."""
        if not self.leads:
            return {}
        values = self.values()
        record: dict[str, Any] = {"step": self._last[0].step if self._last else 0}
        for metric in SERVE:
            value = as_json(values.get(metric.name)) if metric.record else None
            if value is not None:
                record[metric.record.removeprefix(FOLDER)] = value
        return record

    def _sum_up(self) -> None:
        while self._notes:
            note = self._notes.popleft()
            if isinstance(note, _Push):
                self._sum_push(note)
            elif isinstance(note, _Step):
                self._sum_step(note)
            else:
                for rollout in note.rollouts:
                    self._env(note.env).dropped.add(rollout.length)

    def _env(self, name: str) -> _Env:
        label = self.labels.of(name)
        if label not in self._envs:
            self._envs[label] = _Env()
        return self._envs[label]

    def _sum_push(self, push: _Push) -> None:
        env, info = self._env(push.info.env), push.info
        if not info.totals.rollouts:
            return
        _, _, loss_tokens, _, rewards, oldest, _, flags, _, _ = zip(*ROW.iter_unpack(info.rows), strict=True)
        if push.is_new:
            env.came.update(groups=1, rollouts=len(flags), generated_tokens=sum(loss_tokens))
        if not info.totals.is_scored:
            return
        named = {REWARD: list(rewards)}
        for its in names_of(info)[1]:
            for name, value in its.items():
                if name != REWARD:
                    named.setdefault(env.rewards.of(name), []).append(value)
        env.prompts.add(fmean(rewards))
        env.window.append(
            _Sums(
                rollouts=len(flags),
                on_policy=sum([version >= push.newest for version in oldest]),
                truncated=sum([bool(its & IS_TRUNCATED) for its in flags]),
                teaches=push.teaches,
                rewards={name: moments_of(values) for name, values in named.items()},
            )
        )

    def _sum_step(self, step: _Step) -> None:
        plan = step.plan
        self._last = step.header, step.ready
        for env in self._envs.values():
            env.new, env.before = env.came - env.before, env.came.copy()
        self._builds.add(step.seconds)
        planned = Planned(plan, step.entries)
        packed = planned.numbers["length"].astype(np.int64)
        responses = packed - planned.numbers["prompt_tokens"]
        lengths: dict[str, list[int]] = {}
        for name, its in planned.by_env.items():
            env, answered = self._env(name), responses[its].tolist()
            env.ages.add_all(planned.ages[its].tolist())
            env.packed.add_all(packed[its].tolist())
            env.responses.add_all(answered)
            lengths.setdefault(self.labels.of(name), []).extend(answered)
        self._responses = {name: fmean(values) for name, values in lengths.items()}
        for entry in step.entries.values():
            self._env(entry.env).waits.add(max(0.0, (step.header.committed_ms - entry.pushed_ms) / 1000))

    def _drops_by_reason(self) -> dict[str, dict[str, int]]:
        out: dict[str, dict[str, int]] = {}
        for (env, reason), groups in list(self._drops.items()):
            of_env = out.setdefault(self.labels.of(env), {})
            of_env[reason] = of_env.get(reason, 0) + groups
        return out

    def _pools(self, batcher: Batcher) -> dict[str, Any]:
        """The pool's running sums, as they stand."""
        pools = {
            name: {
                "groups_ready": pool.ready_groups,
                "groups_forming": len(pool.forming),
                "rollouts_ready": pool.ready_rollouts,
                "tokens_ready": pool.ready_tokens,
                "tokens_forming": pool.forming_tokens,
            }
            for name, pool in list(batcher.pools.items())
        }
        out: dict[str, Any] = {}
        for name, sums in pools.items():
            label = self.labels.of(name)
            for metric, value in sums.items():
                of_metric = out.setdefault(metric, {})
                of_metric[label] = of_metric.get(label, 0) + value
        return out

    def _pushed(self) -> dict[str, Any]:
        """The env's last pushes, and how many there were."""
        envs = self._envs
        windows = {name: list(env.window) for name, env in envs.items() if env.window}
        judged = {name: [p.teaches for p in its if p.teaches is not None] for name, its in windows.items()}
        rollouts = {name: sum(push.rollouts for push in its) for name, its in windows.items()}
        rewards = {
            env: {name: merged(p.rewards[name] for p in its if name in p.rewards) for name in _names(its)}
            for env, its in windows.items()
        }
        return {
            "groups_received_total": {name: env.came["groups"] for name, env in envs.items()},
            "tokens_generated_total": {name: env.came["generated_tokens"] for name, env in envs.items()},
            "prompt_reward": {name: env.prompts for name, env in envs.items()},
            "reward_mean": {env: {name: its[1] for name, its in named.items()} for env, named in rewards.items()},
            "reward_std": {env: {name: spread(its) for name, its in named.items()} for env, named in rewards.items()},
            "on_policy_ratio": {name: sum(p.on_policy for p in its) / rollouts[name] for name, its in windows.items()},
            "truncated_ratio": {name: sum(p.truncated for p in its) / rollouts[name] for name, its in windows.items()},
            "flat_ratio": {name: fmean(not teaches for teaches in its) for name, its in judged.items() if its},
        }

    def _batches(self) -> dict[str, Any]:
        """The steps that were committed, and the last one of them."""
        envs = self._envs
        values: dict[str, Any] = {
            "age_versions": {name: env.ages for name, env in envs.items()},
            "wait_seconds": {name: env.waits for name, env in envs.items()},
            "response_tokens": {name: env.responses for name, env in envs.items()},
            "packed_rollout_tokens": {name: env.packed for name, env in envs.items()},
            "dropped_rollout_tokens": {name: env.dropped for name, env in envs.items()},
            "batch_build_seconds": self._builds,
            "batches_total": dict(self._closed),
        }
        if self._last is None:
            return values
        header, ready = self._last
        its = {self.labels.of(name): figures for name, figures in header.envs.items()}
        new = {f"new_{unit}": {name: env.new.get(unit, 0) for name, env in envs.items()} for unit in NEW_UNITS}
        return (
            values
            | new
            | {
                "batch_tokens": header.tokens,
                "batch_rollouts": header.rollouts,
                "batch_groups": len(header.group_ids),
                "batch_fill_ratio": header.fill,
                "batch_used_ratio": {name: env["tokens"] / max(1, header.tokens) for name, env in its.items()},
                "batch_age_mean": {name: env["age"] for name, env in its.items()},
                "batch_age_max": {name: env["max_age"] for name, env in its.items()},
                "batch_reward_mean": {name: env["reward"] for name, env in its.items()},
                "batch_response_tokens_mean": self._responses,
                "last_step_time_seconds": header.committed_ms / 1000,
                "used_in_batch_ratio": {
                    self.labels.of(name): env["groups"] / (env["groups"] + ready.get(name, 0))
                    for name, env in header.envs.items()
                },
                "budget_ratio": {
                    self.labels.of(name): share
                    for name, share in budgets_at(self._config.budgets if self._config else {}, header.step + 1).items()
                },
            }
        )


def _names(pushes: Iterable[_Sums]) -> list[str]:
    return list(dict.fromkeys(name for push in pushes for name in push.rewards))
