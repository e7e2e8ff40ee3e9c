"""``rlbuffer top``."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext, suppress

import click

from rlbuffer.errors import ServerRefused, ServerUnreachable
from rlbuffer_cli import options
from rlbuffer_cli.options import show_json
from rlbuffer_cli.session import open_run
from rlbuffer_cli.starting import is_drawable


@options.command("top")
@options.common
@click.option("--once", is_flag=True, help="Look once. [default: again and again until ctrl-C]")
@click.option(
    "--every", type=click.FloatRange(0.1), default=2.0, show_default=True, metavar="S", help="Seconds between looks."
)
@options.json_lines("One object per look.")
def command(given: options.Given, once: bool, every: float) -> int:
    """See both sides of a run at a glance: who waits for whom, rates, lag, drops. Changes nothing.

    Rates and drops are of the last minute; where steps are slow, of the time of five, at most of five minutes. On a
    terminal the view stays in place; elsewhere every look is printed below the one before. How long the trainer waits
    is shown where its output folder can be read from here.

    \b
    Example:
      rlbuffer top --once
    """
    from rich.console import Group, RenderableType
    from rich.text import Text

    from rlbuffer.client.run_state import read_run_state
    from rlbuffer.state.step_record import StepRecord
    from rlbuffer_cli import look
    from rlbuffer_cli.live import MetricsTail, shown
    from rlbuffer_cli.plots import METRICS_FILE
    from rlbuffer_cli.run_tables import READ_RECORDS
    from rlbuffer_cli.view import bad, run_view

    is_drawn = not (once or options.is_json()) and is_drawable(sys.stdout)
    with open_run(given) as buffer, suppress(KeyboardInterrupt):
        tail, trained = MetricsTail(buffer.settings.output_dir / METRICS_FILE), list[StepRecord]()
        with shown(Text("looking ..."), is_whole=True) if is_drawn else nullcontext() as live:
            view: RenderableType = ""
            while True:
                trouble = ""
                try:
                    state = read_run_state(buffer.store, history=0 if options.is_json() else READ_RECORDS)
                    trained += tail.new()
                    view = run_view(state, trained)
                except (ServerRefused, ServerUnreachable) as error:
                    if live is None:
                        raise
                    trouble = str(error).splitlines()[0]
                if options.is_json():
                    show_json(state.as_object())
                elif live is None:
                    look.show(view, *([] if once else [""]))
                else:
                    live.update(Group(*([bad(trouble)] if trouble else []), view))
                if once:
                    break
                sys.stdout.flush()
                time.sleep(every)
    return 0
