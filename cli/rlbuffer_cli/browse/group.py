"""What a group, two of its rollouts, or a step consist of: what is said of it, then a row for each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.text import Text
from textual.binding import Binding, BindingType

from rlbuffer.client.filters import parse
from rlbuffer.client.searching import with_text
from rlbuffer.client.views import GroupDetail
from rlbuffer.errors import NotFound
from rlbuffer.records.step_header import StepHeader
from rlbuffer.state.text import plural, printable
from rlbuffer_cli.browse.listing import Listing
from rlbuffer_cli.browse.screen import Looking, Open
from rlbuffer_cli.facts import (
    answer,
    best_and_worst,
    cost_of,
    headline,
    member_of,
    pair_lines,
    pair_rows,
    pair_view,
    rank_lines,
    shared_lines,
    shared_prompt,
    step_lines,
)
from rlbuffer_cli.table import Target
from rlbuffer_cli.tables import MEMBERS, WORST, detail_record, member_rows, step_record, worst_rows

SHOWN_CHARACTERS = 4000
"""Length of a prompt, an answer or metadata that is shown; `o` shows all."""
PAIR_TOKENS = 4000


class Group(Listing):
    """A group, known by its id or the beginning of it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "compare", "compare"),
        Binding("b", "extremes", "best, worst"),
    ]

    def __init__(self, looking: Looking, group_id: str) -> None:
        super().__init__(looking, MEMBERS)
        self.group_id = group_id
        self.detail: GroupDetail | None = None
        self.marked = ""
        """The first rollout of a comparison."""
        self.chosen = parse(looking.where)
        """The filter of the groups: what it says of rollouts marks those that match."""

    def heading(self) -> str:
        if self.detail is None or not self.chosen.rollout_terms:
            return f"group {self.group_id}"
        matches = sum(row.is_match for row in self.items)
        count = plural(len(self.detail.members), "rollout")
        return f"group {self.group_id}: {matches} of {count} match {self.looking.where}"

    def read(self) -> tuple[Sequence[Any], RenderableType]:
        """The rollouts, and what they share."""
        try:
            detail, texts = self.looking.run.group(self.group_id), self.looking.buffer.texts
        except NotFound as error:
            if self.detail is None:
                raise
            raise NotFound(f"{error} Shown is what it was before, {self.detail.view.state}.") from None
        self.detail, self.group_id = detail, detail.view.group_id
        prompt = shared_prompt(detail, texts)
        rows = member_rows(
            detail,
            lambda member: answer(member, texts, bool(prompt)),
            lambda member: (
                bool(self.chosen.rollout_terms) and self.chosen.matches_rollout(with_text(member, texts.decoded))
            ),
        )
        lines = [*headline(detail.view), *shared_lines(detail, prompt, SHOWN_CHARACTERS)]
        return rows, Stack(*(Text(printable(line.strip())) for line in lines))

    def identifier(self) -> str:
        return super().identifier() or self.group_id

    def exported(self) -> str:
        return self.group_id

    def record(self) -> Mapping[str, Any] | None:
        return None if self.detail is None else detail_record(self.detail)

    def action_compare(self) -> None:
        """Takes the first of two rollouts, then shows both."""
        name = self.identifier() if self.item() is not None else ""
        if not name or name == self.marked:
            self.marked = ""
            self.say("")
        elif not self.marked:
            self.marked = name
            self.say(f"compare {name} with: c on another rollout (c here again: with none)")
        else:
            self.compare(self.marked, name)
            self.marked = ""
            self.say("")

    def action_extremes(self) -> None:
        """Shows the best rollout beside the worst."""
        names = None if self.detail is None else best_and_worst(self.detail)
        if names is None:
            self.say("no rollout is better than another")
        else:
            self.compare(*names)

    def compare(self, one: str, other: str) -> None:
        self.post_message(Open(Target("pair", one, group=self.group_id, other=other)))


class Pair(Listing):
    """Two rollouts of a group: where they part, and the tokens from there on."""

    def __init__(self, looking: Looking, group_id: str, names: tuple[str, str]) -> None:
        super().__init__(looking, pair_view(*names))
        self.group_id, self.names = group_id, names

    def heading(self) -> str:
        return f"{self.names[0]} and {self.names[1]}"

    def read(self) -> tuple[Sequence[Any], RenderableType]:
        """The tokens, and where they part."""
        buffer = self.looking.buffer
        detail, _ = self.looking.run.group(self.group_id), buffer.texts.lacks
        one, other = (member_of(detail, name) for name in self.names)
        lines = pair_lines(detail, one, other, buffer.texts)
        above = Stack(*(Text(printable(line)) for line in lines))
        return list(pair_rows(one, other, buffer.texts, PAIR_TOKENS)), above


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
        return worst_rows(view), Stack(*lines, Text(), *bars)

    def record_name(self) -> str:
        return f"step {self.step}"

    def exported(self) -> str:
        item = self.item()
        return f"{item.member.group_id}/{item.member.info.rollout_id.rpartition('/')[2]}" if item else ""

    def record(self) -> Mapping[str, Any] | None:
        return None if self.header is None else step_record(self.header)

    def action_other(self, by: int) -> None:
        self.step = max(1, self.step + by)
        self.reload()
