"""Text that scrolls, and a line to type in: what comes from a server is never markup, and controls no terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from textual import events
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Input, Static

from rlbuffer.state.text import printable

MOST_FLOWING = 2000
"""A longer line is broken anywhere."""


def wrapped_cells(line: str, width: int) -> list[str]:
    """The line in rows of at most `width` columns, broken between words where that is cheap."""
    text, width = printable(line), max(1, width)
    if cell_len(text) <= width:
        return [text]
    if len(text) < MOST_FLOWING and all(cell_len(c) == 1 for c in set(text)):
        lead = " " * min(len(text) - len(text.lstrip()), width // 2)
        return textwrap.wrap(
            text.strip(), width, initial_indent=lead, subsequent_indent=f"{lead}  ", break_on_hyphens=False
        ) or [""]
    return chop_cells(text, width)


class Flowing(NamedTuple):
    """Lines that are broken to the width that there is. What begins with ``!`` is bold."""

    lines: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            style = "bold" if line.lstrip().startswith("!") else ""
            yield from (Text(row, style) for row in wrapped_cells(line, options.max_width))


class Prose(VerticalScroll, can_focus=True):
    """Text that scrolls."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("j", "scroll_down"),
        ("k", "scroll_up"),
        ("g", "scroll_home"),
        ("G", "scroll_end"),
    ]

    def __init__(self, *, id: str) -> None:
        self.shown = Static(markup=False)
        super().__init__(self.shown, id=id)

    def put(self, lines: Sequence[str]) -> None:
        """Replaces the text; the place stays."""
        self.shown.update(Flowing(lines))


class EntryLine(Input):
    """A line to type in, shown when it is asked for. Enter is taken at once, and keys typed ahead go to the screen."""

    def __init__(self, chosen: Callable[[str], None], example: str) -> None:
        """`chosen` takes what was typed at enter; it hides the line where that is right."""
        super().__init__(placeholder=example)
        self._chosen = chosen

    def on_mount(self) -> None:
        self.display = False

    def open(self, text: str = "") -> None:
        """Shows the line, with a text to go on from."""
        self.value, self.display = text, True
        self.screen.set_focus(self)  # at once: `focus` would let keys that are typed ahead pass it

    def on_key(self, event: events.Key) -> None:
        """Takes enter before the keys behind it: as a binding it would pass through the whole application first."""
        is_open = bool(self.display)
        if is_open and event.key != "enter":
            return
        event.stop()
        event.prevent_default()
        if is_open:
            self._chosen(self.value)
        else:
            self.app.post_message(events.Key(event.key, event.character))
