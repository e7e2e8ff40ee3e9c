"""The work of each process of `rlbuffer run` once it is started: serve, sample, train.

The supervisor hands over the settings as JSON, so that a process acts on what was loaded at the start, not on what a
file says by then. Every process ends when its supervisor is gone, whatever killed it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection

from rlbuffer.config.placement import gpus_of, visible
from rlbuffer.config.settings import RunSettings, ScoreSettings, WorkerSettings, from_json
from rlbuffer.errors import RlbufferError
from rlbuffer.process import logs
from rlbuffer.process.environment import name_process
from rlbuffer.process.signals import end_with, end_with_supervisor, stop_on_signals
from rlbuffer.process.watchdog import ended_when_stuck
from rlbuffer.state.text import printable

DONE = 10
"""Exit code of a worker whose env is done, or of a scorer of a run that has ended: it is not to be started again."""


# -- workers and scorers ---------------------------------------------------------------------------------------------
def member(
    settings: RunSettings, kind: str, key: str, replica: int, name: str, stop: threading.Event, *, origin: str = ""
) -> int:
    """Runs one process of ``[KIND.KEY]``, a worker or a scorer, until `stop` is set. -> exit code, or DONE."""
    from rlbuffer.client.buffer import connect
    from rlbuffer.client.refusals import PATIENCE_SECONDS

    sections: Mapping[str, WorkerSettings | ScoreSettings] = settings.worker if kind == "worker" else settings.score
    options = sections[key]
    os.environ.update(visible(gpus_of(options, replica)))
    with connect(settings.redis_url, run=settings.run, config=settings, name=f"{kind}-{name}", origin=origin) as buffer:
        buffer.store.patience_seconds = PATIENCE_SECONDS
        if isinstance(options, WorkerSettings):
            from rlbuffer.worker.loop import run_worker

            is_done = run_worker(buffer, name, options, stop=stop, evaluations=settings.eval, section=key)
        else:
            from rlbuffer.scorer.loop import run_scorer

            is_done = run_scorer(buffer, name, key, settings, stop=stop)
    return DONE if is_done else 0


# -- gateway ---------------------------------------------------------------------------------------------------------
def gateway(settings: RunSettings, name: str, stop: threading.Event, *, origin: str = "") -> int:
    """Runs one process of the gateway until `stop` is set. -> exit code."""
    from rlbuffer.client.buffer import connect
    from rlbuffer.gateway.service import run_gateway

    with connect(settings.redis_url, run=settings.run, config=settings, name=name, origin=origin) as buffer:
        run_gateway(buffer, name, settings, stop=stop)
    return 0


# -- batcher ---------------------------------------------------------------------------------------------------------
def serve(
    settings: RunSettings,
    stop: threading.Event,
    *,
    replace_config: bool = False,
    follows: bool = False,
    origin: str = "",
) -> int:
    """Runs the batcher until `stop` is set; see :class:`rlbuffer.daemon.Daemon` for the options. -> exit code."""
    from rlbuffer.checks.server import WhileItLasts
    from rlbuffer.client.buffer import connect
    from rlbuffer.client.scrapes import serving_metrics
    from rlbuffer.daemon import Daemon

    with connect(settings.redis_url, run=settings.run, config=settings, name="serve", origin=origin) as buffer:
        daemon = Daemon(
            buffer,
            settings.batcher,
            replace_config=replace_config,
            follows=follows,
            look=WhileItLasts(buffer.settings).faults,
        )
        with serving_metrics(settings, buffer.store.errors, origin=origin):
            daemon.run(stop)
    return 0


# -- beginning and end -----------------------------------------------------------------------------------------------
def main() -> None:
    """A process with an interpreter of its own, ``python -m rlbuffer.run.members WHAT ARGUMENTS``.

    The settings come on the first line of stdin, whose end is the supervisor's.
    """
    settings = from_json(sys.stdin.readline())
    end_with(sys.stdin.read)
    _work(settings, *sys.argv[1:])


def forked_main(settings_json: str, log: Connection, *work: str) -> None:
    """A process that comes from the forkserver."""
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    log.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the supervisor's: it drains in order
    end_with_supervisor()
    _work(from_json(settings_json), *work)


def _work(settings: RunSettings, what: str, *arguments: str) -> None:
    """Does the work of ``train``, ``serve [again]``, ``gateway NAME``, ``worker`` or ``score KEY REPLICA NAME``, and
    exits with its code; an error is one line in the log and its own exit code."""
    name_process(" ".join([what, *arguments[2:]]))
    logs.start(clock=False)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    try:
        code = _done(settings, what, *arguments)
    except RlbufferError as error:
        code = error.exit_code
        if os.environ.get("RLBUFFER_DEBUG"):
            traceback.print_exc()
        else:
            print(printable(f"Error: {error}", lines=True))
    except Exception:
        code = 1
        traceback.print_exc()
    finally:
        logs.stop()  # a process that was forked by the forkserver leaves without `atexit`
    sys.exit(code)


def _done(settings: RunSettings, what: str, *arguments: str) -> int:
    if what == "train":  # the launcher of all ranks
        from rlbuffer.process.forkserver import share
        from rlbuffer.trainer.launch.launcher import launch

        share()
        return launch(settings, world_size=settings.trainer.world_size)
    stop = threading.Event()
    with stop_on_signals(stop):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as above
        if what == "serve":
            # In the place of one that ended the run's settings count, which an operator may have changed since.
            return serve(settings, stop, follows="again" in arguments)
        if what == "gateway":
            return gateway(settings, arguments[0], stop)
        key, replica, name = arguments
        with ended_when_stuck(stop):
            return member(settings, what, key, int(replica), name, stop)


if __name__ == "__main__":
    main()
