"""The tokens of a rollout by role, a window of them at a time, with a cursor and the marks of a lens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from rlbuffer.client.rollout_view import RolloutView
from rlbuffer.client.texts import Texts
from rlbuffer.records.rollout import Rollout
from rlbuffer.state.text import plural, printable
from rlbuffer_cli.facts import Section, sections
from rlbuffer_cli.lenses import Lens
from rlbuffer_cli.look import TINTS, tint_style
from rlbuffer_cli.text import cut

TOKENS_PER_WINDOW = 4000
MAX_LABEL = 60
"""Columns of one token."""
SHOWN_TEXT = 32_000
"""Characters of a text that is shown as a whole."""
CURSOR, BOLD, DIM, NO_STYLE = Style(reverse=True), Style(bold=True), Style(dim=True), Style()


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the pane: words between two turns, or tokens `first` to `end`."""

    words: str
    first: int = 0
    end: int = 0


class Tokens(Widget, can_focus=True):
    """Tokens that flow like words, drawn line by line as they come into sight. `cursor` is a token."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("right", "move(1)"),
        ("left", "move(-1)"),
        ("down,j", "line(1)"),
        ("up,k", "line(-1)"),
        ("pagedown", "page(1)"),
        ("pageup", "page(-1)"),
        ("home,g", "first"),
        ("end,G", "last"),
    ]

    class Moved(Message):
        """The cursor may be on another token."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.top = self.cursor = 0
        self.rollout: Rollout | None = None
        self.lens: Lens | None = None
        self.sections: list[Section] = []
        self.given = 0
        """Tokens that it shares with an earlier sequence of the rollout."""
        self._lines: list[_Line] = []
        self._labels: dict[int, str] = {}
        self._window = -1
        self._texts = Texts()
        self.kind = "dark"
        """Of the colours."""
        self._has_pieces = False
        """Every token has a text of its own."""
        self._is_hidden: Sequence[bool] = ()
        """Of each token: the plain lens leaves it out, as what a chat template writes around what is said."""

    def put(self, member: RolloutView | None, lens: Lens | None, texts: Texts) -> None:
        """Shows a rollout through a lens; the cursor stays where the rollout is the same."""
        rollout: Rollout | None = None if member is None else member.rollout
        if self.rollout is None or rollout is None or rollout.rollout_id != self.rollout.rollout_id:
            self.cursor = self.top = 0
        self.rollout, self.lens, self._window = rollout, lens, -1
        self.sections = sections(member, texts) if member is not None and rollout is not None else []
        self.given = member.shared.tokens if member is not None and member.shared is not None else 0
        self._texts, self._has_pieces = texts, rollout is not None and texts.has_pieces(rollout)
        is_plain = lens is not None and lens.levels is None
        self._is_hidden = texts.frame(rollout).tolist() if rollout is not None and is_plain else ()
        self.move_to(self.cursor)

    def count(self) -> int:
        return self.rollout.length if self.rollout is not None else 1

    @property
    def window(self) -> tuple[int, int]:
        """First and end of the tokens that are laid out."""
        first = self.cursor // TOKENS_PER_WINDOW * TOKENS_PER_WINDOW
        return first, min(first + TOKENS_PER_WINDOW, self.count())

    def label(self, position: int) -> str:
        """The token as text where it has one of its own, else its id."""
        if self.rollout is None:
            return ""
        return printable(self._texts.pieces(self.rollout, position, position + 1)[0])

    def role(self, position: int) -> str:
        """The role that spoke the token; "" where turns do not say."""
        turns = self.rollout.turns if self.rollout is not None else ()
        return next((turn.role for turn in turns if turn.start <= position < turn.end), "")

    # -- layout ----------------------------------------------------------------------------------------------------
    def _lay_out(self) -> None:
        """Breaks the tokens of the window into lines of the pane's width."""
        rollout = self.rollout
        self._lines, self._labels = [], {}
        first, end = self.window
        self._window = first
        if rollout is None:
            return
        if first:
            self._lines.append(_Line(f"... {plural(first, 'token')} before"))
        edges = {section.start: section for section in self.sections}
        start, room = first, max(1, self.size.width)
        used = 0
        pieces = self._texts.pieces(rollout, first, end)
        for position in range(first, end):
            if (section := edges.get(position)) is not None:
                if position > start:
                    self._lines.append(_Line("", start, position))
                start, used = position, 0
                self._lines += [_Line(f"══ {section.rule} ══")] if section.rule else []
                self._lines.append(_Line(f"── {section.title} ──"))
            piece = "" if self._is_hidden and self._is_hidden[position] else pieces[position - first]
            self._labels[position] = label = self._cell(cut(printable(piece), min(room, MAX_LABEL)))
            if used + cell_len(label) > room and position > start:
                self._lines.append(_Line("", start, position))
                start, used = position, 0
            used += cell_len(label)
            if piece.endswith("\n"):
                self._lines.append(_Line("", start, position + 1))
                start, used = position + 1, 0
        if end > start:
            self._lines.append(_Line("", start, end))
        if end < rollout.length:
            self._lines.append(_Line(f"... {plural(rollout.length - end, 'token')} after"))

    def _cell(self, label: str) -> str:
        return label if self._has_pieces or not label else f"{label} "

    def _line_of(self, position: int) -> int:
        return next((i for i, line in enumerate(self._lines) if line.first <= position < line.end), 0)

    def render_line(self, y: int) -> Strip:
        strip = Strip(self._draw(self.top + y)).adjust_cell_length(self.size.width, NO_STYLE)
        return strip.apply_style(self.rich_style)

    def move_to(self, place: int) -> None:
        """Puts the cursor there, or as near as there is something, and brings it into sight."""
        self.cursor = max(0, min(place, self.count() - 1))
        if self.window[0] != self._window:
            self._lay_out()
        at, room = self._line_of(self.cursor), max(1, self.size.height)
        above = 1 if at and self._lines[at - 1].words else 0
        self.top = max(at - room + 1, min(self.top, at - above))
        self.refresh()
        self.post_message(self.Moved())

    def _draw(self, line: int) -> list[Segment]:
        if line >= len(self._lines):
            return []
        row = self._lines[line]
        if row.words:
            return [Segment(cut(printable(row.words), max(1, self.size.width)), BOLD)]
        styles = [NO_STYLE] * (row.end - row.first)
        if self.lens is not None and self.lens.levels is not None:
            tints = styles_of(self.lens, self.kind)
            styles = [tints[level] for level in self.lens.levels[row.first : row.end].tolist()]
        if self.rollout is not None and row.first < self.given:
            theirs = ~self.rollout.loss_mask[row.first : min(row.end, self.given)]
            styles = [s + DIM if at < len(theirs) and theirs[at] else s for at, s in enumerate(styles)]
        if row.first <= self.cursor < row.end:
            styles[self.cursor - row.first] = CURSOR
        return [Segment(self._labels[row.first + at], style) for at, style in enumerate(styles)]

    # -- keys ------------------------------------------------------------------------------------------------------
    def action_move(self, by: int) -> None:
        self.move_to(self.cursor + by)

    def action_first(self) -> None:
        self.move_to(0)

    def action_last(self) -> None:
        self.move_to(self.count() - 1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_line(1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_line(-1)

    def action_line(self, by: int) -> None:
        """Goes to the same place of a line of tokens above or below."""
        at = self._line_of(self.cursor)
        offset = self.cursor - self._lines[at].first if self._lines else 0
        at += by
        while 0 <= at < len(self._lines):
            row = self._lines[at]
            if not row.words:
                self.move_to(min(row.first + offset, row.end - 1))
                return
            at += by
        first, end = self.window
        self.move_to(end if by > 0 else first - 1)

    def action_page(self, by: int) -> None:
        for _ in range(max(1, self.size.height - 1)):
            self.action_line(by)

    def on_resize(self) -> None:
        """Lays the tokens out again; the cursor stays in sight."""
        self._window = -1
        self.move_to(self.cursor)


def styles_of(lens: Lens, kind: str) -> list[Style]:
    return [tint_style(tint, kind) for tint in TINTS[lens.name.partition(" ")[0]]]


def legend_of(lens: Lens, number: int, kind: str) -> Text:
    """A lens' levels as its tokens look, each with what it stands for."""
    text = Text.assemble((f"{number} {lens.name}: ", "bold"))
    styles = styles_of(lens, kind) if lens.labels else []
    for level, label in lens.labels:
        text.append(" Aa ", styles[level]).append(f" {printable(label)}  ")
    return text.append(printable(lens.note))
