"""Small marks and plain tables: everything that looks the same with and without colours."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import IO

import click

from rlbuffer.state.text import printable
from rlbuffer_cli.starting import has_colours

BLOCKS = "▁▂▃▄▅▆▇█"
MAX_STRIP = 16
"""Characters of a strip; more values are averaged into that many."""


def cell_len(text: str) -> int:
    """Columns of a terminal that the text takes: rich knows them, and is not loaded for what is one each."""
    if all(c < "\u0300" or "\u2010" <= c <= "\u25ff" for c in text):  # Latin, dashes, blocks and lines
        return len(text)
    from rich.cells import cell_len as cells

    return cells(text)


def sparkline(values: Sequence[float], *, width: int = MAX_STRIP, low: float = 0.0, high: float = 1.0) -> str:
    """Values as block characters between `low` and `high`, at most `width` of them.

    Example:
        >>> sparkline([0.0, 0.5, 1.0])
        '▁▅█'
    """
    values = thinned(values, width)
    span = (high - low) or 1.0
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[min(top, max(0, round((v - low) / span * top + 1e-9)))] for v in values)


def thinned(values: Sequence[float], width: int) -> Sequence[float]:
    """At most `width` values: means of neighbours where there are more."""
    if len(values) <= width:
        return values
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def bar(fraction: float, *, width: int = 20, mark: float | None = None) -> str:
    """A bar for 0-1, with a stroke at `mark` (a target).

    Example:
        >>> bar(0.5, width=4), bar(0.25, width=4, mark=0.75)
        ('██··', '█··│')
    """
    filled = min(width, max(0, round(fraction * width)))
    out = ["█"] * filled + ["·"] * (width - filled)
    if mark is not None:
        out[min(width - 1, max(0, round(mark * width)))] = "│"
    return "".join(out)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[str] = frozenset()) -> list[str]:
    """Aligned columns; names in `right` are numbers."""
    return [_joined(cells) for cells in aligned(header, rows, right=right)]


def show_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: frozenset[str] = frozenset(),
    optional: Sequence[str] = (),
) -> None:
    """A table, coloured on a terminal; the same words either way.

    Where the terminal is too narrow, columns of `optional` are left out, the first ones first, and then lines are cut:
    a wrapped table cannot be read. Off a terminal everything is printed.
    """
    width = terminal_width()
    for i, cells in enumerate(aligned(header, rows, right=right, optional=optional, width=width)):
        line = _joined(cells)
        if width is not None and cell_len(line) > width:
            line = cut(line, width)
        elif has_colours(sys.stdout):
            line = _joined([_coloured(cell) if i else click.style(cell, bold=True) for cell in cells])
        click.echo(line)


def aligned(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: frozenset[str] = frozenset(),
    optional: Sequence[str] = (),
    width: int | None = None,
) -> list[list[str]]:
    """The cells of a table, header first, each padded to its column.

    Columns of `optional` are left out, the first ones first, while a line is wider than `width`.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    if width is not None:
        header, rows = _fitted(header, rows, optional, width)
    widths = _widths(header, rows)
    return [_cells(header, row, widths, right) for row in [header, *rows]]


def cut(line: str, width: int) -> str:
    """The line in at most `width` columns of a terminal, with an ellipsis where something is left out."""
    if cell_len(line) <= width:
        return line
    from rich.cells import set_cell_size

    return set_cell_size(line, width - 1) + "…"


def terminal_width(stream: IO[str] | None = None) -> int | None:
    """Columns of the terminal that the stream (None: stdout) is; None when it is none."""
    stream = stream or sys.stdout
    return columns_of(stream) if stream.isatty() else None


def columns_of(stream: IO[str]) -> int:
    """Width of a terminal by its own word; where it has none, what COLUMNS says, or 80.

    The other way round a program that was started from within another one would have that one's width.
    """
    try:
        known = os.get_terminal_size(stream.fileno()).columns  # 0: a terminal whose size nobody has set
    except (OSError, ValueError):
        known = 0
    return max(20, known) if known else shutil.get_terminal_size().columns


def wrapped(line: str, *, indent: str | None = None, stream: IO[str] | None = None) -> list[str]:
    """A line of prose, broken between words where the terminal (None: of stdout) is too narrow for it."""
    return broken(line, terminal_width(stream), indent=indent)


def broken(line: str, width: int | None, *, indent: str | None = None) -> list[str]:
    """A line of prose in at most `width` columns, broken between words; `width` None: as it is.

    `indent` begins the rows after the first; None: two blanks more than the line has.
    """
    if width is None or len(line) <= width:
        return [line]
    lead = line[: len(line) - len(line.lstrip())]
    after = f"{lead}  " if indent is None else indent
    return textwrap.wrap(line.strip(), width, initial_indent=lead, subsequent_indent=after, break_on_hyphens=False)


def _fitted(
    header: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str], width: int
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    for name in optional:
        widths = _widths(header, rows)
        if sum(widths) + 2 * (len(widths) - 1) <= width:
            break
        keep = [i for i, other in enumerate(header) if other != name]
        header, rows = [header[i] for i in keep], [[row[i] for i in keep] for row in rows]
    return header, rows


def _widths(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(header, *rows, strict=True)]


def _cells(header: Sequence[str], row: Sequence[str], widths: Sequence[int], right: frozenset[str]) -> list[str]:
    return [
        " " * (width - cell_len(cell)) + cell if name in right else cell + " " * (width - cell_len(cell))
        for name, cell, width in zip(header, row, widths, strict=True)
    ]


def _joined(cells: Sequence[str]) -> str:
    return "  ".join(cells).rstrip()


def _coloured(cell: str) -> str:
    colour = colour_of(cell)
    return click.style(cell, fg=colour) if colour else cell


def colour_of(cell: str) -> str | None:
    """The colour of a state."""
    return _COLOURS.get(cell.strip().partition(" ")[0])


_COLOURS = {"ready": "green", "forming": "yellow", "packed": "cyan", "trained": "blue", "dropped": "red"}


def utc(seconds: float | None) -> str | None:
    """Unix seconds as ISO 8601 in UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def flow(parts: Sequence[str], width: int) -> list[str]:
    """Parts side by side, two blanks between them, as many to a line as fit."""
    lines = [""]
    for part in filter(None, parts):
        joined = f"{lines[-1]}  {part}" if lines[-1] else part
        if len(joined) > width and lines[-1]:
            lines.append(part)
        else:
            lines[-1] = joined
    return lines
