"""``rlbuffer run``."""

from __future__ import annotations

import logging
import threading

from rlbuffer.process.logs import fields
from rlbuffer_cli import options
from rlbuffer_cli.options import say
from rlbuffer_cli.session import warn_of_server
from rlbuffer_cli.starting import starting

_log = logging.getLogger("rlbuffer.run")


@options.command("run")
@options.common_of_file
@options.setting("trainer.steps", "Stop after this many trained steps.", type=int, metavar="N")
@options.display
def command(given: options.RunFlags, display: str) -> int:
    """Start and supervise every process of a run on this machine.

    FILE has the settings; without it the rlbuffer.toml of this folder counts. Starts the embedded server (unless
    redis_url is set), the batcher, every worker and the trainer; restarts what dies; ends when the trainer has made
    its steps. Ctrl-C drains workers, batcher and trainer, in that order. What all of them say is kept in
    HOME/runs/RUN/run.log, their pids in pids.json.

    \b
    Example:
      rlbuffer run rlbuffer.toml --steps 500
    """
    from rlbuffer.checks.check import EVERYTHING
    from rlbuffer.process.signals import stop_on_signals

    loaded = given.load(parts=EVERYTHING)
    warn_of_server(loaded)
    run, display, stop = loaded.settings.run, options.choose_display(display), threading.Event()
    starting("loading torch")
    from rlbuffer_cli.live import supervised

    with stop_on_signals(stop), supervised(loaded, display, stop, _relay, title="rlbuffer run") as ended:
        code = ended.code
    name, where = options.program(), given.again(run)
    say(f"next: {name} inspect {where}   {name} verify {where}", err=True)
    return code


def _relay(name: str, line: str) -> None:
    _log.info("%-14s %s", name, line, extra=fields("log", process=name, line=line))
