"""``rlbuffer step``."""

from __future__ import annotations

import click

from rlbuffer.narration.numbers import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import say


@click.group("step")
def command() -> None:
    """Take a committed step back.

    \b
    Example:
      rlbuffer step void 120 --run math
    """


@command.command("void")
@click.argument("number", metavar="N", type=click.IntRange(min=1))
@options.common
@click.option("--force", is_flag=True, help="Although a trainer is at work; it ends.")
def void(number: int, force: bool, given: options.Given) -> int:
    """Take step N and what follows it out of the run.

    Their rollouts drop as void and are not trained again; what is pending stays. The run goes on from the step before
    in a new epoch. The trainer takes its newest checkpoint, so those of later steps must be moved away first.

    \b
    Example:
      rlbuffer step void 120 --run math
    """
    from rlbuffer_cli.session import open_existing, resume_hint

    loaded = given.load()
    with open_existing(loaded, run_given=given.run is not None) as buffer:
        outcome = buffer.store.void_from(number, force=force)
        name = buffer.run
    say(
        f'run "{name}" goes on from step {number - 1} in epoch {outcome["epoch"]}; '
        f"void: {plural(outcome['steps'], 'step')}. {resume_hint(loaded.settings, name, number - 1)}"
    )
    return 0
