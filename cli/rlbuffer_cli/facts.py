"""What is said of a group, a rollout, two rollouts and a step: the lines that every screen has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from rlbuffer.client.agent_calls import call_count, call_of
from rlbuffer.client.details import GroupDetail
from rlbuffer.client.group_view import GroupView
from rlbuffer.client.rollout_view import RolloutView, Underway
from rlbuffer.client.spoken import Said, in_line, question_among
from rlbuffer.client.step_view import StepView
from rlbuffer.client.texts import Texts
from rlbuffer.errors import NotFound
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.states import ClosedBy, State
from rlbuffer.state.text import amount, duration, percent, plural, printable
from rlbuffer_cli import look
from rlbuffer_cli.lenses import numbers_of
from rlbuffer_cli.open_rollouts import standing
from rlbuffer_cli.table import View, of_tuples
from rlbuffer_cli.tables import MemberRow, age_of, member_rows, shared_words, version_range, worst_rows
from rlbuffer_cli.text import as_json, cut, moment, signs, time_of

MAX_TEXT, LINE_OF_TEXT = 160, 120
"""Characters of an answer in a row; of a prompt, an answer or metadata in a line."""
SHOWN_PROMPT_TOKENS = 40
NAMED_MEMBERS = 8
"""Rollouts that an error names."""
SHOWN_BEFORE = 3
"""Equal tokens that are shown before the first that differs."""
WHY_CLOSED: Mapping[str, str] = MappingProxyType(
    {
        ClosedBy.CAPACITY: "the next group would have needed more rows than a step has",
        ClosedBy.FILL: "it was as full as batcher.close_fill asks, with every env near its share",
        ClosedBy.GROUPS: "it held step_groups groups",
        ClosedBy.ROLLOUTS: "it held step_rollouts rollouts",
        ClosedBy.PARTIAL: "an env was short for too long",
        ClosedBy.TIMEOUT: "it had waited for fill_timeout_seconds",
        ClosedBy.END: "no env sends anything more",
    }
)
"""Rule -> why it ended the selection."""
ENV_MARKS = "█▓▒ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Marks of envs in a bar."""
EMPTY = "/"


# -- groups and rollouts -----------------------------------------------------------------------------------------------
def scored(reward: float | None) -> str:
    """The reward in words."""
    return "not scored" if reward is None else signs(f"reward {reward:.3f}")


def state_of(view: GroupView) -> Text:
    """Where the group stands: with its step, or why it was dropped."""
    why = f"({view.reason}: {view.detail})" if view.reason else ""
    return look.state(view.state, f"in step {view.step}" if view.step and not why else why)


def headline(view: GroupView) -> list[str | Text]:
    """The group in a few lines."""
    versions = f"{view.min_version}-{view.max_version}" if view.max_version > view.min_version else view.min_version
    whole = plural(view.planned_size or view.rollouts, "rollout")
    lines: list[str | Text] = [
        Text.assemble(printable(f"group {view.group_id}   "), state_of(view), printable(f"   env {view.env}"))
    ]
    facts = [
        f"{view.rollouts} of {whole}" if view.planned_size else whole,
        f"{amount(view.tokens)} tokens",
        scored(view.reward),
        f"used {view.uses} times" if view.uses > 1 else "",
        f"age {view.age}" if view.age is not None else "",
        f"version{'s' * (view.max_version > view.min_version)} {versions}",
        f"waited {duration(view.waited_seconds)}" if view.waited_seconds is not None else "",
        f"from {view.worker}" if view.worker else "",
        f"prompt {printable(view.prompt_id)}" if view.prompt_id else "",
    ]
    lines.append("  " + " · ".join(fact for fact in facts if fact))
    if view.detail and not view.reason:
        lines.append(f"  ! {printable(view.detail)}")
    return lines


def shared_values(detail: GroupDetail, texts: Texts) -> dict[str, Any]:
    """What all rollouts share: the prompt as text or token ids, the answer, the metadata; those that there are."""
    prompt = in_line(shared_prompt(detail, texts)) or _prompt_ids(detail.members)
    shared = {"prompt": prompt or None, "answer": detail.answer, "metadata": dict(detail.metadata) or None}
    return {name: value for name, value in shared.items() if value is not None}


def shared_lines(shared: Mapping[str, Any], most: int) -> list[str]:
    """A line for each of them, of at most `most` characters of its value."""
    texts = {name: value if name == "prompt" else worded(value) for name, value in shared.items()}
    return [f"  {name:<9} {cut(printable(text), most)}" for name, text in texts.items()]


def shared_prompt(detail: GroupDetail, texts: Texts) -> list[Said]:
    """The turns that all rollouts begin with; none where they differ, or where no text is known."""
    members = [m for m in detail.members if m.rollout is not None]
    if not members or len(members) < len(detail.members):
        return []
    first, *others = members
    begin = first.rollout.tokens[: first.prompt_tokens]
    alike = all(np.array_equal(begin, m.rollout.tokens[: m.prompt_tokens]) for m in others)
    return texts.prompt(first.rollout) if alike else []


def _prompt_ids(members: Sequence[RolloutView]) -> str:
    """The token ids that all rollouts begin with; "" where they differ or no payload is there."""
    prompts = {tuple(m.rollout.tokens[: m.prompt_tokens].tolist()) for m in members if m.rollout is not None}
    if len(prompts) != 1 or prompts == {()}:
        return ""
    ids = prompts.pop()
    more = f" ... ({len(ids):,} tokens)" if len(ids) > SHOWN_PROMPT_TOKENS else ""
    return f"token ids {' '.join(map(str, ids[:SHOWN_PROMPT_TOKENS]))}{more}"


def worded(value: Any) -> str:
    """The value as JSON: whether it is a text or a number matters to who compares answers."""
    return json.dumps(as_json(value), ensure_ascii=False)


def rows_of(
    detail: GroupDetail, texts: Texts, matches: Callable[[RolloutView], bool] = lambda member: False
) -> list[MemberRow]:
    """A row for each rollout and each of its sequences, with the beginning of what it says."""
    has_prompt = bool(shared_prompt(detail, texts))
    return member_rows(detail, lambda member: _answer(member, texts, has_prompt), matches)


def _answer(member: RolloutView, texts: Texts, is_prompt_shown: bool) -> str:
    """The beginning of a rollout's answer; behind its own question where no prompt is shown for all."""
    if member.rollout is None:
        return (member.text or "")[: MAX_TEXT + 1]
    answer = texts.answer(member.rollout, MAX_TEXT + 1)  # what is cut from it shows that there is more
    asked = None if is_prompt_shown or member.sequence is not None else question_among(texts.prompt(member.rollout))
    first, *others = [*([asked] if asked else []), *answer] or [Said("", "")]
    return " · ".join([first.text, *(f"{turn.role}: {turn.text}" if turn.role else turn.text for turn in others)])


def member_of(detail: GroupDetail, identifier: str) -> RolloutView:
    """The rollout of a group, or one of its sequences, by its id, by its index (``<group>/<index>``), or by a unique
    beginning of its id.

    Raises:
        NotFound: none of those that can be read fits, or several do.
    """
    view = detail.view
    if not detail.members:
        why = f"{view.state}{f' ({view.reason}: {view.detail})' if view.reason else ''}"
        raise NotFound(f"group {view.group_id!r} was {why}: its rollouts are no longer kept")
    head, _, tail = identifier.rpartition("/")
    is_its = view.group_id.startswith(head)  # an index alone, too; of another group there is nothing here
    tree = detail.tree()
    members = tree if is_its else ()
    fitting = [m for m in tree if m.rollout_id == identifier]
    fitting = fitting or [m for m in members if m.rollout_id.rsplit("/", 1)[-1] == tail]
    fitting = fitting or [m for m in members if m.rollout_id.startswith(identifier)]
    if len(fitting) != 1:
        named = ", ".join(m.rollout_id for m in detail.members[:NAMED_MEMBERS])
        more = f" and {len(detail.members) - NAMED_MEMBERS:,} more" if len(detail.members) > NAMED_MEMBERS else ""
        lacking = tail if is_its else identifier
        raise NotFound(f"group {view.group_id!r} has no rollout {lacking!r}. Its rollouts: {named}{more}.")
    return fitting[0]


def verdict(member: RolloutView) -> list[str]:
    """What a rollout earned, in all and in parts, how long it is, and why it ended."""
    calls = 0 if member.rollout is None else call_count(member.rollout.sequences)
    facts = [
        _judged(member),
        *(f"{name} {value:.3f}" for name, value in member.rewards.items()),
        "" if member.advantage is None else f"advantage {signs(f'{member.advantage:+.4f}')}",
        plural(member.length, "token"),
        f"{len(member.rollout.further) + 1} sequences" if member.rollout is not None and member.rollout.further else "",
        plural(calls, "call") if calls else "",
        member.name,
        member.finish_reason,
    ]
    return [fact for fact in facts if fact]


def _judged(member: RolloutView) -> str:
    if member.failure:
        return f"failed: {cut(printable(str(member.failure)), LINE_OF_TEXT)}"
    if member.underway is not None and member.reward is None:
        return standing(member.underway.rollout).plain
    return scored(member.reward)


def panels(detail: GroupDetail, member: RolloutView) -> list[tuple[str, str, dict[str, str]]]:
    """The numbers of a rollout that stand beside its text on every screen, in panels: title, its number, and further
    ones by name, those that there are."""
    view, rollout = detail.view, member.rollout
    turns = 0 if rollout is None else sum(len(sequence.turns) for sequence in rollout.sequences)
    calls = 0 if rollout is None else call_count(rollout.sequences)
    successes = {} if rollout is None else rollout.successes
    earned = {
        **{name: signs(f"{value:.3f}") for name, value in member.rewards.items()},
        **{name: "yes" if is_so else "no" for name, is_so in successes.items()},
        "advantage": "" if member.advantage is None else signs(f"{member.advantage:+.4f}"),
        "mean of the group": "" if view.reward is None else signs(f"{view.reward:.3f}"),
        "answer": "" if detail.answer is None else cut(printable(worded(detail.answer)), LINE_OF_TEXT),
    }
    size = {
        "prompt": f"{member.prompt_tokens:,}",
        "trained": f"{member.loss_tokens:,}",
        "turns": f"{turns:,}" if turns else "",
        "calls": f"{calls:,}" if calls else "",
        "logprob mean": "" if member.logprob_mean is None else signs(f"{member.logprob_mean:.3f}"),
        "stop": member.finish_reason,
        "sampled by": version_range(member),
        "age": "" if (age := age_of(view, member)) is None else str(age),
    }
    reward = "not scored" if member.reward is None else signs(f"{member.reward:.3f}")
    return [
        (title, number, {name: text for name, text in facts.items() if text})
        for title, number, facts in (("reward", reward, earned), ("tokens", f"{member.length:,}", size))
    ]


class Section(NamedTuple):
    """Tokens in a row that are shown under one heading."""

    start: int
    end: int
    title: str
    rule: str = ""
    """What stands above the heading: where a beginning that is shared starts and ends."""


def sections(member: RolloutView, texts: Texts) -> list[Section]:
    """The tokens by turn, or without turns the prompt and what was sampled after it; cut where the beginning ends that
    the sequence shares with an earlier one. A prompt is cut where its text says that somebody else speaks."""
    rollout: Rollout = member.rollout
    turns = [turn for turn in rollout.turns if turn.end > turn.start]
    shared = 0 if member.shared is None else member.shared.tokens
    firsts = [turn.start for turn in turns] if turns else [rollout.prompt_tokens]
    spoken = [turn for turn in texts.turns(rollout, 0, rollout.prompt_tokens) if turn.role]
    roles = {turn.opens if at else 0: turn.role for at, turn in enumerate(spoken)} if len(spoken) > bool(turns) else {}
    edges = sorted({0, *firsts, *(turn.end for turn in turns), *roles, shared, rollout.length})
    rules = {0: shared_words(member), shared: "its own from here"} if shared else {}
    return [Section(a, b, _title(rollout, a, b, roles.get(a, "")), rules.get(a, "")) for a, b in pairwise(edges)]


def _title(rollout: Rollout, start: int, end: int, spoken: str) -> str:
    turn = next((turn for turn in rollout.turns if turn.start <= start < turn.end), None)
    role = turn.role if turn else "" if rollout.turns else "prompt" if end <= rollout.prompt_tokens else "sampled"
    call = call_of(turn) if turn is not None and turn.start == start else 0
    reward = f"reward {turn.reward:g}" if turn is not None and turn.reward is not None and turn.start == start else ""
    named = f"call {call}" if call else ""
    return " · ".join(filter(None, (named, spoken or role, plural(end - start, "token"), reward)))


def life(view: GroupView, member: RolloutView) -> list[str]:
    """The rollout's life from sampling to training, as far as it came."""
    rollout: Rollout | None = member.rollout
    spans = [] if rollout is None or rollout.further else rollout.version_spans
    sampled = ", ".join(f"v{s.policy_version} [{s.start}, {s.end})" for s in spans) or version_range(member)
    stop = ""
    if rollout is not None:
        is_said = not rollout.is_truncated or rollout.finish_reason == "length"
        stop = f"{rollout.finish_reason}{'' if is_said else ' (truncated)'}".strip()
    if member.underway is not None:
        return _life_so_far(member.underway, sampled)
    stages = [f"sampled by {sampled}" + (f", stop: {stop}" if stop else "")]
    if member.failure:
        stages.append(f"failed: {printable(str(member.failure))}")
    if view.created is not None:
        by = f" by {printable(view.worker)}" if view.worker else ""
        stages.append(f"pushed {moment(view.created)}{by}")
    waited = f", {duration(view.waited_seconds)} after the push" if view.waited_seconds is not None else ""
    if member.left_out and member.step is None:
        return [*stages, f"left out of step {view.step}, which trains its group{waited} ({member.left_out})"]
    if member.step is not None:
        where = f", rank {member.place.rank}, row {member.place.row}" if member.place else ""
        stages.append(f"packed into step {member.step}{where}{waited}")
    if member.left_out:
        return [*stages, f"given to the trainer, and not trained ({member.left_out})"]
    if view.state == State.DROPPED:
        return [*stages, f"dropped{waited} ({view.reason}{f': {printable(view.detail)}' if view.detail else ''})"]
    return stages + ([view.state] if view.state != State.PACKED else [])


def _life_so_far(underway: Underway, sampled: str) -> list[str]:
    """The life of a rollout that is not pushed yet."""
    opened, now = underway
    stages = [f"begun {moment(opened.begun_ms / 1000)}"]
    if opened.calls:
        stages.append(f"{plural(opened.calls, 'call')} so far, sampled by {sampled}")
    stages.append(f"heard {duration(max(0.0, now - opened.heard_ms / 1000))} ago")
    if opened.deadline_ms:
        left = duration(max(0.0, opened.deadline_ms / 1000 - now))
        return [*stages, f"open: it counts as abandoned in {left} if nothing is heard"]
    end = opened.end
    why = f" (failed: {printable(str(end.failure))})" if end is not None and end.failure is not None else ""
    return [*stages, f"ended{why}; its group waits for the others, or for its push"]


# -- two rollouts ------------------------------------------------------------------------------------------------------
def pair_view(one: str, other: str) -> View:
    """The table of two rollouts, each by its id."""
    sides = [(name, name.rpartition("/")[2]) for name in map(printable, (one, other))]
    short = sides[0][1] != sides[1][1]
    parts = ("id", "text", "mask", "logprob")
    columns = [f"/{tail} {part}" if short else f"{name} {part}" for name, tail in sides for part in parts]
    numbers = {"token", *(title for title in columns if title.endswith((" id", " logprob")))}
    masks = {title for title in columns if title.endswith(" mask")}
    empty = "the payload of one of them is no longer kept"
    return of_tuples("tokens", ("token", "≠", *columns), numbers, wide=masks, empty=empty)


def best_and_worst(detail: GroupDetail) -> tuple[str, str] | None:
    """Ids of the rollouts with the largest and the smallest reward; None where no two differ in it."""
    scored = [member for member in detail.members if member.reward is not None]
    if not scored:
        return None
    best = max(scored, key=lambda member: member.reward or 0.0)
    worst = min(scored, key=lambda member: member.reward or 0.0)
    return None if best.reward == worst.reward else (best.rollout_id, worst.rollout_id)


def first_difference(one: RolloutView, other: RolloutView) -> int | None:
    """Position of the first token that differs, or that one of them lacks; None: they are the same, or a payload is
    gone."""
    if one.rollout is None or other.rollout is None:
        return None
    a, b = one.main.rollout.tokens, other.main.rollout.tokens
    both = min(len(a), len(b))
    differs = (a[:both] != b[:both]).nonzero()[0]
    if len(differs):
        return int(differs[0])
    return both if len(a) != len(b) else None


def pair_lines(one: RolloutView, other: RolloutView) -> list[str]:
    """What each earned, and where they part."""
    lines = [f"{m.rollout_id}: {' · '.join(verdict(m))}" for m in (one, other)]
    if one.rollout is None or other.rollout is None:
        return lines
    parts = first_difference(one, other)
    return [*lines, f"they part at token {parts:,}" if parts is not None else "their tokens are the same"]


def pair_rows(one: RolloutView, other: RolloutView, texts: Texts, most: int) -> Iterator[list[str]]:
    """Rows of :func:`pair_view`, for `most` tokens from a little before they part; a mark where they differ."""
    if one.rollout is None or other.rollout is None:
        return
    one, other = one.main, other.main
    parts = first_difference(one, other)
    first = max(0, (parts or 0) - SHOWN_BEFORE)
    end = min(max(one.length, other.length), first + most)
    sides = [token_cells(member, texts, first, end) for member in (one, other)]
    for at, (left, right) in enumerate(zip(*sides, strict=True), first):
        mark = "" if left[0] == right[0] else "≠ first" if at == parts else "≠"
        yield [str(at), mark, *left[:4], *right[:4]]


def token_cells(member: RolloutView, texts: Texts, first: int, end: int) -> Iterator[list[str]]:
    """Id, text, mask, logprob and advantage of each position; empty behind the rollout's end."""
    rollout: Rollout = member.rollout
    pieces = texts.pieces(rollout, first, end) if texts.has_pieces(rollout) else []
    numbers_at = numbers_of(member)
    for at in range(first, end):
        numbers = numbers_at(at) if at < rollout.length else {}
        text = pieces[at - first] if numbers and pieces else ""
        trained = "trained" if numbers.get("trained") == "yes" else ""
        yield [numbers.get("id", ""), text, trained, numbers.get("logprob", ""), numbers.get("advantage", "")]


# -- steps -------------------------------------------------------------------------------------------------------------
def step_lines(step: StepView, *, trained: int) -> list[str]:
    """The step in lines: its size, why it was closed, and a line per env."""
    header = step.header
    when = f"committed {time_of(header.committed_ms / 1000)} UTC"
    state = "trained" if header.step <= trained else "packed"
    why = WHY_CLOSED.get(header.closed_by, "")
    sequences = f", {plural(header.sequences, 'sequence')}" if header.sequences > header.rollouts else ""
    capacity = f" ({percent(header.capacity_share)} of its capacity)" if header.capacity_share else ""
    lines = [
        f"step {header.step}   {state}   {when}   closed by {header.closed_by}{f': {why}' if why else ''}",
        (
            f"  {plural(len(header.group_ids), 'group')} · {plural(header.rollouts, 'rollout')}{sequences} · "
            f"{plural(header.tokens, 'token')}{capacity} · {scored(header.reward)} · "
            f"age {header.age:.1f} max {header.max_age} · {plural(header.world_size, 'rank')}"
        ),
    ]
    if header.masks_truncated:
        lines.append("  no token of a truncated rollout is trained")
    marks = env_marks(step)
    for env, facts in header.envs.items():
        lines.append(
            f"  {marks.get(env, ' ')} {env}: {plural(facts.get('groups', 0), 'group')} · "
            f"{plural(facts.get('rollouts', 0), 'rollout')} · {amount(facts.get('tokens', 0))} tokens · "
            f"{scored(facts.get('reward'))}"
        )
    members = [row.member for row in worst_rows(step)]
    if members and members[0].info.reward != members[-1].info.reward:
        worst, best = (f"{m.info.rollout_id} ({scored(m.info.reward)})" for m in (members[0], members[-1]))
        lines.append(f"  worst rollout {worst} · best {best}")
    return lines


def env_marks(step: StepView) -> Mapping[str, str]:
    """Env -> the mark of its tokens in a bar."""
    envs = list(dict.fromkeys([*step.header.envs, *(member.env for _, member in step.rollouts)]))
    return {env: ENV_MARKS[i % len(ENV_MARKS)] for i, env in enumerate(envs)}


def env_shades(step: StepView) -> Mapping[str, str]:
    """Env -> the style of its tokens in a bar."""
    return {env: f"e{min(4, at)}" for at, env in enumerate(env_marks(step), 1)}


def rank_figures(step: StepView, cost: tuple[int, int]) -> list[dict[str, Any]]:
    """Rank, rows, tokens and cost of each rank; `cost` (a, b): a rollout of L tokens costs a L + b L^2."""
    lengths = {member.name: member.info.length for _, member in step.rollouts}
    out = []
    for rank, micro_steps in enumerate(step.rows):
        rows = [row for micro_step in micro_steps for row in micro_step]
        sizes = [lengths[name] for row in rows for name in row]
        weights = sum(cost[0] * size + cost[1] * size * size for size in sizes)
        out.append({"rank": rank, "rows": [list(row) for row in rows], "tokens": sum(sizes), "cost": weights})
    return out


def rank_bars(step: StepView, cost: tuple[int, int]) -> list[tuple[str, list[list[tuple[str, int]]]]]:
    """Of each rank: what it has to do, and its rows, each as the (env, tokens) of its rollouts."""
    members = {member.name: member for _, member in step.rollouts}
    ranks = rank_figures(step, cost)
    most = max((rank["cost"] for rank in ranks), default=0) or 1
    bars = []
    for rank in ranks:
        rows = [[(members[name].env, members[name].info.length) for name in row] for row in rank["rows"]]
        empty = 1 - rank["tokens"] / (max(1, step.row_tokens) * len(rows)) if rows else 0.0
        size = f"{plural(rank['tokens'], 'token')} in {plural(len(rows), 'row')}, {percent(empty)} empty"
        is_busiest = rank["cost"] == most and len(ranks) > 1
        work = "sets the pace" if is_busiest else f"{percent(rank['cost'] / most)} of the work of the busiest rank"
        bars.append((f"rank {rank['rank']}: {size}, {work}", rows))
    return bars


def rank_lines(step: StepView, width: int, cost: tuple[int, int]) -> Iterator[Text]:
    """A bar for each row of each rank: the tokens of its envs, then what is empty."""
    marks, shades = env_marks(step), env_shades(step)
    room = max(8, width - 26)
    legend = [part for env, mark in marks.items() for part in ((mark, shades[env]), f" {printable(env)}  ")]
    yield Text.assemble(f"rows of {step.row_tokens:,} tokens: ", *legend, (EMPTY, "line"), " empty")
    for title, rows in rank_bars(step, cost):
        yield Text(title)
        for number, row in enumerate(rows):
            drawn, reached, cells = Text(f"  {number:>4} ", no_wrap=True), 0, 0
            for env, size in row:
                reached += size
                end = min(room, round(room * reached / max(1, step.row_tokens)))
                drawn.append(marks[env] * (end - cells), shades[env])
                cells = end
            yield drawn.append(EMPTY * (room - cells), "line").append(f" {reached:>9,} tokens")
