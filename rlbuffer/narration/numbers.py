"""Numbers and names as text for people: amounts, durations, shares; and what controls a terminal made harmless."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


def printable(text: str, *, lines: bool = False) -> str:
    r"""Text of anybody's for a terminal: what controls it (escapes, bidirectional marks) is shown, not obeyed.

    `lines`: line feeds stay.

    Example:
        >>> printable("a\x1b[2J\u202eb")
        'a\\x1b[2J\\u202eb'
    """
    if text.isprintable():
        return text
    kept = " \n" if lines else " "
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def amount(n: float) -> str:
    """A count in at most four digits: 950, 12.3k, 262k, 1.2M.

    Example:
        >>> amount(262144), amount(950), amount(1200000)
        ('262k', '950', '1.2M')
    """
    for limit, scale, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if abs(n) < limit:
            value = n / scale
            return f"{value:.0f}{unit}" if not unit or value >= 100 else f"{value:.1f}".removesuffix(".0") + unit
    return f"{n / 1e9:.1f}G"


def plural(count: int, noun: str, many: str = "") -> str:
    """A count with its noun; `many` of a noun that takes no s.

    Example:
        >>> plural(1, "rank"), plural(2000, "rank")
        ('1 rank', '2,000 ranks')
    """
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def duration(seconds: float | None) -> str:
    """Seconds as people say them: 0.3 s, 12 s, 6 min, 2.5 h; "" for None."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Failed(NamedTuple):
    """The groups that could not be made, as a worker's heartbeat says."""

    kinds: Mapping[str, int]
    """Kind of the error -> groups."""
    last: str
    """The last one, with file and line."""


def failures_of(beat: Mapping[str, Any]) -> Failed:
    """Any process may write a heartbeat, so nothing in it is certain to be there."""
    kinds, last = beat.get("failures"), beat.get("failure")
    sound = {str(k): n for k, n in kinds.items() if isinstance(n, int)} if isinstance(kinds, dict) else {}
    return Failed(sound, str(last or ""))


def percent(fraction: float) -> str:
    """A fraction as whole percent."""
    return f"{100 * fraction:.0f}%"
