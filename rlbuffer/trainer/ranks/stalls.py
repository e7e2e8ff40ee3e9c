"""Tells a rank that hangs in its data from one that is busy, and ends the job in seconds.

Exchanges cannot tell them apart: whoever waits in one knows only that somebody is missing, and a rank may be long for
good reasons (it writes weights, or a checkpoint). So every rank leaves a note in the process group's store of what it
does. A committed step can be read by all ranks at once: one that is still pulling it, seconds after another has it,
hangs (its disk, its connection, a column's decoder), and waiting longer would not help. Unless the server is away, or
has lost the step since: then the other one waits for a step to come.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from rlbuffer.errors import BatchTimeout
from rlbuffer.process.ranks import Ranks

STALL_SECONDS = 15.0
"""How long ranks that have a step wait for one that still pulls it."""
STALL_LOOK_SECONDS = 0.5
"""Seconds between looks of a waiting rank at the notes of the others."""


class StallWatch:
    """This rank's note, and its look at the others' while it waits for them. Without a store it does nothing."""

    def __init__(self, ranks: Ranks, store: Store | None, *, seconds: float = STALL_SECONDS) -> None:
        self._ranks = ranks
        self._store = store
        self._seconds = seconds
        self._next_look = 0.0
        self._since: dict[int, float] = {}
        """Rank -> when it was first seen pulling what this one has."""
        self._note("begins")

    def pulling(self, step: int) -> None:
        """This rank begins to wait for `step`."""
        self._note(f"pulls {step}")

    def has(self, step: int) -> None:
        """This rank has `step`, or knows why it has not."""
        self._note(f"has {step}")
        self._next_look, self._since = time.monotonic() + STALL_LOOK_SECONDS, {}

    def check(self, step: int, is_there: Callable[[], bool]) -> None:
        """Looks at the others, now and then, while this rank has `step` and they do not all have it.

        `is_there` is asked where one of them pulls: whether the step could be pulled now.

        Raises:
            BatchTimeout: one of them has been pulling it for too long.
        """
        now = time.monotonic()
        if self._store is None or now < self._next_look:
            return
        self._next_look = now + STALL_LOOK_SECONDS
        try:
            notes = {r: self._store.get(str(r)) for r in range(self._ranks.world_size) if r != self._ranks.rank}
        except RuntimeError:
            return  # the process that serves the store has ended: the exchange says so
        late = [rank for rank, note in notes.items() if note == f"pulls {step}".encode()]
        self._since = {rank: self._since.get(rank, now) for rank in late} if late and is_there() else {}
        for rank, first in self._since.items():
            if now - first >= self._seconds:
                raise BatchTimeout(
                    f"rank {self._ranks.rank} has step {step}, and rank {rank} has been pulling it for "
                    f"{self._seconds:g} s more: rank {rank} hangs in its data. Look at its host and its connection to "
                    "the server"
                )

    def _note(self, text: str) -> None:
        if self._store is not None:
            self._store.set(str(self._ranks.rank), text)


def is_lost_peer(error: Exception) -> bool:
    """True when an exchange failed because another rank had left: gloo and nccl say so in words only."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "tcpstore")
    )
