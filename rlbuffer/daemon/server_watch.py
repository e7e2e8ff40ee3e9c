"""The checks of the server that hold at the start, made again while a leader leads: in a thread, which may wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from rlbuffer.errors import RlbufferError
from rlbuffer.process.logs import fields
from rlbuffer.records.waiting import Problem, Trouble

_log = logging.getLogger(__name__)
CHECK_SECONDS = 10.0
"""Seconds between two looks, each of some small requests."""
CLOSE_SECONDS = 1.0
"""Longest that leaving waits for a look."""
ServerCheck = Callable[[], Sequence[str]]
"""What is wrong with the server now, each with what to do."""


class ServerWatch:
    """Makes the checks of one leadership.

    Args:
        look: makes them; None: nobody does.
    """

    def __init__(self, look: ServerCheck | None) -> None:
        self._look = look
        self._wrong: Sequence[str] = ()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-checks", daemon=True)

    def __enter__(self) -> ServerWatch:
        if self._look is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._look is not None:
            self._thread.join(CLOSE_SECONDS)

    def problems(self) -> tuple[Problem, ...]:
        """What the last look has found."""
        wrong = self._wrong
        return (Problem(kind=Trouble.SERVER, detail="; ".join(wrong)),) if wrong else ()

    def _run(self) -> None:
        while self._look is not None:
            try:
                wrong = self._look()
            except RlbufferError:  # it does not answer: the leader meets that, too
                wrong = self._wrong
            except Exception as error:  # a look that fails decides nothing
                _log.warning("the server's settings cannot be looked at", exc_info=error)
                wrong = ()
            if self._wrong and not wrong:
                _log.info("the server is again as it must be", extra=fields("server", state="well"))
            self._wrong = wrong
            if self._is_over.wait(CHECK_SECONDS):
                return
