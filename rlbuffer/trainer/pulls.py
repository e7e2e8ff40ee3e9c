"""Pulling the next step, until all ranks hold the same one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from rlbuffer.batches import Step
from rlbuffer.errors import RlbufferError
from rlbuffer.trainer.agreement import Agreement, Verdict, refuse_adapters
from rlbuffer.trainer.setup import Session

MAX_PULLS = 3
"""Times that a step is pulled because ranks hold different ones, before giving up."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pulled:
    """A step that every rank holds."""

    step: Step
    damaged_tokens: int
    """Trained tokens of the step that no rank could read, over all ranks."""


class Pulls:
    """The steps of one rank, one after the other. While one trains, the reader pulls and assembles the next."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._steps: Iterator[Step] | None = None
        self.has_ended = False
        """All ranks have seen that the run has ended."""

    def next(self, number: int) -> Pulled | None:
        """Step `number`, as all ranks agreed on it; None: one of them was asked to stop, or the run has
        ended (`has_ended`).

        Raises:
            RlbufferError: this rank got none, or the ranks never hold the same. RankFailed: another rank got none.
            Further errors: see `Reader.steps`, `Ranks.agree`.
        """
        for _ in range(MAX_PULLS):
            step, agreement = self._pull(number)
            if agreement.verdict in (Verdict.STOP, Verdict.END):
                self.has_ended = agreement.verdict is Verdict.END
                return None
            if agreement.verdict is Verdict.TRAIN and step is not None:
                return Pulled(step=step, damaged_tokens=agreement.damaged_tokens)
            self.close()
        raise RlbufferError(
            f"the ranks pulled different steps {MAX_PULLS} times: {'; '.join(agreement.held)}. "
            "`rlbuffer verify` checks the steps; are all ranks on the same run and server?"
        )

    def close(self) -> None:
        """Lets go of what is being pulled ahead."""
        if self._steps is not None and hasattr(self._steps, "close"):
            self._steps.close()
        self._steps = None

    def _pull(self, number: int) -> tuple[Step | None, Agreement]:
        """This rank's step, and what the ranks make of it. This rank's errors reach the others through `agree`."""
        session = self._session
        step: Step | None = None
        failure: RlbufferError | None = None
        session.stalls.pulling(number)
        try:
            if self._steps is None:
                self._steps = session.reader.steps(number, until=lambda: session.stop.is_set)
            step = None if session.stop.is_set else next(self._steps, None)
            if step is None and not session.stop.is_set and not session.reader.has_ended:
                failure = RlbufferError("the reader ended without a step")
        except RlbufferError as error:
            failure = error
        if step is not None and step.number != number:
            failure = RlbufferError(f"the reader gave step {step.number}, expected was {number}")
        elif step is not None:
            failure = refuse_adapters(step)
        with nullcontext() if step is None else session.stalls.holding(number):
            return step, session.ranks.agree(
                step,
                failure=failure,
                is_stopping=session.stop.is_set,
                has_ended=session.reader.has_ended,
                max_damaged=session.settings.trainer.max_damaged,
            )
