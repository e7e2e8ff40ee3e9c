"""One group: what all its rollouts share, then a row for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from rlbuffer.client.filters import parse
from rlbuffer.client.searching import with_text
from rlbuffer.client.views import GroupDetail, RolloutView
from rlbuffer.errors import NotFound
from rlbuffer.state.text import plural
from rlbuffer_cli.browse.panes import Prose, Table
from rlbuffer_cli.browse.screen import EVERYWHERE, Look, Looking, Open
from rlbuffer_cli.render.group import (
    MEMBER_HEADER,
    MEMBER_NUMBERS,
    MEMBER_OPTIONAL,
    answer,
    detail_record,
    headline,
    largest_reward,
    member_row,
    shared_lines,
    shared_prompt,
)
from rlbuffer_cli.render.pair import best_and_worst

SHOWN_CHARACTERS = 4000
"""Length of a prompt, an answer or metadata that is shown; `o` shows all."""
AGE_AT = MEMBER_HEADER.index("version")


class Group(Look):
    """A group, known by its id or the beginning of it."""

    keys = (
        "enter open",
        "c compare",
        "b best, worst",
        "e HTML",
        "y copy id",
        "o raw",
        "tab prompt",
        "esc back",
        *EVERYWHERE,
    )
    BINDINGS: ClassVar[list[BindingType]] = [("c", "compare"), ("b", "extremes")]

    def __init__(self, looking: Looking, group_id: str) -> None:
        super().__init__(looking)
        self.group_id = group_id
        self.detail: GroupDetail | None = None
        self.marked = ""
        """The first rollout of a comparison."""
        self.chosen = parse(looking.where)
        """The filter of the pool: what it says of rollouts marks those that match."""
        self.matches: list[bool] = []

    def body(self) -> list[Widget]:
        header = ("match",) * bool(self.chosen.rollout_terms) + (
            *MEMBER_HEADER[:AGE_AT],
            "age",
            *MEMBER_HEADER[AGE_AT:],
        )
        optional = (*MEMBER_OPTIONAL, "age", "")
        return [Prose(id="header"), Table(header, right=MEMBER_NUMBERS | {"age"}, optional=optional, id="members")]

    def on_mount(self) -> None:
        """The rollouts have the keys."""
        self.query_one("#members").focus()

    def heading(self) -> str:
        if self.detail is None or not self.chosen.rollout_terms:
            return f"group {self.group_id}"
        matches = f"{sum(self.matches)} of {plural(len(self.matches), 'rollout')} match {self.looking.where}"
        return f"group {self.group_id}: {matches}"

    async def fetch(self) -> None:
        try:
            detail, self.matches = await self.ask(self.read)
        except NotFound as error:
            if self.detail is None:
                raise
            raise NotFound(f"{error} Shown is what it was before, {self.detail.view.state}.") from None
        self.detail, self.group_id = detail, detail.view.group_id
        texts = self.looking.buffer.texts
        best, prompt = largest_reward(detail), shared_prompt(detail, texts)
        header = self.query_one("#header", Prose)
        header.put([*headline(detail.view), *shared_lines(detail, prompt, SHOWN_CHARACTERS)])
        header.styles.height = min(header.height_at(self.size.width), max(4, (self.size.height - 4) // 2))
        rows = [
            with_age(member_row(member, best, answer(member, texts, bool(prompt))), detail, member)
            for member in detail.members
        ]
        if self.chosen.rollout_terms:
            rows = [["*" * is_match, *row] for is_match, row in zip(self.matches, rows, strict=True)]
        self.query_one("#members", Table).put(rows, [member.rollout_id for member in detail.members])

    def read(self) -> tuple[GroupDetail, list[bool]]:
        """The group, and for each of its rollouts True where the filter's terms about one hold."""
        buffer = self.looking.buffer
        detail, decoded = self.looking.run.group(self.group_id), buffer.texts.decoded
        return detail, [self.chosen.matches_rollout(with_text(m, decoded)) for m in detail.members]

    def identifier(self) -> str:
        return self.query_one("#members", Table).key or self.group_id

    def exported(self) -> str:
        return self.group_id

    def record(self) -> Mapping[str, Any] | None:
        return None if self.detail is None else detail_record(self.detail)

    def on_pane_chosen(self) -> None:
        """Opens the rollout under the cursor."""
        self.post_message(Open("rollout", self.identifier(), {"group": self.group_id}))

    def action_compare(self) -> None:
        """Takes the first of two rollouts, then shows both."""
        name = self.query_one("#members", Table).key
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
        if self.detail is None:
            return
        names = best_and_worst(self.detail)
        if names is None:
            self.say("no rollout is better than another")
        else:
            self.post_message(Open("pair", names[0], {"group": self.group_id, "other": names[1]}))


def with_age(row: list[str], detail: GroupDetail, member: RolloutView) -> list[str]:
    """The row of a rollout with its own age: the group's is that of its oldest."""
    view = detail.view
    age = "" if view.age is None else str(view.age + view.min_version - member.min_version)
    return [*row[:AGE_AT], age, *row[AGE_AT:]]
