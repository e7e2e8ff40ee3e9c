"""A trouble that is met again and again is said at once, then every minute."""

from __future__ import annotations

AGAIN_SECONDS = 60.0
"""A trouble that lasts is said once, and again after so long."""


class Lasting:
    """Decides when to say a trouble that is met again and again: at once, then every minute."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def is_due(self, sentence: str, now: float) -> bool:
        """True when `sentence` is to be said now. Its first line counts: what follows may differ each time."""
        head = sentence.partition("\n")[0]
        if now < self._told.get(head, float("-inf")) + AGAIN_SECONDS:
            return False
        self._told[head] = now
        return True

    def is_over(self) -> None:
        """The trouble has passed: another one is said at once."""
        self._told.clear()
