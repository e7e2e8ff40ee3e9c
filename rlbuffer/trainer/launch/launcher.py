"""Starts the ranks of one machine, and starts them again when one is lost.

A rank that dies (killed, out of memory, a bug) takes the others with it; all start again from the newest checkpoint.
An error of rlbuffer's own (no batch in time, a wrong setting) would come again: it ends the job with its exit code and
one message. Ranks are forked from a process that has imported torch and transformers once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlbuffer.client.buffer import URL_VARIABLE
from rlbuffer.config.models import model_modules
from rlbuffer.config.placement import visible
from rlbuffer.config.settings import RunSettings, to_json
from rlbuffer.process import forkserver
from rlbuffer.process.environment import yield_cores
from rlbuffer.process.signals import stop_on_signals
from rlbuffer.state.text import plural, printable
from rlbuffer.trainer.launch.processes import INTERRUPTED, run_ranks
from rlbuffer.trainer.launch.rank_end import RankEnd, read_ends
from rlbuffer.weights.places import load_serving

MOST_RESTARTS = 10
LASTED_SECONDS = 60.0
"""Ranks that ran this long were well: an end after it starts the count of restarts again."""


def launch(
    settings: RunSettings,
    *,
    world_size: int,
    output: Path | None = None,
    display: str = "plain",
    fake_data: bool = False,
    max_restarts: int = MOST_RESTARTS,
    debug_samples: int = 0,
    say: Callable[[str], None] | None = None,
    say_last: Callable[[str], None] | None = None,
) -> int:
    """Runs `world_size` ranks on this machine until the planned steps are trained.

    Call it from the main thread: it handles SIGINT and SIGTERM by letting the ranks write a checkpoint and leave.

    Args:
        output: in place of ``settings.trainer.output``.
        display: of what rank 0 says: ``plain``, ``json`` or ``none`` (``metrics.jsonl`` has its steps anyway).
        fake_data: made-up steps in place of a server.
        max_restarts: in a row after which it gives up.
        debug_samples: rollouts of the first step that rank 0 prints token by token, with checks.
        say: where messages go; default: stderr.
        say_last: where the message goes that says why it ended; default: `say`.

    Returns:
        0 when the steps are trained, 130 when interrupted, else the exit code of what ended it; the message was said.
    """
    tell = say or _print
    trainer = settings.trainer.model_copy(
        update={"world_size": world_size} | ({"output": output.absolute()} if output is not None else {})
    )
    # Ranks act on what was given here, not on the environment of the process that they are forked from.
    url = os.environ.get(URL_VARIABLE) or settings.redis_url
    settings = settings.model_copy(update={"trainer": trainer, "redis_url": url})
    os.environ.update(visible(trainer.gpus))  # before anything looks for GPUs; inherited by the ranks
    yield_cores()  # before anything imports torch
    context = forkserver.start(["rlbuffer.trainer.launch.rank", *model_modules(settings.model.config)])
    stop = threading.Event()

    def start() -> _End:
        with tempfile.TemporaryDirectory(prefix="rlbuffer-ranks-") as reports:
            arguments = (to_json(settings), reports, display, fake_data, debug_samples)
            codes, killed = run_ranks(context, _run_rank, arguments, world_size=world_size, stop=stop)
            if stop.is_set():
                return _End(INTERRUPTED, is_final=True)
            return _cause(read_ends(Path(reports)), codes, killed)

    with contextlib.ExitStack() as stack:
        stack.enter_context(stop_on_signals(stop))
        if settings.weights.listen and not fake_data:
            server = stack.enter_context(load_serving().serve_beside(settings))
            tell(f"policy versions are served at {settings.weights.listen} ({server.url} from here)")
        return _run(start, world_size, max_restarts, tell, say_last or tell)


def _run(
    start: Callable[[], _End],
    world_size: int,
    max_restarts: int,
    tell: Callable[[str], None],
    tell_last: Callable[[str], None],
) -> int:
    """Starts the ranks until they have trained, or may not be started again. -> exit code."""
    restarts = 0
    while True:
        began = time.monotonic()
        end = start()
        if end.exit_code == 0 or end.is_final:
            if end.text:
                tell_last(end.text)
            return end.exit_code
        restarts = restarts + 1 if time.monotonic() - began < LASTED_SECONDS else 1
        if restarts > max_restarts:
            given = plural(max_restarts, "restart")
            tell_last(f"{end.text}\nGiving up after {given}.")
            return end.exit_code
        all_ranks = f"all {world_size} ranks" if world_size > 1 else "the rank"
        tell(
            f"{end.text}\nStarting {all_ranks} again from the newest checkpoint (restart {restarts} of {max_restarts})."
        )


@dataclass(frozen=True, slots=True)
class _End:
    """The end of one start of the ranks."""

    exit_code: int
    text: str = ""
    is_final: bool = False


def _run_rank(settings_json: str, reports: str, display: str, fake_data: bool, debug_samples: int) -> None:
    """The rank's own process alone imports transformers, seconds of CPU; the launcher never needs it."""
    from rlbuffer.trainer.launch.rank import rank_main

    rank_main(settings_json, reports, display, fake_data, debug_samples)


def _cause(reports: Sequence[RankEnd], codes: Mapping[int, int], ended: Collection[int]) -> _End:
    """The sentence about an end, and what to do: the first rank that failed by itself counts, not those that lost it.

    `codes` are the exit codes by rank; `ended` are ranks that had to be killed, because they did not end by themselves
    when another one had.
    """
    if INTERRUPTED in codes.values():
        return _End(INTERRUPTED, is_final=True)
    own = [report for report in reports if not report.is_consequence]
    for report in sorted(own, key=lambda report: not report.is_final):
        if report.is_final:
            return _End(report.exit_code, f"Error: {report.message}", is_final=True)
        return _End(1, f"Rank {report.rank} failed:\n{report.trace.rstrip()}")
    silent = {rank: code for rank, code in codes.items() if code and rank not in ended}
    for report in reports:
        silent.pop(report.rank, None)
    for rank, code in silent.items():
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return _End(1, f"Rank {rank} {how}.")
    if ended:
        return _End(1, f"Rank {min(ended)} did not answer: the others waited for it in an exchange, and it was ended.")
    if reports:
        return _End(reports[0].exit_code, f"Rank {reports[0].rank} failed:\n{reports[0].trace or reports[0].message}")
    return _End(0)


def _print(text: str) -> None:
    print(printable(text, lines=True), file=sys.stderr, flush=True)
