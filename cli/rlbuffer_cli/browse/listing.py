"""One screen for all that has rows: their order, a filter, what is under the cursor. A group and a step add keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widget import Widget
from textual.widgets import DataTable, Input, Static

from rlbuffer.client.filters import parse
from rlbuffer.errors import FilterError, NotFound, clause
from rlbuffer.state.text import plural, printable
from rlbuffer_cli import look, sheets
from rlbuffer_cli.browse.screen import BrowsedRun, BrowserScreen, Open
from rlbuffer_cli.browse.tokens import TOKENS_PER_WINDOW
from rlbuffer_cli.facts import best_and_worst
from rlbuffer_cli.sheets import Sheet
from rlbuffer_cli.table import LEAST_TEXT, Target, View, fitting, of_tuples, ordered
from rlbuffer_cli.tables import GROUPS, VIEWS
from rlbuffer_cli.view import bad

ROWS = 200
"""That are read at once, and further ones at `m`."""
LEAST_OF_WORDS = 24
"""Columns of the terminal that a cell of words has at least."""
SHOWN_CHARACTERS = 4000
"""Length of a prompt, an answer or metadata that is shown; `o` shows all."""
NOT_READ = of_tuples("rows", ())


class Rows(DataTable[Text]):
    """The rows of a table. Every cell is a `Text`: a string would be read as markup."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "open"),
        Binding("j", "cursor_down", show=False),
        Binding("k", "cursor_up", show=False),
        Binding("g", "scroll_top", show=False),
        Binding("G", "scroll_bottom", show=False),
    ]

    def action_select_cursor(self) -> None:
        """Opens the row under the cursor; while there is none yet the screen says why."""
        if self.row_count or not isinstance(self.screen, BrowserScreen) or not self.screen.is_reading():
            super().action_select_cursor()


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


class Listing(BrowserScreen):
    """The rows of a target, of a table those that its filter chooses."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter"),
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", show=False),
        Binding("m", "more", "more", show=False),
    ]

    def __init__(self, browsed: BrowsedRun, target: Target) -> None:
        super().__init__(browsed)
        self.came_with = target.where
        self.sheet = Sheet(target=target, view=VIEWS[target.name] if target.kind == "table" else NOT_READ)
        self.choose_where(target.where)
        self.shown: Sequence[Any] = ()
        """The items in the chosen order."""
        self.cut_cells: dict[str, str] = {}
        """Key of an item -> its cells that are cut, whole."""
        self.limit, self.by, self.is_reversed = ROWS, "", False
        self.read_where: str | None = None
        """The filter that the rows obey; None until they are read."""

    @property
    def target(self) -> Target:
        return self.sheet.target

    @property
    def view(self) -> View:
        return self.sheet.view

    @property
    def items(self) -> Sequence[Any]:
        return self.sheet.items

    # -- what it reads ---------------------------------------------------------------------------------------------
    def read(self) -> tuple[Sheet, RenderableType]:
        """The sheet, and what stands above its rows."""
        run, most = self.browsed.run, self.limit if self.target.kind == "table" else TOKENS_PER_WINDOW
        sheet = sheets.read(run, self.target._replace(where=self.where), most)
        lines = [look.plain(line) for line in sheet.all_lines(SHOWN_CHARACTERS)]
        above = sheet.above(max(20, self.size.width - 4))
        blank = [Text()] if lines and above else []
        return sheet, Stack(*lines, *blank, *above, *(bad(str(problem)) for problem in sheet.problems))

    # -- the frame -------------------------------------------------------------------------------------------------
    def says_how_the_run_stands(self) -> bool:
        return self.view is not GROUPS

    def body(self) -> list[Widget]:
        rows = Rows(cursor_type="row", id="rows", cursor_foreground_priority="renderable")
        line = EntryLine(self.filter_by, self.view.filter_help)
        top = VerticalScroll(Static(id="head", markup=False), id="top")
        return [top, Static(id="legend", markup=False), rows, Static(id="more", markup=False), line]

    def on_mount(self) -> None:
        self.set_class(self.view is GROUPS, "-pool")
        self.rows.focus()

    @property
    def rows(self) -> Rows:
        return self.query_one(Rows)

    def on_resize(self) -> None:
        if self.read_where is not None:
            self.fill()

    def heading(self) -> str:
        if self.target.kind == "pair":
            return f"{self.target.name} and {self.target.other}"
        if self.read_where is None:
            return self.target.name
        count = self.view.counted(len(self.items))
        more = f"the first {count} (m: more)" if len(self.items) >= self.limit else count
        where = f" where {self.read_where}" if self.read_where else ""
        order = f", by {self.by}" if self.by else ", newest first" if self.view is GROUPS else ""
        return f"{more}{where}{order}{', reversed' * self.is_reversed}"

    async def fetch(self) -> None:
        where = self.where
        self.sheet, above = await self.ask(self.read)
        self.read_where = where
        self.query_one("#head", Static).update(above)
        self.tell("#legend", self.view.legend(self.items) if self.items else "")
        self.fill()

    def fill(self) -> None:
        """Shows the items in the chosen order; the cursor stays on the same one, but for the first row."""
        rows, before = self.rows, self.identifier()
        at = rows.cursor_row
        self.shown = ordered(self.view, self.items, self.by, is_reversed=self.is_reversed)
        rows.clear(columns=True)
        rows.show_header = bool(self.items)
        width = self.size.width
        room = width - 4  # of which the frame of the cells and the bar at the right take the rest
        most = max(LEAST_OF_WORDS, width // 5)
        columns, cells, titles = fitting(self.view, self.shown, width, room=room, most=most)
        widths = [max(map(cell_len, [title, *(c.plain for c in of)])) for title, of in zip(titles, cells, strict=True)]
        left = room - sum(widths[:-1]) - 2 * (len(widths) - 1)  # for words; a number needs no more than it has
        last = max(min(widths[-1], LEAST_TEXT), min(left, widths[-1]) if columns[-1].is_number else left)
        widths[-1] = last
        for column, title, wide in zip(columns, titles, widths, strict=True):
            head = Text(title, "faint", justify="right" if column.is_number else "left")
            rows.add_column(head, width=wide, key=column.title)
        self.cut_cells = {}
        for number, (item, row) in enumerate(zip(self.shown, zip(*cells, strict=True), strict=True)):
            row[-1].truncate(last, overflow="ellipsis")
            for cell, column in zip(row, columns, strict=True):
                cell.no_wrap, cell.justify = True, "right" if column.is_number else "left"
            if any(is_cut := [cell.plain.endswith("…") for cell in row]):
                whole = [look.plain(column.cell(item)).plain for column in compress(columns, is_cut)]
                self.cut_cells[self.view.key(item)] = "\n".join(whole)
            rows.add_row(*row, key=str(number))
        keys = [self.view.key(item) for item in self.shown]
        rows.move_cursor(row=keys.index(before) if at and before in keys else min(at, max(0, len(keys) - 1)))
        self.tell("#more", "" if self.items else printable(self.sheet.nothing))
        self.show_more()
        self.frame()

    def tell(self, where: str, words: str) -> None:
        """Writes above or below the rows; what is empty takes no line."""
        place = self.query_one(where, Static)
        place.update(Text.assemble((words, "faint" if where == "#legend" else "")))
        place.display = bool(words)

    def show_more(self) -> None:
        """Shows all that is known of what is under the cursor."""
        item = self.item()
        if item is not None:
            whole = self.cut_cells.get(self.view.key(item), "")
            self.tell("#more", "\n".join(printable(line) for line in self.view.more(item)) or whole)

    # -- what is under the cursor ----------------------------------------------------------------------------------
    def item(self) -> Any | None:
        at = self.rows.cursor_row
        return self.shown[at] if 0 <= at < len(self.shown) else None

    def identifier(self) -> str:
        item = self.item()
        return "" if item is None else self.view.key(item)

    def exported(self) -> str:
        return self.identifier() if self.view is GROUPS else ""

    def record(self) -> Mapping[str, Any] | None:
        if self.target.kind != "table":
            return None if self.sheet.record is None else self.sheet.record()
        item = self.item()
        return None if item is None else self.view.record(item)

    def record_name(self) -> str:
        return self.identifier() if self.target.kind == "table" else self.heading()

    def at_top(self) -> bool:
        return self.rows.cursor_row <= 0 and not self.query_one(EntryLine).display

    def on_data_table_row_selected(self) -> None:
        item = self.item()
        if item is None or self.view.opens is None:
            return
        if (target := self.view.opens(item)) is not None:
            self.post_message(Open(target))
        else:
            self.say(f"{self.identifier()} writes no groups")

    def on_data_table_row_highlighted(self) -> None:
        if self.read_where is not None:
            self.show_more()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sorts by the column whose head was clicked; again: the other way round."""
        self.sort_by(str(event.column_key.value))

    # -- keys ------------------------------------------------------------------------------------------------------
    def sort_by(self, title: str) -> None:
        """Sorts by a column, and the other way round where it did already."""
        self.is_reversed = self.by == title and not self.is_reversed
        self.by = title
        self.fill()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Nothing is filtered where there is no filter."""
        return super().check_action(action, parameters) and (action != "filter" or bool(self.view.filter_help))

    def action_sort(self) -> None:
        """Takes the next column; behind the last one the order in which things are read."""
        titles = ["", *(column.title for column in self.view.columns)]
        self.by, self.is_reversed = titles[(titles.index(self.by) + 1) % len(titles)], False
        self.fill()

    def action_reverse(self) -> None:
        self.is_reversed = not self.is_reversed
        self.fill()

    def action_more(self) -> None:
        if len(self.items) >= self.limit:
            self.limit += ROWS
            self.reload()

    def on_key(self, event: events.Key) -> None:
        """Hands what was typed ahead to the line of the filter: it was on its way to the rows when that opened."""
        line = self.query_one(EntryLine)
        if line.display and event.is_printable and event.character:
            line.insert_text_at_cursor(event.character)
            event.stop()
            event.prevent_default()

    def action_filter(self) -> None:
        self.query_one(EntryLine).open(self.where)

    def filter_by(self, where: str) -> None:
        """Reads with the filter; what is wrong with it is said, and it stays open."""
        try:
            self.view.takes(where)
        except FilterError as error:
            self.say(f"! {error}")
            return
        self.close_filter()
        self.choose(where.strip())

    def close_filter(self) -> None:
        self.query_one(EntryLine).display = False
        self.say("")
        self.rows.focus()

    def choose(self, where: str) -> None:
        self.choose_where(where)
        self.limit = ROWS
        self.rows.move_cursor(row=0)
        self.reload()

    def choose_where(self, where: str) -> None:
        """Takes the filter; that of the groups is for other screens, too."""
        self.where = where
        if self.view is GROUPS:
            self.browsed.where = where

    def action_back(self) -> None:
        """Closes the line of the filter, or takes the filter away, or goes to the screen before."""
        is_first = len(self.app.screen_stack) <= 1
        if self.query_one(EntryLine).display:
            self.close_filter()
        elif self.where != self.came_with or (self.where and is_first):
            self.choose("" if is_first else self.came_with)
        elif not is_first:
            super().action_back()


class OneGroup(Listing):
    """A group, known by its id or the beginning of it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "compare", "compare"),
        Binding("b", "extremes", "best, worst"),
    ]

    def __init__(self, browsed: BrowsedRun, target: Target) -> None:
        super().__init__(browsed, target._replace(where=browsed.where))
        self.marked = ""
        """The first rollout of a comparison."""

    def heading(self) -> str:
        matches, detail = sum(row.is_match for row in self.items), self.sheet.found
        if detail is None or not parse(self.where).rollout_terms:
            return f"group {self.target.name}"
        count = plural(len(detail.members), "rollout")
        return f"group {self.target.name}: {matches} of {count} match {self.where}"

    def read(self) -> tuple[Sheet, RenderableType]:
        try:
            return super().read()
        except NotFound as error:
            if (before := self.sheet.found) is None:
                raise
            raise NotFound(f"{clause(error)}. Shown is what it was before, {before.view.state}.") from None

    def identifier(self) -> str:
        return super().identifier() or self.target.name

    def exported(self) -> str:
        return self.target.name

    def action_compare(self) -> None:
        """Takes the first of two rollouts, then shows both."""
        name = self.identifier() if self.item() is not None else ""
        one, self.marked = self.marked, ""
        if name and name != one and not one:
            self.marked = name
            self.say(f"compare {name} with: c on another rollout (c here again: with none)")
            return
        self.say("")
        if name and name != one:
            self.compare(one, name)

    def action_extremes(self) -> None:
        """Shows the best rollout beside the worst."""
        names = None if self.sheet.found is None else best_and_worst(self.sheet.found)
        if names is None:
            self.say("no rollout is better than another")
        else:
            self.compare(*names)

    def compare(self, one: str, other: str) -> None:
        self.post_message(Open(Target("pair", one, group=self.target.name, other=other)))


class OneStep(Listing):
    """A step, known by its number."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("N", "other(1)", "next"),
        Binding("P", "other(-1)", "previous"),
    ]

    def heading(self) -> str:
        return f"step {self.target.name}"

    def exported(self) -> str:
        item = self.item()
        return f"{item.member.group_id}/{item.member.info.rollout_id.rpartition('/')[2]}" if item else ""

    def action_other(self, by: int) -> None:
        number = max(1, int(self.target.name) + by)
        self.sheet = Sheet(target=Target("step", str(number)), view=self.view, items=self.items)
        self.reload()
