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
from rlbuffer.process.logs import Lasting, fields
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


def when_there_is_room(
    write: Callable[[], T], *, folder: Path, ranks: Ranks, stop: StopRequest, reader: SaysWhy | None = None
) -> T:
    """Does `write` on all ranks, again and again while one of them has no room for it. -> what it gives.

    All ranks call it. `write` may be repeated; it may do nothing on some of them.

    Raises:
        RlbufferError: asked to stop while there was no room here. Else what `write` raises.
    """
    lasting, pause, has_waited = Lasting(), 1, False
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
            waiting = Waiting(kind=Wait.DISK, detail=state_of(folder, lack_of_room(refused)))
            if lasting.is_due(Wait.DISK, time.monotonic()):
                _log.warning("%s", waiting, extra=fields("waiting", **waiting.record(), sentence=str(waiting)))
            if reader is not None:
                reader.waits(waiting)
        elif not lacking:
            if has_waited and ranks.rank == 0:
                _log.info("there is room in %s again: training goes on", folder, extra=fields("room", path=str(folder)))
            return given
        for _ in range(pause):
            if stops:
                break
            time.sleep(LOOK_SECONDS)
            _, stops = _any(ranks, False, stop.is_set)
        if reader is not None:
            reader.waits(None)
        if stops:
            if refused is not None:
                raise RlbufferError(f"asked to stop while something waited to be written: {waiting}") from refused
            return given
        has_waited, pause = True, min(2 * pause, LONGEST_PAUSE)


def _any(ranks: Ranks, *facts: bool) -> list[bool]:
    """Each fact: is it one of any rank?"""
    return ranks.gather(torch.tensor(facts, dtype=torch.int64)).amax(0).bool().tolist()
