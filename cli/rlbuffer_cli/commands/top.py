"""``rlbuffer top``."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING

import click

from rlbuffer_cli import options
from rlbuffer_cli.options import echo
from rlbuffer_cli.starting import clear

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.state.run_state import RunState
    from rlbuffer.state.step_record import StepRecord
    from rlbuffer_cli.render.metrics_tail import MetricsTail


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
    from rlbuffer.errors import ServerRefused, ServerUnreachable
    from rlbuffer_cli.render.metrics_tail import MetricsTail
    from rlbuffer_cli.session import open_existing

    loaded = given.load()
    with open_existing(loaded, run_given=given.run is not None) as buffer:
        folder = loaded.settings.model_copy(update={"run": buffer.run}).output_dir
        view = _View(buffer, MetricsTail(folder / "metrics.jsonl"))
        clear()
        if once or as_json or not _may_draw():
            return _print(view, once=once, every=every, as_json=as_json)
        from rlbuffer_cli.render.foot import Foot

        with Foot(view.lines) as foot:
            try:
                while True:
                    try:
                        view.look()
                    except (ServerRefused, ServerUnreachable) as error:
                        view.trouble = str(error).splitlines()[0]
                    time.sleep(every)
            except KeyboardInterrupt:
                foot.close(keep=True)
    return 0


def _may_draw() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _print(view: _View, *, once: bool, every: float, as_json: bool) -> int:
    from rlbuffer_cli.render.text import terminal_width

    try:
        while True:
            if as_json:
                echo(json.dumps(view.read(history=0).as_object()))
            else:
                view.look()
                for line in [*view.rows(terminal_width()), *[""] * (not once)]:
                    echo(line)
            if once:
                return 0
            sys.stdout.flush()
            time.sleep(every)
    except KeyboardInterrupt:
        return 0


class _View:
    """The last look, for a terminal."""

    def __init__(self, buffer: Buffer, tail: MetricsTail) -> None:
        self._buffer, self._tail = buffer, tail
        self._trained: list[StepRecord] = []
        self._state: RunState | None = None
        self.trouble = ""
        """The reason why the last look failed; "" when it did not."""

    def read(self, *, history: int) -> RunState:
        from rlbuffer.client.run_state import read_run_state

        return read_run_state(self._buffer.store, history=history)

    def look(self) -> None:
        from rlbuffer_cli.render.run import READ_RECORDS

        self._trained += self._tail.new()
        self._state, self.trouble = self.read(history=READ_RECORDS), ""

    def rows(self, width: int | None) -> list[str]:
        from rlbuffer_cli.render.run import run_view

        return ["looking ..."] if self._state is None else run_view(self._state, width, self._trained)

    def lines(self, width: int) -> list[str]:
        """The view, cut to the lines that the terminal has; the last one is the cursor's."""
        from rlbuffer_cli.render.text import cut

        rows = [*([f"! {self.trouble}"] if self.trouble else []), *self.rows(width)]
        return [cut(row, width) for row in rows[: shutil.get_terminal_size().lines - 1]]
