"""Groups as one HTML page: self-contained, without a script, everything that a worker wrote escaped.

Lenses are radio buttons and CSS: each token has a class per lens, and its numbers as a title to hover over. Tokens that
nobody sampled carry no numbers and stay together in one piece of text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from rlbuffer.client.texts import Texts
from rlbuffer.client.trainer_values import NONE, TrainerValues
from rlbuffer.client.views import GroupDetail, RolloutView
from rlbuffer.records.rollout import Rollout
from rlbuffer.state.text import plural, printable
from rlbuffer_cli.render.group import (
    MEMBER_HEADER,
    as_json,
    headline,
    largest_reward,
    life,
    member_row,
    shared_prompt,
)
from rlbuffer_cli.render.html_style import LENSES, policy, style
from rlbuffer_cli.render.lenses import NAMES, Lens, advantages_of, entropy_of, lens, mismatch_of
from rlbuffer_cli.render.text import BLOCKS, utc

TOKENS_WITH_NUMBERS = 8000
"""Tokens of one rollout with their numbers: half of them the first ones, half the last ones."""
MOST_CHARACTERS = 64_000
"""Characters of a text, an answer or metadata."""
MARK_COLOURS = {
    2: ["", "red", "magenta", "yellow", "cyan", "green"],
    3: ["", "red", "yellow", "green"],
    4: ["", "green"],
    5: ["", "green", "cyan", "yellow", "magenta", "red"],
    6: ["", "green", "cyan", "yellow", "magenta", "red"],
    7: ["", *(("cyan", "yellow", "green", "magenta", "red")[i % 5] for i in range(10))],
}
CSS = style(MARK_COLOURS)
POLICY = policy(CSS, forms="none")
"""Of a file."""
SERVED_POLICY = policy(CSS, forms="self")
"""Of a page of `inspect --web`, in its headers and in itself: a browser obeys both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Everything that a page knows besides the groups."""

    texts: Texts
    kept: Callable[[str, Rollout], TrainerValues] = lambda group_id, rollout: NONE
    """(group id, rollout) -> values that the trainer keeps of it."""


def safe(text: str, most: int = MOST_CHARACTERS) -> str:
    """Anybody's text inside an element or a quoted attribute: escaped, controls shown, of at most `most` characters."""
    more = f" ... {plural(len(text) - most, 'character')} more" if len(text) > most else ""
    return escape(printable(text[:most], lines=True) + more, quote=True)


def page(details: Iterable[GroupDetail], *, title: str, sources: Sources, now: float | None = None) -> Iterator[str]:
    """The page in pieces, in order. `title` heads it; `now`: Unix seconds of the reading."""
    yield from head(title, POLICY)
    yield lens_choice()
    when = f"read {str(utc(now))[:19].replace('T', ' ')} UTC; " if now is not None else ""
    yield f'<p class="n">{when}choose a lens, hover over a token for its numbers.</p>\n'
    count = 0
    for count, detail in enumerate(details, 1):
        yield from group_section(detail, sources, is_open=count == 1)
    yield f'<p class="n">{plural(count, "group")}. Made by rlbuffer; nothing in this file is fetched.</p>\n'
    yield "</main></body></html>\n"


def head(title: str, policy: str) -> Iterator[str]:
    """Everything before the first element of the page's own. `policy`: its Content-Security-Policy."""
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    yield '<meta name="viewport" content="width=device-width"><meta name="referrer" content="no-referrer">\n'
    yield f"<title>{safe(title, 200)}</title>\n<style>{CSS}</style></head>\n<body><main><h1>{safe(title, 1000)}</h1>\n"


def lens_choice() -> str:
    """The radio buttons of the lenses."""
    buttons = "".join(
        f'<label><input type="radio" name="lens" id="l{key}"{" checked" * (key == 1)}> {name}</label>'
        for key, name in enumerate(NAMES, 1)
        if key == 1 or key in LENSES
    )
    return f"<fieldset>{buttons}</fieldset>\n"


# -- a group -----------------------------------------------------------------------------------------------------------
def group_section(detail: GroupDetail, sources: Sources, *, is_open: bool) -> Iterator[str]:
    """A group: what its rollouts share, a row for each, then each by its tokens."""
    yield f"<details{' open' * is_open}><summary>{safe(headline(detail.view)[0])}</summary>\n"
    yield from group_facts(detail, sources)
    if not detail.members:
        yield "<p>its rollouts are no longer kept</p>\n"
    else:
        yield _table(detail)
    for member in detail.members:
        yield from rollout_section(detail, member, sources, is_open=is_open and len(detail.members) == 1)
    yield "</details>\n"


def group_facts(detail: GroupDetail, sources: Sources) -> Iterator[str]:
    """The group in lines below its headline: its figures, its prompt, answer and metadata."""
    yield "".join(f'<p class="n">{safe(line.strip())}</p>\n' for line in headline(detail.view)[1:])
    prompt = shared_prompt(detail, sources.texts)
    shown = (("prompt", prompt), ("answer", detail.answer), ("metadata", dict(detail.metadata)))
    for name, value in shown:
        if value not in (None, "", {}):
            text = value if isinstance(value, str) else json.dumps(as_json(value), ensure_ascii=False)
            yield f"<h4>{name}</h4><pre>{safe(text)}</pre>\n"


def _table(detail: GroupDetail) -> str:
    names, best = MEMBER_HEADER[:-1], largest_reward(detail)
    rows = [member_row(member, best, "")[:-1] for member in detail.members]
    cells = "".join(f"<tr>{''.join(f'<td>{safe(cell, 200)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>\n{cells}</table>\n"


# -- a rollout ---------------------------------------------------------------------------------------------------------
def rollout_section(detail: GroupDetail, member: RolloutView, sources: Sources, *, is_open: bool) -> Iterator[str]:
    """A rollout: its figures, its life, and its tokens by turn."""
    reward = "not scored" if member.reward is None else f"reward {member.reward:.3f}"
    advantage = "" if member.advantage is None else f" · advantage {member.advantage:+.4f}"
    figures = f"{reward}{advantage} · {plural(member.length, 'token')} · {member.finish_reason}"
    yield f"<details{' open' * is_open}><summary>{safe(f'{member.rollout_id}   {figures}', 1000)}</summary>\n"
    named = " · ".join(f"{name} {value:.3f}" for name, value in member.rewards.items())
    yield f'<p class="n">{safe(named)}</p>\n' if named else ""
    yield f'<p class="n">{safe(" -> ".join(life(detail.view, member)))}</p>\n'
    rollout: Rollout | None = member.rollout
    if rollout is None:
        yield "<p>its payload is no longer kept</p>\n</details>\n"
        return
    kept = sources.kept(detail.view.group_id, rollout)
    origin = sources.texts.origin(rollout)
    lenses = {key: lens(detail.view, member, key, origin=origin, kept=kept) for key in (1, *LENSES)}
    yield "".join(f'<p class="g g{key}">{_legend(key, shown)}</p>\n' for key, shown in lenses.items())
    yield "<div>"
    if rollout.text is not None and not sources.texts.has_pieces(rollout):
        yield f'<pre class="w">{safe(rollout.text)}</pre>'
    half, length = TOKENS_WITH_NUMBERS // 2, rollout.length
    for first, end in [(0, half), (length - half, length)] if length > TOKENS_WITH_NUMBERS else [(0, length)]:
        if first:
            left_out = f"{first - half:,} tokens left out: rlbuffer inspect ID --tokens {half}:{first}"
            yield f'<p class="t n">{left_out}</p>'
        yield from _tokens(member, first, end, lenses, sources.texts, kept)
    yield "</div></details>\n"


def _legend(key: int, shown: Lens) -> str:
    """The legend of a lens; each mark in it looks like the tokens of its level."""
    text = f"  {safe(shown.legend)}"
    for level, mark in enumerate(shown.marks if shown.levels is not None else ()):
        sample = "Aa" if mark in BLOCKS else safe(mark)  # a block would hide the colour behind it
        text = text.replace(f"  {safe(mark)} ", f'  <b class="{LENSES[key]}{level}">{sample}</b> ', 1)
    return text[2:]


def _tokens(
    member: RolloutView, first: int, end: int, lenses: dict[int, Lens], texts: Texts, kept: TrainerValues
) -> Iterator[str]:
    """Tokens [first, end), a paragraph per turn."""
    rollout: Rollout = member.rollout
    pieces, titles = texts.pieces(rollout, first, end), _titles(member, kept)
    blank = "" if texts.has_pieces(rollout) else " "
    classes = {LENSES[key]: shown.levels for key, shown in lenses.items() if shown.levels is not None and key in LENSES}
    is_sampled = rollout.loss_mask.copy()
    for span in rollout.version_spans:
        is_sampled[span.start : span.end] = True
    turns = {turn.start: turn for turn in rollout.turns if turn.end > turn.start}
    turns = {turn.start: turn for turn in rollout.turns if turn.end > turn.start}
    edges = sorted({first, *(start for start in turns if first < start < end), end})
    for start, stop in pairwise(edges):
        if (turn := turns.get(start)) is not None:
            reward = f" · reward {turn.reward:g}" if turn.reward is not None else ""
            yield f"<h4>{safe(turn.role, 100)} · {plural(turn.end - turn.start, 'token')}{reward}</h4>"
        yield '<div class="t">'
        for sampled, run in groupby(range(start, stop), key=lambda t: bool(is_sampled[t])):
            if not sampled:
                at = list(run)
                text = blank.join(pieces[t - first] for t in at)
                yield f'<i title="tokens {at[0]} to {at[-1]}, not sampled">{safe(text, len(text))}{blank}</i>'
                continue
            for t in run:
                names = " ".join(f"{letter}{levels[t]}" for letter, levels in classes.items() if levels[t])
                yield f'<b class="{names}" title="{titles(t)}">{safe(pieces[t - first], 1000)}</b>{blank}'
        yield "</div>\n"


def _titles(member: RolloutView, kept: TrainerValues) -> Callable[[int], str]:
    """Position -> all numbers of a sampled token."""
    rollout: Rollout = member.rollout
    advantages, entropy, mismatch = advantages_of(member), entropy_of(rollout, kept), mismatch_of(rollout, kept)
    versions = np.full(rollout.length, -1, np.int64)
    for span in rollout.version_spans:
        versions[span.start : span.end] = span.policy_version

    def title(t: int) -> str:
        parts: list[Any] = [f"token {t} · id {int(rollout.tokens[t])}"]
        if rollout.loss_mask[t]:
            logprob = float(rollout.logprobs[t])
            parts.append(f"logprob {logprob:.4f} (p {np.exp(min(logprob, 0.0)):.3f})")
            parts += [f"advantage {float(advantages[t]):+.4f}"] if advantages is not None else []
            parts += [f"entropy {float(entropy[0][t]):.4f}"] if entropy is not None else []
            parts += [f"mismatch {float(mismatch[0][t]):+.4f}"] if mismatch is not None else []
        else:
            parts.append("not trained")
        parts += [f"version {versions[t]}"] if versions[t] >= 0 else []
        return safe(" · ".join(parts))

    return title
