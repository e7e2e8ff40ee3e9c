"""A full disk stops no trainer: its ranks wait for room together, say so, and go on by themselves.

    written by all ranks -> agreed -> on
            ^                 |
            '--- a pause -----'   one of them has no room

The ranks come together every second, so that none of their exchanges runs into its time limit; what they say of
themselves goes on in threads of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from rlbuffer.errors import RlbufferError
from rlbuffer.process.logs import RateLimited, fields
from rlbuffer.process.ranks import Ranks
from rlbuffer.process.room import lack_of_room, state_of
from rlbuffer.process.signals import StopRequest
from rlbuffer.records.waiting import Wait, Waiting

T = TypeVar("T")
_log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
"""Seconds between two exchanges of ranks that wait."""
LONGEST_PAUSE = 8
"""Exchanges between two tries to write, of which there are fewer and fewer: a checkpoint may take minutes to fail."""


class SaysWhy(Protocol):
    """A rank's reader, whose heartbeat says what is waited for."""

    def waits(self, waiting: Waiting | None) -> None:
        """From now on."""


class NoRoom:
    """Says of a rank that something waits to be written: in its log at once and each minute, in its heartbeat."""

    def __init__(self, folder: Path, reader: SaysWhy | None = None) -> None:
        self._folder, self._reader = folder, reader
        self._lasting = RateLimited()
        self.waiting: Waiting | None = None
        """What was said last; None before, and where there was room again."""

    def since(self, refused: OSError | RlbufferError) -> None:
        """The disk has refused with this error."""
        self.waiting = waiting = Waiting(kind=Wait.DISK, detail=state_of(self._folder, lack_of_room(refused)))
        if self._lasting.is_due(Wait.DISK, time.monotonic()):
            _log.warning("%s", waiting, extra=fields("waiting", **waiting.record(), sentence=str(waiting)))
        if self._reader is not None:
            self._reader.waits(waiting)

    def is_over(self) -> None:
        """It is tried again: the heartbeat says nothing of it."""
        if self._reader is not None:
            self._reader.waits(None)

    def goes_on(self) -> None:
        """There was room."""
        self.waiting = None
        path = self._folder
        _log.info("there is room in %s again: training goes on", path, extra=fields("room", path=str(path)))


def when_there_is_room(
    write: Callable[[], T], *, folder: Path, ranks: Ranks, stop: StopRequest, reader: SaysWhy | None = None
) -> T:
    """Does `write` on all ranks, again and again while one of them has no room for it. -> what it gives.

    All ranks call it. `write` may be repeated; it may do nothing on some of them.

    Raises:
        RlbufferError: asked to stop while there was no room here. Else what `write` raises.
    """
    no_room, pause, has_waited = NoRoom(folder, reader), 1, False
    while True:
        refused: OSError | RlbufferError | None = None
        try:
            given = write()
        except (OSError, RlbufferError) as error:
            if not lack_of_room(error):
                raise
            refused = error
        lacking, stops = _any(ranks, refused is not None, stop.is_set)
        if refused is not None:
            no_room.since(refused)
        elif not lacking:
            if has_waited and ranks.rank == 0:
                no_room.goes_on()
            return given
        for _ in range(pause):
            if stops:
                break
            time.sleep(LOOK_SECONDS)
            _, stops = _any(ranks, False, stop.is_set)
        no_room.is_over()
        if stops:
            if refused is not None:
                raise RlbufferError(
                    f"asked to stop while something waited to be written: {no_room.waiting}"
                ) from refused
            return given
        has_waited, pause = True, min(2 * pause, LONGEST_PAUSE)


def _any(ranks: Ranks, *facts: bool) -> list[bool]:
    """Each fact: is it one of any rank?"""
    return ranks.gather(torch.tensor(facts, dtype=torch.int64)).amax(0).bool().tolist()
