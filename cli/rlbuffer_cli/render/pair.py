"""Two rollouts of a group side by side: where they part, and the tokens from there on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlbuffer.state.text import plural
from rlbuffer_cli import look
from rlbuffer_cli.options import say
from rlbuffer_cli.table import Printed, View, of_tuples

if TYPE_CHECKING:
    from rlbuffer.client.texts import Texts
    from rlbuffer.client.views import GroupDetail, RolloutView

SHOWN_BEFORE = 3
"""Equal tokens that are shown before the first that differs."""
PRINTED_TOKENS = 200


def pair_view(one: str, other: str) -> View:
    """The table of two rollouts, each by its id."""
    sides = [(name, name.rpartition("/")[2]) for name in (one, other)]
    short = sides[0][1] != sides[1][1]
    parts = ("id", "text", "logprob", "mask")
    columns = [f"/{tail} {part}" if short else f"{name} {part}" for name, tail in sides for part in parts]
    numbers = {"token", *(title for title in columns if title.endswith((" id", " logprob")))}
    return of_tuples("tokens", ("token", "", *columns), numbers)


def best_and_worst(detail: GroupDetail) -> tuple[str, str] | None:
    """Ids of the rollouts with the largest and the smallest reward; None where no two differ in it."""
    scored = [member for member in detail.members if member.reward is not None]
    if not scored:
        return None
    best = max(scored, key=lambda member: member.reward or 0.0)
    worst = min(scored, key=lambda member: member.reward or 0.0)
    return None if best.reward == worst.reward else (best.rollout_id, worst.rollout_id)


def figures(member: RolloutView) -> str:
    """A rollout in one line."""
    reward = "not scored" if member.reward is None else f"reward {member.reward:.3f}"
    advantage = "" if member.advantage is None else f" · advantage {member.advantage:+.4f}"
    stop = f" · {member.finish_reason}" if member.finish_reason else ""
    return f"{member.rollout_id}: {reward}{advantage} · {plural(member.length, 'token')}{stop}"


def first_difference(one: RolloutView, other: RolloutView) -> int | None:
    """Position of the first token that differs, or that one of them lacks; None: they are the same."""
    a, b = one.rollout.tokens, other.rollout.tokens
    both = min(len(a), len(b))
    differs = (a[:both] != b[:both]).nonzero()[0]
    if len(differs):
        return int(differs[0])
    return both if len(a) != len(b) else None


def pair_lines(detail: GroupDetail, one: RolloutView, other: RolloutView, texts: Texts) -> list[str]:
    """Shows what both were asked, each in a line, and where they part."""
    from rlbuffer_cli.render.group import MAX_TEXT, shared_lines, shared_prompt

    shared = shared_lines(detail, shared_prompt(detail, texts), 2 * MAX_TEXT)
    lines = [*(line.strip() for line in shared), figures(one), figures(other)]
    if one.rollout is None or other.rollout is None:
        return [*lines, "! the payload of one of them is no longer kept"]
    parts = first_difference(one, other)
    return [*lines, f"they part at token {parts:,}" if parts is not None else "their tokens are the same"]


def pair_rows(one: RolloutView, other: RolloutView, texts: Texts, most: int) -> Iterator[list[str]]:
    """Rows of :func:`pair_view`, for `most` tokens from a little before they part; a mark where they differ."""
    if one.rollout is None or other.rollout is None:
        return
    parts = first_difference(one, other)
    first = max(0, (parts or 0) - SHOWN_BEFORE)
    end = min(max(one.length, other.length), first + most)
    sides = [_cells(member, texts, first, end) for member in (one, other)]
    for at, (left, right) in enumerate(zip(*sides, strict=True), first):
        mark = "" if left[0] == right[0] else "≠ first" if at == parts else "≠"
        yield [str(at), mark, *left, *right]


def _cells(member: RolloutView, texts: Texts, first: int, end: int) -> Iterator[list[str]]:
    """Id, text, logprob and mask of each position; empty behind the rollout's end."""
    rollout: Any = member.rollout
    pieces = texts.pieces(rollout, first, end) if texts.has_pieces(rollout) else []
    for at in range(first, end):
        if at >= rollout.length:
            yield ["", "", "", ""]
            continue
        trained = bool(rollout.loss_mask[at])
        logprob = f"{float(rollout.logprobs[at]):.3f}" if trained else ""
        text = pieces[at - first] if pieces else ""
        yield [str(int(rollout.tokens[at])), text, logprob, "trained" if trained else ""]


def show_pair(detail: GroupDetail, one: RolloutView, other: RolloutView, texts: Texts) -> None:
    """Prints the pair."""
    for line in pair_lines(detail, one, other, texts):
        say(line, indent="    ")
    rows = list(pair_rows(one, other, texts, PRINTED_TOKENS))
    if rows:
        look.show("", Printed(pair_view(one.rollout_id, other.rollout_id), rows))


def pair_record(one: RolloutView, other: RolloutView) -> dict[str, Any]:
    """``rlbuffer.pair/1``: where two rollouts part; None where they are the same, or a payload is gone."""
    is_there = one.rollout is not None and other.rollout is not None
    return {
        "schema": "rlbuffer.pair/1",
        "rollouts": [one.rollout_id, other.rollout_id],
        "rewards": [one.reward, other.reward],
        "part_at_token": first_difference(one, other) if is_there else None,
    }
