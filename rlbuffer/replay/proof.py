"""Weights that do not arrive, proved: what one version is said to have sampled, scored by the versions that are kept.

The table by age shows that a sampler is off, and why it seems so. Which weights it had is known only from their own
logprobs (:mod:`rlbuffer.replay.scoring`). The proof takes a few thousand tokens of one step, on the CPU: the trainer's
GPUs are in use.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlbuffer.archive.library import Archive, ArchivedRollout
from rlbuffer.errors import ArchiveError, CheckpointError
from rlbuffer.replay.scoring import MOST_VERSIONS, Fit, beside, not_kept, other_samplers, travelled, versions_in
from rlbuffer.replay.training import attempt_of, checkpoints_of, trained_records
from rlbuffer.state.text import plural
from rlbuffer.state.verdicts import LEAST_TOKENS, rounding

MOST_TOKENS = 4096
"""Trained tokens that are scored: the rms of so many is certain within some percent."""
MOST_BYTES = 8 * 2**30
"""Size of a kept version above which it is not loaded beside a run at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The tokens of a step that version `named` is said to have sampled, scored."""

    step: int
    named: int
    fits: tuple[Fit, ...]
    """One per version, ascending; that of `named` is the last."""
    further: tuple[int, ...]
    """Older versions that are kept and have not scored them, ascending."""
    rounded: float
    """Nats up to which a sampler rounds, and no more."""

    @property
    def other(self) -> Fit | None:
        """The version that fits them, where that is another one than is said, and certain."""
        return other_samplers(self.fits).get(self.named)

    @property
    def has_arrived(self) -> bool:
        """The version that is said to have sampled them has."""
        return self.fits[-1].rms <= self.rounded

    @property
    def to_score(self) -> tuple[int, ...]:
        """Versions that tell more, with `named` as the last: those beside the nearest one that are not scored yet."""
        nearest = min(self.fits, key=lambda fit: fit.rms)
        return (*beside(nearest.version, self.further), self.named)

    def __str__(self) -> str:
        fit, other = self.fits[-1], self.other
        tokens = f"{fit.tokens:,} tokens of step {self.step} that version {self.named} is said to have sampled"
        if self.has_arrived:
            return f"{tokens} are its own: scored by it they are off by {fit.rms:.2g} nats (rms)"
        off = f"scored by it they are off by {fit.rms:.2g} nats (rms)"
        if other is None:
            others = ", ".join(f"by {each.rms:.2g} from version {each.version}" for each in self.fits[:-1])
            return f"{tokens}: {off}, {others or 'and no older version is kept'}. {self._none}"
        if other.rms <= self.rounded:
            return (
                f"{tokens} are those of version {other.version}: {off}, by {other.rms:.2g} from version {other.version}"
            )
        nearest = f"by {other.rms:.2g} from version {other.version}, which is nearest"
        return f"{tokens} are older: {off}, {nearest}. {self._none}"

    @property
    def _none(self) -> str:
        """How far it is known that no kept version has sampled them."""
        if not self.further:
            return "None that is kept has sampled them"
        more = plural(len(self.further), "other older version")
        return f"None of the {len(self.fits)} versions that were scored has sampled them; not scored, but kept: {more}"


def weights_proof(archive: Archive, first: int, last: int) -> Proof:
    """Scores the newest archived step from `first` to `last` that a kept version is said to have sampled.

    Raises:
        ArchiveError: the archive lacks them, or does not say what its trainer trained with.
        CheckpointError: no such version is kept, or it is too large.
    """
    steps = [step for step in archive.steps if first <= step.step <= last]
    if not steps:
        raise ArchiveError(f"the archive {archive.folder} has no step from {first} to {last} yet")
    _, attempt = attempt_of(archive, steps[-1].step)
    kept: Mapping[str, Any] = attempt["settings"]
    checkpoints = checkpoints_of(kept)
    places = {"output": checkpoints.parent, "checkpoints": checkpoints}
    there = versions_in(**places)
    members, seen = list[ArchivedRollout](), set[int]()
    for step in reversed(steps):
        members = [m for m in archive.rollouts(step.step) if m.row["min_version"] == m.row["max_version"]]
        tokens = Counter[int]()
        for member in members:
            tokens[int(member.row["min_version"])] += int(member.row["loss_tokens"])
        seen |= tokens.keys()
        sampled = {version for version, count in tokens.items() if count >= LEAST_TOKENS}
        if scorable := sorted(version for version in sampled if version in there or version == 0):
            break
    else:
        names = ", ".join(map(str, sorted(seen)))
        raise not_kept(f"of the versions that sampled steps {first} to {last} ({names}) none is", there, **places)
    named = scorable[-1]
    older = [version for version in sorted({0, *there}) if version <= named]
    versions = _spread(older)
    for version in versions:
        if (size := _size(there.get(version))) > MOST_BYTES:
            raise CheckpointError(
                f"version {version} takes {size / 2**30:.0f} GiB in {there[version]}: score it elsewhere"
            )
    on_cpu = {**kept, "trainer": {**kept["trainer"], "device": "cpu"}}
    batcher = json.loads(archive.settings(step.revision)["config"])
    fits, _ = travelled(on_cpu, batcher, members=_some(members, named), versions=versions, **places)
    if not fits:
        raise ArchiveError(
            f"the archive {archive.folder} has no tokens of step {step.step} that version {named} sampled"
        )
    record = trained_records(archive).get(step.step)
    rounded = rounding(record.bfloat16_rms if record is not None else None)
    further = tuple(version for version in older if version not in versions)
    return Proof(step=step.step, named=named, fits=tuple(fits), further=further, rounded=rounded)


def _spread(versions: Sequence[int]) -> list[int]:
    """At most so many of them, the last among them: a sampler may have stood still for long."""
    count = min(len(versions), MOST_VERSIONS)
    return [versions[-1 - round(i * (len(versions) - 1) / max(1, count - 1))] for i in reversed(range(count))]


def _some(members: Sequence[ArchivedRollout], version: int) -> list[ArchivedRollout]:
    """Rollouts of a version, as many as have so many tokens."""
    found, tokens = list[ArchivedRollout](), 0
    for member in members:
        if tokens < MOST_TOKENS and int(member.row["min_version"]) == version:
            found.append(member)
            tokens += int(member.row["loss_tokens"])
    return found


def _size(place: Path | None) -> int:
    return 0 if place is None else sum(path.stat().st_size for path in place.rglob("*.safetensors"))
