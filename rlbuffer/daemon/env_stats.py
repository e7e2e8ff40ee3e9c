"""The leader's numbers between two steps: what came, what a step took, what was dropped.

The leader notes references while it works; the sums are made when a step is committed, by numpy over the columns of all
its rollouts, and stand in its heartbeat until the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.batcher.group import PooledGroup
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.fractions import budgets_at
from rlbuffer.records.info import HAS_REWARD, IS_TRUNCATED, ROW_DTYPE, GroupInfo, rollouts_of
from rlbuffer.records.states import Reason, Trait
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Drop, StepPlan
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.state.lengths import Lengths
from rlbuffer.state.metric import SHORT_SECONDS, Metric, metrics_of
from rlbuffer.state.run_state import EnvState
from rlbuffer.store.records import PoolEntry
from rlbuffer.wire.metadata import names_of

MOST_ENVS, MOST_REWARDS, MOST_KINDS = 64, 16, 16
"""Envs, and named rewards and kinds of failures of an env, that have numbers of their own: workers choose the names."""
MOST_NOTES = 4096
"""Pushes that are kept until they are summed up."""
REWARD = "reward"
"""Name of the whole reward among the named ones."""
HISTOGRAMS: Mapping[str, Metric] = {name: each for name, each in metrics_of(EnvState) if each.kind == "histogram"}


class Histogram:
    """Values by bucket, and their sum.

    Example:
        >>> histogram = Histogram((1.0, 2.0))
        >>> histogram.add([0.5, 1.0, 3.0])
        >>> histogram.record()
        {'buckets': {'1.0': 2, '2.0': 2, '+Inf': 3}, 'sum': 4.5, 'count': 3}
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self.sum = 0.0

    def add(self, values: ArrayLike) -> None:
        """Counts each value into the first bucket whose bound is not below it."""
        array = np.asarray(values, dtype=np.float64)
        self._counts += np.bincount(np.searchsorted(self._bounds, array), minlength=len(self._counts))
        self.sum += float(array.sum())

    def record(self) -> dict[str, Any]:
        """The same for a heartbeat."""
        counts = np.cumsum(self._counts).tolist()
        buckets = dict(zip([*map(str, self._bounds), "+Inf"], counts, strict=True))
        return {"buckets": buckets, "sum": self.sum, "count": counts[-1]}


@dataclass(slots=True)
class _Env:
    came: Counter[str] = field(default_factory=Counter)
    """Groups (pushes), rollouts and trainable tokens, since this process leads."""
    before: Counter[str] = field(default_factory=Counter)
    """The same at the last step."""
    rewards: dict[str, list[NDArray[np.float64]]] = field(default_factory=dict)
    """Named reward -> its values since the last step."""
    on_policy: int = 0
    truncated: int = 0
    flat: list[bool] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> groups."""
    failed: Counter[str] = field(default_factory=Counter)
    """Kind -> failed attempts."""
    lengths: Lengths = field(default_factory=Lengths)
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(each.bounds) for name, each in HISTOGRAMS.items()}
    )


@dataclass(frozen=True, slots=True)
class _Note:
    info: GroupInfo
    newest: int
    """Newest version that could be sampled from when it was read."""
    is_new: bool
    """A scorer did not put it into the place of another."""
    teaches: bool | None
    """None of a part of a group, and of one that waits for a scorer."""


class EnvStats:
    """Takes notes from the leader's thread; what they sum up to is said with its heartbeat."""

    def __init__(self) -> None:
        self.published: Mapping[str, int] = {}
        """Adapter -> newest version that can be sampled from."""
        self.envs: Mapping[str, Mapping[str, Any]] = {}
        """Env -> fields of :class:`EnvState`, as of the last step."""
        self.run: Mapping[str, Any] = {}
        """Fields of :class:`RunState`, likewise."""
        self.problems: list[Problem] = []
        """Envs whose long rollouts are lost, likewise."""
        self.lead(None)

    def lead(self, batcher: Batcher | None, config: BatcherConfig | None = None) -> None:
        """The leader has taken over with this batcher and its config, or (None) leads no more. Counts from 0."""
        self._config, self._batcher = config, batcher
        self._pushes: list[_Note] = []
        self._envs: dict[str, _Env] = {}
        self._closed: Counter[str] = Counter()
        self._builds = Histogram(SHORT_SECONDS)
        self.envs, self.run, self.problems = {}, {}, []

    def arrived(self, entry: PoolEntry, group: PooledGroup | None) -> None:
        """A push was read: all of `group`, or a part (None). What a takeover reads was counted by the leader before."""
        if self._batcher is None or entry.info is None or not entry.info.totals.rollouts:
            return
        newest = self.published.get(entry.info.adapter, -1)
        teaches = None if group is None else self._batcher.teaching.of(group)
        self._pushes.append(_Note(entry.info, newest, not entry.replaces, teaches))
        if len(self._pushes) >= MOST_NOTES:
            self._sum_up()

    def dropped(self, reason: Reason, entries: Sequence[PoolEntry]) -> None:
        """Pushes of a group will not be trained."""
        infos = [entry.info for entry in entries if entry.info is not None and entry.info.totals.rollouts]
        if self._batcher is None or not infos:
            return
        env, lengths = self._env(infos[0].env), _numbers(infos)["length"]
        env.histograms["dropped_tokens"].add(lengths)
        if Trait.TOO_LATE in reason.traits:
            env.lengths.add([float(lengths.mean())], is_trained=False)

    def drop(self, drop: Drop) -> None:
        """A group was dropped, or refused as late."""
        if self._batcher is not None:
            self._env(drop.env).dropped[drop.reason] += 1

    def committed(self, plan: StepPlan, entries: Mapping[str, PoolEntry], header: StepHeader, seconds: float) -> None:
        """A step was committed, `seconds` after the first look at the pool."""
        if self._batcher is None:
            return
        self._sum_up()
        self._closed[header.closed_by] += 1
        self._builds.add([seconds])
        responses = self._of_plan(plan, entries, header)
        ready = {name: pool.ready_groups for name, pool in self._batcher.pools.items()}
        budgets = budgets_at(self._config.budgets if self._config else {}, header.step + 1)
        envs: dict[str, dict[str, Any]] = {name: self._close(env) for name, env in self._envs.items()}
        for name, amounts in header.envs.items():
            envs.setdefault(name, {}).update(
                frac_used_in_batch=amounts["groups"] / max(1, amounts["groups"] + ready.get(name, 0)),
                frac_used=amounts["tokens"] / max(1, header.tokens),
                batch_age=amounts["age"],
                batch_age_max=amounts["max_age"],
                batch_reward=amounts["reward"],
                batch_response_tokens=responses.get(name),
            )
        for name, share in budgets.items():
            envs.setdefault(name, {})["budget"] = share
        self.problems = [
            Problem(kind=Trouble.LONG_LOST, env=name, detail=f"{self._envs[name].lengths.long_trained:.0%}")
            for name in sorted(self._envs)
            if self._envs[name].lengths.are_lost
        ]
        self.envs = envs
        self.run = {
            "stepped_at": header.committed_ms / 1000,
            "batch_tokens": header.tokens,
            "batch_rollouts": header.rollouts,
            "batch_groups": len(header.group_ids),
            "batch_fill": header.fill,
            "batches": dict(self._closed),
            "build": self._builds.record(),
        }

    # -- inside --------------------------------------------------------------------------------------------------------
    def _env(self, name: str) -> _Env:
        if name not in self._envs and len(self._envs) >= MOST_ENVS:
            return _Env()  # nobody's
        return self._envs.setdefault(name, _Env())

    def _sum_up(self) -> None:
        envs: dict[str, list[_Note]] = {}
        for push in self._pushes:
            envs.setdefault(push.info.env, []).append(push)
        self._pushes = []
        for name, pushes in envs.items():
            self._sum_pushes(self._env(name), pushes)

    def _sum_pushes(self, env: _Env, pushes: list[_Note]) -> None:
        new = [push.info for push in pushes if push.is_new]
        env.came.update(groups=len(new), rollouts=sum(info.totals.rollouts for info in new))
        env.came["tokens"] += int(_numbers(new)["loss_tokens"].sum())
        for rollout in (rollout for info in new if info.totals.failed for rollout in info.rollouts):
            if rollout.failure and (rollout.failure in env.failed or len(env.failed) < MOST_KINDS):
                env.failed[rollout.failure] += 1
        scored = [push for push in pushes if push.info.totals.is_scored]
        scored = [push for push in scored if push.info.totals.rollouts > push.info.totals.failed]
        if not scored:
            return
        counts = [push.info.totals.rollouts - push.info.totals.failed for push in scored]
        rows = _numbers([push.info for push in scored])
        rows = rows[rows["flags"] & HAS_REWARD != 0]  # the others failed
        rewards = rows["reward"]
        env.histograms["prompt_reward"].add(np.add.reduceat(rewards, np.cumsum([0, *counts[:-1]])) / counts)
        env.on_policy += int(
            (rows["min_version"].astype(np.int64) >= np.repeat([p.newest for p in scored], counts)).sum()
        )
        env.truncated += int(((rows["flags"] & IS_TRUNCATED) != 0).sum())
        env.flat += [not push.teaches for push in scored if push.teaches is not None]
        env.rewards.setdefault(REWARD, []).append(rewards)
        named: dict[str, list[float]] = {}
        for push in scored:
            for components in names_of(push.info)[1]:
                for name, value in components.items():
                    named.setdefault(name, []).append(value)
        for name, values in named.items():
            if name != REWARD and (name in env.rewards or len(env.rewards) <= MOST_REWARDS):
                env.rewards.setdefault(name, []).append(np.array(values))

    def _of_plan(self, plan: StepPlan, entries: Mapping[str, PoolEntry], header: StepHeader) -> dict[str, float]:
        """-> env -> mean tokens behind the prompt."""
        rollouts, ages, means = plan.rollouts, plan.ages(), dict[str, float]()
        packed = rollouts.numbers["length"].astype(np.int64)
        responses = packed - rollouts.numbers["prompt_tokens"]
        for name, places in rollouts.by_env.items():
            histograms = self._env(name).histograms
            histograms["age"].add(ages[places])
            histograms["packed_tokens"].add(packed[places])
            histograms["response_tokens"].add(responses[places])
            means[name] = float(responses[places].mean())
        groups: dict[str, list[GroupInfo]] = {}
        for entry in entries.values():
            if entry.info is not None:
                groups.setdefault(entry.group_id, []).append(entry.info)
        for infos in groups.values():
            mean = float(_numbers(infos)["length"].mean())
            self._env(infos[0].env).lengths.add([mean], is_trained=True)
        waits: dict[str, list[float]] = {}
        for entry in entries.values():
            waits.setdefault(entry.env, []).append(max(0.0, (header.committed_ms - entry.pushed_ms) / 1000))
        for name, values in waits.items():
            self._env(name).histograms["wait"].add(values)
        return means

    def _close(self, env: _Env) -> dict[str, Any]:
        """What came since the last step, and what is counted since the takeover. The next step begins."""
        new, env.before = env.came - env.before, env.came.copy()
        rewards = {name: np.concatenate(parts) for name, parts in env.rewards.items()}
        scored = len(rewards.get(REWARD, ()))
        record = {
            "new_groups": new["groups"],
            "new_rollouts": new["rollouts"],
            "new_generated_tokens": new["tokens"],
            "reward_mean": {name: float(values.mean()) for name, values in rewards.items()},
            "reward_std": {name: float(values.std(ddof=1)) for name, values in rewards.items() if len(values) > 1},
            "groups_received": env.came["groups"],
            "tokens_generated": env.came["tokens"],
            "groups_dropped": dict(env.dropped),
            "rollouts_failed": dict(env.failed),
            **{name: histogram.record() for name, histogram in env.histograms.items()},
        }
        if scored:
            record |= {"frac_on_policy": env.on_policy / scored, "frac_truncated": env.truncated / scored}
        record |= {"length_distance": env.lengths.distance, "long_trained": env.lengths.long_trained}
        if env.flat:
            record["frac_flat"] = sum(env.flat) / len(env.flat)
        env.rewards, env.on_policy, env.truncated, env.flat = {}, 0, 0, []
        return record


def _numbers(infos: Iterable[GroupInfo]) -> NDArray[np.void]:
    """[rollouts] of :data:`~rlbuffer.records.info.ROW_DTYPE`."""
    return rollouts_of(np.frombuffer(b"".join([info.rows for info in infos]), ROW_DTYPE))
