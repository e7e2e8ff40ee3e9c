"""The line of a command before it has anything to show: on a terminal nobody shall wonder whether it hangs.

One line on stderr, taken away by whatever is printed first. Imports next to nothing: it stands there before anything is
loaded.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

RUN_COMMANDS = ("demo", "run", "serve", "worker", "gateway", "score", "train", "weights")
"""Commands that work for a run until they are stopped: they go on when nobody reads what they print."""
SLOW_COMMANDS = (
    *("demo", "run", "serve", "worker", "gateway", "score", "train", "push", "replay"),
    *("inspect", "top", "verify", "config", "doctor"),
)
"""Commands that may take a second until they print something."""

_is_shown = False


def is_drawable(stream: TextIO) -> bool:
    """True for a terminal that obeys escapes: a dumb one prints them."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def has_colours(stream: TextIO) -> bool:
    """True where colours are obeyed and wanted: NO_COLOR, unless it is empty, takes them away."""
    return is_drawable(stream) and not os.environ.get("NO_COLOR")


def starting(what: str) -> None:
    """Says what is done now."""
    global _is_shown
    if is_drawable(sys.stderr):
        _is_shown = True
        sys.stderr.write(f"\r\x1b[K{what} ...")
        sys.stderr.flush()


def clear() -> None:
    """Takes the line away."""
    global _is_shown
    if _is_shown:
        _is_shown = False
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
