"""``rlbuffer drop``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from rlbuffer_cli import options
from rlbuffer_cli.options import echo, say

if TYPE_CHECKING:
    from rlbuffer.client.operations import Chosen


@click.command("drop")
@options.common
@click.option("--where", required=True, metavar="FILTER", help="Which groups, e.g. 'env:math age>=2'.")
@click.option("--yes", is_flag=True, help="Do it; without, it is asked on a terminal, else only said what would go.")
@click.option("--json", "as_json", is_flag=True, help="One object; without --yes nothing is dropped.")
def command(where: str, yes: bool, as_json: bool, given: options.Given) -> int:
    """Drop pending groups that match a filter.

    Groups that are forming or ready go, whole, and are counted as dropped by an operator; parts that come later are
    late. What is in a step stays (see `rlbuffer runs void`). The filter is that of `rlbuffer inspect --where`;
    'state:forming,ready' is everything that is pending. Works with and without a batcher, also while it runs.

    \b
    Examples:
      rlbuffer drop --where 'env:math reward<0.01'
      rlbuffer drop --where 'worker:inf-3' --run math --yes
      rlbuffer drop --where 'id=math.7'  # id:math.7 takes math.70, too
    """
    from rlbuffer.client.filters import parse
    from rlbuffer.client.operations import choose
    from rlbuffer.store.operator import OperatorStore
    from rlbuffer_cli.session import open_existing

    if not parse(where).terms:
        raise click.UsageError("which groups? 'state:forming,ready' is everything that is pending")
    with open_existing(given.load(), run_given=given.run is not None) as buffer:
        name, store = buffer.run, buffer.role(OperatorStore)
        chosen = choose(store, where, text_of=buffer.texts.decoded)
        what = amounts(len(chosen.drops), chosen.rollouts, chosen.tokens)
        if as_json and (not yes or not chosen.drops):
            echo(json.dumps(_record(name, where, chosen, pushes=0)))
            return 0
        if not chosen.drops:
            say(f'no pending group of run "{name}" matches {where!r}')
            return 0
        question = f'this drops {what} of run "{name}" for good ({_envs(chosen)})'
        if not yes:
            if not sys.stdin.isatty():
                raise click.UsageError(f"{question}: say so with --yes")
            if not click.confirm(f"{question}: do it?"):
                say("nothing was dropped")
                return 1
        pushes = store.drop_pending(chosen.drops)
    if as_json:
        echo(json.dumps(_record(name, where, chosen, pushes=pushes)))
        return 0
    say(f'dropped {what} of run "{name}" ({_envs(chosen)})')
    gone = sum(len(entries) for _, entries in chosen.drops) - pushes
    if gone:
        say(f"{gone} of their pushes had left the pool meanwhile: into a step, or dropped otherwise", err=True)
    return 0


def amounts(groups: int, rollouts: int, tokens: int) -> str:
    """``12 groups (96 rollouts, 31k tokens)``."""
    from rlbuffer.state.text import amount, plural

    return f"{plural(groups, 'group')} ({plural(rollouts, 'rollout')}, {amount(tokens)} tokens)"


def _envs(chosen: Chosen) -> str:
    return ", ".join(f"{env} {groups}" for env, (groups, _, _) in chosen.envs().items())


def _record(run: str, where: str, chosen: Chosen, *, pushes: int) -> dict[str, Any]:
    return {
        "schema": "rlbuffer.drop/1",
        "run": run,
        "where": where,
        "groups": len(chosen.drops),
        "rollouts": chosen.rollouts,
        "tokens": chosen.tokens,
        "envs": {
            env: {"groups": groups, "rollouts": rollouts, "tokens": tokens}
            for env, (groups, rollouts, tokens) in chosen.envs().items()
        },
        "dropped_pushes": pushes,
    }
