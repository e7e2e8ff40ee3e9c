"""A recorded run, as far as what-if needs it, and what its archive cannot answer."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from statistics import fmean
from typing import Any

from rlbuffer.archive import Archive, ArchivedStep
from rlbuffer.archive.decisions import RecordedPush, entry_order, recorded_commits, recorded_pushes
from rlbuffer.archive.library import DroppedGroup
from rlbuffer.batcher.age import oldest_version
from rlbuffer.config.batcher import WAITING, BatcherConfig
from rlbuffer.config.explain import meant_by
from rlbuffer.config.losses import needs_advantage
from rlbuffer.config.recorded import settings_of
from rlbuffer.errors import ArchiveError, ConfigError
from rlbuffer.records.info import GroupInfo
from rlbuffer.records.readable import readable
from rlbuffer.records.states import Reason
from rlbuffer.records.step_header import StepHeader
from rlbuffer.store.history import DecidedRecord, Dropped
from rlbuffer.what_if.outcome import Fate, Outcome, oldest_of, outcome_of

REWARDS = "the rewards and lengths of a policy that trained on other data are not known"
UNKNOWN: Mapping[str, str] = {
    "trainer": f"{REWARDS}: replay the steps (`rlbuffer replay`) to see what a loss does to the recorded ones",
    "model": REWARDS,
    "worker": "how fast a sampler is, and how it slows down beside others, is not in the archive",
    "gateway": "how fast engines are, and how they slow down beside others, is not in the archive",
}
"""Section of the settings -> why nothing is known of a run with others."""
_ENTRY = re.compile(r"[0-9]{1,20}-[0-9]{1,20}\Z")
DECIDED_BY_CONTENT = ("flat", "flat_by", "advantage", "advantage_scale", "oversized", "truncated", "adapters", "feeds")
"""Settings of the batcher whose effect is on what is learned, or on other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A recorded commit: what the leader knew, and what it made of it."""

    step: ArchivedStep
    header: StepHeader
    read: tuple[int, int]
    """Place in the pool of the last entry that the leader had read."""
    decided: float
    since: float
    """The leader's takeover."""
    began: float
    """When it had read everything: later than its takeover where settings had changed, or an operator had dropped."""
    published: Mapping[str, int]

    def is_of_one_leader(self, other: Commit) -> bool:
        """No leader has read everything anew between the two."""
        mine, others = ((c.since, c.began, c.step.revision, c.step.epoch) for c in (self, other))
        return mine == others


@dataclass(frozen=True, slots=True, kw_only=True)
class DropTurn:
    """What was dropped at once, and what the leader knew, as far as the archive says it."""

    at: float
    """When, by the leader's clock; of what it did not decide, or says nothing of, by the server's."""
    drops: tuple[DroppedGroup, ...]
    read: tuple[int, int]
    """Place in the pool of the last entry that the leader had read for certain."""
    since: float | None
    """The leader's takeover; None, as the rest, where nobody says."""
    published: Mapping[str, int] | None
    is_held: bool | None

    def place(self, commit: Commit) -> tuple[float, float]:
        """Takeover and moment, to be compared with those of a commit: clocks of two leaders may differ."""
        return commit.since if self.since is None else self.since, self.at


class Recorded:
    """A run of an archive."""

    def __init__(self, archive: Archive, config: BatcherConfig, commits: Sequence[Commit]) -> None:
        self.archive = archive
        self.config = config
        """Of its last revision."""
        self.commits = commits
        """In the order in which they were made; also those that were taken back."""

    @cached_property
    def pushes(self) -> list[RecordedPush]:
        """All of them, in the order of the pool."""
        return recorded_pushes(self.archive)

    @cached_property
    def drops(self) -> list[DroppedGroup]:
        """Those of groups, and of parts of them."""
        return [*self.archive.dropped()]

    @cached_property
    def drop_turns(self) -> list[DropTurn]:
        """In their order. What could not be trained is not among them: it was found when a step was made of it."""
        drops = [drop for drop in self.drops if drop.reason != Reason.INVALID]
        return [_turn_of(at, tuple(turn)) for at, turn in groupby(drops, key=self.decided_at)]

    def decided_at(self, drop: DroppedGroup) -> float:
        """Unix seconds: of a leader's turn by its clock, as commits have it; else of the drop by the server's."""
        decided = readable(DecidedRecord, drop.record).get("decided")
        if decided is not None:
            return float(decided)
        # Of before 2026-11-30, or an operator's.
        later = bisect_left(self._committed_ms, drop.at_ms)
        of_turn = self.commits[later].decided if later < len(self.commits) else math.inf
        return min(of_turn, drop.at_ms / 1000)

    @cached_property
    def _committed_ms(self) -> list[int]:
        return [*accumulate((commit.step.committed_ms for commit in self.commits), max)]

    def before(self, commit: Commit) -> Commit | None:
        """The commit of the step before it; None of the first."""
        return self._by_digest.get(commit.step.previous_digest)

    @cached_property
    def _by_digest(self) -> dict[str, Commit]:
        return {commit.step.digest: commit for commit in self.commits}

    def then(self, before: Commit | None, commit: Commit, at: float, turn: DropTurn | None = None) -> Commit:
        """What the leader was about at a moment between two commits, when it dropped these: the step behind the first
        where settings have changed, or steps were taken back, since; and a policy version of then."""
        told = None if turn is None else turn.published
        if before is None:
            return commit if told is None else replace(commit, published={**commit.published, **told})
        is_before = at < commit.began if turn is None else turn.place(commit) < (commit.since, commit.began)
        step = before.step if is_before else commit.step
        number = before.step.step + 1 if is_before else step.step
        if told is not None:
            return replace(commit, step=replace(step, step=number), published={**commit.published, **told})
        dropped = () if turn is None else turn.drops
        newest = [before.published.get("", -1), self._trained_by(at)]
        # A group drops as stale only when a version is out that is not.
        config = config_of(self.archive, step.revision)
        newest += [
            oldest_version(number, config.for_env(drop.env).max_age) for drop in dropped if drop.reason == Reason.STALE
        ]
        published = max(newest) if is_before else min(max(newest), commit.published.get("", -1))
        return replace(commit, step=replace(step, step=number), published={**commit.published, "": published})

    def free_at(self, commit: Commit) -> float:
        """When the trainer had so few steps that this one could be made; 0 where nothing had to be trained first."""
        number = commit.step.step - 1 - self.config.lookahead
        moments = self._trained_at.get(number, ())
        return max((at for at in moments if at <= commit.step.committed_ms / 1000), default=0.0)

    def _trained_by(self, at: float) -> int:
        """The newest step that was said to be trained by then."""
        times, steps = self._newest_trained
        place = bisect_right(times, at)
        return steps[place - 1] if place else 0

    @cached_property
    def _newest_trained(self) -> tuple[list[float], list[int]]:
        trained = [(at, int(record["step"])) for at, record in self.archive.trained_at()]
        return [at for at, _ in trained], [*accumulate((step for _, step in trained), max)]

    @cached_property
    def _trained_at(self) -> dict[int, list[float]]:
        """Step -> when it was said to be trained: again after it was taken back."""
        out: dict[int, list[float]] = {}
        for at, record in self.archive.trained_at():
            out.setdefault(record["step"], []).append(at)
        return out

    @cached_property
    def workers(self) -> list[str]:
        """The env of each worker that pushed with tickets, once per group that it had in flight at once."""
        out: list[str] = []
        times: dict[tuple[str, str], list[tuple[float, int]]] = {}
        for push in self.timed:
            seconds = push.seconds or 0.0
            moments = times.setdefault((push.info.worker, push.info.env), [])
            moments += [(push.pushed - seconds, 1), (push.pushed, -1)]
        for (_, env), of_worker in sorted(times.items()):
            busy, most = 0, 0
            for _, change in sorted(of_worker):
                busy += change
                most = max(most, busy)
            out += [env] * max(1, most)
        return out

    @cached_property
    def timed(self) -> list[RecordedPush]:
        """The first push of each group that had a ticket."""
        found: dict[str, RecordedPush] = {}
        for push in self.pushes:
            if push.seconds is not None:
                found.setdefault(push.info.group_id, push)
        return [*found.values()]

    @cached_property
    def _times(self) -> list[Mapping[str, float]]:
        """`seconds` of the trainer's records that have them."""
        found = [record.get("seconds") for record in self.archive.trained]
        return [times for times in found if isinstance(times, Mapping) and times.keys() & {"total", "train"}]

    @cached_property
    def train_seconds(self) -> float:
        """Mean of a step, without what it waited for."""
        spent = [t["total"] - t.get("wait", 0.0) if "total" in t else t["train"] for t in self._times]
        return fmean(spent) if spent else 0.0

    @cached_property
    def needs_advantage(self) -> bool:
        """The trainer's loss learns nothing where the advantage is 0, as far as is known."""
        try:
            return needs_advantage(settings_of(self.archive.attempts[-1]["settings"]).trainer.loss)
        except (ConfigError, IndexError, KeyError, TypeError, ValueError):  # it said none, or those of another program
            return True

    @property
    def outcome(self) -> Outcome:
        """What became of it."""
        infos: dict[str, list[GroupInfo]] = {}
        for push in self.pushes:
            infos.setdefault(push.info.group_id, []).append(push.info)
        counting = {step.digest for step in self.archive.steps}
        used = [
            (group_id, commit.step.step)
            for commit in self.commits
            if commit.step.digest in counting
            for group_id in commit.header.group_ids
            if group_id in infos
        ]
        fates = [fate_of(infos[group_id], age=step - 1 - oldest_of(infos[group_id])) for group_id, step in used]
        trained = {group_id for group_id, _ in used}
        fates += [
            fate_of(infos[group_id], reason=reason)
            for group_id, reason in {drop.group_id: drop.reason for drop in self.drops}.items()
            if group_id in infos and group_id not in trained
        ]
        steps = len(self.archive.trained)
        waited = fmean(times.get("wait", 0.0) for times in self._times) * steps
        return outcome_of(fates, steps=steps, seconds=waited + self.train_seconds * steps, waited=waited)


def fate_of(infos: Sequence[GroupInfo], *, age: int | None = None, reason: str = "") -> Fate:
    """The fate of a group by its pushes."""
    tokens, rollouts = sum(info.tokens for info in infos), sum(info.totals.rollouts for info in infos)
    return Fate(tokens=tokens, length=tokens / max(1, rollouts), age=age, reason=reason)


def read(archive: Archive) -> Recorded:
    """A run of an archive, if its decisions can be made again.

    Raises:
        ArchiveError: they cannot; the message names what the archive lacks, or has.
    """
    if archive.lacks:
        raise ArchiveError(f"{archive.folder} is of an older format and lacks {'; '.join(archive.lacks)}")
    if not archive.steps:
        raise ArchiveError(f"{archive.folder} has no step")
    config = config_of(archive, archive.steps[-1].revision)
    if config.is_stream:
        raise ArchiveError(f"{archive.folder} is of a stream, whose trainer asks for groups at times that nobody keeps")
    if archive.has_lost_steps:
        raise ArchiveError(f"{archive.folder}: the server had lost steps, and nobody knows what the leader held then")
    commits = _commits(archive)
    recorded = Recorded(archive, config, commits)
    if recorded.train_seconds <= 0:
        raise ArchiveError(
            f"{archive.folder} does not say how long a step trains: `seconds` in the trainer's records "
            "(reader.add_record)"
        )
    return recorded


def _turn_of(at: float, drops: tuple[DroppedGroup, ...]) -> DropTurn:
    records = [readable(DecidedRecord, drop.record) for drop in drops]  # anybody may have written them
    told = next((record for record in records if _ENTRY.match(record.get("read") or "")), {})
    published: dict[str, int] = {}
    for record in records:
        published |= record.get("published") or {}
    return DropTurn(
        at=at,
        drops=drops,
        read=entry_order(told["read"]) if told else max(map(_newest_of, drops)),
        since=told.get("since"),
        published=published if told else None,
        is_held=told.get("is_held"),
    )


def _newest_of(drop: DroppedGroup) -> tuple[int, int]:
    """Place in the pool of its last push."""
    record = readable(Dropped, drop.record)
    pushes = record.get("pushes") or {"": [None, None, record.get("entry_id")]}
    entries = [str(push[2]) for push in pushes.values() if len(push) > 2]
    return max((entry_order(entry) for entry in entries if _ENTRY.match(entry)), default=(0, 0))


def _commits(archive: Archive) -> list[Commit]:
    """Every commit, with what the leader knew. Raises ArchiveError where one of them, or that, is not there."""
    committed = recorded_commits(archive)
    while committed and committed[-1][0] is None:  # committed while the archive was written for the last time
        committed.pop()
    headers = {header.digest: header for header in archive.headers([step for step, _ in committed if step is not None])}
    commits, number = list[Commit](), 0
    for step, record in committed:
        number += 1
        if record["step"] > number:
            lack = f"has no step {number}: what was decided then"
            if number == 1:
                lack = f"begins with step {record['step']}: what was decided before"
            raise ArchiveError(f"{archive.folder} {lack} is not there")
        number = record["step"]
        if step is None:
            is_back = number in {other["step"] for step, other in committed if step is not None}
            why = "was taken back before it was archived" if is_back else "was not archived"
            raise ArchiveError(f"{archive.folder}: step {number} {why}, and nobody knows what was in it")
        if record.get("read") is None:
            raise ArchiveError(f"{archive.folder} does not say what the leader had read at step {number}")
        commits.append(
            Commit(
                step=step,
                header=headers[step.digest],
                read=entry_order(str(record["read"])),
                decided=record["decided"],
                since=record["since"],
                began=record.get("began", record["since"]),
                published=record["published"],
            )
        )
    if number < archive.steps[-1].step:
        raise ArchiveError(f"{archive.folder} does not say what the leader had read at step {number + 1}")
    return commits


def config_of(archive: Archive, revision: int) -> BatcherConfig:
    """The batcher's settings of a revision."""
    return BatcherConfig(**json.loads(archive.settings(revision)["config"]))


def completed(config: BatcherConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes, and what follows from them where they say nothing else: steps that wait take the oldest first."""
    follows: dict[str, Any] = {}
    if changes.get("batcher.slow") == "wait":
        follows = {f"batcher.{name}": value for name, value in WAITING.items() if getattr(config, name) != value}
    return {**changes, **{name: value for name, value in follows.items() if name not in changes}}


def changed(config: BatcherConfig, changes: Mapping[str, Any]) -> BatcherConfig:
    """`config` with other settings, dotted as in the file: ``batcher.max_age``.

    Raises:
        ConfigError: nothing is known of a run with them, and why; or they are no settings.
    """
    values = config.as_dict()
    for setting, value in completed(config, changes).items():
        section, _, name = setting.partition(".")
        if section in UNKNOWN:
            raise ConfigError(f"{setting}: {UNKNOWN[section]}", setting=setting)
        name, _, rest = name.partition(".")
        if section != "batcher" or name not in values:
            raise ConfigError(
                f"{setting} is not a setting of [batcher], which is what can be asked about.{meant_by(setting)}",
                setting=setting,
            )
        if name in DECIDED_BY_CONTENT:
            raise ConfigError(f"{setting}: {REWARDS}", setting=setting)
        if rest:
            if not isinstance(values[name], Mapping):
                raise ConfigError(f"batcher.{name} is no table", setting=setting)
            values[name] = {**values[name], rest: value}
        else:
            values[name] = value
    if ":" in str(values["order"]):
        raise ConfigError("batcher.order: a selector of one's own may ask for anything", setting="batcher.order")
    return BatcherConfig(**values)
