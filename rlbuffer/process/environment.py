"""The title, the cores and the environment of a process."""

from __future__ import annotations

import contextlib
import os


def name_process(title: str) -> None:
    """Sets the name that `ps` shows; nothing where setproctitle is not installed."""
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(f"rlbuffer {title}")


def share_cores(busy: int) -> None:
    """Threads for one of `busy` processes, unless the user has set them; before torch is imported.

    Otherwise every process starts a thread per core, and they spin while they wait for each other: with two workers
    and two ranks on two busy cores, a worker sampled about five times slower that way.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // busy)))
    yield_cores()


def yield_cores() -> None:
    """Threads that wait for each other sleep, unless the user has set it; before torch is imported.

    Threads that spin hold the core that the awaited one needs: where others were at work on the cores, a trainer's step
    of 2 s took 28 s.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
