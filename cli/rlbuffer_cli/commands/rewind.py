"""``rlbuffer rewind``."""

from __future__ import annotations

import click

from rlbuffer.narration.numbers import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import say


@click.command("rewind")
@click.argument("number", metavar="N", type=click.IntRange(min=0))
@options.common
@click.option("--force", is_flag=True, help="Although a trainer is at work (it ends), or step N was retired.")
def command(number: int, force: bool, given: options.Given) -> int:
    """Take a run back to a step, and drop everything that is pending.

    The steps after N and all pending groups drop as void; policy versions above N are taken back. The run goes on from
    step N in a new epoch. The trainer takes its newest checkpoint, so those of later steps must be moved away first.
    With --force N may also be a step that was retired: steps up to the retired one stay counted as trained.

    \b
    Example:
      rlbuffer rewind 100 --run math
    """
    from rlbuffer_cli.session import open_existing, resume_hint

    loaded = given.load()
    with open_existing(loaded, run_given=given.run is not None) as buffer:
        outcome = buffer.store.rewind(number, force=force)
        name = buffer.run
    say(
        f'run "{name}" goes on from step {number} in epoch {outcome["epoch"]}; '
        f"void: {plural(outcome['steps'], 'step')}, {plural(outcome['entries'], 'pending push', 'pending pushes')}. "
        f"{resume_hint(loaded.settings, name, number)}"
    )
    return 0
