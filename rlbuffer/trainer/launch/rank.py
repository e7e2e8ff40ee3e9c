"""One rank's process: set up, train, and leave a report of how it ended for the launcher."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback

import torch

from rlbuffer.client.serverless import Source
from rlbuffer.config.placement import visible
from rlbuffer.config.settings import RunSettings, from_json
from rlbuffer.errors import RankFailed, RlbufferError, text_of
from rlbuffer.process import logs
from rlbuffer.process.environment import name_process, threads_of_one
from rlbuffer.process.signals import StopRequest
from rlbuffer.process.watchdog import HELD_SECONDS, ended_when_stuck
from rlbuffer.trainer.launch.processes import INTERRUPTED, RankEnd
from rlbuffer.trainer.loop import train
from rlbuffer.trainer.ranks.stalls import is_lost_peer


def end_by(error: Exception) -> RankEnd:
    """The end of this rank by an error."""
    if isinstance(error, RlbufferError):
        text, is_lost = f"Error: {text_of(error)}", isinstance(error, RankFailed)
        return RankEnd(exit_code=error.exit_code, text=text, is_final=not is_lost, is_consequence=is_lost)
    trace = "".join(traceback.format_exception(error)).rstrip()
    text = f"Rank {os.environ.get('RANK', '0')} failed:\n{trace}"
    return RankEnd(exit_code=1, text=text, is_consequence=is_lost_peer(error))


def rank_main(settings_json: str, display: str, source: Source | None, debug_samples: int) -> None:
    """Runs one rank in a process of the launcher, which sets rank and world size in the environment."""
    _end_with_launcher()
    if sys.platform == "linux":
        # All ranks are on this machine: gloo need not find out, and possibly fail to, what the host's name means.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        finished = run_rank(from_json(settings_json), display=display, source=source, debug_samples=debug_samples)
    except Exception as error:
        end = end_by(error)
        end.leave()
        logs.stop()
        # The interpreter's own end would wait for threads that wait for a peer that is gone.
        os._exit(end.exit_code)
    # The interpreter's own end would wait for what hangs in a library's thread, or in what it does at exit.
    os._exit(0 if finished else INTERRUPTED)


def run_rank(
    settings: RunSettings,
    *,
    display: str = "plain",
    source: Source | None = None,
    debug_samples: int = 0,
) -> bool:
    """Trains as the rank that the environment names. -> whether the planned steps were made."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    name_process(f"rank {rank}")
    os.environ.update(visible(settings.trainer.gpus))
    torch.set_num_threads(threads_of_one(here))
    stop = StopRequest()
    stop.on_signals(signal.SIGTERM, signal.SIGINT)
    # Modules stay as long as the process. A full collection of what torch and transformers bring takes 50 to 200 ms,
    # and all ranks wait for the one that is in it.
    gc.freeze()
    held_seconds = max(HELD_SECONDS, settings.trainer.timeout_seconds)
    with (
        logs.written(display, clock=False),
        # Asked to stop, it may take as long as its step and a checkpoint: the launcher counts that time.
        ended_when_stuck(threading.Event(), held_seconds=held_seconds),
    ):
        return train(
            settings,
            rank=rank,
            world_size=world_size,
            stop=stop,
            source=source,
            debug_samples=debug_samples,
        )


def _end_with_launcher() -> None:
    """Leaves at once when the launcher is gone, whatever killed it: its successor starts ranks of its own."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="watch-launcher", daemon=True).start()
