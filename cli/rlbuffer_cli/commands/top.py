"""``rlbuffer top``."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from rlbuffer_cli import options
from rlbuffer_cli.options import echo

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from rlbuffer.state.run_state import RunState
    from rlbuffer.state.step_record import StepRecord
    from rlbuffer_cli.live import MetricsTail


@click.command("top")
@options.common
@click.option("--once", is_flag=True, help="Look once. [default: again and again until ctrl-C]")
@click.option(
    "--every", type=click.FloatRange(0.1), default=2.0, show_default=True, metavar="S", help="Seconds between looks."
)
@click.option("--json", "as_json", is_flag=True, help="One object per look.")
def command(given: options.Given, once: bool, every: float, as_json: bool) -> int:
    """See both sides of a run at a glance: who waits for whom, rates, lag, drops. Changes nothing.

    Rates and drops are of the last minute; where steps are slow, of the time of five, at most of five minutes. On a
    terminal the view stays in place; elsewhere every look is printed below the one before. How long the trainer waits
    is shown where its output folder can be read from here.

    \b
    Example:
      rlbuffer top --once
    """
    from rlbuffer.client.run_state import read_run_state
    from rlbuffer.errors import ServerRefused, ServerUnreachable
    from rlbuffer_cli.plots import METRICS_FILE
    from rlbuffer_cli.run_tables import READ_RECORDS
    from rlbuffer_cli.session import open_existing
    from rlbuffer_cli.starting import is_drawable

    loaded = given.load()
    with open_existing(loaded) as buffer, suppress(KeyboardInterrupt):
        if as_json:
            while True:
                echo(json.dumps(read_run_state(buffer.store).as_object()))
                if once:
                    return 0
                sys.stdout.flush()
                time.sleep(every)
        from rlbuffer_cli import look
        from rlbuffer_cli.live import MetricsTail, shown

        folder = loaded.settings.model_copy(update={"run": buffer.run}).output_dir
        view = _View(MetricsTail(folder / METRICS_FILE))
        if once or not is_drawable(sys.stdout):
            while True:
                view.state = read_run_state(buffer.store, history=READ_RECORDS)
                look.show(view)
                if once:
                    return 0
                echo("")
                sys.stdout.flush()
                time.sleep(every)
        with shown(view, is_whole=True):
            while True:
                try:
                    view.state, view.trouble = read_run_state(buffer.store, history=READ_RECORDS), ""
                except (ServerRefused, ServerUnreachable) as error:
                    view.trouble = str(error).splitlines()[0]
                time.sleep(every)
    return 0


class _View:
    """The last look."""

    def __init__(self, tail: MetricsTail) -> None:
        self._tail = tail
        self._trained: list[StepRecord] = []
        self.state: RunState | None = None
        self.trouble = ""
        """The reason why it failed."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        from rlbuffer.state.text import printable
        from rlbuffer_cli.view import run_view

        self._trained += self._tail.new()
        if self.trouble:
            yield Text.assemble(("✕ ", "dropped"), printable(self.trouble))
        yield Text("looking ...") if self.state is None else run_view(self.state, self._trained)
