"""The places of a run's processes: the GPUs that they see, the Python that runs them, and its environment."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rlbuffer.config.settings import ScoreSettings, WorkerSettings
from rlbuffer.errors import ConfigError

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible(gpus: Sequence[int | str]) -> dict[str, str]:
    """The variables that make a process see `gpus` alone; none for an empty list. Before CUDA is first used."""
    return {GPU_VARIABLE: ",".join(map(str, gpus))} if gpus else {}


def gpus_of(options: WorkerSettings | ScoreSettings, replica: int) -> tuple[int | str, ...]:
    """The GPUs of one replica: the list dealt out in order, equally many each.

    Numbers from `replicas` on are those of other hosts, where the list is dealt out again.
    """
    replica %= options.replicas
    each = len(options.gpus) // options.replicas
    return options.gpus[replica * each : (replica + 1) * each]


def gpus_here(
    driver: Path = Path("/proc/driver/nvidia/gpus"), devices: Path = Path("/dev"), *, are_named: bool = False
) -> int | None:
    """GPUs that a process of this host sees, without asking CUDA; None where that is not known. `are_named`: settings
    name its GPUs, so it sees them whatever the environment makes visible."""
    visible_ones = None if are_named else os.environ.get(GPU_VARIABLE)
    if driver.is_dir():
        count = len(list(driver.iterdir()))
        named = None if visible_ones is None else [name for name in visible_ones.split(",") if name.strip()]
        return count if named is None else min(count, len(named))
    others = ("nvidia0", "nvidiactl", "nvidia-caps", "dxg", "kfd")
    return None if any((devices / name).exists() for name in others) or shutil.which("nvidia-smi") else 0


def is_apart(options: WorkerSettings | ScoreSettings) -> bool:
    """The process needs an interpreter of its own: one that has imported torch may have asked for GPUs, and has made
    its thread pools.
    """
    return bool(options.gpus or getattr(options, "python", ""))


def python_of(name: str, options: WorkerSettings | ScoreSettings, default: str) -> str:
    """The program that runs ``[worker.NAME]``; `own` when it names none, as a scorer does.

    Raises:
        ConfigError: there is no such program.

    Example:
        >>> python_of("math", WorkerSettings(env="math"), "/opt/rl/bin/python")
        '/opt/rl/bin/python'
        >>> python_of("math", WorkerSettings(env="math", python="no-such-python"), "/opt/rl/bin/python")
        Traceback (most recent call last):
        rlbuffer.errors.ConfigError: worker.math.python = 'no-such-python' is not a program on this host
    """
    if not isinstance(options, WorkerSettings) or not options.python:
        return default
    program = shutil.which(Path(options.python).expanduser())
    if program is None:
        raise ConfigError(
            f"worker.{name}.python = {options.python!r} is not a program on this host", setting=f"worker.{name}.python"
        )
    return os.path.abspath(program)  # noqa: PTH100 - a link is not followed: a virtual environment's Python is one


def environment_of(options: WorkerSettings | ScoreSettings, replica: int, python: str) -> dict[str, str]:
    """The whole environment of a process with an interpreter of its own. Programs beside `python` come first on PATH:
    engines that compile at run time look for their tools there.
    """
    path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, **visible(gpus_of(options, replica))}
