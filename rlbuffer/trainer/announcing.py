"""The rule by which a policy version is written and announced.

The trainer only announces. Workers find out how good a version is: they evaluate announced versions
(``[eval.NAME]``), so that no rank ever waits for an evaluation.
"""

from __future__ import annotations

from rlbuffer.records.micro_batch import Step
from rlbuffer.trainer.publishing import write_version
from rlbuffer.trainer.session import TrainerSession
from rlbuffer.weights.publishing import announce_once
from rlbuffer.weights.state import is_sharded


class Announcer:
    """Publishes versions for the samplers."""

    def __init__(self, session: TrainerSession) -> None:
        self._session = session

    def publish_if_due(self, step: Step) -> None:
        """Publishes after `step` was trained: at every ``publish.every``, at the end, and where it is waited for."""
        settings = self._session.settings.trainer
        if step.number % settings.publish.every == 0 or step.number == settings.steps:
            self.publish(step.number)
        elif step.header.waiting_for_version is not None:
            # Nothing that could be sampled with an older one would still be young enough for the next step.
            self.publish(step.number, unless=step.header.waiting_for_version)

    def publish(self, version: int, *, unless: int | None = None) -> None:
        """Rank 0 writes and announces a version, unless samplers have it (or version `unless`), or a newer one."""
        session = self._session
        announce_once(
            session.buffer.policy(),
            session.settings,
            version,
            ranks=session.ranks,
            is_sharded=is_sharded(session.policy),
            unless=unless,
            write=lambda: write_version(
                session.settings, session.policy, version, ranks=session.ranks, base=session.base
            ),
        )
