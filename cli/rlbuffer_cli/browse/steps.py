"""Committed steps that can still be read, and one of them: rows per rank as bars."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import BindingType
from textual.widget import Widget

from rlbuffer.errors import RlbufferError
from rlbuffer.records.step_header import StepHeader
from rlbuffer.state.text import plural
from rlbuffer_cli.browse.panes import NO_STYLE, EntryLine, Prose, Table
from rlbuffer_cli.browse.screen import EVERYWHERE, Look, Looking, Open
from rlbuffer_cli.plots import small_charts, trends
from rlbuffer_cli.render.steps import (
    ENV_MARKS,
    ROLLOUT_HEADER,
    ROLLOUT_OPTIONAL,
    STEP_HEADER,
    STEP_NUMBERS,
    STEP_OPTIONAL,
    STEP_ROLLOUT_NUMBERS,
    cost_of,
    facts_of,
    rank_lines,
    rollout_rows,
    step_lines,
    step_row,
    worst_first,
)

COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")
"""Colours of the envs of a step, one after the other."""
STYLES = {mark: Style(color=COLOURS[i % len(COLOURS)]) for i, mark in enumerate(ENV_MARKS)}
BAR = re.compile(r" +\d+ ")
"""The beginning of a line that is the bar of a row."""


class Steps(Look):
    """Every committed step on the server and, before those, of the archive; the newest first."""

    keys = (
        "enter open",
        "/ step",
        "esc back",
        "l live",
        "r refresh",
        "o raw",
        "w workers",
        "tab curves",
        "y copy number",
    )
    BINDINGS: ClassVar[list[BindingType]] = [("slash", "find")]

    def __init__(self, looking: Looking) -> None:
        super().__init__(looking)
        self.headers: list[StepHeader] = []
        self.is_read = False

    def body(self) -> list[Widget]:
        table = Table(STEP_HEADER, right=STEP_NUMBERS, optional=STEP_OPTIONAL, id="steps")
        return [Prose(id="curves"), table, EntryLine(self.go_to, "40")]

    def on_mount(self) -> None:
        """The steps have the keys."""
        self.query_one("#steps").focus()

    def heading(self) -> str:
        return f"{plural(len(self.headers), 'step')} that can still be read" if self.is_read else "reading"

    async def fetch(self) -> None:
        store = self.looking.buffer.store
        problems: list[RlbufferError] = []
        headers = await self.ask(lambda: self.looking.run.headers(problems))
        trained = (await self.ask(store.trainer)).trained
        known = await self.ask(lambda: trends(self.looking.buffer.settings.output_dir, headers))
        lines = small_charts(known, width=self.size.width)
        curves = self.query_one("#curves", Prose)
        curves.put(lines)
        curves.styles.height = min(len(lines), self.size.height // 2)
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

    def action_find(self) -> None:
        """Opens the line for the number of a step."""
        self.query_one(EntryLine).open()

    def action_back(self) -> None:
        """Closes the line of the number, or goes to the screen before."""
        if self.query_one(EntryLine).display:
            self._close_line()
        else:
            super().action_back()

    def go_to(self, number: str) -> None:
        """Opens the step of this number, or says that it cannot be read."""
        if number.strip() in (str(header.step) for header in self.headers):
            self._close_line()
            self.post_message(Open("step", number.strip()))
        else:
            ends = f": {self.headers[-1].step} to {self.headers[0].step} can" if self.headers else ""
            self.say(f"! no step {number!r} that can be read{ends}")

    def _close_line(self) -> None:
        self.query_one(EntryLine).display = False
        self.say("")
        self.query_one("#steps").focus()


class Bars(Prose):
    """Lines of a step; the bars of its rows have a colour for each env, and differ without."""

    def draw(self, line: int) -> list[Segment]:
        segments = super().draw(line)
        text = "".join(segment.text for segment in segments)
        if not BAR.match(text):
            return segments
        return [Segment("".join(run), STYLES.get(mark, NO_STYLE)) for mark, run in groupby(text)]


class OneStep(Look):
    """A step, known by its number: its rows as bars, then its rollouts, the worst first."""

    keys = (
        "enter open",
        "N/P step",
        "tab rollouts/bars",
        "o raw",
        "esc back",
        "y copy id",
        "e HTML",
        *EVERYWHERE,
    )
    BINDINGS: ClassVar[list[BindingType]] = [("N", "other(1)"), ("P", "other(-1)")]

    def __init__(self, looking: Looking, step: int) -> None:
        super().__init__(looking)
        self.step = step
        self.header: StepHeader | None = None
        self.groups: dict[str, str] = {}
        """Rollout id -> id of its group."""

    def body(self) -> list[Widget]:
        table = Table(ROLLOUT_HEADER, right=STEP_ROLLOUT_NUMBERS, optional=ROLLOUT_OPTIONAL, id="worst")
        return [Bars(id="step"), table]

    def on_mount(self) -> None:
        """The rollouts have the keys."""
        self.query_one("#worst").focus()

    def heading(self) -> str:
        return f"step {self.step}"

    async def fetch(self) -> None:
        buffer, number = self.looking.buffer, self.step
        prose, table = self.query_one("#step", Bars), self.query_one("#worst", Table)
        try:
            view, cost = await self.ask(lambda: (self.looking.run.step(number), cost_of(buffer)))
        except RlbufferError:
            self.header = None
            prose.put([])
            table.put([], [])
            raise
        trained = (await self.ask(buffer.store.trainer)).trained
        self.header = view.header
        prose.put([*step_lines(view, trained=trained), "", *rank_lines(view, self.size.width, cost)])
        prose.styles.height = min(prose.height_at(self.size.width), max(4, (self.size.height - 4) * 2 // 3))
        members = worst_first(view)
        self.groups = {member.info.rollout_id: member.group_id for member in members}
        table.put(rollout_rows(view), list(self.groups))

    def on_pane_chosen(self) -> None:
        """Opens the rollout under the cursor."""
        name = self.query_one("#worst", Table).key
        self.post_message(Open("rollout", name, {"group": self.groups[name]}))

    def identifier(self) -> str:
        return self.query_one("#worst", Table).key or str(self.step)

    def record_name(self) -> str:
        return f"step {self.step}"

    def exported(self) -> str:
        name = self.query_one("#worst", Table).key
        return f"{self.groups[name]}/{name.rpartition('/')[2]}" if name else ""

    def record(self) -> Mapping[str, Any] | None:
        return None if self.header is None else facts_of(self.header)

    def action_other(self, by: int) -> None:
        """Goes to the step after, or before."""
        self.step = max(1, self.step + by)
        self.reload()
