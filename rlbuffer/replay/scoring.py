"""The logprobs of a step's rollouts by kept versions of the policy: which of them has sampled what?

A rollout says which version sampled it. Scored by that version its logprobs are those that came with it, but for the
sampler's rounding; by another one they are as far off as the policy has moved. So weights that a sampler did not load
are proved, whatever the learning rate is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlbuffer.archive.library import ArchivedRollout
from rlbuffer.config.recorded import settings_of
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import CheckpointError, PayloadError
from rlbuffer.records.rollout import TokenSequence
from rlbuffer.scorer.reference import Reference
from rlbuffer.state.verdicts import LEAST_RMS, LEAST_TOKENS
from rlbuffer.trainer.checkpoints import checkpoint
from rlbuffer.trainer.model.lora import add_adapter
from rlbuffer.trainer.model.packed_policy import prepare
from rlbuffer.trainer.session import device_of
from rlbuffer.weights import layout
from rlbuffer.weights.model import build_model, narrow_dtype

MOST_VERSIONS = 8
"""Versions that score at once, where nobody has asked for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The tokens that one version is said to have sampled, scored by another one."""

    version: int
    """The one that scores."""
    sampled_by: int
    """The one that is said to have sampled."""
    tokens: int
    rms: float
    """Root mean square of the differences of logprobs, in nats."""
    ratio: float
    """Mean of the version's probability over the recorded one."""
    p99: float
    """99 % of the ratios are within this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A rollout of the step, scored by every version."""

    rollout: ArchivedRollout
    tokens: int
    """Trained ones."""
    sampled_by: tuple[int, int]
    """Oldest and newest version of its tokens."""
    rms: Mapping[int, float]
    """Version -> root mean square of the differences of its logprobs."""


def versions_in(output: Path, checkpoints: Path) -> dict[int, Path]:
    """Version -> where its parameters are: a checkpoint, or what was published under the trainer's `output`."""
    published = layout.versions(output / "weights")
    kept = {version: folders[-1] for version, folders in published.items() if not layout.is_adapter(folders[-1])}
    return kept | {step: checkpoint.path_of(checkpoints, step) for step in checkpoint.steps(checkpoints)}


def samplers(members: Sequence[ArchivedRollout], there: Mapping[int, Path]) -> tuple[list[int], list[int]]:
    """The oldest and the newest version of each rollout, ascending: those that can score, those that are not kept."""
    names = ("min_version", "max_version")
    versions = sorted({int(member.row[name]) for member in members for name in names})
    # Version 0 can be made again.
    return [v for v in versions if v in there or v == 0], [v for v in versions if v not in there and v != 0]


def not_kept(what: str, there: Mapping[int, Path], *, output: Path, checkpoints: Path) -> CheckpointError:
    """The refusal to score by versions that are not kept; `what` names them, with its verb."""
    kept = ", ".join(map(str, sorted({0, *there})))
    return CheckpointError(
        f"{what} kept in {checkpoints}, nor published in {output / 'weights'}: there are {kept}. More are kept "
        "with trainer.checkpoint.keep, and a replay with --output makes further ones"
    )


def other_samplers(fits: Sequence[Fit]) -> dict[int, Fit]:
    """Version that is said to have sampled -> the fit of another one, which is nearer to the tokens, beyond doubt.

    Beyond doubt is half as far off, or less: what a sampler's numbers add is the same for all versions, and makes none
    of them so much better than the right one.
    """
    found: dict[int, Fit] = {}
    for named in [fit for fit in fits if fit.version == fit.sampled_by]:
        nearest = min((fit for fit in fits if fit.sampled_by == named.version), key=lambda fit: fit.rms)
        if named.tokens >= LEAST_TOKENS and named.rms > LEAST_RMS and nearest.rms < named.rms / 2:
            found[named.version] = nearest
    return found


def unexplained(fits: Sequence[Fit], rounded: float) -> dict[int, Fit]:
    """Version that is said to have sampled -> the nearest fit, where even that one is off by more than `rounded`."""
    nearest = {fit.sampled_by: fit for fit in sorted(fits, key=lambda fit: -fit.rms)}
    return {
        by: nearest[by] for by in sorted(nearest) if nearest[by].tokens >= LEAST_TOKENS and nearest[by].rms > rounded
    }


def beside(version: int, versions: Iterable[int]) -> list[int]:
    """At most :data:`MOST_VERSIONS` of `versions`, ascending: those whose numbers are nearest to `version`."""
    return sorted(sorted(versions, key=lambda each: abs(each - version))[:MOST_VERSIONS])


def travelled(
    kept: Mapping[str, Any],
    batcher: Mapping[str, Any],
    *,
    members: Sequence[ArchivedRollout],
    versions: Sequence[int],
    output: Path,
    checkpoints: Path,
) -> tuple[list[Fit], list[Scored]]:
    """Scores rollouts of a step by versions that :func:`versions_in` finds; version 0 can be made again.

    Args:
        kept: the settings of the attempt that trained the step; `batcher`: those of its revision.

    Raises:
        CheckpointError: one is not kept.
    """
    there = versions_in(output, checkpoints)
    for version in versions:
        if version not in there and version != 0:
            raise not_kept(f"version {version} is not", there, output=output, checkpoints=checkpoints)
    settings = settings_of(kept, batcher=batcher)
    pairs: list[tuple[ArchivedRollout, TokenSequence]] = []
    for member in members:
        try:
            pairs += [(member, sequence) for sequence in member.rollout.sequences]
        except PayloadError:
            continue  # it was not trained either
    sequences = [sequence for _, sequence in pairs]
    differences = {version: _differences(settings, there.get(version), sequences) for version in versions}
    tokens = [np.flatnonzero(sequence.loss_mask) for sequence in sequences]
    sampled = [_sampled_by(sequence, at) for sequence, at in zip(sequences, tokens, strict=True)]
    everything = np.concatenate(sampled) if sampled else np.empty(0, np.int64)
    fits = [
        _fit(version, int(by), np.concatenate(differences[version])[everything == by])
        for version in versions
        for by in np.unique(everything)
    ]
    places: dict[int, list[int]] = {}
    for place, (member, _) in enumerate(pairs):
        places.setdefault(id(member), []).append(place)
    scored = [
        Scored(
            rollout=member,
            tokens=sum(len(tokens[place]) for place in places[id(member)]),
            sampled_by=(int(member.row["min_version"]), int(member.row["max_version"])),
            rms={
                version: _rms(np.concatenate([differences[version][place] for place in places[id(member)]]))
                for version in versions
            },
        )
        for member in members
        if id(member) in places
    ]
    return fits, scored


def _sampled_by(sequence: TokenSequence, tokens: Any) -> Any:
    """[trained tokens] the version that sampled each."""
    versions = np.zeros(len(sequence.tokens), np.int64)
    for version, start, end in sequence.version_spans:
        versions[start:end] = version
    return versions[tokens]


def _differences(settings: RunSettings, place: Path | None, sequences: Sequence[TokenSequence]) -> list[Any]:
    """Per sequence the differences of its trained tokens' logprobs: the version's minus the recorded ones."""
    reference = _reference(settings, place)
    found = reference.logprobs(sequences)
    return [
        np.asarray(mine - sequence.logprobs, np.float64)[sequence.loss_mask]
        for mine, sequence in zip(found, sequences, strict=True)
    ]


def _reference(settings: RunSettings, place: Path | None) -> Reference:
    """A version as a scorer has it: layout, head and dtypes are those of the trainer."""
    is_published = place is not None and place.parent.name == "weights"
    chosen = settings.model.model_copy(update={"path": str(place), "config": {}}) if is_published else settings.model
    model = build_model(chosen, seed=settings.seed)
    torch.nn.Module.to(model, device_of(settings))
    policy = prepare(
        model,
        layout=settings.trainer.layout,
        compute=narrow_dtype(chosen),
        longest=settings.batcher.row_tokens,
    )
    if place is not None and not is_published:
        if settings.trainer.lora.is_used:
            add_adapter(policy.model, settings.trainer.lora, seed=settings.seed)
        checkpoint.restore_policy(place, policy)
    return Reference(policy, row_tokens=settings.batcher.row_tokens, temperature=settings.trainer.temperature)


def _rms(differences: Any) -> float:
    return float(np.sqrt(np.mean(differences**2))) if len(differences) else 0.0


def _fit(version: int, by: int, differences: Any) -> Fit:
    return Fit(
        version=version,
        sampled_by=by,
        tokens=len(differences),
        rms=_rms(differences),
        ratio=float(np.mean(np.exp(differences))),
        p99=float(np.exp(np.quantile(np.abs(differences), 0.99))),
    )
