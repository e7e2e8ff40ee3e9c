"""Lines of a terminal: how wide they may be, and where they are broken."""

from __future__ import annotations

import base64
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import IO, Any

WIDE = 110
"""Columns of a terminal from which a table has all its columns."""
MINUS = "\u2212"
MOST_FLOWING = 2000
"""A longer line is broken anywhere."""


def signs(number: str) -> str:
    r"""A number as people read it: with a real minus.

    Example:
        >>> signs("-0.250") == "\N{MINUS SIGN}0.250"
        True
    """
    return number.replace("-", MINUS)


def thinned(values: Sequence[float], width: int) -> Sequence[float]:
    """At most `width` values: means of neighbours where there are more."""
    if len(values) <= width:
        return values
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def cut(line: str, width: int) -> str:
    """The line in at most `width` columns of a terminal, with an ellipsis where something is left out."""
    from rich.cells import cell_len, set_cell_size

    return line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"


def terminal_width(stream: IO[str] | None = None) -> int | None:
    """Columns of the terminal that the stream (None: stdout) is; None when it is none."""
    stream = stream or sys.stdout
    return columns_of(stream) if stream.isatty() else None


def columns_of(stream: IO[str]) -> int:
    """Width of a terminal by its own word; where it has none, what COLUMNS says, or 80.

    The other way round a program that was started from within another one would have that one's width.
    """
    try:
        columns = os.get_terminal_size(stream.fileno()).columns  # 0: a terminal whose size nobody has set
    except (OSError, ValueError):
        columns = 0
    return max(20, columns) if columns else shutil.get_terminal_size().columns


def wrapped(line: str, *, indent: str | None = None, stream: IO[str] | None = None) -> list[str]:
    """A line of prose, broken where the terminal (None: of stdout) is too narrow for it; as :func:`broken`."""
    width = terminal_width(stream)
    return [line] if width is None else broken(line, width, indent=indent)


def broken(line: str, width: int, *, indent: str | None = None) -> list[str]:
    """The line in rows of at most `width` columns, broken between words where that is cheap.

    `indent` begins the rows after the first; None: two blanks more than the line has.
    """
    from rich.cells import cell_len, chop_cells

    if cell_len(line) <= width:
        return [line]
    if len(line) >= MOST_FLOWING or any(cell_len(c) != 1 for c in set(line)):
        return chop_cells(line, width)
    lead = " " * min(len(line) - len(line.lstrip()), width // 2)
    after = f"{lead}  " if indent is None else indent
    rows = textwrap.wrap(line.strip(), width, initial_indent=lead, subsequent_indent=after, break_on_hyphens=False)
    return rows or [""]


def as_json(value: Any) -> Any:
    """Types of msgpack as JSON types: bytes as base64."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if hasattr(value, "items"):
        return {str(k): as_json(v) for k, v in value.items()}
    return [as_json(v) for v in value] if isinstance(value, list | tuple) else value


def utc(seconds: float | None) -> str | None:
    """Unix seconds as ISO 8601 in UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def time_of(seconds: float) -> str:
    """The time of the day of Unix seconds, in UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S}"


def moment(seconds: float) -> str:
    """Day and time of Unix seconds, in UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
