"""The leader's archive: a thread of its own copies steps and drops into files; the leader lets nothing go before.

::

    committed -> waits for others, at most FILE_SECONDS -> written -> may retire

The thread has a store of its own, so it never waits in the leader's turn, nor the leader in its. A folder that cannot
be written holds retirement, and nothing else, until the server's memory is short: then steps go unarchived.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rlbuffer.daemon.memory_rules import WATCH_SHARE
from rlbuffer.errors import LeaseLost, RlbufferError, RunGone, ServerRefused, ServerUnreachable
from rlbuffer.process.logs import fields
from rlbuffer.process.room import FULL, lack_of_room, state_of
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.state.text import plural
from rlbuffer.store.keys import EARLY_SHARE
from rlbuffer.store.records import Meta
from rlbuffer.store.viewer import Viewer

if TYPE_CHECKING:
    from rlbuffer.archive.writer import ArchiveWriter

_log = logging.getLogger(__name__)
FILE_STEPS = 16
"""Most steps of one file."""
FILE_BYTES = 64 * 2**20
"""Payloads from which a file takes no further step."""
FILE_SECONDS = 60.0
"""Longest that a step waits for others before it is written."""
ARCHIVE_POLL_SECONDS = 1.0
"""Seconds between looks at whether there is a file's worth of steps."""
LONGEST_RETRY_SECONDS = 30.0
"""A folder that cannot be written is tried again after a second, later after twice the time, and so long at most."""
ARCHIVE_PATIENCE_SECONDS = 2.0
"""Longest that the thread waits for a server that is away before it looks again."""
ARCHIVE_CLOSE_SECONDS = 30.0
"""Longest that leaving waits for the last file."""


class Archiving:
    """Keeps the archive of a run while this process leads it.

    Args:
        open_store: connects to the run once more.
        folder: where; None: nothing is kept, and everything may go.
    """

    def __init__(self, open_store: Callable[[], Viewer], folder: Path | None) -> None:
        self._open_store = open_store
        self.folder = None if folder is None else folder.expanduser().absolute()
        """The archive's directory on this machine; None: nothing is kept."""
        self._wake = threading.Event()
        self._is_hurried = self._is_closing = self._is_void = False
        self._through = 0
        """Everything that was on the server when this was its last step is written."""
        self._trouble = ""
        self._writer: ArchiveWriter | None = None
        self._store: Viewer | None = None
        self._written_at = time.monotonic()
        self._retry_at, self._pause = float("-inf"), ARCHIVE_POLL_SECONDS
        self._epoch = 0
        self._revisions: deque[Meta] = deque()
        """Settings that are not written yet."""
        self._thread: threading.Thread | None = None

    # -- the leader ------------------------------------------------------------------------------------------------
    def __enter__(self) -> Archiving:
        if self.folder is not None:
            self._thread = threading.Thread(target=self._run, name="archive", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Whoever has lost the lead writes nothing more: another one goes on where the folder ends.
        self._is_void = error is not None
        self._is_closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(ARCHIVE_CLOSE_SECONDS if error is None else ARCHIVE_PATIENCE_SECONDS)

    def take_in(self, meta: Meta) -> None:
        """The settings of `meta` make the next steps."""
        if self._thread is not None and meta.revision:
            self._revisions.append(meta)
            self._wake.set()

    def may_retire(self, up_to: int, *, share: float) -> int:
        """The last step up to `up_to` that may leave the server.

        `share`: how much of the server's memory is used. As it fills, what is not written yet is written at once; when
        it is short, what cannot be written goes.
        """
        if self._thread is None or up_to <= self._through:
            return up_to
        if share >= EARLY_SHARE and self._trouble:
            return up_to
        if share >= WATCH_SHARE:
            self._hurry()
        return min(up_to, self._through)

    def is_catching_up(self, step: int) -> bool:
        """True while steps up to `step` are being written, at once: they are about to be gone."""
        if self._thread is None or step <= self._through or self._trouble:
            return False
        self._hurry()
        return True

    def _hurry(self) -> None:
        self._is_hurried = True
        self._wake.set()

    def problems(self) -> tuple[Problem, ...]:
        """The archive cannot be written."""
        return (Problem(kind=Trouble.ARCHIVE, detail=self._trouble),) if self._trouble else ()

    # -- the thread ------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._is_void:
            is_last = self._is_closing
            try:
                if is_last or time.monotonic() >= self._retry_at:
                    self._write_what_is_due(is_last=is_last)
            except (ServerUnreachable, ServerRefused, LeaseLost, RunGone):
                pass  # the leader meets the same trouble; the next look says whether it is over
            except Exception as error:  # a thread that dies alone would hold retirement without a word
                self._stuck(error)
            if is_last:
                break
            self._wake.wait(ARCHIVE_POLL_SECONDS)
            self._wake.clear()
        if self._store is not None:
            self._store.close()

    def _write_what_is_due(self, *, is_last: bool) -> None:
        """Writes what is there, when it is a file's worth or has waited long enough."""
        from rlbuffer.archive.writer import ArchiveWriter

        if self.folder is None:
            return
        if self._store is None:
            self._store = self._open_store()
            self._store.patience_seconds = ARCHIVE_PATIENCE_SECONDS
        if self._writer is None:
            self._writer = ArchiveWriter(self.folder, self._store.run, self._check)
        while self._revisions:
            self._writer.add_settings(self._revisions[0])
            self._revisions.popleft()
        meta = self._store.meta()
        is_other = meta.epoch != self._epoch or meta.step < self._through
        is_due = time.monotonic() - self._written_at >= FILE_SECONDS
        if is_other or is_due or is_last or self._is_hurried or meta.step - self._through >= FILE_STEPS:
            self._is_hurried = False
            self._write(meta.step, is_last=is_last)
            self._epoch = meta.epoch

    def _check(self) -> None:
        if self._is_void:
            raise LeaseLost("another batcher leads this run, and writes its archive")

    def _write(self, step: int, *, is_last: bool) -> None:
        from rlbuffer.archive.copying import copy_history, copy_pending, copy_steps, copy_trained, files_of, unwritten

        if self._store is None or self._writer is None:
            return
        steps, records = 0, 0
        for file in files_of(unwritten(self._store, self._writer), steps=FILE_STEPS, size=FILE_BYTES):
            steps += copy_steps(self._store, self._writer, file)
        records = copy_history(self._store, self._writer)
        copy_trained(self._store, self._writer)
        if is_last:
            copy_pending(self._store, self._writer)
        self._through, self._written_at = step, time.monotonic()
        self._retry_at, self._pause = float("-inf"), ARCHIVE_POLL_SECONDS
        if self._trouble:
            self._trouble = ""
            text, written = "the archive is written again: %s, up to step %d", {"steps": steps, "records": records}
            extra = fields("archive", state="written", step=step, **written)
            _log.info(text, plural(steps, "step"), step, extra=extra)

    def _stuck(self, error: Exception) -> None:
        if self.folder is not None and (lack := lack_of_room(error)) in FULL:
            trouble = f"{state_of(self.folder, lack)}. Make room there"
        elif isinstance(error, OSError):
            trouble = f"{self.folder}: {error.strerror or error}"
        elif isinstance(error, RlbufferError):
            trouble = str(error)
        else:
            trouble = f"{type(error).__name__}: {error}"
        self._retry_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_RETRY_SECONDS)
        if trouble != self._trouble:
            self._trouble = trouble
            _log.warning("%s", *self.problems(), extra=fields("archive", state="stuck"))
