"""``rlbuffer run``."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from datetime import datetime

import click

from rlbuffer_cli import options
from rlbuffer_cli.options import echo, say
from rlbuffer_cli.starting import starting


@click.command("run")
@click.argument("config_file", metavar="[CONFIG]", required=False)
@options.common
@click.option("--steps", type=int, metavar="N", help="Stop after this many trained steps.")
@options.display
def command(
    config_file: str | None,
    given: options.Given,
    steps: int | None,
    display: str,
) -> int:
    """Start and supervise every process of a run on this machine.

    CONFIG is an rlbuffer.toml. Starts the embedded server (unless redis_url is set), the batcher, every worker and
    the trainer; restarts what dies; ends when the trainer has made its steps. Ctrl-C drains workers, batcher and
    trainer, in that order. What all of them say is kept in HOME/runs/RUN/run.log, their pids in pids.json.

    \b
    Example:
      rlbuffer run rlbuffer.toml --steps 500
    """
    from rlbuffer.client.buffer import connect
    from rlbuffer.process.signals import stop_on_signals
    from rlbuffer.run.host_checks import EVERYTHING
    from rlbuffer.run.supervisor import Supervisor
    from rlbuffer_cli.session import say_ended

    flags = {"trainer.steps": ("--steps", steps)}
    given = replace(given, config=config_file or given.config)
    loaded = given.load(flags, parts=EVERYTHING)
    settings = loaded.settings
    shown = options.choose_display(display)
    stop = threading.Event()
    starting("connecting to the server, loading torch")

    with stop_on_signals(stop):
        if shown == "rich":
            from rlbuffer_cli.render.run_view import watch_run

            code = watch_run(loaded, stop, planned=settings.trainer.steps)
        else:
            origin = options.redis_origin(loaded)
            with connect(settings.redis_url, run=settings.run, config=settings, name="run", origin=origin) as buffer:
                code = Supervisor(settings, say=_printer(shown), origin=origin).run(stop)
                say_ended(buffer, settings, code)
    name, where = options.program(), given.again(settings.run)
    say(f"next: {name} inspect {where}   {name} verify {where}", err=True)
    return code


def _printer(shown: str):  # type: ignore[no-untyped-def]
    from rlbuffer.events.event import as_object
    from rlbuffer_cli.events import ProcessSaid

    def relay(name: str, line: str) -> None:
        if shown == "json":
            echo(json.dumps(as_object(ProcessSaid(process=name, line=line))))
        elif shown == "plain":
            echo(f"{datetime.now():%H:%M:%S} {name:<14} {line}")
        sys.stdout.flush()

    return relay
