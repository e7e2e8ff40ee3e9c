"""The title, the cores and the environment of a process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
NO_PROXY: Mapping[str, None] = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}
"""An HTTP client's `mounts`: a proxy that the environment names cannot reach this host's own servers."""


def name_process(title: str) -> None:
    """Sets the name that `ps` shows; nothing where setproctitle is not installed."""
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(f"rlbuffer {title}")


def cores(cgroups: Path = CGROUPS, cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may use: those of its affinity, or what the quota of its control group comes to if that
    is less. The host may have many more."""
    allowed = float(len(os.sched_getaffinity(0)))
    group = Path()
    with contextlib.suppress(OSError):
        lines = cgroup.read_text(encoding="utf-8").splitlines()
        group = next((Path(line[len("0::/") :]) for line in lines if line.startswith("0::/")), group)
    for each in (group, *group.parents):  # the lowest quota above it holds
        with contextlib.suppress(OSError, ValueError):
            quota, period = (cgroups / each / "cpu.max").read_text(encoding="utf-8").split()
            allowed = min(allowed, int(quota) / int(period))  # ValueError: the quota is "max"
    return max(1, int(allowed))


def threads_of_one(busy: int) -> int:
    """Threads for one of `busy` processes: what the user has set, else its share of the cores."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(given) if given.isdigit() and int(given) else max(1, cores() // busy)


def share_cores(busy: int) -> None:
    """Threads for one of `busy` processes, unless the user has set them; before torch is imported.

    Otherwise every process starts a thread per core, and they spin while they wait for each other: with two workers
    and two ranks on two busy cores, a worker sampled about five times slower that way.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_one(busy)))
    yield_cores()


def yield_cores() -> None:
    """Threads that wait for each other sleep, unless the user has set it; before torch is imported.

    Threads that spin hold the core that the awaited one needs: where others were at work on the cores, a trainer's step
    of 2 s took 28 s.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
