"""The recorded steps of an archive trained again, and how far that is what the run did.

Bits are the same on the same machine, with the same releases, threads and world size, from the checkpoint that the run
had. Another number of ranks adds up in another order. Under other settings the rollouts are, after some steps, not
those of the policy that trains on them: the distance stands beside each figure.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rlbuffer import __version__
from rlbuffer.archive.library import Archive
from rlbuffer.archive.schema import history_names
from rlbuffer.config.recorded import settings_of
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ArchiveError, CheckpointError, ConfigError
from rlbuffer.replay.recorded_run import check_range, recorded_run
from rlbuffer.state.step_record import StepRecord

METRICS = "metrics.jsonl"
LEFT = 0.1
"""k3, in nats, above which the rollouts are not those of the policy that trains on them any more."""
JUMP, USUAL_STEPS, LEAST_STEPS = 4.0, 20, 3
"""A gradient norm jumps where it is so many times the median of the steps before, of which so many count: the most and
the least."""
_FIXED = {
    "trainer.world_size": "--world-size sets it",
    "trainer.output": "--output sets it",
    "trainer.checkpoint": "a replay writes one checkpoint, at its end",
    "trainer.publish": "a replay publishes nothing",
}
_CHANGEABLE = ("trainer", "model", "seed", "deterministic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Recorded steps that can be trained again."""

    archive: Archive
    kept: Mapping[str, Any]
    """Settings, as :func:`rlbuffer.config.recorded.recorded` kept them."""
    attempt: int
    """The number of the attempt that they are of, from 1; 0: they were given."""
    batcher: Mapping[str, Any]
    first: int
    """The first step that is trained: the one behind `begin`."""
    last: int
    begin: int
    """The checkpoint that it begins with; 0: fresh weights."""
    checkpoint: Path | None
    """Its folder."""
    checkpoints: Path
    """The folder of the run's checkpoints."""
    world_size: int
    """Ranks that the run had."""
    notes: tuple[str, ...]
    """What is not as it was when the run was made, a sentence each."""

    def settings(self, changes: Mapping[str, Any], *, output: Path, world_size: int) -> RunSettings:
        """The settings of a replay, some of them changed. Raises ConfigError for one that a replay cannot change."""
        for name in changes:
            fixed = next((why for of, why in _FIXED.items() if f"{name}.".startswith(f"{of}.")), "")
            if name.partition(".")[0] == "batcher":
                fixed = "what a step is made of is recorded, and a replay trains just that"
            elif name.partition(".")[0] not in _CHANGEABLE:
                fixed = "a replay reads [trainer], [model], seed and deterministic"
            if fixed:
                # Without the setting: the place that a file gives it is not where it was changed.
                raise ConfigError(f"--set {name}: {fixed}")
        settings = settings_of(self.kept, batcher=self.batcher, changes=changes)
        if settings.trainer.steps < self.last:
            if "trainer.steps" in changes:
                raise ConfigError(f"--set trainer.steps = {settings.trainer.steps} ends before step {self.last}")
            raise ConfigError(
                f"step {self.last} was committed, and never trained: trainer.steps = {settings.trainer.steps}",
                setting="trainer.steps",
            )
        reports = {"check_ranks": True, "tensorboard": False, "wandb_project": "", "example_every": 0}
        trainer = settings.trainer.model_copy(
            update={
                "world_size": world_size,
                "output": output,
                "reports": settings.trainer.reports.model_copy(update=reports),
                "checkpoint": settings.trainer.checkpoint.model_copy(update={"every": 10**9, "keep": 10**6}),
            }
        )
        return settings.model_copy(update={"trainer": trainer})


def checkpoints_of(kept: Mapping[str, Any]) -> Path:
    """The folder of the checkpoints of a run of these settings."""
    return Path(str(kept["trainer"]["output"])) / "checkpoints"


def planned(
    folder: str | Path,
    *,
    first: int | None = None,
    last: int | None = None,
    checkpoints: Path | None = None,
    given: Mapping[str, Any] | None = None,
) -> Replay:
    """Finds what a replay of steps `first` to `last` needs; None: from the first that there is, to the last trained.

    Args:
        checkpoints: folder of the run's checkpoints; None: where its trainer has written them.
        given: settings in place of the recorded ones, as `recorded` makes them.

    Raises:
        ArchiveError: a hole, a step that is not there, or no settings. CheckpointError: no checkpoint to begin from.
    """
    archive = Archive(folder)
    if not archive.steps:
        raise ArchiveError(f"the archive {folder} has no steps")
    # The newest ones may have been committed ahead, and never trained.
    newest = max(trained_ms(archive), default=archive.steps[-1].step)
    last = newest if last is None else last
    first = archive.steps[0].step if first is None else first
    there = f"{archive.steps[0].step} to {archive.steps[-1].step}"
    if first > last:
        trained = "" if newest == archive.steps[-1].step else f", trained to {newest}"
        raise ArchiveError(f"no step lies from {first} to {last}: the archive has {there}{trained}")
    if not archive.steps[0].step <= first <= last <= archive.steps[-1].step:
        raise ArchiveError(f"the archive {folder} has no steps {first} to {last}: it has {there}")
    number, attempt = attempt_of(archive, first) if given is None else (0, {"settings": given})
    kept = attempt["settings"]
    checkpoints = checkpoints_of(kept) if checkpoints is None else checkpoints
    begin, checkpoint = _beginning(checkpoints, first)
    check_range(archive, begin + 1, last)
    revision = next(step.revision for step in archive.steps if step.step == first)
    return Replay(
        archive=archive,
        kept=kept,
        attempt=number,
        batcher=json.loads(archive.settings(revision)["config"]),
        first=begin + 1,
        last=last,
        begin=begin,
        checkpoint=checkpoint,
        checkpoints=checkpoints,
        world_size=int(attempt.get("world_size", kept["trainer"]["world_size"])),
        notes=tuple(_notes(archive, attempt, number, last)),
    )


def trained_ms(archive: Archive) -> dict[int, int]:
    """Step that counts -> server time in milliseconds when its record came."""
    numbers = {step.digest: step.step for step in archive.steps}
    return {
        numbers[row["digest"]]: row["at_ms"]
        for _, _, name in history_names(archive.folder, "trained")
        for row in archive.table(name)
        if row["digest"] in numbers
    }


def attempt_of(archive: Archive, step: int) -> tuple[int, Mapping[str, Any]]:
    """Number and record of the attempt that trained a step."""
    numbered = [(n, each) for n, each in enumerate(archive.attempts, 1) if isinstance(each.get("settings"), Mapping)]
    attempts = [(n, each) for n, each in numbered if "trainer" in each["settings"] and "model" in each["settings"]]
    if not attempts:
        why = " It is of an older format, which keeps no settings." if archive.lacks else ""
        raise ArchiveError(
            f"the archive {archive.folder} does not say what its trainer trained with.{why} Give the run's settings "
            "with --config; a loop of your own reads the steps with rlbuffer.replay.reader(folder)"
        )
    at = trained_ms(archive).get(step)
    begun = [(n, each) for n, each in attempts if (each["at_ms"] <= at if at is not None else each["step"] < step)]
    return begun[-1] if begun else attempts[0]


def _beginning(checkpoints: Path, first: int) -> tuple[int, Path | None]:
    """The newest checkpoint before step `first`, and its folder; fresh weights before the first step of all."""
    from rlbuffer.trainer.checkpoints import checkpoint

    there = checkpoint.steps(checkpoints)
    before = [step for step in there if step < first]
    if first == 1 or not before:
        if first > 1:
            others = f": there are those of steps {', '.join(map(str, there))}" if there else ""
            raise CheckpointError(
                f"step {first} is trained behind the checkpoint of step {first - 1}, or an older one from which it is "
                f"trained on, and {checkpoints} has none{others}. Keep more of them (trainer.checkpoint.keep), name "
                "another folder with --checkpoints, or begin with step 1"
            )
        return 0, None
    return before[-1], checkpoint.path_of(checkpoints, before[-1])


def _notes(archive: Archive, attempt: Mapping[str, Any], number: int, last: int) -> Iterator[str]:
    kept = attempt["settings"]
    here = {
        "rlbuffer": __version__,
        "torch": version("torch"),
        "python": platform.python_version(),
        "processor": platform.machine(),
    }
    other = [f"{name} {then}, here {here[name]}" for name, then in kept.get("machine", {}).items() if name in here]
    other = [text for text in other if text.split(", here ")[0].split(" ", 1)[1] != text.split(", here ")[1]]
    if other:
        yield f"the run had {'; '.join(other)}: bits may differ"
    until = trained_ms(archive).get(last, 2**63)
    for n, later in enumerate(archive.attempts[number:] if number else (), number + 1):
        if later["at_ms"] > until:
            break
        a, b = (_leaves({k: v for k, v in s.items() if k != "machine"}) for s in (kept, later.get("settings", {})))
        changed = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
        if changed:
            yield f"attempt {n}, behind step {later['step']}, had other settings: {', '.join(changed)}"


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {n: v for key, each in value.items() for n, v in _leaves(each, f"{name}.{key}" if name else key).items()}


def run(replay: Replay, settings: RunSettings, *, display: str) -> int:
    """Trains the steps into the output folder of `settings`. -> exit code, as :func:`rlbuffer.trainer.launch`."""
    from rlbuffer.trainer.launch.launcher import launch

    output = settings.output_dir
    if replay.checkpoint is not None:
        (output / "checkpoints").mkdir(parents=True, exist_ok=True)
        link = output / "checkpoints" / replay.checkpoint.name
        if not link.exists():
            link.symlink_to(replay.checkpoint.absolute(), target_is_directory=True)
    with _threads(replay.kept.get("machine", {}).get("threads")):
        return launch(
            settings,
            world_size=settings.trainer.world_size,
            display=display,
            source=partial(recorded_run, str(replay.archive.folder), replay.last),
            max_restarts=0,
        )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Ranks have as many threads as those of the run: sums are split over them."""
    before = os.environ.get("OMP_NUM_THREADS")
    if count is not None and before is None:
        os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)


def records_in(folder: Path) -> dict[int, StepRecord]:
    """Step -> its record, of the metrics in a folder."""
    lines = (folder / METRICS).read_text("utf-8").splitlines() if (folder / METRICS).exists() else []
    records = [StepRecord.read(json.loads(line)) for line in lines]
    return {record.step: record for record in records if record.event == "step"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A replay beside the run, over the steps that both have."""

    steps: int
    parameters: int | None
    """Steps behind which the parameters are the same bits; None: the run did not keep their hashes."""
    batches: int | None
    """Steps whose micro-batches are the same bytes; None: no hashes, or other ranks."""
    figures: int
    """Steps of which loss, gradient norm and learning rate are the same numbers."""
    largest: float
    """Largest relative difference of losses and gradient norms."""
    damaged: tuple[int, ...]
    """Steps of which the replay lacked payloads that the run had."""


def compared(recorded: Mapping[int, StepRecord], made: Mapping[int, StepRecord]) -> Comparison:
    """Compares the records of the run with those of a replay."""
    pairs = [(recorded[step], made[step]) for step in sorted(recorded.keys() & made.keys())]
    hashed = [(a, b) for a, b in pairs if a.parameters_sha256 and b.parameters_sha256]
    dealt = [(a, b) for a, b in pairs if a.batch_sha256 and len(a.batch_sha256) == len(b.batch_sha256)]
    names = ("loss", "grad_norm", "learning_rate")
    figures = [[(getattr(a, name), getattr(b, name)) for name in names] for a, b in pairs]
    distances = [abs(x - y) / max(abs(x), 1e-12) for figure in figures for x, y in figure[:2] if None not in (x, y)]
    return Comparison(
        steps=len(pairs),
        parameters=sum(a.parameters_sha256[0] == b.parameters_sha256[0] for a, b in hashed) if hashed else None,
        batches=sum(list(a.batch_sha256) == list(b.batch_sha256) for a, b in dealt) if dealt else None,
        figures=sum(all(x == y for x, y in figure) for figure in figures),
        largest=max(distances, default=0.0),
        damaged=tuple(a.step for a, b in pairs if b.damaged_tokens > a.damaged_tokens),
    )


def left_at(records: Mapping[int, StepRecord]) -> int | None:
    """The first step at which the rollouts are further from the policy than :data:`LEFT`; None: at none."""
    return next((step for step in sorted(records) if (records[step].kl or 0.0) > LEFT), None)


def jumped_at(records: Mapping[int, StepRecord]) -> tuple[int, float, float] | None:
    """The first step whose gradient norm jumped, that norm, and the usual one before it; None: none did."""
    before: list[float] = []
    for step in sorted(records):
        norm = records[step].grad_norm
        if norm is None:
            continue
        usual = median(before[-USUAL_STEPS:]) if len(before) >= LEAST_STEPS else norm
        if norm > JUMP * usual:
            return step, norm, usual
        before.append(norm)
    return None


def trained_records(archive: Archive) -> dict[int, StepRecord]:
    """Step -> the trainer's record of it, of the steps that count."""
    records: Sequence[StepRecord] = [StepRecord.read(record) for record in archive.trained]
    return {record.step: record for record in records}
