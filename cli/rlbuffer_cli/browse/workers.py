"""Workers, scorers, ranks and the batcher: when each was heard, and what failed last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from textual.widget import Widget

from rlbuffer.client.run_state import read_run_state
from rlbuffer.state.run_state import RunState
from rlbuffer.state.text import plural
from rlbuffer_cli.browse.panes import Pane, Prose, Table
from rlbuffer_cli.browse.screen import Look, Looking, Open
from rlbuffer_cli.render.run import (
    PROCESS_HEADER,
    PROCESS_NUMBERS,
    PROCESS_OPTIONAL,
    process_lines,
    process_rows,
)
from rlbuffer_cli.run_tables import READ_RECORDS


class Workers(Look):
    """Every process that sends signs of life."""

    keys = (
        "up/down what failed",
        "enter its groups",
        "l live",
        "r refresh",
        "o raw",
        "esc back",
        "t steps",
        "tab failure",
        "y copy name",
    )

    def __init__(self, looking: Looking) -> None:
        super().__init__(looking)
        self.state: RunState | None = None

    def body(self) -> list[Widget]:
        table = Table(PROCESS_HEADER, right=PROCESS_NUMBERS, optional=PROCESS_OPTIONAL, id="beats")
        return [table, Prose(id="failure")]

    def on_mount(self) -> None:
        """The table has the keys."""
        self.query_one("#beats").focus()

    def heading(self) -> str:
        if self.state is None:
            return "reading"
        version = self.state.policy_version
        newest = f", newest policy v{version}" if version >= 0 else ""
        heard = sum(process.is_fresh for process in self.state.processes)
        return f"{plural(len(process_rows(self.state)), 'process', 'processes')}, {heard} heard just now{newest}"

    async def fetch(self) -> None:
        store = self.looking.buffer.store
        self.state = await self.ask(lambda: read_run_state(store, history=READ_RECORDS))
        rows = process_rows(self.state)
        self.query_one("#beats", Table).put(list(rows.values()), list(rows))
        self.show_failure()

    def show_failure(self) -> None:
        """Shows all that the one under the cursor says."""
        lines = [] if self.state is None else process_lines(self.state, self.identifier())
        lines = lines or (["nothing has failed"] if self.record() else [])
        self.query_one("#failure", Prose).put(lines)

    def identifier(self) -> str:
        return self.query_one("#beats", Table).key

    def record(self) -> Mapping[str, Any] | None:
        known = () if self.state is None else self.state.processes
        return next((asdict(process) for process in known if process.title == self.identifier()), None)

    def on_pane_chosen(self) -> None:
        """Shows the groups of the worker under the cursor."""
        kind, _, name = self.identifier().partition(" ")
        if kind == "worker":
            self.post_message(Open("pool", f"worker:{name}"))
        else:
            self.say(f"{self.identifier()} writes no groups")

    def on_pane_moved(self, event: Pane.Moved) -> None:
        """Another one is under the cursor."""
        if isinstance(event.pane, Table):
            self.show_failure()
