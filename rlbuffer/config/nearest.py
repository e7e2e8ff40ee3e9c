"""Did you mean: the nearest of the names that there are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: tuple[str, ...] | list[str]) -> str:
    """`` Did you mean X?`` with the nearest name, or nothing when none is near."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


def no_such_option(what: str, given: Iterable[str], known: Iterable[str]) -> str:
    """A sentence about the first of `given` that is not `known`, with what was probably meant; "" when all are."""
    names = list(known)
    for option in given:
        if option not in names:
            close = difflib.get_close_matches(option, names, n=1)
            hint = f" Did you mean {close[0]}?" if close else f" Its options are {', '.join(names)}." if names else ""
            return f"{what}: {option} is not an option.{hint}"
    return ""
