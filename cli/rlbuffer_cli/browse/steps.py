"""One step: its rows as bars by rank, then its rollouts, the worst first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual.binding import Binding, BindingType

from rlbuffer.records.step_header import StepHeader
from rlbuffer.state.text import printable
from rlbuffer_cli.browse.listing import Listing
from rlbuffer_cli.browse.screen import Looking, Open
from rlbuffer_cli.facts import cost_of, rank_lines, step_lines
from rlbuffer_cli.tables import WORST, step_record, worst_rows


class OneStep(Listing):
    """A step, known by its number."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("N", "other(1)", "next"),
        Binding("P", "other(-1)", "previous"),
    ]

    def __init__(self, looking: Looking, step: int) -> None:
        super().__init__(looking, WORST)
        self.step = step
        self.header: StepHeader | None = None

    def heading(self) -> str:
        return f"step {self.step}"

    def read(self) -> tuple[Sequence[Any], RenderableType]:
        """The scored rollouts, and the step."""
        self.header, buffer = None, self.looking.buffer
        view, cost = self.looking.run.step(self.step), cost_of(buffer)
        trained = buffer.store.trainer().trained
        self.header = view.header
        lines = [Text(printable(line)) for line in step_lines(view, trained=trained)]
        bars = list(rank_lines(view, max(20, self.size.width - 4), cost))
        return worst_rows(view), Group(*lines, Text(), *bars)

    def record_name(self) -> str:
        return f"step {self.step}"

    def exported(self) -> str:
        item = self.item()
        return f"{item.member.group_id}/{item.member.info.rollout_id.rpartition('/')[2]}" if item else ""

    def record(self) -> Mapping[str, Any] | None:
        return None if self.header is None else step_record(self.header)

    def open_item(self) -> None:
        """Asks for the rollout under the cursor."""
        if (item := self.item()) is not None:
            self.post_message(Open("rollout", item.member.info.rollout_id, {"group": item.member.group_id}))

    def action_other(self, by: int) -> None:
        """Goes to the step after, or before."""
        self.step = max(1, self.step + by)
        self.reload()
