"""The pool: a table of groups, below the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlbuffer.records.states import State
from rlbuffer.state.text import amount, duration
from rlbuffer_cli.options import echo, say
from rlbuffer_cli.render.run import ENV_HEADER, ENV_NUMBERS, ENV_OPTIONAL, env_legend, env_row, run_lines
from rlbuffer_cli.text import show_table, sparkline, utc

if TYPE_CHECKING:
    from rlbuffer.client.views import GroupView
    from rlbuffer.state.run_state import RunState

GROUP_ORDER = "first those in the pool, then those in steps, then dropped ones, the newest of each first"
NOT_KEPT = "-"
"""Stands for what a dropped group had and its record has not."""
NOT_KEPT_LEGEND = "-  not kept of a dropped group"
GROUP_HEADER = ("id", "env", "rollouts", "reward", "spread", "age", "tokens", "state", "waited", "worker", "prompt")
GROUP_NUMBERS = frozenset({"rollouts", "reward", "age", "tokens", "waited"})
GROUP_OPTIONAL = ("prompt", "worker", "env", "waited", "rollouts", "tokens", "spread")
"""Columns that a narrow terminal does without, the first ones first."""
SHOWN_PROMPT = 24
"""Characters of a prompt's id in a row."""
SORTS: Mapping[str, Callable[[GroupView], Any]] = MappingProxyType(
    {
        "newest first": lambda view: 0,
        "id": lambda view: view.group_id,
        "env": lambda view: view.env,
        "reward": lambda view: (view.reward is not None, view.reward or 0.0),
        "age": lambda view: view.age if view.age is not None else -1,
        "tokens": lambda view: view.tokens,
        "state": lambda view: (view.state, view.reason),
        "waited": lambda view: view.waited_seconds if view.waited_seconds is not None else -1.0,
        "worker": lambda view: view.worker,
    }
)
"""Orders of groups, the worst reward and the smallest number first."""


def group_record(view: GroupView) -> dict[str, Any]:
    """``rlbuffer.group/1``: numbers raw, ids whole, UTC times."""
    return {"schema": "rlbuffer.group/1", **asdict(view), "created": utc(view.created)}


def show_run(state: RunState) -> None:
    """Prints the run and its envs."""
    for line in run_lines(state):
        say(line, indent="    ")
    echo("")
    if state.envs:
        rows = [env_row(state, env) for env in state.envs]
        show_table(ENV_HEADER, rows, right=ENV_NUMBERS, optional=ENV_OPTIONAL)
        for line in env_legend(state):
            say(line, indent="")


def show(state: RunState, groups: Sequence[GroupView], *, where: str, limit: int) -> None:
    """Prints the run, its envs and groups."""
    show_run(state)
    if state.envs:
        echo("")
    if not groups:
        envs = ", ".join(env.name for env in state.envs)
        echo(f"no group matches {where!r}   (envs: {envs})" if where else "no groups yet")
        return
    rows = [group_row(view) for view in groups]
    show_table(GROUP_HEADER, rows, right=GROUP_NUMBERS, optional=GROUP_OPTIONAL)
    if any(NOT_KEPT in row for row in rows):
        say(NOT_KEPT_LEGEND)
    if len(groups) == limit:
        say(f"the first {limit} ({GROUP_ORDER}): --limit shows more, --where chooses", err=True)
    say(f"one group: rlbuffer inspect {groups[0].group_id}", err=True)


def group_row(view: GroupView) -> list[str]:
    """Cells under :data:`GROUP_HEADER`."""
    low, high = min(view.rewards, default=0.0), max(view.rewards, default=1.0)
    state = f"{view.state} {view.reason}" if view.reason else view.state
    unknown = NOT_KEPT if view.state == State.DROPPED else ""
    return [
        view.group_id,
        view.env,
        f"{view.rollouts}/{view.planned_size}" if view.planned_size else str(view.rollouts),
        unknown if view.reward is None else f"{view.reward:.3f}",
        sparkline(view.rewards, low=min(low, 0.0), high=max(high, 1.0)) or unknown,
        unknown if view.age is None else str(view.age),
        amount(view.tokens),
        f"{state} in {view.step}{f' (use {view.uses})' * (view.uses > 1)}" if view.step else state,
        duration(view.waited_seconds) or unknown,
        view.worker,
        view.prompt_id[:SHOWN_PROMPT],
    ]
