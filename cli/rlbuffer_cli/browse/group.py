"""One group: what all its rollouts share, then a row for each; and two of them side by side."""

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
from rlbuffer.state.text import plural, printable
from rlbuffer_cli.browse.listing import Listing
from rlbuffer_cli.browse.screen import Looking, Open
from rlbuffer_cli.facts import (
    answer,
    best_and_worst,
    headline,
    member_of,
    pair_lines,
    pair_rows,
    pair_view,
    shared_lines,
    shared_prompt,
)
from rlbuffer_cli.tables import MEMBERS, detail_record, member_rows

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

    def open_item(self) -> None:
        """Asks for the rollout under the cursor."""
        if self.item() is not None:
            self.post_message(Open("rollout", self.identifier(), {"group": self.group_id}))

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
            self.post_message(Open("pair", self.marked, {"group": self.group_id, "other": name}))
            self.marked = ""
            self.say("")

    def action_extremes(self) -> None:
        """Shows the best rollout beside the worst."""
        names = None if self.detail is None else best_and_worst(self.detail)
        if names is None:
            self.say("no rollout is better than another")
        else:
            self.post_message(Open("pair", names[0], {"group": self.group_id, "other": names[1]}))


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
