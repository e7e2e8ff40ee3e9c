"""Starts the ranks of one machine, and starts them again when one is lost.

A rank that dies (killed, out of memory, a bug) takes the others with it; all start again from the newest checkpoint.
An error of rlbuffer's own (no batch in time, a wrong setting) would come again: it ends the job with its exit code and
one message. Ranks are forked from a process that has imported torch and transformers once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from rlbuffer.client.buffer import URL_VARIABLE
from rlbuffer.client.serverless import Source
from rlbuffer.config.models import model_modules
from rlbuffer.config.placement import visible
from rlbuffer.config.settings import RunSettings, to_json
from rlbuffer.process import forkserver
from rlbuffer.process.environment import yield_cores
from rlbuffer.process.signals import stop_on_signals
from rlbuffer.process.variables import variable
from rlbuffer.state.text import plural, printable
from rlbuffer.trainer.launch.processes import leave_seconds, run_ranks
from rlbuffer.weights.places import load_serving

MOST_RESTARTS = 10
LASTED_SECONDS = 60.0
"""Ranks that ran this long were well: an end after it starts the count of restarts again."""


def launch(
    settings: RunSettings,
    *,
    world_size: int,
    display: str = "plain",
    source: Source | None = None,
    max_restarts: int = MOST_RESTARTS,
    debug_samples: int = 0,
    say: Callable[[str], None] | None = None,
    say_last: Callable[[str], None] | None = None,
) -> int:
    """Runs `world_size` ranks on this machine until the planned steps are trained.

    Call it from the main thread: it handles SIGINT and SIGTERM by letting the ranks write a checkpoint and leave.

    Args:
        display: of what rank 0 says: ``plain``, ``json`` or ``none`` (``metrics.jsonl`` has its steps anyway).
        source: stands in for the server, in each rank: made-up steps, or those of an archive.
        max_restarts: in a row after which it gives up.
        debug_samples: rollouts of the first step that rank 0 prints token by token, with checks.
        say: where messages go; default: stderr.
        say_last: where the message goes that says why it ended; default: `say`.

    Returns:
        0 when the steps are trained, 130 when interrupted, else the exit code of what ended it; the message was said.
    """
    tell = say or _print
    trainer = settings.trainer.model_copy(update={"world_size": world_size})
    # Ranks act on what was given here, not on the environment of the process that they are forked from.
    url = variable(URL_VARIABLE) or settings.redis_url
    settings = settings.model_copy(update={"trainer": trainer, "redis_url": url})
    os.environ.update(visible(trainer.gpus))  # before anything looks for GPUs; inherited by the ranks
    yield_cores()  # before anything imports torch
    context = forkserver.start(["rlbuffer.trainer.launch.rank", *model_modules(settings.model.config)])
    stop = threading.Event()

    arguments = (to_json(settings), display, source, debug_samples)

    all_ranks = f"all {world_size} ranks" if world_size > 1 else "the rank"
    restarts = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop_on_signals(stop))
        if settings.weights.listen and source is None:
            server = stack.enter_context(load_serving().serve_beside(settings))
            tell(f"policy versions are served at {settings.weights.listen} ({server.url} from here)")
        while True:
            began = time.monotonic()
            end = run_ranks(
                context,
                _run_rank,
                arguments,
                world_size=world_size,
                stop=stop,
                leave_seconds=leave_seconds(settings),
            )
            restarts = restarts + 1 if time.monotonic() - began < LASTED_SECONDS else 1
            given_up = f"\nGiving up after {plural(max_restarts, 'restart')}." if restarts > max_restarts else ""
            if end.exit_code == 0 or end.is_final or given_up:
                if end.text:
                    (say_last or tell)(end.text if end.is_final else end.text + given_up)
                return end.exit_code
            tell(
                f"{end.text}\nStarting {all_ranks} again from the newest checkpoint "
                f"(restart {restarts} of {max_restarts})."
            )


def _run_rank(settings_json: str, display: str, source: Source | None, debug_samples: int) -> None:
    """The rank's own process alone imports transformers, seconds of CPU; the launcher never needs it."""
    from rlbuffer.trainer.launch.rank import rank_main

    rank_main(settings_json, display, source, debug_samples)


def _print(text: str) -> None:
    print(printable(text, lines=True), file=sys.stderr, flush=True)
