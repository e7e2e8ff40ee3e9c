"""Committed steps: a row for each, and one step as bars of its ranks' rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlbuffer.records.states import ClosedBy
from rlbuffer.state.text import amount, percent, plural
from rlbuffer_cli.text import utc

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.client.views import StepView
    from rlbuffer.records.step_header import StepHeader
    from rlbuffer.store.records import PartRollout

STEP_HEADER = ("step", "state", "committed (UTC)", "groups", "rollouts", "tokens", "fill", "closed by", "reward", "age")
STEP_NUMBERS = frozenset({"step", "groups", "rollouts", "tokens", "fill", "reward"})
STEP_OPTIONAL = ("fill", "groups", "committed (UTC)")
WHY_CLOSED: Mapping[str, str] = MappingProxyType(
    {
        ClosedBy.CAPACITY: "the next group would have needed more rows than a step has",
        ClosedBy.FILL: "its tokens reached close_fill, every env near its share",
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
ROLLOUT_HEADER = ("rollout", "env", "reward", "advantage", "tokens", "rank", "worker", "prompt")
STEP_ROLLOUT_NUMBERS = frozenset({"reward", "advantage", "tokens", "rank"})
ROLLOUT_OPTIONAL = ("worker", "rank", "prompt", "env", "advantage")
STEP_SHOWN_PROMPT = 40
"""Characters of a prompt's id."""


def facts_of(header: StepHeader) -> dict[str, Any]:
    """``rlbuffer.step/1``: the fields of a header, by name."""
    return {"schema": "rlbuffer.step/1", **{field.name: getattr(header, field.name) for field in fields(header)}}


def cost_of(buffer: Buffer) -> tuple[int, int]:
    """The cost of a token and of a token's square, as the batcher of the run weighs them."""
    given = buffer.store.meta().config.get("cost")
    pair = given if isinstance(given, list | tuple) and len(given) == 2 else buffer.settings.batcher.cost
    return int(pair[0]), int(pair[1])


def step_row(header: StepHeader, *, trained: int) -> list[str]:
    """Cells under :data:`STEP_HEADER`. `trained`: the last step that the trainer has acknowledged."""
    return [
        str(header.step),
        "trained" if header.step <= trained else "packed",
        str(utc(header.committed_ms / 1000))[11:19],
        str(len(header.group_ids)),
        str(header.rollouts),
        amount(header.tokens),
        percent(header.fill),
        str(header.closed_by),
        "" if header.reward is None else f"{header.reward:.3f}",
        f"{header.age:.1f} max {header.max_age}",
    ]


def step_lines(step: StepView, *, trained: int) -> list[str]:
    """The step in lines: its size, why it was closed, and a line per env."""
    header = step.header
    cells = dict(zip(STEP_HEADER, step_row(header, trained=trained), strict=True))
    reward = f"reward {cells['reward']}" if cells["reward"] else "no reward"
    when = f"committed {cells['committed (UTC)']} UTC"
    why = WHY_CLOSED.get(header.closed_by, "")
    lines = [
        f"step {header.step}   {cells['state']}   {when}   closed by {header.closed_by}{f': {why}' if why else ''}",
        (
            f"  {plural(len(header.group_ids), 'group')} · {plural(header.rollouts, 'rollout')} · "
            f"{plural(header.tokens, 'token')} ({cells['fill']} of its capacity) · {reward} · "
            f"age {cells['age']} · {plural(header.world_size, 'rank')}"
        ),
    ]
    if header.masks_truncated:
        lines.append("  no token of a truncated rollout is trained")
    marks = env_marks(step)
    for env, facts in header.envs.items():
        mean = facts.get("reward")
        lines.append(
            f"  {marks.get(env, ' ')} {env}: {plural(facts.get('groups', 0), 'group')} · "
            f"{plural(facts.get('rollouts', 0), 'rollout')} · {amount(facts.get('tokens', 0))} tokens"
            + (f" · reward {mean:.3f}" if mean is not None else "")
        )
    scored = worst_first(step)
    if scored and scored[0].info.reward != scored[-1].info.reward:
        worst, best = (f"{m.info.rollout_id} (reward {m.info.reward:.3f})" for m in (scored[0], scored[-1]))
        lines.append(f"  worst rollout {worst} · best {best}")
    return lines


def worst_first(step: StepView) -> list[PartRollout]:
    """The scored rollouts of the step by their reward, then by their advantage."""
    scored = [member for _, member in step.rollouts if member.info.reward is not None]
    return sorted(scored, key=lambda m: (m.info.reward or 0.0, m.advantage, m.group_id, m.index))


def rollout_rows(step: StepView) -> list[list[str]]:
    """Cells under :data:`ROLLOUT_HEADER` for each scored rollout, the worst first."""
    ranks = {id(member): rank for rank, member in step.rollouts}
    return [
        [
            member.info.rollout_id,
            member.env,
            f"{member.info.reward:.3f}",
            f"{member.advantage:+.3f}",
            str(member.info.length),
            str(ranks[id(member)]),
            member.worker,
            member.prompt_id[:STEP_SHOWN_PROMPT],
        ]
        for member in worst_first(step)
    ]


def env_marks(step: StepView) -> Mapping[str, str]:
    """Env -> the mark of its tokens in a bar."""
    envs = list(dict.fromkeys([*step.header.envs, *(member.env for _, member in step.rollouts)]))
    return {env: ENV_MARKS[i % len(ENV_MARKS)] for i, env in enumerate(envs)}


def rank_figures(step: StepView, cost: tuple[int, int]) -> list[dict[str, Any]]:
    """Rank, rows, tokens and cost of each rank; `cost` (a, b): a rollout of L tokens costs a L + b L^2."""
    lengths = {member.info.rollout_id: member.info.length for _, member in step.rollouts}
    out = []
    for rank, micro_steps in enumerate(step.rows):
        rows = [row for micro_step in micro_steps for row in micro_step]
        sizes = [lengths[name] for row in rows for name in row]
        weights = sum(cost[0] * size + cost[1] * size * size for size in sizes)
        out.append({"rank": rank, "rows": [list(row) for row in rows], "tokens": sum(sizes), "cost": weights})
    return out


def rank_lines(step: StepView, width: int, cost: tuple[int, int]) -> Iterator[str]:
    """A bar for each row of each rank: the tokens of its envs, then what is empty."""
    marks = env_marks(step)
    rollouts: dict[str, Any] = {member.info.rollout_id: member for _, member in step.rollouts}
    capacity = max(1, step.row_tokens)
    room = max(8, width - 30)
    legend = "  ".join(f"{mark} {env}" for env, mark in marks.items())
    yield f"rows of {step.row_tokens:,} tokens: {legend}  {EMPTY} empty"
    ranks = rank_figures(step, cost)
    most = max((rank["cost"] for rank in ranks), default=0) or 1
    for rank in ranks:
        rows, tokens = rank["rows"], rank["tokens"]
        empty = 1 - tokens / (capacity * len(rows)) if rows else 0.0
        size = f"{plural(tokens, 'token')} in {plural(len(rows), 'row')}, {percent(empty)} empty"
        yield f"rank {rank['rank']}: {size}, {percent(rank['cost'] / most)} of the work of the busiest rank"
        for number, row in enumerate(rows):
            used = sum(rollouts[name].info.length for name in row)
            bar, reached = "", 0
            for name in row:
                reached += rollouts[name].info.length
                bar += marks[rollouts[name].env] * (min(room, round(room * reached / capacity)) - len(bar))
            yield f"  {number:>4} {bar.ljust(room, EMPTY)} {used:>9,} tokens"
