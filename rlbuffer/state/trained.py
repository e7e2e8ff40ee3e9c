"""The trained steps in text: the time that was waited for data, what trained nothing, and examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlbuffer.state.step_record import StepRecord
from rlbuffer.state.text import percent

RECENT_STEPS = 20
"""Trained steps that sentences about waiting, and rates, are means of."""
LONG_WAIT = 0.2
"""Share of the trainer's time from which waiting for data is worth a sentence."""


class Waited(NamedTuple):
    """The time that a trainer waited for data, and the side that is the slow one by that."""

    share: float
    """0-1."""
    text: str
    is_long: bool
    """A person should know."""


def waited(wait: Sequence[float], total: Sequence[float], *, is_troubled: bool = False) -> Waited:
    """Sums up the last steps, from the seconds waited for data and the seconds in all, one each per step.

    `is_troubled`: somebody must cure something of the run. It may be what was waited for, so no worker is called slow.

    Example:
        >>> waited([0.5, 0.36], [1.0, 1.0]).text
        'the trainer waited 43% of the last 2 steps for data: workers are slower than the trainer'
    """
    share = sum(wait) / max(sum(total), 1e-9)
    of = f"the last {len(wait)} steps" if len(wait) != 1 else "the last step"
    is_long = share >= LONG_WAIT
    side = ": workers are slower than the trainer" if is_long and not is_troubled else ""
    if share < 0.05:
        side = ": the trainer is the slow side"
    return Waited(share=share, text=f"the trainer waited {percent(share)} of {of} for data{side}", is_long=is_long)


def waited_of(records: Sequence[StepRecord], *, is_troubled: bool = False) -> Waited:
    """The time that the trainer waited in these steps; `is_troubled`: as of :func:`waited`."""
    wait, total = ([record.seconds.get(name, 0.0) for record in records] for name in ("wait", "total"))
    return waited(wait, total, is_troubled=is_troubled)


def masked_words(record: StepRecord) -> str:
    """What leaves a step's tokens without a gradient, beside the loss itself, what corrections weigh, and tokens whose
    experts, or whose support, are not those that they were sampled with; "": nothing.

    Example:
        >>> masked_words(StepRecord(masked_fraction=0.3, masked_by={"clip": 0.25, "icepop": 0.1},
        ...     correction_weight={"icepop": 0.93}))
        'masked 30.0% (icepop 10.0%)  weight icepop 0.93'
        >>> masked_words(StepRecord(experts_unrecorded=0.031))
        'experts unrecorded 3.1%'
        >>> masked_words(StepRecord(support={"exact": 0.94, "unrecorded": 0.05, "too_wide": 0.01}))
        'support unrecorded 5.0%, too wide 1.0%'
    """
    others = {stage: share for stage, share in record.masked_by.items() if share and stage != "clip"}
    masked = [f"masked {record.masked_fraction:.1%} ({_shares(others)})"] if others and record.masked_fraction else []
    weights = " ".join(f"{name} {weight:.2f}" for name, weight in record.correction_weight.items())
    other = [f"experts unrecorded {record.experts_unrecorded:.1%}"] if record.experts_unrecorded else []
    inexact = {n.replace("_", " "): share for n, share in record.support.items() if share and n != "exact"}
    other += [f"support {_shares(inexact)}"] if inexact else []
    return "  ".join([*masked, *([f"weight {weights}"] if weights else []), *other])


def nothing_left(record: StepRecord) -> str:
    """The sentence of a step of which no token has a gradient by its loss; "" of another, and of one whose groups are
    all flat: that is no fault of the loss, and every run has such steps once it has learnt.

    Example:
        >>> nothing_left(StepRecord(step=3, masked_fraction=1.0, masked_by={"advantage": 0.125, "icepop": 1.0}))
        'step 3 trains nothing: its tokens are masked by icepop 100.0%, advantage 12.5%'
    """
    if record.masked_fraction != 1.0 or record.masked_by.get("advantage") == 1.0:
        return ""
    by = {stage: share for stage, share in record.masked_by.items() if share}
    why = f"its tokens are masked by {_shares(by)}" if by else "it brings no token to train"
    return f"step {record.step} trains nothing: {why}"


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{stage} {share:.1%}" for stage, share in sorted(shares.items(), key=lambda item: -item[1]))


def example_lines(examples: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each of a step's examples. Rollouts are untrusted: what is not printable is shown escaped.

    Example:
        >>> example_lines([{"name": "best", "rollout_id": "a.3/0", "env": "a", "reward": 1.0, "advantage": 0.5,
        ...     "token_ids": [7, 9], "text": ""}])
        ['best a.3/0 of a, reward 1 (advantage +0.50): 7 9']
    """
    lines = []
    for example in examples:
        shown = example["text"] or " ".join(map(str, example["token_ids"]))
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
        lines.append(
            f"{example['name']} {example['rollout_id']} of {example['env']}, reward {example['reward']:.4g} "
            f"(advantage {example['advantage']:+.2f}): {shown}"
        )
    return lines
