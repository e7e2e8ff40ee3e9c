"""Panes that draw plain cells: what comes from a server is never markup, and controls no terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.cells import cell_len, chop_cells
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input

from rlbuffer.state.text import printable
from rlbuffer_cli.text import cut

CURSOR = Style(reverse=True)
BOLD = Style(bold=True)
NO_STYLE = Style()
WHEEL_LINES = 3
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


class Pane(Widget, can_focus=True):
    """Lines that are drawn one by one as they come into sight; `cursor` is a line, or a token."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("down,j", "move(1)"),
        ("up,k", "move(-1)"),
        ("pagedown", "page(1)"),
        ("pageup", "page(-1)"),
        ("home,g", "first"),
        ("end,G", "last"),
    ]

    class Moved(Message):
        """The cursor of `pane` may be on something else."""

        def __init__(self, pane: Pane) -> None:
            super().__init__()
            self.pane = pane

    def __init__(self, **given: str) -> None:
        super().__init__(id=given.get("id"), classes=given.get("classes"))
        self.top = 0
        self.cursor = 0

    def count(self) -> int:
        """Places of the cursor."""
        raise NotImplementedError

    def draw(self, line: int) -> list[Segment]:
        """One line of the pane."""
        raise NotImplementedError

    def render_line(self, y: int) -> Strip:
        segments = self.draw(self.top + y)
        strip = Strip(segments).adjust_cell_length(self.size.width, NO_STYLE)
        return strip.apply_style(self.rich_style)

    def move_to(self, place: int) -> None:
        """Puts the cursor there, or as near as there is something, and brings it into sight."""
        self.cursor = max(0, min(place, self.count() - 1))
        self.reveal()
        self.refresh()
        self.post_message(self.Moved(self))

    def reveal(self) -> None:
        """Scrolls so that the cursor can be seen."""
        room = max(1, self.size.height)
        self.top = max(self.cursor - room + 1, min(self.top, self.cursor))

    def action_move(self, by: int) -> None:
        """Moves the cursor."""
        self.move_to(self.cursor + by)

    def action_page(self, by: int) -> None:
        """Moves by a screen."""
        self.move_to(self.cursor + by * max(1, self.size.height - 1))

    def action_first(self) -> None:
        """Goes to the beginning."""
        self.move_to(0)

    def action_last(self) -> None:
        """Goes to the end."""
        self.move_to(self.count() - 1)

    def wheel(self, by: int) -> None:
        """Moves by a notch of the mouse wheel."""
        self.action_move(by * WHEEL_LINES)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """The wheel moves the cursor."""
        event.stop()
        self.wheel(1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """The wheel moves the cursor."""
        event.stop()
        self.wheel(-1)

    def on_resize(self) -> None:
        """Keeps the cursor in sight."""
        self.move_to(self.cursor)


class Prose(Pane):
    """Text that scrolls. Its lines are wrapped when the width is known."""

    def __init__(self, **given: str) -> None:
        super().__init__(**given)
        self._lines: list[str] = []
        self._rows: list[str] = []

    def put(self, lines: Sequence[str]) -> None:
        """Replaces the text; the place stays."""
        self._lines = list(lines)
        self._wrap()

    def _wrap(self) -> None:
        self._rows = [row for line in self._lines for row in wrapped_cells(line, self.size.width or 80)]
        self.move_to(self.top)

    def count(self) -> int:
        return max(1, len(self._rows) - self.size.height + 1)

    def reveal(self) -> None:
        self.top = self.cursor

    def draw(self, line: int) -> list[Segment]:
        if line >= len(self._rows):
            return []
        row = self._rows[line]
        more = line == self.top + self.size.height - 1 and line < len(self._rows) - 1
        row = f"{cut(row, max(1, self.size.width - 2))} ↓" if more and not row.endswith("↓") else row
        return [Segment(row, BOLD if row.lstrip().startswith("!") else NO_STYLE)]

    def on_resize(self) -> None:
        self._wrap()


class EntryLine(Input):
    """A line to type in, shown when it is asked for. Enter is taken at once, and keys typed ahead go to the screen."""

    def __init__(self, chosen: Callable[[str], None], example: str) -> None:
        """`chosen` takes what was typed at enter; it hides the line where that is right."""
        super().__init__(placeholder=example)
        self._chosen = chosen

    def on_mount(self) -> None:
        """Nothing is typed yet."""
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
