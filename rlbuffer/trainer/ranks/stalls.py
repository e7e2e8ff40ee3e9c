"""Tells a rank that hangs in its data from one that is busy, and ends the job in seconds.

Exchanges cannot tell them apart: whoever waits in one knows only that somebody is missing, and a rank may be long for
good reasons (it writes weights, or a checkpoint). So every rank leaves a note in the process group's store of what it
does. A committed step can be read by all ranks at once: one that is still pulling it, seconds after another has it,
hangs (its disk, its connection, a column's decoder), and waiting longer would not help. Unless the server is away, or
has lost the step since: then the other one waits for a step to come.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from torch.distributed.distributed_c10d import Store

from rlbuffer.errors import BatchTimeout, RlbufferError
from rlbuffer.process import logs
from rlbuffer.process.ranks import Ranks
from rlbuffer.state.text import printable

STALL_SECONDS = 15.0
"""How long ranks that have a step wait for one that still pulls it."""
STALL_LOOK_SECONDS = 0.5
"""Seconds between looks of a waiting rank at the notes of the others."""

OnStall = Callable[[RlbufferError], None]
"""Called in a thread of its own; the main thread is stuck in an exchange, so it must end the process."""


class StallWatch:
    """This rank's note, and its look at the others' while it waits for them. Alone, it does nothing."""

    def __init__(self, ranks: Ranks, store: Store | None, *, seconds: float, on_stall: OnStall | None) -> None:
        self._ranks = ranks
        self._store = store
        self._seconds = seconds
        self._on_stall = on_stall or say_and_leave
        self._held: tuple[int, Callable[[], bool]] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._note("begins")

    def __enter__(self) -> StallWatch:
        if self._store is not None:
            self._thread = threading.Thread(target=self._watch, name="watch-ranks", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held = None
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * STALL_LOOK_SECONDS)

    def pulling(self, step: int) -> None:
        """This rank begins to wait for `step`."""
        self._note(f"pulls {step}")

    @contextmanager
    def holding(self, step: int, is_there: Callable[[], bool]) -> Iterator[None]:
        """This rank has `step` and waits, within the block, for the others to have it.

        `is_there` is asked while one of them does not: whether it could be pulled now.
        """
        self._note(f"has {step}")
        self._held = step, is_there
        try:
            yield
        finally:
            self._held = None

    def _note(self, text: str) -> None:
        if self._store is not None:
            self._store.set(str(self._ranks.rank), text)

    def _watch(self) -> None:
        since: dict[int, float] = {}
        watched: tuple[int, Callable[[], bool]] | None = None
        while not self._ended.wait(STALL_LOOK_SECONDS):
            current = self._held
            if current is None or current is not watched:
                watched, since = current, {}
                continue
            step, is_there = current
            late = self._late(step)
            if late and not is_there():
                since = {}
                continue
            now = time.monotonic()
            since = {rank: since.get(rank, now) for rank in late}
            stalled = [rank for rank, first in since.items() if now - first >= self._seconds]
            if stalled and self._held is current:
                self._on_stall(BatchTimeout(self._message(stalled[0], step)))
                return

    def _late(self, step: int) -> list[int]:
        """Ranks that still pull `step`."""
        if self._store is None:
            return []
        try:
            notes = {r: self._store.get(str(r)) for r in range(self._ranks.world_size) if r != self._ranks.rank}
        except RuntimeError:
            return []  # the rank that serves the store has ended: the exchange says so
        return [rank for rank, note in notes.items() if note == f"pulls {step}".encode()]

    def _message(self, stalled: int, step: int) -> str:
        return (
            f"rank {self._ranks.rank} has step {step}, and rank {stalled} has been pulling it for {self._seconds:g} s "
            f"more: rank {stalled} hangs in its data. Look at its host and its connection to the server"
        )


def say_and_leave(error: RlbufferError) -> None:
    """Ends this process with the error's exit code."""
    print(printable(f"Error: {error}", lines=True), file=sys.stderr)
    logs.stop()
    os._exit(error.exit_code)


def is_lost_peer(error: Exception) -> bool:
    """True when an exchange failed because another rank had left: gloo and nccl say so in words only."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "tcpstore")
    )
