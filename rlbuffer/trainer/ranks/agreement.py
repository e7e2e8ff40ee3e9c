"""Before each step the ranks compare what they hold, in one small exchange.

A fault on one rank (no step came, its server is away, it was asked to stop) becomes the same decision on
all of them, so that none waits in a gradient exchange for a rank that has left.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbuffer.errors import RankFailed, RlbufferError
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.micro_batch import Step


class Verdict(enum.Enum):
    """The next action of all ranks."""

    TRAIN = "train"
    PULL_AGAIN = "pull again"
    """The ranks hold different steps: everybody discards theirs."""
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
    has_ended: bool = False,
) -> Agreement:
    """Compares what each rank holds: digest, outcome, readable tokens.

    Args:
        step: what this rank would train; None when it failed or stops, or the run has ended.

    Raises:
        RlbufferError: `failure`, if this rank has one.
        RankFailed: another rank has one; with that rank's exit code.
    """
    rows = ranks.gather(_encode(step, failure, is_stopping, has_ended))
    if failure is not None:
        raise failure
    failed = [r for r in range(len(rows)) if rows[r, 0] == _FAILED]
    if failed:
        error = RankFailed(f"rank {failed[0]} could not go on; its own message says why")
        error.exit_code = int(rows[failed[0], 1])
        raise error
    if (rows[:, 0] == _STOPPING).any():
        return Agreement(verdict=Verdict.STOP)
    if (rows[:, 0] == _ENDED).all():
        return Agreement(verdict=Verdict.END)
    if (rows[:, 0] == _ENDED).any():  # it goes on: more was pushed at this very moment
        return Agreement(verdict=Verdict.PULL_AGAIN, held=tuple(_OUTCOMES[int(row[0])] for row in rows))
    if step is None:
        raise RlbufferError("agree() was called with neither a step nor a reason for having none")
    if not (rows[:, 2:_LOSS_TOKENS] == rows[0, 2:_LOSS_TOKENS]).all():
        by_rank = tuple(
            f"rank {r}: step {int(row[2])} of epoch {int(row[3])}, digest {_digest_text(row)}"
            for r, row in enumerate(rows)
        )
        return Agreement(verdict=Verdict.PULL_AGAIN, held=by_rank)
    damaged = max(0, step.normalizers.loss_tokens - int(rows[:, _LOSS_TOKENS].sum()))
    return Agreement(verdict=Verdict.TRAIN, damaged_tokens=damaged)


_READY, _STOPPING, _FAILED, _ENDED = 0, 1, 2, 3
_OUTCOMES = ("a step", "stopping", "failed", "the end of the run")
_LOSS_TOKENS = 9
"""Place of the rank's readable trained tokens: everything from place 2 up to it must be equal on all ranks."""


def _encode(step: Step | None, failure: RlbufferError | None, is_stopping: bool, has_ended: bool) -> Tensor:
    """[10] int64: outcome, exit code, step, epoch, four words of its digest, micro-batches, readable trained tokens."""
    if failure is not None or step is None:
        outcome = _FAILED if failure is not None else _ENDED if has_ended and not is_stopping else _STOPPING
        return torch.tensor([outcome, getattr(failure, "exit_code", 0)] + [0] * 8, dtype=torch.int64)
    words = bytes.fromhex(step.digest).ljust(32, b"\0")[:32]
    digest = [int.from_bytes(words[i : i + 8], "big", signed=True) for i in range(0, 32, 8)]
    readable = sum(int(micro_batch.loss_mask.sum()) for micro_batch in step)
    outcome = _STOPPING if is_stopping else _READY
    return torch.tensor([outcome, 0, step.number, step.epoch, *digest, len(step), readable], dtype=torch.int64)


def _digest_text(row: Tensor) -> str:
    return b"".join(int(word).to_bytes(8, "big", signed=True) for word in row[4:8]).hex()[:12]
