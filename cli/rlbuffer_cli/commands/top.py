"""``rlbuffer top``."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress

import click

from rlbuffer_cli import options
from rlbuffer_cli.options import show_json
from rlbuffer_cli.session import open_existing, open_run
from rlbuffer_cli.starting import is_drawable


@options.command("top")
@options.common_of_run
@click.option("--once", is_flag=True, help="Look once. [default: again and again until ctrl-C]")
@click.option(
    "--every", type=click.FloatRange(0.1), default=2.0, show_default=True, metavar="S", help="Seconds between looks."
)
@options.json_lines("One object per look.")
def command(given: options.RunFlags, once: bool, every: float) -> int:
    """See both sides of a run at a glance: who waits for whom, rates, lag, drops. Changes nothing.

    Rates and drops are of the last minute; where steps are slow, of the time of five, at most of five minutes. On a
    terminal the view stays in place; elsewhere every look is printed below the one before. How long the trainer waits
    is shown where its output folder can be read from here.

    \b
    Example:
      rlbuffer top --once
    """
    if not (once or options.is_json()) and is_drawable(sys.stdout):
        return _draw(given, every)
    from rlbuffer.client.run_state import read_run_state
    from rlbuffer.state.step_record import StepRecord
    from rlbuffer_cli import look
    from rlbuffer_cli.live import MetricsTail
    from rlbuffer_cli.plots import METRICS_FILE
    from rlbuffer_cli.run_tables import READ_RECORDS
    from rlbuffer_cli.view import run_view

    with open_run(given) as buffer, suppress(KeyboardInterrupt):
        tail, trained = MetricsTail(buffer.settings.output_dir / METRICS_FILE), list[StepRecord]()
        while True:
            state = read_run_state(buffer.store, history=0 if options.is_json() else READ_RECORDS)
            trained += tail.new()
            if options.is_json():
                show_json(state.as_object())
            else:
                look.show(run_view(state, trained), *([] if once else [""]))
            if once:
                break
            sys.stdout.flush()
            time.sleep(every)
    return 0


def _draw(given: options.RunFlags, every: float) -> int:
    """The dashboard, until `q` or ctrl-C."""
    from rlbuffer.run.run_log import LOG_FILE
    from rlbuffer_cli.live import LiveRun, shown

    loaded = given.load()
    with open_existing(loaded) as buffer:
        settings = buffer.settings
    planned = 0 if loaded.place("trainer.steps") == "default" else None
    over = threading.Event()

    def take(key: str) -> None:
        if key == "q":
            over.set()

    keys = {"T": "light, dark", "q": "quit", "rlbuffer inspect": "browse"}
    log = settings.run_dir / LOG_FILE
    watch = LiveRun(
        settings,
        title="rlbuffer top",
        opening="looking ...",
        every=every,
        planned=planned,
        keys=keys,
        log_file=log,
    )
    with suppress(KeyboardInterrupt), shown(watch, take=take), watch:
        over.wait()
    return 0
