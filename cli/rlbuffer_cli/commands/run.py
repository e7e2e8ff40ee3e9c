"""``rlbuffer run``."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from dataclasses import replace

import click

from rlbuffer.process.logs import fields
from rlbuffer_cli import options
from rlbuffer_cli.options import say
from rlbuffer_cli.starting import starting

_log = logging.getLogger("rlbuffer.run")


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
    from rlbuffer.checks.check import EVERYTHING
    from rlbuffer.client.buffer import connect
    from rlbuffer.process.signals import stop_on_signals
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
        origin = options.redis_origin(loaded)
        with ExitStack() as stack:
            enter = stack.enter_context
            buffer = enter(connect(settings.redis_url, run=settings.run, config=settings, name="run", origin=origin))
            relay = _relay
            if shown == "rich":
                from rlbuffer_cli.live import Watch
                from rlbuffer_cli.live import shown as drawn

                watch = Watch(settings, title=f'rlbuffer run "{settings.run}"', opening="starting the processes ...")
                watch.may_ask.set()
                relay = watch.log
                enter(drawn(watch, is_whole=True))
                enter(watch)
            else:
                enter(options.writing(shown))
            code = Supervisor(settings, say=relay, origin=origin).run(stop)
            say_ended(buffer, settings, code)
    name, where = options.program(), given.again(settings.run)
    say(f"next: {name} inspect {where}   {name} verify {where}", err=True)
    return code


def _relay(name: str, line: str) -> None:
    _log.info("%-14s %s", name, line, extra=fields("log", process=name, line=line))
