"""Text for people: counts, durations and shares, what controls a terminal made harmless, what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SHOWN_IDS = 5
"""Ids of several that are named."""


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


def percent(fraction: float) -> str:
    """A fraction as whole percent."""
    return f"{100 * fraction:.0f}%"


def counted(kinds: Mapping[str, int]) -> str:
    """``KeyError 12, TimeoutError 1``: the most frequent first."""
    return ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items(), key=lambda item: (-item[1], item[0])))


def nearest(name: str, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The one of `names` that is most like `name`; "" when none is as much like it as `cutoff` (0 to 1) says."""
    import difflib  # only commands that fail need it

    close = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return close[0] if close else ""


def did_you_mean(name: str, names: Iterable[str], *, cutoff: float = 0.6, otherwise: str = "") -> str:
    """A sentence with the nearest name, a blank in front of it; `otherwise` when none is near.

    Example:
        >>> did_you_mean("rlooo", ["rloo", "grpo"])
        ' Did you mean rloo?'
    """
    name = nearest(name, names, cutoff=cutoff)
    return f" Did you mean {name}?" if name else otherwise


def several_ids(prefix: str, ids: Iterable[str], place: str) -> str:
    """The sentence about a beginning that several ids have: some of them, and what to type.

    Example:
        >>> several_ids("a.1", ["a.11", "a.10"], "run 'math'")
        "2 groups of run 'math' begin with 'a.1': a.10, a.11. Type one of them whole: rlbuffer inspect a.10"
    """
    names = sorted(ids)
    more = f" and {len(names) - SHOWN_IDS:,} more" if len(names) > SHOWN_IDS else ""
    return (
        f"{len(names):,} groups of {place} begin with {prefix!r}: {', '.join(names[:SHOWN_IDS])}{more}. Type one of "
        f"them whole: rlbuffer inspect {names[0]}"
    )


def no_such_option(what: str, given: Iterable[str], allowed: Iterable[str]) -> str:
    """A sentence about the first of `given` that is not `allowed`, with what was probably meant; "" when all are."""
    names = list(allowed)
    for option in given:
        if option not in names:
            options = f" Its options are {', '.join(names)}." if names else ""
            return f"{what}: {option} is not an option.{did_you_mean(option, names, otherwise=options)}"
    return ""
