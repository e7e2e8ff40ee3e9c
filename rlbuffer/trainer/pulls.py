"""Pulling the next step, until all ranks hold the same one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rlbuffer.errors import RlbufferError
from rlbuffer.records.micro_batch import Step
from rlbuffer.trainer.publishing import Publishing
from rlbuffer.trainer.ranks.agreement import Agreement, Verdict, agree
from rlbuffer.trainer.session import TrainerSession

MAX_PULLS = 3
"""Times that a step is pulled because ranks hold different ones, before giving up."""


class Pulls:
    """The steps of one rank, one after the other. While one trains, the reader pulls and assembles the next.

    The next one may wait for the version that is on its way: where `publishing` cannot bring it, nothing is waited for.
    """

    def __init__(self, session: TrainerSession, publishing: Publishing) -> None:
        self._session, self._publishing = session, publishing
        self._steps: Iterator[Step] | None = None
        self.has_ended = False
        """All ranks have seen that the run has ended."""

    def next(self, number: int) -> tuple[Step, int] | None:
        """Step `number`, as all ranks agreed on it, and its trained tokens that no rank could read; None: one of them
        was asked to stop, or the run has ended (`has_ended`).

        Raises:
            RlbufferError: this rank got none, or the ranks never hold the same. RankFailed: another rank got none.
            WeightsError: the version that is on its way cannot be written.
            Further errors: see `Reader.steps`, `agree`.
        """
        for _ in range(MAX_PULLS):
            step, agreement = self._pull(number)
            if agreement.verdict in (Verdict.STOP, Verdict.END):
                self.has_ended = agreement.verdict is Verdict.END
                return None
            if agreement.verdict is Verdict.TRAIN and step is not None:
                return step, agreement.damaged_tokens
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
                self._steps = session.reader.steps(
                    number, until=lambda: session.stop.is_set or self._publishing.has_failed()
                )
            step = None if session.stop.is_set else next(self._steps, None)
            if step is None and not session.stop.is_set and not session.reader.has_ended:
                failure = RlbufferError("the reader ended without a step")
        except RlbufferError as error:
            failure = error
        if step is None:
            self._publishing.check()  # before any exchange: the others wait for a step that waits for this version
        if step is not None and step.number != number:
            failure = RlbufferError(f"the reader gave step {step.number}, expected was {number}")
        session.stalls.has(number)
        meanwhile = None
        if step is not None:
            meanwhile = partial(session.stalls.check, number, partial(session.reader.still_there, step))
        stops = session.stop.is_set
        return step, agree(session.ranks, step, failure=failure, is_stopping=stops, meanwhile=meanwhile)
