"""The way of records to TensorBoard or W&B: what raises or hangs there is theirs, and training goes on.

::

    opening -> open -> closed
       ^        |
       '- pause-'   it raised

A thread of its own opens, feeds and closes each. Records wait for it in their order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from rlbuffer.process.logs import RateLimited, fields
from rlbuffer.state.step_record import StepRecord
from rlbuffer.state.text import plural
from rlbuffer.trainer.reports.sinks import Write

KEPT_RECORDS = 1000
"""Records that wait; of more the oldest are left out."""
HANG_SECONDS = 20.0
"""Time in which nothing has come back, after which it is said."""
CLOSE_SECONDS = 30.0
"""Time that the end of the training waits for what is not handed over yet."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Between two tries to open what has raised."""
MOST_TRIES = 2
"""Of one record, which may be the cause."""
_log = logging.getLogger(__name__)


class Outlet:
    """Hands records over in a thread, which ends with the process whatever it is in the middle of.

    Args:
        name: for people.
        opened: opens what takes records.
    """

    def __init__(self, name: str, opened: Callable[[], AbstractContextManager[Write]]) -> None:
        self._name, self._opened = name, opened
        self._changed = threading.Condition()
        self._records: deque[StepRecord] = deque()
        """The first one may be on its way."""
        self._tries = 0
        """Of the first record that have failed."""
        self._left_out = 0
        """Records that are not handed over any more."""
        self._busy: tuple[str, float] | None = None
        """What the thread is in the middle of, and since when (monotonic)."""
        self._is_told = False
        """People know that it takes nothing."""
        self._is_closing = False
        self._pause = FIRST_PAUSE_SECONDS
        self._lasting = RateLimited()
        self._thread = threading.Thread(target=self._run, name=f"report {name}", daemon=True)
        self._thread.start()

    def add(self, record: StepRecord) -> None:
        """Takes in a record; never waits."""
        with self._changed:
            if len(self._records) >= KEPT_RECORDS:
                del self._records[1]
                self._left_out += 1
            self._records.append(record)
            self._changed.notify()
            busy = self._busy
            hangs = busy is not None and time.monotonic() - busy[1] >= HANG_SECONDS and not self._is_told
            self._is_told |= hangs
        if busy is not None and hangs:
            text = (
                f"{self._name} has not come back from {busy[0]} for {HANG_SECONDS:.0f} s: training goes on without it, "
                f"now at step {record.step}"
            )
            self._warn(text, "hangs")

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Hands over what waits, and closes. It takes so many seconds at most; those in which nothing has come back
        already count."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
            spent = 0.0 if self._busy is None else time.monotonic() - self._busy[1]
        self._thread.join(max(0.0, seconds - spent))
        with self._changed:
            busy, lacking = self._busy, len(self._records) + self._left_out
        if self._thread.is_alive() and busy is not None:
            self._warn(f"{self._name} has not come back from {busy[0]}: the trainer ends without it", "hangs")
        elif lacking:
            self._warn(f"{self._name} lacks {plural(lacking, 'step')}", "lacks")

    # -- the thread ------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closing
            try:
                self._hand_over()
                return
            except BaseException as error:  # a library that ends its process by sys.exit ends this try alone
                self._failed(error)
            with self._changed:
                if self._is_closing and not self._records:
                    return
                self._changed.wait_for(lambda: self._is_closing, self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    def _hand_over(self) -> None:
        """Opens, hands over what comes until nothing more does, and closes. Raises what it raises."""
        with ExitStack() as stack:
            self._begins("its start")
            write = stack.enter_context(self._opened())
            stack.callback(self._begins, "its end")
            while (record := self._next()) is not None:
                self._begins(f"step {record.step}")
                try:
                    write(record)
                except BaseException as error:
                    self._failed(error)
                    self._tries += 1
                    if self._tries == MOST_TRIES:
                        self._remove_first(left_out=1)
                    raise
                self._remove_first(left_out=0)
                self._took(record)

    def _next(self) -> StepRecord | None:
        """The next record; None: no more come."""
        with self._changed:
            self._busy = None
            self._changed.wait_for(lambda: self._records or self._is_closing)
            return self._records[0] if self._records else None

    def _remove_first(self, *, left_out: int) -> None:
        with self._changed:
            self._records.popleft()
            self._tries, self._left_out = 0, self._left_out + left_out

    def _begins(self, what: str) -> None:
        with self._changed:
            self._busy = what, time.monotonic()

    def _took(self, record: StepRecord) -> None:
        self._pause = FIRST_PAUSE_SECONDS
        if self._is_told:
            self._is_told = False
            lacks = f"; it lacks {plural(self._left_out, 'step')}" if self._left_out else ""
            text = f"{self._name} takes steps again, from step {record.step} on{lacks}"
            _log.info("%s", text, extra=fields("report", name=self._name, state="back", step=record.step))

    def _failed(self, error: BaseException) -> None:
        """Says what it has raised, once a minute at most."""
        with self._changed:
            what, self._busy = self._busy[0] if self._busy else "its end", None
        why = f"{type(error).__name__}: {error}"
        if self._lasting.is_due(why, time.monotonic()):
            self._is_told = True
            text = f"{self._name} has failed at {what} ({why}). It is tried again, and training goes on meanwhile"
            self._warn(text, "failed")

    def _warn(self, text: str, state: str) -> None:
        """Says a trouble, and where the record of each step is whatever comes of it."""
        extra = fields("report", name=self._name, state=state)
        _log.warning("%s. metrics.jsonl has every step", text, extra=extra)
