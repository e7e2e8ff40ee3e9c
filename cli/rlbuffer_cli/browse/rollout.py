"""One rollout: its tokens on the left, through a lens, and on the right its rewards, its life, the token under the
cursor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rich.cells import cell_len
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Static

from rlbuffer.client.details import GroupDetail
from rlbuffer.client.rollout_view import RolloutView
from rlbuffer.client.texts import Texts
from rlbuffer.client.trainer_values import NONE, TrainerValues
from rlbuffer.records.rollout import Rollout
from rlbuffer.state.text import plural, printable
from rlbuffer_cli.browse.pages import Prose
from rlbuffer_cli.browse.screen import BrowsedRun, BrowserScreen
from rlbuffer_cli.browse.tokens import SHOWN_TEXT, Tokens, legend_of
from rlbuffer_cli.facts import life, member_of, panels, verdict
from rlbuffer_cli.lenses import NAMES, columns_of, lens, numbers_of
from rlbuffer_cli.table import Target
from rlbuffer_cli.tables import rollout_record, shared_words
from rlbuffer_cli.text import cut

FACTS_WIDTH = 32
COLUMN = len(NAMES)
"""The key of the lens that shows further columns."""


class OneRollout(BrowserScreen):
    """A rollout, known by its id and its group's."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "other(1)", "next"),
        Binding("p", "other(-1)", "previous"),
        Binding("2", "lens(2)", "lens", key_display="1-8"),
        *(Binding(str(number), f"lens({number})", show=False) for number in range(1, len(NAMES) + 1) if number != 2),
    ]

    def __init__(self, browsed: BrowsedRun, target: Target) -> None:
        super().__init__(browsed)
        self.rollout_id, self.group_id = target.name, target.group
        self.detail: GroupDetail | None = None
        self.member: RolloutView | None = None
        self.drawn: RolloutView | None = None
        """What has the tokens: the rollout, or the first of its sequences."""
        self.number = 1
        self.column = ""
        self.kept: dict[str, TrainerValues] = {}
        """Rollout id -> what the trainer keeps of it."""

    def body(self) -> list[Widget]:
        left = Horizontal(Tokens(id="tokens"), Prose(id="text"), Prose(id="facts"), id="halves")
        return [Static(id="legend", markup=False), left]

    def heading(self) -> str:
        place = ""
        if self.detail is not None and self.member is not None:
            number, count = self.place(self.detail.members), len(self.detail.members)
            of = f"{number} of {count} of its group" if number else f"sequence {self.member.sequence} of its rollout"
            place = f" ({of}) · {' · '.join(verdict(self.member))}"
        return f"rollout {self.rollout_id}{place}"

    def place(self, members: Sequence[RolloutView]) -> int:
        """Its number among these, from 1; 0 where it is none of them."""
        return next((n for n, member in enumerate(members, 1) if member.rollout_id == self.rollout_id), 0)

    async def fetch(self) -> None:
        detail = await self.ask(self.read)
        self.member = member_of(detail, self.rollout_id)
        self.detail, self.group_id = detail, detail.view.group_id
        self.rollout_id = self.member.rollout_id
        self.show_member()

    def read(self) -> GroupDetail:
        """The group, with the tokenizer and the trainer's file read beside it."""
        run = self.browsed.run
        detail, _ = run.group(self.group_id), run.texts.lacks
        rollouts = [m.rollout for m in detail.tree() if m.rollout is not None and not m.rollout.further]
        self.kept = {r.rollout_id: run.kept.of(detail.view.group_id, r) for r in rollouts}
        return detail

    def show_member(self) -> None:
        member = self.member
        if member is None or self.detail is None:
            return
        self.drawn = drawn = member.main
        rollout = drawn.rollout
        tokens, text = self.query_one("#tokens", Tokens), self.query_one("#text", Prose)
        texts = self.browsed.run.texts
        has_text = rollout is not None and rollout.text is not None and not texts.has_pieces(rollout)
        is_text = has_text and self.number == 1
        text.display, tokens.display = is_text, not is_text
        focused = self.query_one("#facts")
        if not focused.has_focus:
            (text if is_text else tokens).focus()
        if rollout is None:
            tokens.put(None, None, texts)
            self.say(f"! {member.lacks}")
        else:
            kept = self.kept.get(drawn.rollout_id, NONE)
            group, origin = self.detail.view, texts.origin(rollout)
            through = lens(group, drawn, NAMES[self.number - 1], column=self.column, origin=origin, kept=kept)
            tokens.kind = self.browsed.colours
            follows = self.follows()
            tokens.put(drawn, through, texts)
            if follows:
                tokens.action_last()
            text.put(said_lines(rollout, texts) if is_text else [])
            self.query_one("#legend", Static).update(legend_of(through, self.number, tokens.kind))
        self.show_facts()
        self.frame()

    def show_facts(self) -> None:
        """Shows the right half."""
        if self.detail is not None and self.member is not None and self.drawn is not None:
            tokens = self.query_one("#tokens", Tokens)
            kept = self.kept.get(self.drawn.rollout_id, NONE)
            here = token_lines(self.drawn, tokens, kept) if tokens.display else []
            self.query_one("#facts", Prose).put([*here, *fact_lines(self.detail, self.member)])

    def on_tokens_moved(self) -> None:
        self.show_facts()

    def identifier(self) -> str:
        return self.rollout_id

    def exported(self) -> str:
        return f"{self.group_id}/{self.rollout_id.rpartition('/')[2]}" if self.member is not None else ""

    def record(self) -> Mapping[str, Any] | None:
        return rollout_record(self.member, self.detail.view) if self.member and self.detail else None

    def at_top(self) -> bool:
        is_at_edge = self.query_one(Tokens).cursor == 0 or self.follows()
        return is_at_edge and not any(pane.scroll_y for pane in self.query(Prose))

    def follows(self) -> bool:
        """The cursor is at the end of what an agent is at work on: it stays there as calls come."""
        tokens = self.query_one(Tokens)
        is_underway = self.member is not None and self.member.underway is not None
        return is_underway and 0 < tokens.cursor == tokens.count() - 1

    def action_lens(self, number: int) -> None:
        """Looks through another lens; the last has one further column after the other."""
        rollout = self.member.rollout if self.member is not None else None
        if number == COLUMN:
            names = columns_of(rollout) if rollout is not None else []
            if not names:
                self.say("this rollout has no further column per token")
                return
            at = names.index(self.column) + 1 if self.column in names and self.number == COLUMN else 0
            self.column = names[at % len(names)]
        self.number = number
        self.say("")
        self.show_member()

    def action_other(self, by: int) -> None:
        """Goes to the next rollout of the group, or the next of its sequences."""
        if self.detail is None or self.member is None:
            return
        tree = self.detail.tree()
        at = self.place(tree) - 1 + by
        if 0 <= at < len(tree):
            self.member = tree[at]
            self.rollout_id = self.member.rollout_id
            if self.column not in (columns_of(self.member.rollout) if self.member.rollout is not None else []):
                self.number = 1 if self.number == COLUMN else self.number
            self.say("")
            self.show_member()


def said_lines(rollout: Rollout, texts: Texts) -> list[str]:
    """The text that was pushed: by turns where it names them."""
    turns = texts.prompt(rollout) + texts.answer(rollout)
    if not any(turn.role for turn in turns):
        return text_lines(rollout.text or "")
    return [line for turn in turns for line in (f"── {turn.role or 'text'} ──", *text_lines(turn.text))]


def text_lines(text: str) -> list[str]:
    """The text by its own lines, as far as it is shown."""
    lines = text[:SHOWN_TEXT].split("\n")
    if len(text) > SHOWN_TEXT:
        lines.append(f"... {plural(len(text) - SHOWN_TEXT, 'character')} more: rlbuffer inspect ID --json has them all")
    return lines


def token_lines(member: RolloutView, tokens: Tokens, kept: TrainerValues) -> list[str]:
    """The token under the cursor."""
    rollout, at = member.rollout, tokens.cursor
    if rollout is None:
        return []
    label, numbers = tokens.label(at), numbers_of(member, kept)(at)
    text = f"'{label}'" if label != numbers["id"] else ""
    facts = {"text": text, "id": numbers["id"], "role": tokens.role(at), **numbers}
    facts.setdefault("version", "none")
    facts |= {
        name: f"{rollout.columns[name][at]:g}" for name in columns_of(rollout) if name not in ("advantages", "entropy")
    }
    return _section("TOKEN", f"{at:,} of {rollout.length:,}", facts)


def fact_lines(detail: GroupDetail, member: RolloutView) -> list[str]:
    """Rewards, tokens and life of a rollout."""
    view = detail.view
    lines = [line for title, number, more in panels(detail, member) for line in _section(title.upper(), number, more)]
    if member.shared is not None:
        lines[-1:] = [f"  {shared_words(member)}", ""]
    if sequences := member.sequences():
        lines.append(_fact("SEQUENCES", f"{len(sequences)}, shown is 0"))
    for one in sequences:
        counts = f"{one.length:,}, {one.loss_tokens:,} trained"
        lines.append(
            _fact(f"  {one.sequence} {cut(printable(one.name), FACTS_WIDTH - len(counts) - 7)}".rstrip(), counts)
        )
        lines += [f"    {shared_words(one)}"] if one.shared is not None else []
    lines += [*([""] if sequences else []), "LIFE", *(f"  {stage}" for stage in life(view, member))]
    if view.detail and not view.reason:
        lines.append(f"  ! {view.detail}")
    return lines


def _section(title: str, value: str, facts: Mapping[str, str]) -> list[str]:
    """A heading, the facts that are known below it, and an empty line."""
    return [_fact(title, value), *(_fact(f"  {name}", text) for name, text in facts.items() if text), ""]


def _fact(name: str, value: str) -> str:
    """A fact in the width of the pane, its value at the right; a longer one behind its name, to be broken."""
    return f"{name} {value:>{max(0, FACTS_WIDTH - 1 - cell_len(name))}}"
