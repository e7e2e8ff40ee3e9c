"""A recorded run, as far as what-if needs it, and what its archive cannot answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from rlbuffer.archive import Archive, ArchivedStep
from rlbuffer.archive.decisions import RecordedPush, commits_that_count, recorded_pushes
from rlbuffer.config.batcher import WAITING, BatcherConfig
from rlbuffer.config.losses import needs_advantage
from rlbuffer.config.recorded import settings_of
from rlbuffer.errors import ArchiveError, ConfigError
from rlbuffer.records.info import GroupInfo
from rlbuffer.records.step_header import StepHeader
from rlbuffer.what_if.outcome import Fate, Outcome, oldest_of, outcome_of

REWARDS = "the rewards and lengths of a policy that trained on other data are not known"
UNKNOWN: Mapping[str, str] = {
    "trainer": f"{REWARDS}: replay the steps (`rlbuffer replay`) to see what a loss does to the recorded ones",
    "model": REWARDS,
    "worker": "how fast a sampler is, and how it slows down beside others, is not in the archive",
    "gateway": "how fast engines are, and how they slow down beside others, is not in the archive",
}
"""Section of the settings -> why nothing is known of a run with others."""
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
    published: Mapping[str, int]


class Recorded:
    """A run of an archive."""

    def __init__(self, archive: Archive, config: BatcherConfig, commits: Sequence[Commit]) -> None:
        self.archive = archive
        self.config = config
        """Of its last revision."""
        self.commits = commits

    @cached_property
    def pushes(self) -> list[RecordedPush]:
        """All of them, in the order of the pool."""
        return recorded_pushes(self.archive)

    @cached_property
    def drops(self) -> dict[str, tuple[str, str]]:
        """Group -> reason and detail, of those that were dropped whole."""
        return {drop.group_id: (drop.reason, drop.detail) for drop in self.archive.dropped()}

    @cached_property
    def workers(self) -> list[str]:
        """The env of each worker that pushed with tickets, once per group that it had in flight at once."""
        out: list[str] = []
        times: dict[tuple[str, str], list[tuple[float, int]]] = {}
        for push in self.timed:
            seconds = push.seconds or 0.0
            its = times.setdefault((push.info.worker, push.info.env), [])
            its += [(push.pushed - seconds, 1), (push.pushed, -1)]
        for (_, env), moments in sorted(times.items()):
            busy, most = 0, 0
            for _, change in sorted(moments):
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
        said = [record.get("seconds") for record in self.archive.trained]
        return [times for times in said if isinstance(times, Mapping) and times.keys() & {"total", "train"}]

    @cached_property
    def train_seconds(self) -> float:
        """Mean of a step, without what it waited for."""
        spent = [t["total"] - t.get("wait", 0.0) if "total" in t else t["train"] for t in self._times]
        return fmean(spent) if spent else 0.0

    @cached_property
    def trained(self) -> list[tuple[float, Mapping[str, Any]]]:
        """When the trainer said that it had trained a step, Unix seconds, and its record."""
        return self.archive.trained_at()

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
        fates = []
        for commit in self.commits:
            fates += [
                fate_of(infos[group_id], age=commit.step.step - 1 - oldest_of(infos[group_id]))
                for group_id in commit.header.group_ids
                if group_id in infos
            ]
        trained = {group_id for commit in self.commits for group_id in commit.header.group_ids}
        fates += [
            fate_of(infos[group_id], reason=reason)
            for group_id, (reason, _) in self.drops.items()
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
    if len({step.epoch for step in archive.steps}) > 1 or len(archive.all_steps) > len(archive.steps):
        raise ArchiveError(
            f"{archive.folder}: steps were taken back or lost, and what the leader held then is not there"
        )
    if archive.steps[0].step != 1:
        raise ArchiveError(
            f"{archive.folder} begins with step {archive.steps[0].step}: what was decided before is not there"
        )
    numbers = {step.step for step in archive.steps}
    holes = [number for number in range(1, archive.steps[-1].step) if number not in numbers]
    if holes:
        raise ArchiveError(f"{archive.folder} has no step {holes[0]}: what was decided then is not there")
    config = config_of(archive, archive.steps[-1].revision)
    if config.is_stream:
        raise ArchiveError(f"{archive.folder} is of a stream, whose trainer asks for groups at times that nobody keeps")
    known = {step.digest: record for step, record in commits_that_count(archive)}
    missing = [step.step for step in archive.steps if known.get(step.digest, {}).get("read") is None]
    if missing:
        raise ArchiveError(f"{archive.folder} does not say what the leader had read at step {missing[0]}")
    headers = dict(zip([s.digest for s in archive.steps], archive.headers(archive.steps), strict=True))
    commits = []
    for step in archive.steps:
        record = known[step.digest]
        at, _, sequence = str(record["read"]).partition("-")
        commits.append(
            Commit(
                step=step,
                header=headers[step.digest],
                read=(int(at), int(sequence)),
                decided=record["decided"],
                since=record["since"],
                published=record["published"],
            )
        )
    recorded = Recorded(archive, config, commits)
    if recorded.train_seconds <= 0:
        raise ArchiveError(
            f"{archive.folder} does not say how long a step trains: `seconds` in the trainer's records "
            "(reader.add_record)"
        )
    return recorded


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
            raise ConfigError(f"{setting} is no setting of the batcher: those are what is asked", setting=setting)
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
