"""What a table of things is: one definition that is printed, written as JSON lines, browsed, and shown on web pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from rlbuffer.client.filters import FilteredTable, parse
from rlbuffer.state.text import plural
from rlbuffer_cli import look
from rlbuffer_cli.text import MINUS, WIDE, signs

EVERYTHING = 2**31
LEAST_TEXT = 16
"""Columns of a terminal that the last column of a table has at least."""


class Column(NamedTuple):
    """One column of a table."""

    title: str
    cell: Callable[[Any], object]
    """A `Text` that is styled already, or anything as text."""
    sort: Callable[[Any], Any] | None = None
    """Its order; None: by the cell's text."""
    is_number: bool = False
    at: int = 0
    """The least width of a terminal that prints it; of those that have no room the one with the largest goes first."""


def figure(
    title: str,
    of: Callable[[Any], Any],
    form: str | Callable[[Any], str] = ".3f",
    at: int = 0,
    *,
    unknown: Callable[[Any], str] = lambda item: "",
) -> Column:
    """A column of numbers: those that are not known come first in order."""

    def cell(item: Any) -> str:
        value = of(item)
        if value is None:
            return unknown(item)
        return form(value) if callable(form) else signs(f"{value:{form}}")

    def order(item: Any) -> Any:
        value = of(item)
        return value is not None, value or 0

    return Column(title, cell, order, True, at)


def bar(title: str, of: Callable[[Any], Any], draw: Callable[[Any], Text], at: int = 0) -> Column:
    """A column of marks, sorted by the number that is drawn; one that is not known draws nothing."""
    return Column(title, lambda item: "" if of(item) is None else draw(item), lambda item: of(item) or 0.0, at=at)


class Target(NamedTuple):
    """Something to look at: a `group`, `rollout`, `pair` or `step` by its id, a `table` by its name."""

    kind: str
    name: str
    group: str = ""
    """Id of the group that a rollout is of."""
    other: str = ""
    """The second of a pair."""
    where: str = ""
    """The filter of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A table of things."""

    name: str
    columns: tuple[Column, ...]
    key: Callable[[Any], str]
    read: Callable[[Any, str, int], Sequence[Any]] = lambda run, where, most: ()
    """(run, filter of groups, most) -> items, of a table that is listed by itself; ask :meth:`listed`."""
    record: Callable[[Any], Mapping[str, Any]] = asdict
    opens: Callable[[Any], Target | None] | None = None
    """What `enter`, or a link, shows of an item; None: nothing."""
    above: Callable[[Any, Sequence[Any], int], Sequence[RenderableType]] = lambda run, items, width: ()
    """(run, items, columns of the terminal) -> what stands above the rows."""
    whole: Callable[[Any], Any] = lambda item: item
    """The item that it is a part of, and stays with in every order."""
    more: Callable[[Any], Sequence[str]] = lambda item: ()
    """All that is known of an item, where that is more than its row."""
    one: str = ""
    """What an item is called; "" for the name without its s."""
    many: str = ""
    """What items are called; "" for the name."""
    press: str = ""
    """The key that shows it in the browser."""
    answers: str = ""
    """The questions that it answers, for the page of keys."""
    fields: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict, hash=False)
    """Fields of the filter that an item has -> its value; none of groups, which have all of them."""
    words: Callable[[Any], str] | None = None
    """What a word of the filter is looked for in; None: a filter has fields alone."""
    filter_help: str = ""
    empty: str = ""
    """What stands where nothing is."""
    legend: Callable[[Sequence[Any]], str] = lambda items: ""
    """What its marks mean, in numbers."""
    of_server: bool = False
    """The run's server alone knows it."""
    is_prose: bool = False
    """Its last column holds sentences: they are broken where a cell of others is cut."""

    def listed(self, run: Any, where: str, most: int) -> Sequence[Any]:
        """The first `most` items that match a filter. Raises FilterError."""
        if not self.fields:
            return self.read(run, where, most)
        takes = self.takes(where)
        return [item for item in self.read(run, "", EVERYTHING if where else most) if takes(item)][:most]

    @property
    def filtered(self) -> FilteredTable | None:
        """What a filter may say of its items; None: all that one of groups may."""
        plural_name = self.many or self.name
        return FilteredTable(plural_name, tuple(self.fields), self.words is not None) if self.fields else None

    def takes(self, where: str) -> Callable[[Any], bool]:
        """Tells whether an item matches a filter. Raises FilterError."""
        terms = parse(where, self.filtered).terms

        def value(item: Any, name: str) -> Any:
            return self.words(item) if name == "text" and self.words is not None else self.fields[name](item)

        return lambda item: all(term.holds(value(item, term.field)) for term in terms)

    def nothing(self, where: str) -> str:
        """What stands where no item is: of the filter, where one was given."""
        return f"no {self.many or self.name} match {where!r}" if where else self.empty

    def counted(self, count: int) -> str:
        """So many items, in words."""
        return plural(count, self.one or self.name.removesuffix("s"), self.many or self.name)


class Fitting(NamedTuple):
    """What a terminal has room for of a table."""

    columns: Sequence[Column]
    cells: Sequence[Sequence[Text]]
    """Of each column."""
    titles: Sequence[str]
    """» in the last one where a wider terminal has more columns."""


def fitting(view: View, items: Sequence[Any], width: int, *, room: int, most: int = 0) -> Fitting:
    """The columns that there is room for on a terminal of `width` columns, two of them between cells.

    Args:
        room: columns of the terminal that the table may take.
        most: columns of a cell of words, which is cut there with an ellipsis; 0 for no limit. The last cell has none.
    """
    shown = [
        (column, [look.plain(column.cell(item)).copy() for item in items])
        for column in view.columns
        if column.at <= width
    ]
    for column, cells in shown[:-1]:
        for cell in cells if most and not column.is_number else ():
            cell.truncate(most, overflow="ellipsis")

    def needs() -> int:
        *widths, last = [max([cell_len(column.title), *(cell.cell_len for cell in cells)]) for column, cells in shown]
        return sum(widths) + 2 * len(widths) + min(last, LEAST_TEXT)

    while len(shown) > 2 and needs() > room:
        del shown[max(range(1, len(shown) - 1), key=lambda at: (shown[at][0].at, at))]
    columns, cells = zip(*shown, strict=True)
    *titles, last = [column.title for column in columns]
    return Fitting(columns, cells, [*titles, last + " »" * (len(columns) < len(view.columns))])


class Printed:
    """Items under the columns of a view that a terminal of its width has room for."""

    def __init__(self, view: View, items: Sequence[Any]) -> None:
        self._view, self._items = view, items

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        columns, cells, titles = fitting(self._view, self._items, width, room=width)
        widths = [
            max([cell_len(title), *(cell.cell_len for cell in of)]) for title, of in zip(titles, cells, strict=True)
        ]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="faint")
        for at, (column, title) in enumerate(zip(columns, titles, strict=True), 1):
            is_last = at == len(columns)
            table.add_column(
                title,
                justify="right" if column.is_number else "left",
                no_wrap=not (is_last and self._view.is_prose),
                overflow="ellipsis",
                min_width=None if is_last else min(widths[at - 1], width),
                max_width=max(1, width - sum(widths[:-1]) - 2 * (len(columns) - 1)) if is_last else None,
            )
        for row in zip(*cells, strict=True):
            table.add_row(*row)
        yield table
        if self._items and (legend := self._view.legend(self._items)):
            yield Text(legend, "faint")


def ordered(view: View, items: Sequence[Any], by: str, *, is_reversed: bool = False) -> list[Any]:
    """The items by a column; as they are read where there is none of that title."""
    column = next((column for column in view.columns if by and column.title == by), None)
    if column is None:
        return list(items)[:: -1 if is_reversed else 1]
    order = column.sort or (lambda item: look.plain(column.cell(item)).plain)
    return sorted(items, key=lambda item: order(view.whole(item)), reverse=is_reversed)


def of_tuples(
    name: str, titles: Sequence[str], numbers: Collection[str] = (), *, wide: Collection[str] = (), empty: str = ""
) -> View:
    """A view of plain rows, a tuple each; the `wide` columns are those of a wide terminal."""

    def cell(at: int) -> Callable[[Any], object]:
        return lambda row: row[at]

    def size(at: int) -> Callable[[Any], float]:
        return lambda row: float(str(row[at]).replace(",", "").replace(MINUS, "-") or "-inf")

    columns = tuple(
        Column(title, cell(at), size(at) if title in numbers else None, title in numbers, WIDE if title in wide else 0)
        for at, title in enumerate(titles)
    )
    return View(name=name, columns=columns, key=lambda row: str(row[0]), empty=empty)
