"""``rlbuffer reset``."""

from __future__ import annotations

from dataclasses import replace

import click

from rlbuffer.narration.numbers import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import say


@click.command("reset")
@click.argument("name", metavar="RUN")
@options.common
@click.option("--yes", is_flag=True, help="Do it; without, it is only said what would go.")
@click.option("--force", is_flag=True, help="Although processes of the run are at work.")
def command(
    name: str,
    yes: bool,
    force: bool,
    given: options.Given,
) -> int:
    """Remove a run from the server, with everything in it.

    Pool, steps, payloads, ledger and history; checkpoints and weights on the disk stay. Refused while processes of the
    run are at work, unless --force: a batcher or worker that is still there begins the run anew.

    \b
    Example:
      rlbuffer reset math --yes
    """
    if given.run not in (None, name):
        raise click.UsageError(f"the run is named twice: {name!r} and --run {given.run!r}")
    from rlbuffer.errors import RlbufferError, RunDamaged
    from rlbuffer_cli.session import at_work, open_existing

    with open_existing(replace(given, run=name).load(), run_given=True, even_damaged=True) as buffer:
        try:
            step = plural(buffer.store.meta().step, "step")
        except RunDamaged:
            step = "without its meta"
        content = f"{step}, {plural(buffer.ledger().total().pending[0], 'pending rollout')}"
        if not yes:
            raise click.UsageError(f'this removes run "{name}" ({content}) for good: say so with --yes')
        processes = [] if force else at_work(buffer)
        if processes:
            raise RlbufferError(
                f"processes of run {name!r} are at work, or were a few seconds ago: {', '.join(processes)}. Stop them "
                "first: what is still there begins the run anew. --force removes it all the same"
            )
        keys = buffer.store.delete_run()
    say(f'run "{name}" ({content}) is gone: {plural(keys, "key")} removed')
    return 0
