"""Lenses: one mark per token that says one thing of it, with a legend in numbers. The marks differ without colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.client.trainer_values import NONE, TrainerValues
from rlbuffer.client.views import GroupView, RolloutView
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.states import State
from rlbuffer.state.text import printable
from rlbuffer_cli.render.text import BLOCKS

LEVEL_MARKS = "▁▂▄▆█"
LEAST_PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9)
PROBABILITY_COLOURS = ("red", "magenta", "yellow", "cyan", "green")
LEAST_ENTROPIES = (0.0, 0.1, 0.5, 1.0, 2.0)
"""Nats: from nearly certain to some seven tokens that are as likely as each other."""
LEAST_MISMATCHES = (0.0, 0.01, 0.05, 0.2, 1.0)
"""Nats that trainer and sampler differ by in a token's logprob."""
RISING_COLOURS = PROBABILITY_COLOURS[::-1]
NAMES = ("plain", "logprob", "advantage", "mask", "entropy", "mismatch", "version", "column")
"""Lenses by their keys, 1 to 8."""
KEPT = "a worker pushes it as a column `{column}`, or `rlbuffer train --debug-samples N` keeps it of N rollouts"


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


def lens(
    group: GroupView,
    member: RolloutView,
    number: int,
    *,
    column: str = "",
    origin: str = "",
    kept: TrainerValues = NONE,
) -> Lens:
    """The lens of a key, 1 to 8, for a rollout of `group`.

    `column` is what the eighth shows, "" for none; `origin` says whose text is shown; `kept` is what the trainer keeps
    of this rollout.
    """
    rollout: Rollout = member.rollout
    if number == 2:
        return _logprob(rollout)
    if number == 3:
        return _advantage(group, member, rollout)
    if number == 4:
        trained = rollout.loss_tokens
        legend = f"■ trained ({trained:,})   · context ({rollout.length - trained:,}); as it was pushed"
        return Lens(
            name="mask", levels=rollout.loss_mask.astype(np.int8), marks="·■", colours=("", "green"), legend=legend
        )
    if number == 5:
        return _entropy(rollout, kept)
    if number == 6:
        return _mismatch(rollout, kept)
    if number == 7:
        return _version(rollout)
    if number == 8 and column:
        return _column(rollout, column)
    return Lens(name="plain", levels=None, legend=origin)


def columns_of(rollout: Rollout) -> list[str]:
    """Further columns that the eighth lens can show: one number per token."""
    return sorted(name for name, values in rollout.columns.items() if values.ndim == 1 and values.dtype.kind in "fiub")


def _leveled(name: str, rollout: Rollout, values: NDArray[Any], least: Sequence[float], words: str) -> Lens:
    """Levels by lower bounds of values [T] that rise from green to red, of the trained tokens."""
    levels = np.searchsorted(least[1:], values, side="right") + 1
    lowest, others = LEVEL_MARKS[0], LEVEL_MARKS[1:]
    bounds = [f"{lowest} <{least[1]:g}", *(f"{mark} >={low:g}" for mark, low in zip(others, least[1:], strict=True))]
    return Lens(
        name=name,
        levels=np.where(rollout.loss_mask, levels, 0).astype(np.int8),
        marks="·" + LEVEL_MARKS,
        colours=("", *RISING_COLOURS),
        legend=f"{'  '.join(bounds)}  · not trained   {words}",
    )


def entropy_of(rollout: Rollout, kept: TrainerValues = NONE) -> tuple[NDArray[Any], str] | None:
    """Entropies [T] in nats, and who computed them; None where nobody keeps them."""
    own = rollout.columns.get("entropy")
    if own is not None and own.ndim == 1:
        return own, "pushed as column `entropy`"
    return None if kept.entropy is None else (kept.entropy, f"of the trainer in step {kept.step}")


def mismatch_of(rollout: Rollout, kept: TrainerValues = NONE) -> tuple[NDArray[Any], str] | None:
    """Trainer's minus sampler's logprobs [T] in nats, and who computed them; None where nobody keeps the trainer's."""
    own = rollout.columns.get("trainer_logprobs")
    if own is not None and own.ndim == 1:
        return own - rollout.logprobs, "column `trainer_logprobs`"
    return None if kept.logprobs is None else (kept.logprobs - rollout.logprobs, f"of the trainer in step {kept.step}")


def _entropy(rollout: Rollout, kept: TrainerValues) -> Lens:
    known = entropy_of(rollout, kept)
    if known is None:
        legend = f"not kept per token: {KEPT.format(column='entropy')}. Its mean by step is in metrics.jsonl"
        return Lens(name="entropy", levels=None, legend=legend)
    values, who = known
    trained = values[rollout.loss_mask]
    words = f"nats, {who}: mean {trained.mean():.3f}, most {trained.max():.3f}" if len(trained) else who
    return _leveled("entropy", rollout, values, LEAST_ENTROPIES, words)


def _mismatch(rollout: Rollout, kept: TrainerValues) -> Lens:
    known = mismatch_of(rollout, kept)
    if known is None:
        legend = f"trainer's logprobs are not kept per token: {KEPT.format(column='trainer_logprobs')}"
        return Lens(name="mismatch", levels=None, legend=legend)
    values, who = known
    off = np.abs(values)
    words = who
    if rollout.loss_tokens:
        worst = int(np.where(rollout.loss_mask, off, -1.0).argmax())
        mean = float(off[rollout.loss_mask].mean())
        words = f"|trainer - sampler| in nats, {who}: mean {mean:.4f}, most {float(off[worst]):.4f} at token {worst:,}"
    return _leveled("mismatch", rollout, off, LEAST_MISMATCHES, words)


def _logprob(rollout: Rollout) -> Lens:
    values = rollout.logprobs[rollout.loss_mask]
    edges = np.log(np.maximum(LEAST_PROBABILITIES[1:], 1e-9))
    levels = np.where(rollout.loss_mask, np.searchsorted(edges, rollout.logprobs, side="right") + 1, 0)
    bounds = "  ".join(
        f"{mark} p>={p:g}" if p else f"{mark} p<{LEAST_PROBABILITIES[1]:g}"
        for mark, p in zip(LEVEL_MARKS, LEAST_PROBABILITIES, strict=True)
    )
    range_ = f"   logprob mean {values.mean():.3f}, least {values.min():.3f}" if len(values) else ""
    return Lens(
        name="logprob",
        levels=levels.astype(np.int8),
        marks="·" + LEVEL_MARKS,
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


def _advantage(group: GroupView, member: RolloutView, rollout: Rollout) -> Lens:
    values = advantages_of(member)
    if values is None:
        return Lens(name="advantage", levels=None, legend=_no_advantage(group))
    signs = np.where(rollout.loss_mask, np.sign(values) + 2, 0).astype(np.int8)
    trained = values[rollout.loss_mask]
    range_ = f"   from {trained.min():+.4f} to {trained.max():+.4f}" if len(trained) else ""
    counts = [int(np.count_nonzero(signs == level)) for level in range(4)]
    words = f"+ above 0 ({counts[3]:,})  - below 0 ({counts[1]:,})  0 ({counts[2]:,})  · not trained ({counts[0]:,})"
    legend = f"{words}{range_}"
    return Lens(name="advantage", levels=signs, marks="·-0+", colours=("", "red", "yellow", "green"), legend=legend)


def _no_advantage(group: GroupView) -> str:
    if group.state == State.DROPPED:
        return f"no advantages: the group was dropped ({printable(group.reason)}), and only groups of a step have some"
    if group.state in (State.PACKED, State.TRAINED):
        return f"no advantages: step {group.step} trains the group without this rollout"
    return "advantages are known once the group is packed into a step"


def _version(rollout: Rollout) -> Lens:
    levels = np.zeros(rollout.length, np.int8)
    spans = rollout.version_spans
    versions = sorted({span.policy_version for span in spans})
    digits = "⁰¹²³⁴⁵⁶⁷⁸⁹"
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
    legend = f"{BLOCKS[0]} {low:g} to {BLOCKS[-1]} {high:g}   mean {values.mean():g}   (8 again: the next column)"
    return Lens(name=f"column {column}", levels=levels, marks=BLOCKS, colours=("cyan",) * len(BLOCKS), legend=legend)
