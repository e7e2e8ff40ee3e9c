"""Small marks and plain tables: everything that looks the same with and without colours."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise

import click

BLOCKS = "▁▂▃▄▅▆▇█"
MAX_STRIP = 16
"""Characters of a strip; more values are averaged into that many."""


def sparkline(values: Sequence[float], *, width: int = MAX_STRIP, low: float = 0.0, high: float = 1.0) -> str:
    """Values as block characters between `low` and `high`, at most `width` of them.

    Example:
        >>> sparkline([0.0, 0.5, 1.0])
        '▁▅█'
    """
    values = _thinned(values, width)
    span = (high - low) or 1.0
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[min(top, max(0, round((v - low) / span * top + 1e-9)))] for v in values)


def _thinned(values: Sequence[float], width: int) -> Sequence[float]:
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
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[str] = frozenset()) -> None:
    """A table with rich on a terminal, plain text elsewhere; the same words either way."""
    if not (sys.stdout.isatty() and "NO_COLOR" not in os.environ):
        for line in table(header, rows, right=right):
            click.echo(line)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        shown.add_column(name, justify="right" if name in right else "left", no_wrap=name in ("id", "rollout"))
    for row in rows:
        shown.add_row(*[Text(cell, style=_STYLES.get(cell, "")) for cell in row])
    Console().print(shown)


_STYLES = {"ready": "green", "forming": "yellow", "packed": "cyan", "trained": "blue", "dropped": "red"}


def utc(seconds: float | None) -> str | None:
    """Unix seconds as ISO 8601 in UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def printable(text: str) -> str:
    """Untrusted text for a terminal: control characters are shown, not obeyed."""
    return "".join(c if c.isprintable() or c == " " else c.encode("unicode_escape").decode() for c in text)
