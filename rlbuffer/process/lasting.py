"""A trouble that is met again and again is said at once, then every minute."""

from __future__ import annotations

from collections.abc import Hashable

AGAIN_SECONDS = 60.0
"""A trouble that lasts is said once, and again after so long."""


class Lasting:
    """Decides when to say a trouble that is met again and again: at once, then every minute."""

    def __init__(self) -> None:
        self._told: dict[Hashable, float] = {}

    def is_due(self, trouble: Hashable, now: float) -> bool:
        """True when `trouble` is to be said now: an error's first line, or the key of a record."""
        if isinstance(trouble, str):
            trouble = trouble.partition("\n")[0]  # what follows may differ each time
        if now < self._told.get(trouble, float("-inf")) + AGAIN_SECONDS:
            return False
        self._told[trouble] = now
        return True

    def is_over(self) -> None:
        """The trouble has passed: another one is said at once."""
        self._told.clear()
