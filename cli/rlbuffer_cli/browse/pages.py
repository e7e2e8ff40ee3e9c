"""Text that scrolls, and pages of it: the keys, a record as JSON. What comes from a server is never markup."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widget import Widget
from textual.widgets import Static

from rlbuffer.client.filters import NUMBERS, ROLLOUT_NUMBERS, TEXT_FIELDS
from rlbuffer.records.states import State
from rlbuffer.state.text import plural, printable
from rlbuffer_cli.browse.screen import BrowsedRun, BrowserScreen
from rlbuffer_cli.browse.tokens import SHOWN_TEXT, TOKENS_PER_WINDOW
from rlbuffer_cli.tables import VIEWS
from rlbuffer_cli.text import as_json, broken

KEYED = [f"{view.press:<4}{view.name:<11}" for view in VIEWS.values() if view.press]
VIEW_KEYS = "\n  ".join("".join(KEYED[at : at + 5]).rstrip() for at in range(0, len(KEYED), 5))
ANSWERS = "\n".join(f"  {view.name:<10} {view.answers}" for view in VIEWS.values())
OTHER_FIELDS = "\n".join(f"  {view.name:<10} {' '.join(view.fields)}" for view in VIEWS.values() if view.fields)
HELP = f"""
What each screen answers
{ANSWERS}
  group      Do its rollouts differ, and which of them are good? Why was it dropped?
  rollout    What did the model write, how sure was it, which tokens are trained, and with what credit?

Keys
  arrows j k  move            enter      open              esc    back
  g G         ends            page keys  by a screen       tab    other pane
  n p         rollout         N P        step              1 - 8  lens
  /           filter          s S        sort, reverse     m      more rows
  c           compare         b          best and worst    l      live
  {VIEW_KEYS}
  o           raw JSON        e          write as HTML     y      copy the id
  r           read again      T          light, dark       ? q    help, quit
  A click on a key at the foot presses it, one on the head of a column sorts by it, again: the other way round.

Lenses: 1 plain, 2 logprob, 3 advantage, 4 mask, 5 entropy, 6 trainer against sampler, 7 version, 8 a further column.
Enter on a process or an env shows its groups. Below 110 columns tables leave some columns out.
The line above the tokens has each lens' legend in numbers, or says why nobody keeps what it would show.

Filter of groups, as in `rlbuffer inspect --where`: {" ".join(TEXT_FIELDS)} (field:value, commas for
alternatives; of id and prompt the beginning), {" ".join(NUMBERS)} (field>=value, 8k = 8000). For example:
env:vcopy state:ready reward<0.5
Groups with a rollout for which all of these hold: stop:length truncated:yes text:word text:/regex/i and the numbers
{" ".join(ROLLOUT_NUMBERS)}
States: {" ".join(State)}
Other tables have some of the fields:
{OTHER_FIELDS}
A word alone is a part of the name of an env, a process or an open rollout, or a word of a problem.

Esc first takes a filter away. Live reads every 2 s; it waits while the cursor is not at the top, so that nothing moves
under it.
Nothing here writes to the server: looking changes nothing. `rlbuffer inspect --plain` prints the same figures.
"""


class Flowing(NamedTuple):
    """Lines that are broken to the width that there is. What begins with ``!`` is bold."""

    lines: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            style = "bold" if line.lstrip().startswith("!") else ""
            yield from (Text(row, style) for row in broken(printable(line), max(1, options.max_width)))


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


class Page(BrowserScreen):
    """Text that needs no server."""

    def says_how_the_run_stands(self) -> bool:
        return False

    def body(self) -> list[Widget]:
        return [Prose(id="page")]

    def on_mount(self) -> None:
        self.query_one("#page").focus()

    def lines(self) -> list[str]:
        raise NotImplementedError

    async def fetch(self) -> None:
        self.query_one("#page", Prose).put(self.lines())


class Help(Page):
    """The keys."""

    def heading(self) -> str:
        return "rlbuffer inspect: keys"

    def lines(self) -> list[str]:
        return HELP.strip("\n").split("\n")


class Raw(Page):
    """A record as JSON."""

    def __init__(self, browsed: BrowsedRun, name: str, record: Mapping[str, Any]) -> None:
        super().__init__(browsed)
        self.what, self.content = name, record

    def heading(self) -> str:
        return f"{self.what}: raw"

    def identifier(self) -> str:
        return self.what

    def lines(self) -> list[str]:
        return list(_json_lines(shortened(as_json(dict(self.content)))))


def shortened(value: Any) -> Any:
    """The value with at most :data:`TOKENS_PER_WINDOW` entries in a list, :data:`SHOWN_TEXT` characters in a text."""
    if isinstance(value, str) and len(value) > SHOWN_TEXT:
        return f"{value[:SHOWN_TEXT]} ... {plural(len(value) - SHOWN_TEXT, 'character')} more"
    if isinstance(value, dict):
        return {name: shortened(inner) for name, inner in value.items()}
    if not isinstance(value, list):
        return value
    more = len(value) - TOKENS_PER_WINDOW
    shown = [shortened(inner) for inner in value[:TOKENS_PER_WINDOW]]
    return [*shown, f"... {more:,} more: rlbuffer inspect ID --json has them all"] if more > 0 else shown


def _json_lines(value: Mapping[str, Any]) -> Iterator[str]:
    """A line per field; those of the rollouts of a group one further in."""
    for name, inner in value.items():
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            yield f"{json.dumps(name)}: ["
            for entry in inner:
                yield from (f"  {line}" for line in _json_lines(entry)) if isinstance(entry, dict) else [f"  {entry}"]
                yield "  ,"
            yield "]"
        else:
            yield f"{json.dumps(name)}: {json.dumps(inner, ensure_ascii=False, default=str)}"
