"""The places of a run's processes: the GPUs that they see, the Python that runs them, and its environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import rlbuffer
from rlbuffer.config.gpus import GPU_VARIABLE, gpus_of, visible
from rlbuffer.config.settings import RunSettings, WorkerSettings
from rlbuffer.errors import ConfigError

IMPORT_SECONDS = 120.0
"""Longest that another Python may take to import rlbuffer: a cold network disk must fit."""
_PROBE = "import rlbuffer.run.members, rlbuffer; print(rlbuffer.__version__)"


_answers: dict[tuple[str, str], str] = {}
"""(Python, PYTHONPATH) -> what is wrong with it, as the check found: the start does not ask again."""


def gpus_here(driver: Path = Path("/proc/driver/nvidia/gpus"), devices: Path = Path("/dev")) -> int | None:
    """GPUs that a process of this host sees, without asking CUDA; None where that is not known."""
    visible_ones = os.environ.get(GPU_VARIABLE)
    if driver.is_dir():
        count = len(list(driver.iterdir()))
        named = None if visible_ones is None else [name for name in visible_ones.split(",") if name.strip()]
        return count if named is None else min(count, len(named))
    others = ("nvidia0", "nvidiactl", "nvidia-caps", "dxg", "kfd")
    return None if any((devices / name).exists() for name in others) or shutil.which("nvidia-smi") else 0


def is_apart(options: WorkerSettings) -> bool:
    """The worker needs an interpreter of its own: one that has imported torch may have asked for GPUs, and has made its
    thread pools.
    """
    return bool(options.python or options.gpus)


def python_of(name: str, options: WorkerSettings, own: str) -> str:
    """The program that runs ``[worker.NAME]``; `own` when it names none.

    Raises:
        ConfigError: there is no such program.

    Example:
        >>> python_of("math", WorkerSettings(env="math"), "/opt/rl/bin/python")
        '/opt/rl/bin/python'
        >>> python_of("math", WorkerSettings(env="math", python="no-such-python"), "/opt/rl/bin/python")
        Traceback (most recent call last):
        rlbuffer.errors.ConfigError: worker.math.python = 'no-such-python' is not a program on this host
    """
    if not options.python:
        return own
    program = shutil.which(Path(options.python).expanduser())
    if program is None:
        raise ConfigError(
            f"worker.{name}.python = {options.python!r} is not a program on this host", setting=f"worker.{name}.python"
        )
    return os.path.abspath(program)  # noqa: PTH100 - a link is not followed: a virtual environment's Python is one


def environment_of(options: WorkerSettings, replica: int, python: str) -> dict[str, str]:
    """The whole environment of a worker with an interpreter of its own. Programs beside `python` come first on PATH:
    engines that compile at run time look for their tools there.
    """
    path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, **visible(gpus_of(options, replica))}


def check_pythons(settings: RunSettings, own: str) -> None:
    """Makes sure that every other Python is there and has this rlbuffer, before anything is started.

    Raises:
        ConfigError: what is missing, and how to install it.
    """
    for error in wrong_pythons(settings, own):
        raise error


def wrong_pythons(settings: RunSettings, own: str) -> Iterator[ConfigError]:
    """Every other Python that is not there or lacks this rlbuffer: what is missing, and how to install it."""
    for name, options in settings.worker.items():
        if not options.python:
            continue
        try:
            python = python_of(name, options, own)
        except ConfigError as error:
            yield error
            continue
        environment = environment_of(options, 0, python)
        key = python, environment.get("PYTHONPATH", "")
        if key not in _answers:
            _answers[key] = _probe(python, environment)
        if _answers[key]:
            yield ConfigError(
                f"worker.{name}.python = {options.python!r} {_answers[key]}\n"
                f"  Install it there:   {options.python} -m pip install 'rlbuffer[{_extra(options)}]=="
                f"{rlbuffer.__version__}'",
                setting=f"worker.{name}.python",
            )


def _probe(python: str, environment: Mapping[str, str]) -> str:
    """The mistake with a Python, as the end of a sentence; "" when there is none."""
    try:
        answer = subprocess.run(
            [python, "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
            check=False,
            env=environment,
        )
    except OSError as error:
        return f"cannot be run ({error.strerror})."
    except subprocess.TimeoutExpired:
        return f"did not import rlbuffer within {IMPORT_SECONDS:.0f} s."
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        return f"cannot import rlbuffer ({lines[-1]})."
    version = answer.stdout.strip()
    if version != rlbuffer.__version__:
        return f"has rlbuffer {version}, this is {rlbuffer.__version__}."
    return ""


def _extra(options: WorkerSettings) -> str:
    return "train" if options.sampler == "transformers" else options.sampler
