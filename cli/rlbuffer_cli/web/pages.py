"""Pages from templates: what stands on each, and how anybody's text is made harmless there.

Text is escaped by the templates, controls and direction marks in it are shown, styles come from one sheet whose hash is
in the policy, and there is no script.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
from markupsafe import Markup, escape

from rlbuffer.client.details import GroupDetail
from rlbuffer.client.rollout_view import RolloutView
from rlbuffer.client.texts import Texts
from rlbuffer.client.trainer_values import NONE, TrainerValues
from rlbuffer.process.files import write_whole
from rlbuffer.records.rollout import Rollout
from rlbuffer.state.text import plural, printable
from rlbuffer_cli.facts import (
    first_difference,
    headline,
    life,
    member_of,
    panels,
    rows_of,
    sections,
    shared_prompt,
    shared_values,
    state_of,
    verdict,
    worded,
)
from rlbuffer_cli.lenses import NAMES, Lens, lens, numbers_of
from rlbuffer_cli.look import PALETTE, TINTS, Tint, plain
from rlbuffer_cli.plots import Curve
from rlbuffer_cli.shown_run import ShownRun
from rlbuffer_cli.table import Column, View
from rlbuffer_cli.tables import MEMBERS
from rlbuffer_cli.text import MINUS, WIDE, moment

LENSES = NAMES[:7]
STDOUT = "-"
TITLED_TOKENS = 20_000
"""A rollout of more tokens has no numbers to point at: they are most of a page."""
MOST_CHARACTERS = 64_000
"""Characters of a text, an answer or metadata."""
MOST_IN_CELL = 1000
PLOT_WIDTH = 350
"""Of a curve, in units that are pixels where three charts stand side by side: so the labels of its axes can be read."""
SMOOTHED = 5
"""Steps that a point of a curve is the mean of."""
TITLES = {"age": "age, versions", "fill": "fill of a step", "tokens": "tokens of a step"}
"""Of curves whose name does not say what they are of."""
LEAST_PROSE = 20
"""Characters of a cell from which a narrow window gives it a line of its own."""
_CLASSES = {*PALETTE, "bold"}
_LINES = {
    "thick": "box-shadow: inset 0 -2px var(--ink)",
    "thin": "box-shadow: inset 0 -1px var(--ink)",
    "dotted": "text-decoration: underline dotted var(--minus) 2px",
    "dim": "color: var(--faint)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageData:
    """Everything that a page knows besides the groups."""

    texts: Texts
    kept: Callable[[str, Rollout], TrainerValues] = lambda group_id, rollout: NONE
    """(group id, rollout) -> values that the trainer keeps of it."""


# -- templates ---------------------------------------------------------------------------------------------------------
def page(name: str, *, title: str, forms: str = "none", **values: Any) -> Iterator[str]:
    """The page of a template in pieces. `forms`: where a form may be sent, `none` or `self`."""
    empty = {
        "lenses": (),
        "count": {},
        "standing": (),
        "tabs": (),
        "problems": (),
        "tab": "",
        "href": lambda view, item: "",
    }
    given = {"title": title, "policy": Markup(policy(forms)), "style": Markup(style()), **values}
    return _templates().get_template(f"{name}.html.j2").generate(empty | given)


@cache
def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("rlbuffer_cli", "web/templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value), lines=True),
    )
    tokens = partial(plural, noun="token")
    made.filters |= {
        "marked": marked,
        "shortened": shortened,
        "seen_from": seen_from,
        "has_prose": has_prose,
        "plural_tokens": tokens,
    }
    return made


def seen_from(column: Column, view: View) -> str:
    """The classes of a column's cells: those that a narrow window leaves out, as a narrow terminal does."""
    is_first_or_last = column in (view.columns[0], view.columns[-1])
    size = "" if is_first_or_last or not column.at else "wide" if column.at >= WIDE else "mid"
    return " ".join(filter(None, ["num" * column.is_number, size]))


def has_prose(view: View, items: Sequence[Any]) -> bool:
    """Its last column holds words that need a line of their own in a narrow window."""
    return any(len(plain(view.columns[-1].cell(item))) > LEAST_PROSE for item in items)


def marked(value: object) -> Markup:
    """A cell: anybody's text, or one with the styles of a terminal, which are classes here."""
    text = plain(value)
    text.truncate(MOST_IN_CELL, overflow="ellipsis")
    spans = [(span.start, span.end, str(span.style)) for span in text.spans] + [(0, len(text), str(text.style))]
    edges = sorted({0, len(text), *(at for start, end, _ in spans for at in (start, end))})
    out = []
    for start, end in pairwise(edges):
        classes = " ".join(sorted({name for a, b, name in spans if a <= start and end <= b and name in _CLASSES}))
        piece = escape(text.plain[start:end])
        out.append(f'<span class="{classes}">{piece}</span>' if classes else piece)
    return Markup("").join(map(Markup, out))


def shortened(text: str) -> str:
    """At most :data:`MOST_CHARACTERS` of it."""
    more = f" ... {plural(len(text) - MOST_CHARACTERS, 'character')} more" if len(text) > MOST_CHARACTERS else ""
    return text[:MOST_CHARACTERS] + more


@cache
def style() -> str:
    """The whole sheet: the palette on light and dark, the rules, and a rule for each level of each lens."""
    colours = "; ".join(f"--{name}: light-dark({light}, {dark})" for name, (light, dark) in PALETTE.items())
    rules = [f":root {{ color-scheme: light dark; {colours} }}"]
    rules.append((resources.files("rlbuffer_cli") / "web" / "look.css").read_text(encoding="utf-8"))
    rules += [f".{name} {{ color: var(--{name}) }}" for name in PALETTE]
    for name in LENSES:
        chosen = f":is(body.lens-{name}:not(:has(.anchor:target)), body:has(#{name}:target))"
        rules.append(f"{chosen} .g-{name} {{ display: flex }}")
        rules.append(f"{chosen} .t-{name} {{ color: var(--ink); border-bottom-color: var(--accent) }}")
        for level, tint in enumerate(TINTS.get(name, ())):
            if rule := _rule(tint):
                rules.append(f"{chosen} .{name[:2]}{level} {{ {rule} }}")
        if name == "plain":
            rules.append(f"{chosen} .whole {{ display: block }} {chosen} .whole ~ * {{ display: none }}")
            rules.append(f"{chosen} .tokens .frame {{ display: none }}")
    return "\n".join(rules)


def _rule(tint: Tint) -> str:
    over = f"color-mix(in srgb, var(--{tint.colour}) {tint.part:.0%}, transparent)" if tint.colour else ""
    return "; ".join(filter(None, [f"background: {over}" if over else "", _LINES.get(tint.signal, "")]))


@cache
def policy(forms: str) -> str:
    """The Content-Security-Policy: nothing is fetched, run or framed."""
    digest = base64.b64encode(hashlib.sha256(style().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action '{forms}'"


# -- groups and rollouts -----------------------------------------------------------------------------------------------
def sources_of(run: ShownRun) -> PageData:
    """Everything that pages of this run know besides the groups: its tokenizer, and what its trainer keeps here."""
    return PageData(texts=run.texts, kept=run.kept.of)


def write_page(details: Iterable[GroupDetail], file: str, *, title: str, run: ShownRun | None = None) -> None:
    """Writes groups as one page to `file`, ``-`` for stdout, a group at a time. A file is there whole or not at all.

    `run`: where it is known.

    Raises:
        OSError: the file cannot be written.
    """
    sources = PageData(texts=Texts()) if run is None else sources_of(run)
    at = "" if run is None else moment(run.now())
    groups = (shown_group(detail, sources, is_whole=True) for detail in details)
    pieces = page("export", title=title, groups=groups, view=MEMBERS, lenses=LENSES, lens="logprob", at=at)
    if file == STDOUT:
        sys.stdout.writelines(pieces)
        return
    write_whole(Path(file).expanduser(), pieces)


def one_of(detail: GroupDetail, identifier: str) -> GroupDetail:
    """The group, with one rollout alone where `identifier` (GROUP/INDEX) names it."""
    if "/" not in identifier:
        return detail
    return replace(detail, members=(member_of(detail, identifier),))


def file_name(identifier: str) -> str:
    """The name of a file for an id, which may hold anything: ``rlbuffer-math.7-3.html``."""
    return f"rlbuffer-{re.sub(r'[^A-Za-z0-9_.-]+', '-', identifier)[:120]}.html"


def shown_group(detail: GroupDetail, sources: PageData, *, is_whole: bool = False) -> dict[str, Any]:
    """What a page says of a group; `is_whole`: with the tokens of its rollouts."""
    view = detail.view
    title, *facts = (line if isinstance(line, str) else line.plain for line in headline(view))
    return {
        "title": title,
        "facts": [state_of(view), f"env {view.env}", *(fact for line in facts for fact in line.strip().split(" · "))],
        "step": detail.view.step,
        "prompt": shared_prompt(detail, sources.texts),
        "texts": [
            (name.capitalize(), value if isinstance(value, str) else worded(value))
            for name, value in shared_values(detail, sources.texts).items()
        ],
        "rows": rows_of(detail, sources.texts),
        "rollouts": [shown_rollout(detail, m, sources) for m in detail.members] if is_whole else [],
    }


def shown_rollout(detail: GroupDetail, member: RolloutView, sources: PageData, *, since: int = 0) -> dict[str, Any]:
    """What a page says of a rollout: its verdict, its life, and its tokens by turn, through every lens; those from
    token `since` on."""
    facts = verdict(member)
    shown: dict[str, Any] = {
        "id": member.rollout_id,
        "title": f"{member.rollout_id}   {' · '.join(facts)}",
        "facts": facts,
        "life": life(detail.view, member),
        "panels": panels(detail, member),
        "lacks": member.lacks,
        "legends": [],
        "rows": [],
        "sequences": [],
    }
    rollout: Rollout | None = member.rollout
    if rollout is None:
        return shown
    if rollout.further:
        rows = rows_of(replace(detail, members=(member,)), sources.texts)
        return shown | {"rows": rows, "sequences": [shown_rollout(detail, one, sources) for one in member.sequences()]}
    texts, kept = sources.texts, sources.kept(detail.view.group_id, rollout)
    lenses = [lens(detail.view, member, name, origin=texts.origin(rollout), kept=kept) for name in LENSES]
    has_pieces = texts.has_pieces(rollout)
    return shown | {
        "legends": [
            {"name": each.name, "note": each.note, "labels": [(f"{each.name[:2]}{n}", text) for n, text in each.labels]}
            for each in lenses
        ],
        "whole": [] if has_pieces or rollout.text is None else texts.prompt(rollout) + texts.answer(rollout),
        "turns": list(_turns(member, lenses, texts, kept, since)),
    }


def _turns(
    member: RolloutView, lenses: Sequence[Lens], texts: Texts, kept: TrainerValues, since: int
) -> Iterator[dict[str, Any]]:
    rollout: Rollout = member.rollout
    pieces = texts.pieces(rollout, 0, rollout.length)
    blank = "" if texts.has_pieces(rollout) else " "
    levels = [(each.name[:2], each.levels) for each in lenses if each.levels is not None]
    is_sampled = rollout.loss_mask.copy()
    for span in rollout.version_spans:
        is_sampled[span.start : span.end] = True
    has_titles, numbers_at = rollout.length <= TITLED_TOKENS, numbers_of(member, kept)
    given = member.shared.tokens if member.shared is not None else 0

    is_frame = texts.frame(rollout)

    def marks(at: int) -> str:
        shades = " ".join(f"{code}{each[at]}" for code, each in levels) if is_sampled[at] else ""
        more = " frame" * bool(is_frame[at]) + " given" * (at < given and not rollout.loss_mask[at])
        return f"{shades}{more}".strip()

    def alike(at: int) -> Any:
        return (marks(at), at if has_titles and is_sampled[at] else -1)

    for first, end, title, rule in sections(member, texts):
        start = max(first, since)
        if start >= end:
            continue
        tokens = []
        for (classes, _), run in groupby(range(start, end), key=alike):
            first, *rest = run
            text = blank.join([pieces[first], *(pieces[at] for at in rest)]) + blank
            values = numbers_at(first) if has_titles and is_sampled[first] else {}
            numbers = [f"token {first}", *(f"{name} {value}" for name, value in values.items())] if values else []
            tokens.append((text, classes, " · ".join(numbers)))
        shown = f"{title}, from token {start:,} on" if start > first else title
        yield {"title": shown, "rule": rule, "tokens": tokens}


# -- two rollouts ------------------------------------------------------------------------------------------------------
def shown_pair(detail: GroupDetail, one: RolloutView, other: RolloutView, sources: PageData) -> dict[str, Any]:
    """What a page says of two rollouts of a group: the facts, what both begin with, and each from where they part."""
    parts = first_difference(one, other)
    pairs = [dict(_flat(panels(detail, member))) for member in (one, other)]
    names = dict.fromkeys(name for pair in pairs for name in pair)
    shown: dict[str, Any] = {
        "names": [one.rollout_id, other.rollout_id],
        "facts": [(name, *(pair.get(name, "") for pair in pairs)) for name in names],
        "parts": parts,
        "begin": [],
        "sides": [],
    }
    if one.rollout is None or other.rollout is None:
        return shown
    first = one.main.rollout
    since = first.length if parts is None else parts
    sides = [shown_rollout(detail, member.main, sources, since=since) for member in (one, other)]
    return shown | {"begin": sources.texts.turns(first, 0, since), "shared": since, "sides": sides}


def _flat(groups: Iterable[tuple[str, str, Mapping[str, str]]]) -> Iterator[tuple[str, str]]:
    for title, value, facts in groups:
        yield title, value
        yield from facts.items()


# -- curves ------------------------------------------------------------------------------------------------------------
def drawn(curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """Each curve as a line on axes of its own values, and of the steps of all: the mean of :data:`SMOOTHED` steps, with
    a band from the least to the most of them."""
    steps = [step for curve in curves.values() for step, _ in curve.points]
    return [_drawn(curve, min(steps), max(steps)) for curve in curves.values()]


def _drawn(curve: Curve, first: int, last: int) -> dict[str, Any]:
    values = [value for _, value in curve.points]
    low, high = min(values), max(values)
    across, up = max(1, last - first), (high - low) or 1.0
    windows = [values[max(0, at - SMOOTHED + 1) : at + 1] for at in range(len(values))]
    xs = [f"{PLOT_WIDTH * (step - first) / across:.1f}" for step, _ in curve.points]

    def line(of: Callable[[Sequence[float]], float]) -> list[str]:
        return [f"{x},{80 - 72 * (of(window) - low) / up:.1f}" for x, window in zip(xs, windows, strict=True)]

    means = line(fmean)
    now, most, least = written([values[-1], high, low])
    return {
        "title": TITLES.get(curve.name, curve.name),
        "legend": curve.legend,
        "now": now,
        "high": most,
        "low": least,
        "first": first,
        "last": last,
        "width": PLOT_WIDTH,
        "points": " ".join(means),
        "band": " ".join([*line(max), *reversed(line(min))]),
        "end": means[-1].split(","),
    }


def written(values: Sequence[float]) -> list[str]:
    """Numbers of one axis with as many decimals as the largest needs: three digits that count.

    Example:
        >>> written([15570.0, 3.5]), written([0.5, -0.25])
        (['15,570', '4'], ['0.500', '−0.250'])
    """
    size = max(map(abs, values), default=0.0)
    places = max(0, 3 - len(str(int(size)))) if size >= 1 else 3 if size >= 0.01 or not size else 5
    return [f"{value:,.{places}f}".replace("-", MINUS) for value in values]
