"""Did you mean: the nearest of the names that there are."""

from __future__ import annotations

from collections.abc import Iterable

SHOWN_IDS = 5
"""Ids of several that are named."""


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


def no_such_option(what: str, given: Iterable[str], known: Iterable[str]) -> str:
    """A sentence about the first of `given` that is not `known`, with what was probably meant; "" when all are."""
    names = list(known)
    for option in given:
        if option not in names:
            options = f" Its options are {', '.join(names)}." if names else ""
            return f"{what}: {option} is not an option.{did_you_mean(option, names, otherwise=options)}"
    return ""
