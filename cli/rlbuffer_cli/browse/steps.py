"""Committed steps that can still be read, and one of them: rows per rank as bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from rlbuffer.errors import RlbufferError
from rlbuffer.records.step_header import StepHeader
from rlbuffer_cli.browse.panes import Prose, Table
from rlbuffer_cli.browse.screen import Look, Looking, Open
from rlbuffer_cli.render.steps import (
    STEP_HEADER,
    STEP_NUMBERS,
    STEP_OPTIONAL,
    cost_of,
    facts_of,
    rank_lines,
    step_lines,
    step_row,
)


class Steps(Look):
    """Every committed step on the server, the newest first."""

    keys = ("enter open", "l live", "r refresh", "o raw", "esc back")

    def __init__(self, looking: Looking) -> None:
        super().__init__(looking)
        self.headers: list[StepHeader] = []
        self.is_read = False

    def body(self) -> list[Widget]:
        return [Table(STEP_HEADER, right=STEP_NUMBERS, optional=STEP_OPTIONAL, id="steps")]

    def on_mount(self) -> None:
        """The steps have the keys."""
        self.query_one("#steps").focus()

    def heading(self) -> str:
        return f"{len(self.headers):,} steps that can still be read" if self.is_read else "reading"

    async def fetch(self) -> None:
        store = self.looking.buffer.store
        problems: list[RlbufferError] = []
        headers = await self.ask(lambda: list(store.headers(problems=problems)))
        trained = (await self.ask(store.trainer)).trained
        self.headers, self.is_read = headers[::-1], True
        rows = [step_row(header, trained=trained) for header in self.headers]
        self.query_one("#steps", Table).put(rows, [str(header.step) for header in self.headers])
        if problems:
            self.say(f"! {str(problems[0]).splitlines()[0]}")

    def identifier(self) -> str:
        return self.query_one("#steps", Table).key

    def record(self) -> Mapping[str, Any] | None:
        return next((facts_of(header) for header in self.headers if str(header.step) == self.identifier()), None)

    def on_pane_chosen(self) -> None:
        """Opens the step under the cursor."""
        self.post_message(Open("step", self.identifier()))


class OneStep(Look):
    """A step, known by its number."""

    keys = ("N/P step", "g/G ends", "o raw", "esc back")
    BINDINGS: ClassVar[list[BindingType]] = [("N", "other(1)"), ("P", "other(-1)")]

    def __init__(self, looking: Looking, step: int) -> None:
        super().__init__(looking)
        self.step = step
        self.header: StepHeader | None = None

    def body(self) -> list[Widget]:
        return [Prose(id="step")]

    def on_mount(self) -> None:
        """The text has the keys."""
        self.query_one("#step").focus()

    def heading(self) -> str:
        return f"step {self.step}"

    async def fetch(self) -> None:
        buffer, number = self.looking.buffer, self.step
        prose = self.query_one("#step", Prose)
        try:
            view, cost = await self.ask(lambda: (buffer.step(number), cost_of(buffer)))
        except RlbufferError:
            self.header = None
            prose.put([])
            raise
        trained = (await self.ask(buffer.store.trainer)).trained
        self.header = view.header
        prose.put([*step_lines(view, trained=trained), "", *rank_lines(view, self.size.width, cost)])

    def identifier(self) -> str:
        return str(self.step)

    def record(self) -> Mapping[str, Any] | None:
        return None if self.header is None else facts_of(self.header)

    def action_other(self, by: int) -> None:
        """Goes to the step after, or before."""
        self.step = max(1, self.step + by)
        self.reload()
