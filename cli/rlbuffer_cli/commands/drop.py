"""``rlbuffer drop``."""

from __future__ import annotations

import click

from rlbuffer.state.text import amount, plural
from rlbuffer_cli import options
from rlbuffer_cli.options import answer, say
from rlbuffer_cli.session import open_run


@options.command("drop")
@options.common_of_run
@click.option("--where", required=True, metavar="FILTER", help="Which groups, e.g. 'env:math age>=2'.")
@options.yes
@options.json_lines("One object.")
def command(where: str, yes: bool, given: options.RunFlags) -> int:
    """Drop pending groups that match a filter.

    Groups that are forming or ready go, whole, and are counted as dropped by an operator; parts that come later are
    late. What is in a step stays (see `rlbuffer runs rewind`). The filter is that of `rlbuffer inspect --where`;
    'state:forming,ready' is everything that is pending. Works with and without a batcher, also while it runs.

    \b
    Examples:
      rlbuffer drop --where 'env:math reward<0.01'
      rlbuffer drop --where 'worker:inf-3' --run math --yes
      rlbuffer drop --where 'id=math.7'  # id:math.7 takes math.70, too
    """
    from rlbuffer.client.filters import parse
    from rlbuffer.client.operations import choose
    from rlbuffer.client.texts import Texts, tokenizer_directory
    from rlbuffer.store.operator import OperatorStore

    if not parse(where).terms:
        raise click.UsageError("which groups? 'state:forming,ready' is everything that is pending")
    with open_run(given) as buffer:
        name, store = buffer.run, buffer.store.role(OperatorStore)
        texts = Texts(tokenizer_directory(buffer.settings))
        chosen = choose(store, where, text_of=texts.decoded)
        sums = {"groups": len(chosen.drops), "rollouts": chosen.rollouts, "tokens": chosen.tokens}
        envs = chosen.envs()
        named = ", ".join(f"{env} {groups}" for env, (groups, _, _) in envs.items())
        what = f'{amounts(**sums)} of run "{name}" for good ({named})'
        if chosen.drops and not options.is_wanted(f"drops {what}", yes=yes):
            return 1
        pushes = store.drop_pending(chosen.drops) if chosen.drops else 0
    record = {"schema": "rlbuffer.drop/1", "run": name, "where": where, **sums, "dropped_pushes": pushes}
    record["envs"] = {env: dict(zip(sums, counts, strict=True)) for env, counts in envs.items()}
    text = f"dropped {what}" if chosen.drops else f'no pending group of run "{name}" matches {where!r}'
    answer(record, text)
    gone = sum(len(entries) for _, entries in chosen.drops) - pushes
    if gone:
        say(f"{gone} of their pushes had left the pool meanwhile: into a step, or dropped otherwise", err=True)
    return 0


def amounts(groups: int, rollouts: int, tokens: int) -> str:
    """``12 groups (96 rollouts, 31k tokens)``."""
    return f"{plural(groups, 'group')} ({plural(rollouts, 'rollout')}, {amount(tokens)} tokens)"
