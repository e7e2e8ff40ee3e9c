"""Lenses: each sorts the tokens of a rollout into a few levels, with a legend in numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.client.group_view import GroupView
from rlbuffer.client.rollout_view import RolloutView
from rlbuffer.client.trainer_values import NONE, TrainerValues
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.states import State
from rlbuffer.state.text import printable
from rlbuffer_cli.look import TINTS
from rlbuffer_cli.text import signs

NAMES = ("plain", "logprob", "advantage", "mask", "entropy", "mismatch", "version", "column")
"""Lenses by their keys, 1 to 8."""
PROBABILITIES = (0.01, 0.1, 0.5, 0.9)
ENTROPIES = (2.0, 1.0, 0.5, 0.1)
"""Nats: from some seven tokens that are as likely as each other to nearly certain."""
MISMATCHES = (1.0, 0.2, 0.05, 0.01)
"""Nats that trainer and sampler differ by in a token's logprob."""
STRONG_ADVANTAGE = 1.0
OF_TRAINER = {"entropy": "entropy", "mismatch": "trainer_logprobs"}
"""Lens of what the trainer knows -> the column in which a worker may push it."""
NOT_KEPT = (
    "not kept per token: a worker pushes it as a column `{column}`, or `rlbuffer train --debug-samples N` keeps it of N"
    " rollouts"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lens:
    """A look at the tokens of one rollout."""

    name: str
    note: str
    """What its numbers are of; the reason why it shows nothing."""
    levels: NDArray[np.int8] | None = None
    """[T]; index into the lens' tints; None: nothing is marked."""
    labels: Sequence[tuple[int, str]] = ()
    """The legend: (level, what it stands for)."""


def lens(
    group: GroupView,
    member: RolloutView,
    name: str,
    *,
    column: str = "",
    origin: str = "",
    kept: TrainerValues = NONE,
) -> Lens:
    """A lens for a rollout of `group`.

    `column` is what the last one shows; `origin` says whose text is shown; `kept` is what the trainer keeps of it.
    """
    rollout: Rollout = member.rollout
    makers: dict[str, Callable[[], Lens]] = {
        "logprob": lambda: _logprob(rollout),
        "advantage": lambda: _advantage(group, member, rollout),
        "mask": lambda: _mask(rollout),
        "entropy": lambda: _of_trainer(name, rollout, kept, ENTROPIES),
        "mismatch": lambda: _of_trainer(name, rollout, kept, MISMATCHES),
        "version": lambda: _version(rollout),
    }
    if name == "column" and column:
        return _column(rollout, column)
    return makers[name]() if name in makers else Lens(name="plain", note=origin)


def columns_of(rollout: Rollout) -> list[str]:
    """Further columns that the last lens can show: one number per token."""
    return sorted(name for name, values in rollout.columns.items() if values.ndim == 1 and values.dtype.kind in "fiub")


def _heat(
    name: str, rollout: Rollout, values: NDArray[Any], note: str, edges: Sequence[float], *, is_rising: bool = False
) -> Lens:
    """Levels 1 to 5 of the trained tokens, from hot to none: below `edges` that rise, or above edges that fall."""
    sign, text = ("<", "≥") if is_rising else ("≥", "<")
    order = np.asarray(edges) if is_rising else -np.asarray(edges)
    levels = np.searchsorted(order, values if is_rising else -values, side="right" if is_rising else "left") + 1
    labels = [(level, f"{sign} {edge:g}") for level, edge in enumerate(edges, 1)]
    return Lens(
        name=name,
        levels=np.where(rollout.loss_mask, levels, 0).astype(np.int8),
        labels=[*labels, (5, f"{text} {edges[-1]:g}")],
        note=note,
    )


def _logprob(rollout: Rollout) -> Lens:
    values = rollout.logprobs[rollout.loss_mask]
    mean, least = (signs(f"{value:.3f}") for value in (values.mean(), values.min())) if len(values) else ("", "")
    note = f"probability; logprob mean {mean}, least {least}" if len(values) else "none trained"
    return _heat("logprob", rollout, np.exp(np.minimum(rollout.logprobs, 0.0)), note, PROBABILITIES, is_rising=True)


def _mask(rollout: Rollout) -> Lens:
    trained = rollout.loss_tokens
    return Lens(
        name="mask",
        levels=rollout.loss_mask.astype(np.int8),
        labels=[(1, f"trained ({trained:,})"), (0, f"context ({rollout.length - trained:,})")],
        note="as it was pushed",
    )


def of_trainer(name: str, rollout: Rollout, kept: TrainerValues = NONE) -> tuple[NDArray[Any], str] | None:
    """[T] in nats, and who computed it: the `entropy`, or the `mismatch`: the trainer's minus the sampler's logprob.
    None where nobody keeps it."""
    column, values = OF_TRAINER[name], kept.entropy if name == "entropy" else kept.logprobs
    pushed, who = rollout.columns.get(column), f"of the trainer in step {kept.step}"
    if pushed is not None and pushed.ndim == 1:
        values, who = pushed, f"pushed as column `{column}`"
    if values is None:
        return None
    return values if name == "entropy" else values - rollout.logprobs, who


def _of_trainer(name: str, rollout: Rollout, kept: TrainerValues, edges: Sequence[float]) -> Lens:
    found = of_trainer(name, rollout, kept)
    if found is None:
        where = "; its mean by step is in metrics.jsonl" if name == "entropy" else ""
        return Lens(name=name, note=NOT_KEPT.format(column=OF_TRAINER[name]) + where)
    unit = "nats" if name == "entropy" else "|trainer - sampler| in nats"
    sizes, note = np.abs(found[0]), f"{unit}, {found[1]}"
    if rollout.loss_tokens:
        worst = int(np.where(rollout.loss_mask, sizes, -1.0).argmax())
        mean = float(sizes[rollout.loss_mask].mean())
        note += f"; mean {mean:.4f}, most {float(sizes[worst]):.4f} at token {worst:,}"
    return _heat(name, rollout, sizes, note, edges)


def advantages_of(member: RolloutView) -> NDArray[Any] | None:
    """[T] float; the advantage of each token, its own or the rollout's; None before the rollout is packed."""
    rollout: Rollout = member.rollout
    pushed = rollout.columns.get("advantages")
    if pushed is not None:
        return pushed
    return None if member.advantage is None else np.full(rollout.length, member.advantage, np.float32)


def _advantage(group: GroupView, member: RolloutView, rollout: Rollout) -> Lens:
    values = advantages_of(member)
    if values is None:
        return Lens(name="advantage", note=_no_advantage(group))
    strong = STRONG_ADVANTAGE
    # 1: below -strong, 2: below 0, 3: 0, 4: above 0, 5: above strong
    levels = 3 + np.sign(values) + np.where(np.abs(values) > strong, np.sign(values), 0)
    levels = np.where(rollout.loss_mask, levels, 0).astype(np.int8)
    counts = [int(np.count_nonzero(levels == level)) for level in range(6)]
    words = (f"below -{strong:g}", "below 0", "0", "above 0", f"above {strong:g}")
    trained = values[rollout.loss_mask]
    return Lens(
        name="advantage",
        levels=levels,
        labels=[(level, f"{word} ({counts[level]:,})") for level, word in enumerate(words, 1)],
        note=f"from {trained.min():+.4f} to {trained.max():+.4f}" if len(trained) else "none trained",
    )


def _no_advantage(group: GroupView) -> str:
    if group.state == State.DROPPED:
        return f"no advantages: the group was dropped ({printable(group.reason)}), and only groups of a step have some"
    if group.state in (State.PACKED, State.TRAINED):
        return f"no advantages: step {group.step} trains the group without this rollout"
    return "advantages are known once the group is packed into a step"


def _version(rollout: Rollout) -> Lens:
    levels = np.zeros(rollout.length, np.int8)
    versions = sorted({span.policy_version for span in rollout.version_spans})
    cycle = len(TINTS["version"]) - 1
    for span in rollout.version_spans:
        levels[span.start : span.end] = versions.index(span.policy_version) % cycle + 1
    more = f"and {len(versions) - 12} more; " if len(versions) > 12 else ""
    return Lens(
        name="version",
        levels=levels,
        labels=[(at % cycle + 1, f"v{version}") for at, version in enumerate(versions[:12])],
        note=f"{more}dim: sampled by none",
    )


def _column(rollout: Rollout, column: str) -> Lens:
    values = np.asarray(rollout.columns[column], np.float64)
    low, high = float(values.min()), float(values.max())
    edges = [low + (high - low) * part for part in (0.25, 0.5, 0.75)]
    words = (f"< {edges[0]:g}", f"< {edges[1]:g}", f"< {edges[2]:g}", f"≥ {edges[2]:g}")
    return Lens(
        name=f"column {column}",
        levels=np.searchsorted(edges, values, side="right").astype(np.int8),
        labels=list(enumerate(words)),
        note=f"from {low:g} to {high:g}, mean {values.mean():g}; 8 again: the next column",
    )


def numbers_of(member: RolloutView, kept: TrainerValues = NONE) -> Callable[[int], dict[str, str]]:
    """Position of a token -> its numbers by name: those of training where it is trained, its version where sampled."""
    rollout: Rollout = member.rollout
    logprobs, advantages = rollout.logprobs, advantages_of(member)
    versions = np.full(rollout.length, -1, np.int64)
    for span in rollout.version_spans:
        versions[span.start : span.end] = span.policy_version
    further = {name: values[0] for name in OF_TRAINER if (values := of_trainer(name, rollout, kept)) is not None}

    def numbers(at: int) -> dict[str, str]:
        named = {"id": str(int(rollout.tokens[at])), "trained": "yes" if rollout.loss_mask[at] else "no"}
        if rollout.loss_mask[at]:
            named["logprob"] = signs(f"{float(logprobs[at]):.4f}")
            named["p"] = f"{np.exp(min(float(logprobs[at]), 0.0)):.3f}"
            named |= {"advantage": signs(f"{float(advantages[at]):+.4f}")} if advantages is not None else {}
            named |= {name: signs(f"{float(values[at]):.4f}") for name, values in further.items()}
        return named | ({"version": f"v{versions[at]}"} if versions[at] >= 0 else {})

    return numbers
