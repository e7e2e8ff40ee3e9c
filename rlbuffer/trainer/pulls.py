"""Pulling the next step, until all ranks hold the same one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rlbuffer.errors import RlbufferError, StepDamaged
from rlbuffer.records.micro_batch import Step
from rlbuffer.trainer.publishing import Publishing
from rlbuffer.trainer.ranks.agreement import Agreement, Verdict, agree
from rlbuffer.trainer.session import TrainerSession

MAX_PULLS = 3
"""Times that a step is pulled because ranks hold different ones, before giving up."""
MOST_DAMAGED = 0.5
"""Share of a step's trained tokens that may be missing or damaged."""
MOST_DAMAGED_STEPS = 8
"""Steps in a row, beside those that are committed ahead, of which too much may be damaged. The batcher looks into
payloads from the first damaged one on, so no producer alone gets that far: the server has lost its payloads."""


class Pulls:
    """The steps of one rank, one after the other. While one trains, the reader pulls and assembles the next.

    The next one may wait for the version that is on its way: where `publishing` cannot bring it, nothing is waited for.
    """

    def __init__(self, session: TrainerSession, publishing: Publishing) -> None:
        self._session, self._publishing = session, publishing
        self._steps: Iterator[Step] | None = None
        self.has_ended = False
        """All ranks have seen that the run has ended."""
        self._damaged = 0
        """Steps in a row of which more than MOST_DAMAGED could not be read."""

    def next(self, number: int) -> tuple[Step, int] | None:
        """Step `number`, as all ranks agreed on it, and its trained tokens that no rank could read; None: one of them
        was asked to stop, or the run has ended (`has_ended`).

        Raises:
            RlbufferError: this rank got none, or the ranks never hold the same. RankFailed: another rank got none.
            StepDamaged: too much of too many steps in a row is damaged; on all ranks alike.
            WeightsError: the version that is on its way cannot be written.
            Further errors: see `Reader.steps`, `agree`.
        """
        for _ in range(MAX_PULLS):
            step, agreement = self._pull(number)
            if agreement.verdict in (Verdict.STOP, Verdict.END):
                self.has_ended = agreement.verdict is Verdict.END
                return None
            if agreement.verdict is Verdict.TRAIN and step is not None:
                self._count(step, agreement.damaged_tokens)
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

    def _count(self, step: Step, damaged: int) -> None:
        """Counts steps with too many damaged tokens, which are left out in every replay of the step alike. Such a step
        alone never ends a run: whoever pushes can make one. A run of which nothing sound comes any more does end."""
        settings, expected = self._session.settings, step.normalizers.loss_tokens
        self._damaged = self._damaged + 1 if damaged > MOST_DAMAGED * expected else 0
        if self._damaged > MOST_DAMAGED_STEPS + settings.batcher.lookahead:
            raise StepDamaged(
                f"step {step.number}: {damaged} of {expected} trained tokens ({damaged / expected:.1%}) are missing or "
                f"damaged, as was more than {MOST_DAMAGED:.0%} of each of {self._damaged} steps in a row. "
                "`rlbuffer verify` lists what is gone, and the batcher's output says whose it is"
            )

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
