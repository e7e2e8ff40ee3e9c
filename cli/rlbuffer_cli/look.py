"""The look of every screen, in one place: colours, the signs of states, and marks that draw a number.

A style is a name (`ready`, `accent`, `faint`), never a colour: printed text takes the terminal's own colours, the
browser and pages take :data:`PALETTE`. A mark says the same without colours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.style import Style
from rich.text import Text
from rich.theme import Theme

from rlbuffer.state.text import printable
from rlbuffer_cli.starting import clear, has_colours, is_drawable
from rlbuffer_cli.text import terminal_width, thinned

PALETTE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "bg": ("#faf9f7", "#111215"),
        "panel": ("#ffffff", "#181a1f"),
        "line": ("#e5e3dd", "#2a2d35"),
        "line-soft": ("#efeeea", "#212329"),
        "ink": ("#1d1c1a", "#e9e8e4"),
        "label": ("#5c5a54", "#a5a7ae"),
        "faint": ("#706d66", "#868993"),
        "accent": ("#4a41c4", "#a9a4ff"),
        "accent-soft": ("#ecebfa", "#26254a"),
        "forming": ("#66635d", "#898680"),
        "ready": ("#006a9e", "#2f9fe0"),
        "packed": ("#643e03", "#fdca3a"),
        "trained": ("#015636", "#73edb1"),
        "dropped": ("#cb2865", "#fb6a58"),
        "e1": ("#4a41c4", "#a9a4ff"),
        "e2": ("#8e87e3", "#6f69cf"),
        "e3": ("#b5b0ef", "#5a55a3"),
        "e4": ("#dedcd6", "#35373f"),
        "hot": ("#e8590c", "#ff7a3d"),
        "plus": ("#0069a8", "#3fa7ee"),
        "minus": ("#d9480f", "#ff7a3d"),
    }
)
"""Name -> its colour on light, on dark."""
PRINTED: Mapping[str, str] = MappingProxyType(
    {
        "ink": "default",
        "label": "default",
        "faint": "dim",
        "line": "dim",
        "accent": "bold magenta",
        "forming": "dim",
        "ready": "blue",
        "packed": "yellow",
        "trained": "green",
        "dropped": "red",
        "e1": "bold magenta",
        "e2": "magenta",
        "e3": "dim magenta",
        "e4": "dim",
        "hot": "red",
        "plus": "blue",
        "minus": "red",
    }
)
"""The same by the terminal's own colours: whether it is light or dark is not known."""
SIGNS: Mapping[str, str] = MappingProxyType(
    {"forming": "◌", "ready": "●", "packed": "◆", "trained": "✓", "dropped": "✕"}
)
BLOCKS = "▁▂▃▄▅▆▇"
"""The highest leaves a line between two rows."""
FACT_WIDTH, MOST_ACROSS = 20, 140
UNCUT = 10_000
"""Columns of what is no terminal."""


def background() -> str:
    """`light` where the terminal says that its background is, as some do (COLORFGBG); else `dark`."""
    return "light" if os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15") else "dark"


def themed(kind: str) -> Theme:
    """The styles by name: `light`, `dark`, or `printed`."""
    if kind == "printed":
        return Theme(dict(PRINTED))
    return Theme({name: colours[kind == "dark"] for name, colours in PALETTE.items()})


def console(stream: TextIO | None = None) -> Console:
    """A console with the styles; off a terminal nothing is cut or coloured, and NO_COLOR takes the colours away."""
    stream = stream or sys.stdout
    # A terminal's own word counts: COLUMNS may be that of the one in which another program runs.
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return Console(
        file=stream,
        theme=themed("printed"),
        width=None if terminal_width(stream) else UNCUT,
        force_terminal=is_drawable(stream),
        no_color=not has_colours(stream),
        highlight=False,
        markup=False,
        emoji=False,
        _environ=environ,
    )


def screen() -> tuple[Console, bool]:
    """A console for a screen of its own, and whether that has the palette's background: with fewer than 256 colours
    it has the terminal's."""
    target = console()
    is_ours = target.color_system in ("256", "truecolor")
    if is_ours:
        target.push_theme(themed(background()))
    return target, is_ours


def show(*views: RenderableType) -> None:
    clear()
    target = console()
    for view in views:
        with target.capture() as captured:
            target.print(view)
        for line in captured.get().rstrip("\n").split("\n"):
            print(line.rstrip())


def plain(value: object, style: str = "") -> Text:
    """Anybody's text: no markup, controls shown."""
    return value if isinstance(value, Text) else Text(printable(str(value)), style)


# -- marks -------------------------------------------------------------------------------------------------------------
def state(name: str, more: str = "") -> Text:
    """A state by sign, word and colour."""
    return Text(printable(f"{SIGNS.get(name, '')} {name} {more}".strip()), name)


def spark(values: Sequence[float], low: float, high: float, *, cells: int = 16) -> str:
    """Values over time as blocks; the axis is `low` to `high`.

    Example:
        >>> spark([0.0, 0.5, 1.0], 0.0, 1.0)
        '▁▄▇'
    """
    span, top = (high - low) or 1.0, len(BLOCKS) - 1
    return "".join(BLOCKS[min(top, max(0, round((v - low) / span * top + 1e-9)))] for v in thinned(list(values), cells))


def strip(values: Sequence[float], low: float = 0.0, high: float = 1.0, *, cells: int = 10) -> Text:
    """How values spread on a fixed axis: a cell's height is the share that lies there; the mean's is in the accent.

    Example:
        >>> strip([0.0, 1.0, 1.0, 1.0]).plain
        '▂······╷·▅'
    """
    if not values:
        return Text()
    span = (high - low) or 1.0
    counts = [0] * cells
    for value in values:
        counts[_cell(value, low, span, cells)] += 1
    mean = _cell(sum(values) / len(values), low, span, cells)
    drawn = Text()
    for at, count in enumerate(counts):
        style = "accent" if at == mean else "label" if count else "line"
        block = _block(count / len(values)) if count else "╷" if at == mean else "·"
        drawn.append(block, style)
    return drawn


def _block(part: float) -> str:
    """A share above 0 as the height of a cell."""
    return BLOCKS[max(1, round(part * len(BLOCKS))) - 1]


def _cell(value: float, low: float, span: float, cells: int) -> int:
    return min(cells - 1, max(0, int((value - low) / span * cells)))


def budget(part: float, target: float | None, style: str = "e1", *, cells: int = 16) -> Text:
    """A share as a bar, with its target.

    Example:
        >>> budget(0.5, 0.75, cells=4).plain, budget(0.5, None, cells=4).plain
        ('━━─┃', '━━──')
    """
    full = min(cells, max(0, round(part * cells)))
    drawn = Text.assemble(("━" * full, style), ("─" * (cells - full), "line"))
    if target is None:
        return drawn
    at = min(cells - 1, round(target * cells))
    return drawn[:at] + Text("┃", "ink") + drawn[at + 1 :]


def meter(part: float, style: str = "accent", *, cells: int = 8) -> Text:
    """A share as a bar: nothing of it draws nothing.

    Example:
        >>> meter(0.5, cells=4).plain
        '━━──'
    """
    return budget(part, None, style, cells=cells)


def signed(value: float, most: float, *, cells: int = 8) -> Text:
    """A number to the left or the right of a middle line; `most`: a half of the bar.

    Example:
        >>> signed(-1.0, 2.0).plain, signed(2.0, 2.0).plain
        ('  ▇▇│    ', '    │▇▇▇▇')
    """
    half = cells // 2
    full = min(half, round(abs(value) / (most or 1.0) * half))
    left, right = (BLOCKS[-1] * full if value < 0 else "", BLOCKS[-1] * full if value > 0 else "")
    return Text.assemble((left.rjust(half), "minus"), ("│", "line"), (right.ljust(half), "plus"))


def ages(counts: Mapping[int, int], top: int) -> Text:
    """Groups by age from 0 to the oldest, a block each, `top` being a full one; then the range.

    Example:
        >>> ages({0: 4, 2: 8}, 8).plain
        '▄·▇ 0-2'
    """
    if not counts:
        return Text()
    youngest, oldest = min(counts), max(counts)
    first = max(0, oldest - 9)
    drawn = Text()
    for age in range(first, oldest + 1):
        count = counts.get(age, 0)
        drawn.append(_block(count / (top or 1)) if count else "·", "label" if count else "line")
    return drawn.append(f" {youngest}" + (f"-{oldest}" if oldest > youngest else ""), "faint")


def pairs(facts: Mapping[str, Any]) -> dict[str, Text]:
    """Numbers with their names, those that are known."""
    return {
        name: Text.assemble((f"{name} ", "faint"), plain(value, "bold"))
        for name, value in facts.items()
        if value not in (None, "")
    }


def across(facts: Sequence[Text], width: int) -> Text:
    """Facts in one line of `width` columns, the first of them that have room: in cells of one width where all have."""
    cell, line = min(FACT_WIDTH, width // max(1, len(facts))), Text(no_wrap=True, overflow="ellipsis")
    is_even = all(fact.cell_len + 2 <= cell for fact in facts)
    for fact in facts:
        if line.cell_len + fact.cell_len > width:
            break
        line.append_text(fact).append(" " * (cell - fact.cell_len if is_even else 2))
    line.rstrip()
    return line


class Facts:
    """Facts in cells of one width, a long one in several: each stays at its place while numbers change."""

    def __init__(self, facts: Iterable[Text]) -> None:
        self._facts = list(facts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        across, line = min(options.max_width, MOST_ACROSS), Text()
        for fact in self._facts:
            width = FACT_WIDTH * (1 + (fact.cell_len + 1) // FACT_WIDTH)
            if line and line.cell_len + fact.cell_len > across:
                yield line
                line = Text()
            line.append_text(fact).append(" " * (width - fact.cell_len))
        line.rstrip()
        yield line


# -- tokens ------------------------------------------------------------------------------------------------------------
class Tint(NamedTuple):
    """How a lens shows a level of tokens."""

    colour: str = ""
    """Laid under the token; "" for none."""
    part: float = 0.0
    """How strong, 0-1."""
    signal: str = ""
    """The same without colours: `thick`, `thin` or `dotted` lines below, or `dim`."""


_HEAT = (Tint(), Tint("hot", 0.62, "thick"), Tint("hot", 0.42, "thin"), Tint("hot", 0.26), Tint("hot", 0.12), Tint())
_RISING = (Tint("accent", 0.12), Tint("accent", 0.36, "thin"), Tint("accent", 0.6, "thick"))
TINTS: Mapping[str, tuple[Tint, ...]] = MappingProxyType(
    {
        "logprob": _HEAT,
        "advantage": (
            *(Tint(), Tint("minus", 0.46, "dotted"), Tint("minus", 0.17, "dotted"), Tint()),
            *(Tint("plus", 0.17), Tint("plus", 0.46, "thick")),
        ),
        "mask": (Tint(signal="dim"), Tint("accent", 0.2, "thin")),
        "entropy": _HEAT,
        "mismatch": _HEAT,
        "version": (Tint(signal="dim"), *_RISING),
        "column": (Tint(), *_RISING),
    }
)
"""Lens -> its levels; level 0 is what it says nothing of."""
_LINES = {"thick": "bold underline", "thin": "underline", "dotted": "italic underline", "dim": "dim"}


def tint_style(tint: Tint, kind: str) -> Style:
    """The style of a token on a terminal: `dark`, `light`, or "" for its lines alone."""
    style = Style.parse(_LINES.get(tint.signal, ""))
    if not (kind and tint.colour):
        return style
    channels = zip(*(_channels(PALETTE[name][kind == "dark"]) for name in (tint.colour, "bg")), strict=True)
    mixed = "".join(f"{round(over * tint.part + under * (1 - tint.part)):02x}" for over, under in channels)
    return style + Style(bgcolor=f"#{mixed}")


def _channels(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
