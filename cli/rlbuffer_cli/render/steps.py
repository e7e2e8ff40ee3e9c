"""Committed steps: a row for each, and one step as bars of its ranks' rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rlbuffer.records.states import ClosedBy
from rlbuffer.state.text import amount, percent, plural, printable
from rlbuffer_cli.tables import worst_rows
from rlbuffer_cli.text import utc

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.client.views import StepView

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


def cost_of(buffer: Buffer) -> tuple[int, int]:
    """The cost of a token and of a token's square, as the batcher of the run weighs them."""
    given = buffer.store.meta().config.get("cost")
    pair = given if isinstance(given, list | tuple) and len(given) == 2 else buffer.settings.batcher.cost
    return int(pair[0]), int(pair[1])


def step_lines(step: StepView, *, trained: int) -> list[str]:
    """The step in lines: its size, why it was closed, and a line per env."""
    header = step.header
    reward = "no reward" if header.reward is None else f"reward {header.reward:.3f}"
    when = f"committed {str(utc(header.committed_ms / 1000))[11:19]} UTC"
    state = "trained" if header.step <= trained else "packed"
    why = WHY_CLOSED.get(header.closed_by, "")
    lines = [
        f"step {header.step}   {state}   {when}   closed by {header.closed_by}{f': {why}' if why else ''}",
        (
            f"  {plural(len(header.group_ids), 'group')} · {plural(header.rollouts, 'rollout')} · "
            f"{plural(header.tokens, 'token')} ({percent(header.fill)} of its capacity) · {reward} · "
            f"age {header.age:.1f} max {header.max_age} · {plural(header.world_size, 'rank')}"
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
    scored = [row.member for row in worst_rows(step)]
    if scored and scored[0].info.reward != scored[-1].info.reward:
        worst, best = (f"{m.info.rollout_id} (reward {m.info.reward:.3f})" for m in (scored[0], scored[-1]))
        lines.append(f"  worst rollout {worst} · best {best}")
    return lines


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


def rank_lines(step: StepView, width: int, cost: tuple[int, int]) -> Iterator[Text]:
    """A bar for each row of each rank: the tokens of its envs, then what is empty."""
    marks = env_marks(step)
    shades = {mark: f"e{min(4, at)}" for at, mark in enumerate(marks.values(), 1)}
    rollouts: dict[str, Any] = {member.info.rollout_id: member for _, member in step.rollouts}
    capacity = max(1, step.row_tokens)
    room = max(8, width - 26)
    legend = [part for env, mark in marks.items() for part in ((mark, shades[mark]), f" {printable(env)}  ")]
    yield Text.assemble(f"rows of {step.row_tokens:,} tokens: ", *legend, (EMPTY, "line"), " empty")
    ranks = rank_figures(step, cost)
    most = max((rank["cost"] for rank in ranks), default=0) or 1
    for rank in ranks:
        rows, tokens = rank["rows"], rank["tokens"]
        empty = 1 - tokens / (capacity * len(rows)) if rows else 0.0
        size = f"{plural(tokens, 'token')} in {plural(len(rows), 'row')}, {percent(empty)} empty"
        pace = ", sets the pace" if rank["cost"] == most and len(ranks) > 1 else ""
        yield Text(f"rank {rank['rank']}: {size}, {percent(rank['cost'] / most)} of the work of the busiest rank{pace}")
        for number, row in enumerate(rows):
            used = sum(rollouts[name].info.length for name in row)
            bar, reached = "", 0
            for name in row:
                reached += rollouts[name].info.length
                bar += marks[rollouts[name].env] * (min(room, round(room * reached / capacity)) - len(bar))
            drawn = [("".join(run), shades.get(mark, "line")) for mark, run in groupby(bar.ljust(room, EMPTY))]
            yield Text.assemble(f"  {number:>4} ", *drawn, f" {used:>9,} tokens", no_wrap=True)
