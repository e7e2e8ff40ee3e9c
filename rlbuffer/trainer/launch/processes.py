"""The ranks' processes: started together, ended together.

A rank that hangs in an exchange, in its data or halted does not answer when it is asked to end, and has nothing to
save: a checkpoint takes all ranks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from typing import Any

END_SECONDS = 4.0
"""Time that ranks have to end by themselves once one has failed: to see the lost connection, and to report it."""
LEAVE_SECONDS = 15.0
"""Time that ranks have to leave once asked to: a step and a checkpoint."""
LOOK_SECONDS = 0.2
INTERRUPTED = 130
"""Exit code of a rank that was asked to stop, and did after a checkpoint."""


def run_ranks(
    context: ForkServerContext,
    main: Callable[..., None],
    arguments: tuple[Any, ...],
    *,
    world_size: int,
    stop: threading.Event,
) -> tuple[dict[int, int], set[int]]:
    """Runs `main` in a process for each rank, with torchrun's environment, and waits until all have ended.

    They are asked to leave when `stop` is set, and killed some seconds after one of them failed.

    Returns:
        rank -> exit code, and the ranks that were killed here.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # ranks meet there, as torchrun's do
    environment = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ranks = []
    for rank in range(world_size):
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(context.Process(target=_main, args=(main, own, *arguments), name=f"rank-{rank}"))
        ranks[-1].start()
    killed: set[int] = set()
    deadline: float | None = None
    is_told = False
    while left := {rank: process for rank, process in enumerate(ranks) if process.exitcode is None}:
        wait([process.sentinel for process in left.values()], LOOK_SECONDS)
        if stop.is_set() and not is_told:
            is_told, deadline = True, time.monotonic() + LEAVE_SECONDS
            for process in left.values():
                process.terminate()
        elif deadline is None and any(process.exitcode not in (None, 0, INTERRUPTED) for process in ranks):
            deadline = time.monotonic() + END_SECONDS
        if deadline is not None and time.monotonic() >= deadline:
            for rank, process in left.items():
                if process.is_alive():
                    killed.add(rank)
                    process.kill()
            deadline = float("inf")
    return {rank: process.exitcode or 0 for rank, process in enumerate(ranks)}, killed


def _main(main: Callable[..., None], environment: Mapping[str, str], *arguments: Any) -> None:
    os.environ.update(environment)
    main(*arguments)
