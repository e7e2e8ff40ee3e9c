"""Workers, scorers, ranks and the batcher: when each was heard, and what failed last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from textual.widget import Widget

from rlbuffer.narration.numbers import printable
from rlbuffer_cli.browse.panes import Pane, Prose, Table
from rlbuffer_cli.browse.screen import Look, Looking
from rlbuffer_cli.render.workers import BEAT_HEADER, BEAT_NUMBERS, PROCESS_KINDS, beat_row, failure_lines


class Workers(Look):
    """Every process that sends signs of life."""

    keys = ("up/down whose failure", "l live", "r refresh", "o raw", "esc back")

    def __init__(self, looking: Looking) -> None:
        super().__init__(looking)
        self.beats: dict[str, Mapping[str, Any]] = {}
        self.waiting: Mapping[str, str] = {}

    def body(self) -> list[Widget]:
        return [Table(BEAT_HEADER, right=BEAT_NUMBERS, optional=("env", "rate"), id="beats"), Prose(id="failure")]

    def on_mount(self) -> None:
        """The table has the keys."""
        self.query_one("#beats").focus()

    def heading(self) -> str:
        return f"{len(self.beats)} processes with signs of life"

    async def fetch(self) -> None:
        store = self.looking.buffer.store
        every = await self.ask(lambda: {kind: store.heartbeats(kind) for kind in PROCESS_KINDS})
        self.waiting = await self.ask(store.waiting)
        self.beats = {f"{kind} {name}": beat for kind in PROCESS_KINDS for name, beat in sorted(every[kind].items())}
        rows = [beat_row(key, beat) for key, beat in self.beats.items()]
        self.query_one("#beats", Table).put(rows, list(self.beats))
        self.show_failure()

    def show_failure(self) -> None:
        """Shows all that the one under the cursor says."""
        key = self.identifier()
        lines: list[str] = []
        if beat := self.beats.get(key):
            name = key.split(" ", 1)[1]
            lines = [*failure_lines(name, beat)] or ["nothing has failed"]
            if beat.get("error"):
                lines.append(f"  ! {printable(str(beat['error']))}")
            sentence = self.waiting.get("batcher" if key.startswith("batcher") else key) or beat.get("waiting")
            lines += [f"  waits: {sentence}"] if sentence else []
        self.query_one("#failure", Prose).put(lines)

    def identifier(self) -> str:
        return self.query_one("#beats", Table).key

    def record(self) -> Mapping[str, Any] | None:
        return self.beats.get(self.identifier())

    def on_pane_moved(self, event: Pane.Moved) -> None:
        """Another one is under the cursor."""
        if isinstance(event.pane, Table):
            self.show_failure()
