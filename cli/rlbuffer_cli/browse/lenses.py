"""Lenses: one mark per token that says one thing of it, with a legend in numbers. The marks differ without colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.client.views import RolloutView
from rlbuffer.records.rollout import Rollout
from rlbuffer_cli.render.text import BLOCKS

LEAST_PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9)
PROBABILITY_MARKS = "▁▂▄▆█"
PROBABILITY_COLOURS = ("red", "magenta", "yellow", "cyan", "green")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lens:
    """A look at the tokens of one rollout."""

    name: str
    levels: NDArray[np.int8] | None
    """[T] int8; index into `marks` and `colours`; None: nothing is marked."""
    marks: Sequence[str] = ()
    colours: Sequence[str] = ()
    """Names of colours; "" is the terminal's own."""
    legend: str = ""


def lens(member: RolloutView, number: int, column: str) -> Lens:
    """The lens of a key, 1 to 6. `column` is what the sixth shows, "" for none."""
    rollout: Rollout = member.rollout
    if number == 2:
        return _logprob(rollout)
    if number == 3:
        return _advantage(member, rollout)
    if number == 4:
        trained = rollout.loss_tokens
        legend = f"■ trained ({trained:,})   · context ({rollout.length - trained:,}); as it was pushed"
        return Lens(
            name="mask", levels=rollout.loss_mask.astype(np.int8), marks="·■", colours=("", "green"), legend=legend
        )
    if number == 5:
        return _version(rollout)
    if number == 6 and column:
        return _column(rollout, column)
    words = "text as it was pushed" if rollout.text is not None else "token ids: no text was pushed"
    return Lens(name="plain", levels=None, legend=words)


def columns_of(rollout: Rollout) -> list[str]:
    """Further columns that the sixth lens can show: one number per token."""
    return sorted(name for name, values in rollout.columns.items() if values.ndim == 1 and values.dtype.kind in "fiub")


def _logprob(rollout: Rollout) -> Lens:
    values = rollout.logprobs[rollout.loss_mask]
    edges = np.log(np.maximum(LEAST_PROBABILITIES[1:], 1e-9))
    levels = np.where(rollout.loss_mask, np.searchsorted(edges, rollout.logprobs, side="right") + 1, 0)
    bounds = "  ".join(
        f"{mark} p>={p:g}" if p else f"{mark} p<{LEAST_PROBABILITIES[1]:g}"
        for mark, p in zip(PROBABILITY_MARKS, LEAST_PROBABILITIES, strict=True)
    )
    range_ = f"   logprob mean {values.mean():.3f}, least {values.min():.3f}" if len(values) else ""
    return Lens(
        name="logprob",
        levels=levels.astype(np.int8),
        marks="·" + PROBABILITY_MARKS,
        colours=("", *PROBABILITY_COLOURS),
        legend=f"{bounds}  · not trained{range_}",
    )


def advantages_of(member: RolloutView) -> NDArray[Any] | None:
    """[T] float; the advantage of each token, its own or the rollout's; None before the rollout is packed."""
    rollout: Rollout = member.rollout
    own = rollout.columns.get("advantages")
    if own is not None:
        return own
    return None if member.advantage is None else np.full(rollout.length, member.advantage, np.float32)


def _advantage(member: RolloutView, rollout: Rollout) -> Lens:
    values = advantages_of(member)
    if values is None:
        return Lens(name="advantage", levels=None, legend="advantages are known once the group is packed into a step")
    signs = np.where(rollout.loss_mask, np.sign(values) + 2, 0).astype(np.int8)
    trained = values[rollout.loss_mask]
    range_ = f"   from {trained.min():+.4f} to {trained.max():+.4f}" if len(trained) else ""
    counts = [int(np.count_nonzero(signs == level)) for level in range(4)]
    words = f"+ above 0 ({counts[3]:,})  - below 0 ({counts[1]:,})  0 ({counts[2]:,})  · not trained ({counts[0]:,})"
    legend = f"{words}{range_}"
    return Lens(name="advantage", levels=signs, marks="·-0+", colours=("", "red", "yellow", "green"), legend=legend)


def _version(rollout: Rollout) -> Lens:
    levels = np.zeros(rollout.length, np.int8)
    spans = rollout.version_spans
    versions = sorted({span.policy_version for span in spans})
    digits = "0123456789"
    for span in spans:
        levels[span.start : span.end] = versions.index(span.policy_version) % len(digits) + 1
    colours = ("", *(("cyan", "yellow", "green", "magenta", "red")[i % 5] for i in range(len(digits))))
    shown = "  ".join(f"{digits[i % len(digits)]} v{version}" for i, version in enumerate(versions[:12]))
    more = f"  ... {len(versions) - 12} more" if len(versions) > 12 else ""
    return Lens(
        name="version", levels=levels, marks="·" + digits, colours=colours, legend=f"{shown}{more}  · sampled by none"
    )


def _column(rollout: Rollout, column: str) -> Lens:
    values = np.asarray(rollout.columns[column], np.float64)
    low, high = float(values.min()), float(values.max())
    span = (high - low) or 1.0
    levels = np.clip(((values - low) / span * (len(BLOCKS) - 1)).round(), 0, len(BLOCKS) - 1).astype(np.int8)
    legend = f"{BLOCKS[0]} {low:g} to {BLOCKS[-1]} {high:g}   mean {values.mean():g}   (6 again: the next column)"
    return Lens(name=f"column {column}", levels=levels, marks=BLOCKS, colours=("cyan",) * len(BLOCKS), legend=legend)
