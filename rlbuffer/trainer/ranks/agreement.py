"""Before each step the ranks compare what they hold, in one small exchange.

A fault on one rank (no step came, its server is away, it was asked to stop) becomes the same decision on
all of them, so that none waits in a gradient exchange for a rank that has left.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass

from rlbuffer.errors import RankFailed, RlbufferError
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.micro_batch import Step


class Verdict(enum.StrEnum):
    """The next action of all ranks."""

    TRAIN = "train"
    PULL_AGAIN = "pull again"
    """The ranks hold different steps, or only some of them one: everybody discards theirs."""
    STOP = "stop"
    END = "end"
    """The run has ended: no step comes any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The result of an agreement of all ranks."""

    verdict: Verdict
    damaged_tokens: int = 0
    """Trained tokens of the step that no rank could read, over all ranks. The step trains without them."""
    held: tuple[str, ...] = ()
    """A line per rank about the step that it has, for the message when they differ."""


def agree(
    ranks: Ranks,
    step: Step | None,
    *,
    failure: RlbufferError | None = None,
    is_stopping: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> Agreement:
    """Compares what each rank holds: digest, outcome, readable tokens.

    Args:
        step: what this rank would train; None when it failed or stops, or the run has ended.
        meanwhile: called again and again while other ranks are waited for.

    Raises:
        RlbufferError: `failure`, if this rank has one.
        RankFailed: another rank has one; with that rank's exit code.
    """
    wish = Verdict.STOP if is_stopping else Verdict.END if step is None else Verdict.TRAIN
    held = None if step is None else (step.number, step.epoch, step.digest, len(step))
    readable = 0 if step is None else sum(int(micro_batch.loss_mask.sum()) for micro_batch in step)
    proposal = [0 if failure is None else failure.exit_code, wish, held, readable]
    everybody = [json.loads(text) for text in ranks.gather_text(json.dumps(proposal), meanwhile=meanwhile)]
    exit_codes, wishes, steps, tokens = zip(*everybody, strict=True)
    if failure is not None:
        raise failure
    for rank, code in enumerate(exit_codes):
        if code:
            error = RankFailed(f"rank {rank} could not go on; its own message says why")
            error.exit_code = code
            raise error
    if Verdict.STOP in wishes:
        return Agreement(verdict=Verdict.STOP)
    if any(theirs != steps[0] for theirs in steps):
        lines = (f"rank {rank}: {_line(theirs)}" for rank, theirs in enumerate(steps))
        return Agreement(verdict=Verdict.PULL_AGAIN, held=tuple(lines))
    if step is None:
        return Agreement(verdict=Verdict.END)
    return Agreement(verdict=Verdict.TRAIN, damaged_tokens=max(0, step.normalizers.loss_tokens - sum(tokens)))


def _line(held: tuple[int, int, str, int] | None) -> str:
    return "the end of the run" if held is None else f"step {held[0]} of epoch {held[1]}, digest {held[2][:12]}"
