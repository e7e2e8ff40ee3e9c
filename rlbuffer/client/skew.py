"""Do the ranks of a trainer train the same steps at the same time? In a loop of the user's own they may not.

A rank that makes fewer backward passes than another (a micro-batch left out, the model called inside of its wrapper)
has the other wait in an exchange, or exchanges gradients of another step. Neither says anything: only the steps that
the ranks acknowledge tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

APART = 2
"""Ranks that exchange gradients are at most one acknowledged step apart."""
SKEW_LOOKS = 3
"""Looks in a row that must find them apart: one heartbeat may have been on its way for long."""
PEER_FRESH_SECONDS = 2.0
"""Ranks beat every second."""
SLACK_SECONDS = 0.5
REMEMBERED = 16


class Skew:
    """The other ranks' passes as rank 0 sees them. `rank`, `world_size`: of this reader."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.watches = rank == 0 and world_size > 1
        """Rank 0 looks for all."""
        self._seen: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        """When (monotonic) this rank had acknowledged which step."""
        self._apart = 0
        self._is_told = False

    def look(self, step: int, beats: Mapping[str, Mapping[str, Any]], *, now: float) -> str:
        """Returns the fault, once; "" while there is none.

        Args:
            step: the last one that this rank has acknowledged.
            beats: the ranks' heartbeats.
            now: monotonic seconds.
        """
        self._seen.append((now, step))
        apart = [
            sentence for name, beat in beats.items() if name != "0" and (sentence := self._of(name, beat, step, now))
        ]
        self._apart = self._apart + 1 if apart else 0
        if self._apart < SKEW_LOOKS or self._is_told:
            return ""
        self._is_told = True
        return (
            f"{apart[0]}: their passes do not match, so they wait for each other or exchange gradients of different "
            "steps. Every rank makes one forward and backward pass of the wrapped model (DDP, FSDP) per micro-batch, "
            "dummies too"
        )

    def _of(self, name: str, beat: Mapping[str, Any], step: int, now: float) -> str:
        theirs, ago = beat.get("step"), float(beat["seconds_ago"])
        if not isinstance(theirs, int) or ago > PEER_FRESH_SECONDS:
            return ""
        # When the other rank said so this one was at least as far; now it is at least as far as then.
        before = max((s for at, s in self._seen if at <= now - ago - SLACK_SECONDS), default=0)
        if before >= theirs + APART or theirs >= step + APART:
            return f"rank 0 has trained step {step}, rank {name} step {theirs}"
        return ""
