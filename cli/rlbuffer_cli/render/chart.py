"""Curves drawn with characters: one mark for each, so that they differ without colours."""

from __future__ import annotations

from collections.abc import Sequence

from rlbuffer.state.text import printable
from rlbuffer_cli.render.curves import Curve, bounds
from rlbuffer_cli.render.text import cut

CURVE_MARKS = "•o+*#%@="
PLAIN_MARKS = ".o+*#%@="
"""The same for terminals that show nothing but ASCII."""
CHART_HEIGHT = 12
LEAST_COLUMNS = 10


def chart(curves: Sequence[Curve], *, width: int, height: int = CHART_HEIGHT, is_ascii: bool = False) -> list[str]:
    """Curves over one another, then a line for each with its mark, its last value and its range.

    Where two meet, the mark of the later one is seen.

    Example:
        >>> chart([Curve("a", ((1, 0.0), (2, 1.0)))], width=14, height=2)[:3]
        ['1 ┤         •', '0 ┤•', '  └──────────']
    """
    first, last, low, high = bounds(curves)
    labels = {height - 1: f"{high:.4g}", 0: f"{low:.4g}"}
    margin = max(map(len, labels.values()))
    columns = max(LEAST_COLUMNS, width - margin - 2)
    cells = [[" "] * columns for _ in range(height)]
    marks = PLAIN_MARKS if is_ascii else CURVE_MARKS
    for number, curve in enumerate(curves):
        for column, value in _by_column(curve, columns, first, last).items():
            cells[round((value - low) / (high - low) * (height - 1))][column] = marks[number % len(marks)]
    tick, corner, floor = ("|", "+", "-") if is_ascii else ("┤", "└", "─")
    lines = [f"{labels.get(row, ''):>{margin}} {tick}{''.join(cells[row])}".rstrip() for row in reversed(range(height))]
    lines.append(f"{'':>{margin}} {corner}{floor * columns}")
    lines.append(f"{'':>{margin}}  {f'step {first}':<{columns - len(str(last))}}{last}")
    lines += [f"{marks[n % len(marks)]} {legend(curve)}" for n, curve in enumerate(curves)]
    return [cut(line, width) for line in lines]


def legend(curve: Curve) -> str:
    """The curve in words: where it is now, and between which values it was."""
    values = [value for _, value in curve.points]
    step, value = curve.points[-1]
    return f"{printable(curve.name)}  {value:.4g} at step {step}, {min(values):.4g} to {max(values):.4g}"


def _by_column(curve: Curve, columns: int, first: int, last: int) -> dict[int, float]:
    """Column -> mean of the values that fall into it."""
    sums: dict[int, list[float]] = {}
    for step, value in curve.points:
        sums.setdefault(round((step - first) / (last - first) * (columns - 1)), []).append(value)
    return {column: sum(values) / len(values) for column, values in sums.items()}
