"""Workers, scorers, ranks and the batcher: when each was heard, and what failed last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual.widget import Widget

from rlbuffer.state.heartbeats import FRESH_SECONDS
from rlbuffer.state.text import plural
from rlbuffer_cli.browse.panes import Pane, Prose, Table
from rlbuffer_cli.browse.screen import Look, Looking, Open
from rlbuffer_cli.render.processes import PROCESS_HEADER, PROCESS_OPTIONAL, Processes, processes_of
from rlbuffer_cli.render.workers import BEAT_NUMBERS


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
        self.processes = Processes(beats={}, policy_version=-1, writers={})

    def body(self) -> list[Widget]:
        table = Table(PROCESS_HEADER, right=BEAT_NUMBERS, optional=PROCESS_OPTIONAL, id="beats")
        return [table, Prose(id="failure")]

    def on_mount(self) -> None:
        """The table has the keys."""
        self.query_one("#beats").focus()

    def heading(self) -> str:
        version = self.processes.policy_version
        newest = f", newest policy v{version}" if version >= 0 else ""
        beats = self.processes.beats
        heard = sum(beat["seconds_ago"] <= FRESH_SECONDS for beat in beats.values())
        return f"{plural(len(self.processes.rows()), 'process', 'processes')}, {heard} heard just now{newest}"

    async def fetch(self) -> None:
        store = self.looking.buffer.store
        self.processes = await self.ask(lambda: processes_of(store))
        rows = self.processes.rows()
        self.query_one("#beats", Table).put(list(rows.values()), list(rows))
        self.show_failure()

    def show_failure(self) -> None:
        """Shows all that the one under the cursor says."""
        key = self.identifier()
        beat = self.processes.beats.get(key, {})
        lines = self.processes.lines(key) or (["nothing has failed"] if beat else [])
        self.query_one("#failure", Prose).put(lines)

    def identifier(self) -> str:
        return self.query_one("#beats", Table).key

    def record(self) -> Mapping[str, Any] | None:
        return self.processes.beats.get(self.identifier())

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
