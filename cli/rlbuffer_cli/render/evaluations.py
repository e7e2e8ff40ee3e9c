"""Evaluations of a run: how good its versions are, in a line of `inspect` per env."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlbuffer.state.text import plural, printable
from rlbuffer_cli.render.text import sparkline

if TYPE_CHECKING:
    from rlbuffer.store.viewer import Viewer

SHOWN_EVALUATIONS = 1000
"""Newest results that are looked at."""


def summarize_evaluations(store: Viewer) -> tuple[Mapping[str, Any], ...]:
    """Results by env, then by version."""
    results = store.evaluations(limit=SHOWN_EVALUATIONS)
    return tuple(sorted(results, key=lambda result: (result["env"], result["version"])))


def evaluation_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The newest version of every env, and how the mean reward went over the versions before."""
    lines = []
    for env in dict.fromkeys(result["env"] for result in results):
        mine = [result for result in results if result["env"] == env]
        newest = mine[-1]
        history = f"   {sparkline([float(r['reward/mean']) for r in mine])}" if len(mine) > 1 else ""
        lines.append(
            f"eval/{printable(env)}/reward/mean {newest['reward/mean']:.3f} +- {newest['reward/error']:.3f} "
            f"at version {newest['version']} ({plural(newest['rollouts'], 'rollout')}){history}"
        )
    return lines
