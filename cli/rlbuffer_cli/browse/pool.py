"""The pool: the run in a few lines, its envs, and its groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from rlbuffer.client.filters import parse
from rlbuffer.client.run_state import read_run_state
from rlbuffer.client.views import GroupView
from rlbuffer.errors import FilterError, RlbufferError
from rlbuffer.state.run_state import RunState
from rlbuffer.state.text import plural
from rlbuffer_cli.browse.panes import EntryLine, Prose, Table
from rlbuffer_cli.browse.screen import Look, Looking, Open
from rlbuffer_cli.render.pool import GROUP_HEADER, GROUP_NUMBERS, GROUP_OPTIONAL, SORTS, group_record, group_row
from rlbuffer_cli.render.run import (
    ENV_HEADER,
    ENV_NUMBERS,
    ENV_OPTIONAL,
    act_lines,
    env_row,
    fact_lines,
    first_lines,
    pace_lines,
)
from rlbuffer_cli.text import aligned, utc

GROUPS_PER_READ = 1000
MOST_HEADER_ROWS = 10


class Pool(Look):
    """The first screen."""

    keys: tuple[str, ...] = (
        "enter open",
        "/ filter",
        "w workers",
        "t steps",
        "s sort",
        "S reverse",
        "l live",
        "r refresh",
        "tab run",
        "y copy id",
        "o raw",
        "e HTML",
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        ("slash", "filter"),
        ("s", "sort(1)"),
        ("S", "reverse"),
        ("m", "more"),
    ]

    def __init__(self, looking: Looking) -> None:
        super().__init__(looking)
        self.views: list[GroupView] = []
        self.where = ""
        """The filter that they obey; another one is asked for until it is read."""
        self.limit = GROUPS_PER_READ
        self.sort, self.is_reversed = "newest first", False
        self.state: RunState | None = None
        self.problems: list[RlbufferError] = []
        self.is_read = False
        self.is_of_worker = False
        """The filter was chosen on the screen of workers, where the way back leads to."""

    def body(self) -> list[Widget]:
        table = Table(GROUP_HEADER, right=GROUP_NUMBERS, optional=GROUP_OPTIONAL, id="groups")
        return [Prose(id="header"), table, EntryLine(self.filter_by, "env:math age>=2 reward<0.1")]

    def on_mount(self) -> None:
        """The groups have the keys."""
        self.query_one("#groups").focus()

    def heading(self) -> str:
        count = plural(len(self.views), "group") if self.is_read else "reading"
        if len(self.views) >= self.limit:
            count = f"the first {count} (m: more)"
        where = f" where {self.where}" if self.where else ""
        order = f"by {self.sort}" if self.sort != "newest first" else "by state, newest first"
        clock = f" as of {str(utc(self.state.at))[11:19]} UTC" if self.state is not None else ""
        return f'{count}{where}, {order}{", reversed" * self.is_reversed} · run "{self.looking.buffer.run}"{clock}'

    async def fetch(self) -> None:
        buffer, run, where, limit = self.looking.buffer, self.looking.run, self.looking.where, self.limit
        problems: list[RlbufferError] = []
        self.views = await self.ask(lambda: run.groups(where, limit, problems))
        self.where = where
        self.problems, self.is_read = problems, True
        self.put_groups()
        self.frame()
        self.state = state = await self.ask(lambda: read_run_state(buffer.store))
        self.put_header(state)

    def put_groups(self) -> None:
        """Shows the groups in the chosen order."""
        views = sorted(self.views, key=SORTS[self.sort])
        views = views[::-1] if self.is_reversed else views
        self.query_one("#groups", Table).put([group_row(view) for view in views], [view.group_id for view in views])

    def put_header(self, state: RunState) -> None:
        """Shows the run: what it is, who waits for whom, its envs, then everything else."""
        cells = aligned(
            ENV_HEADER,
            [env_row(state, env) for env in state.envs],
            right=ENV_NUMBERS,
            optional=ENV_OPTIONAL,
            width=self.size.width,
        )
        envs = ["  ".join(row).rstrip() for row in cells] if state.envs else ["no env has sent anything yet"]
        problems = [f"! {problem}" for problem in self.problems]
        header = self.query_one("#header", Prose)
        facts = *fact_lines(state), *pace_lines(state)
        header.put([*first_lines(state), *problems, *act_lines(state), *envs, *facts])
        room = max(4, min(MOST_HEADER_ROWS + len(envs), (self.size.height - 4) * 3 // 5))
        header.styles.height = min(header.height_at(self.size.width), room)

    def on_resize(self) -> None:
        """Fits the header again."""
        if self.state is not None:
            self.put_header(self.state)

    def frame(self) -> None:
        """Writes the title and the keys, with the way out of a filter, and to more groups."""
        way_out = "esc back" if self.is_of_worker else "esc all groups"
        more = ("m more",) * (len(self.views) >= self.limit)
        self.keys = (way_out,) * bool(self.looking.where) + more + Pool.keys
        super().frame()

    # -- what is under the cursor ----------------------------------------------------------------------------------
    def identifier(self) -> str:
        return self.query_one("#groups", Table).key

    def exported(self) -> str:
        return self.identifier()

    def record(self) -> Mapping[str, Any] | None:
        return next((group_record(view) for view in self.views if view.group_id == self.identifier()), None)

    def at_top(self) -> bool:
        return self.query_one("#groups", Table).cursor == 0 and not self.query_one(EntryLine).display

    def on_pane_chosen(self) -> None:
        """Opens the group under the cursor."""
        self.post_message(Open("group", self.identifier()))

    # -- keys ------------------------------------------------------------------------------------------------------
    def action_filter(self) -> None:
        """Opens the line of the filter."""
        self.query_one(EntryLine).open(self.looking.where)

    def action_back(self) -> None:
        """Closes the line of the filter, then takes the filter away; there is no screen before this one."""
        line = self.query_one(EntryLine)
        if line.display or not self.looking.where:
            line.display = False
            self.say("")
            self.query_one("#groups").focus()
        else:
            if self.is_of_worker:
                self.call_later(self.run_action, "app.workers")
            self.choose("")

    def filter_by(self, where: str) -> None:
        """Reads with the filter, or says what is wrong with it."""
        try:
            parse(where)
        except FilterError as error:
            self.say(f"! {error}")
            return
        self.query_one(EntryLine).display = False
        self.choose(where.strip())

    def choose(self, where: str, *, is_of_worker: bool = False) -> None:
        """Shows the groups that match a filter."""
        self.looking.where, self.limit, self.is_of_worker = where, GROUPS_PER_READ, is_of_worker
        self.say("")
        groups = self.query_one("#groups", Table)
        groups.focus()
        groups.action_first()
        self.reload()

    def action_sort(self, by: int) -> None:
        """Takes the next column."""
        names = list(SORTS)
        self.sort = names[(names.index(self.sort) + by) % len(names)]
        self.put_groups()
        self.frame()

    def action_reverse(self) -> None:
        """Turns the order around."""
        self.is_reversed = not self.is_reversed
        self.put_groups()
        self.frame()

    def action_more(self) -> None:
        """Reads further groups."""
        if len(self.views) >= self.limit:
            self.limit += GROUPS_PER_READ
            self.reload()
