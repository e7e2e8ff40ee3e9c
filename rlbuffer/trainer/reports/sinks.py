"""Where the records of steps go: ``metrics.jsonl`` always; TensorBoard, Weights & Biases when asked for.

Both are extras, imported only here and only when a setting asks for them; a package that is missing is said at start.
What they raise later stops nobody (:mod:`rlbuffer.trainer.reports.outlet`).
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlbuffer.config.settings import RunSettings, to_json
from rlbuffer.errors import ConfigError, installed_by
from rlbuffer.process.files import append_lines
from rlbuffer.state.step_record import StepRecord, scalars

FILE_NAME = "metrics.jsonl"


Write = Callable[[StepRecord], None]
"""Takes the record of a step. A step that is trained again after a restart has a second one."""


class MetricsFile:
    """``metrics.jsonl``: a line for every step. Lines that the disk has no room for wait here, in their order."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME
        self._lines: deque[str] = deque()

    def add(self, record: StepRecord) -> None:
        """Takes in the record of a step; :meth:`write` writes it."""
        self._lines.append(json.dumps(finite(record.as_object()), allow_nan=False) + "\n")

    def write(self) -> None:
        """Writes what waits. Raises OSError; what is not written then waits on."""
        while self._lines:
            append_lines(self.path, self._lines[0])
            self._lines.popleft()


def sinks_of(settings: RunSettings, *, created: int = 0) -> dict[str, Callable[[], AbstractContextManager[Write]]]:
    """What the settings ask for beside ``metrics.jsonl``: name -> what opens it. Nothing is imported before.

    Args:
        created: when the run was begun, which tells it from others of its name; 0: nobody knows.

    Raises:
        ConfigError: a package is not installed.
    """
    sinks: dict[str, Callable[[], AbstractContextManager[Write]]] = {}
    if settings.trainer.reports.tensorboard:
        _check_installed("tensorboard", "tensorboard", "torch.utils.tensorboard")
        sinks["TensorBoard"] = partial(_tensorboard, settings.output_dir / "tensorboard")
    if settings.trainer.reports.wandb_project:
        _check_installed("wandb", "wandb_project", "wandb")
        sinks["W&B"] = partial(_weights_and_biases, settings, created)
    return sinks


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Write]:
    """Event files in a folder: ``tensorboard --logdir FOLDER``. Numbers only."""
    with importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder)) as events:

        def write(record: StepRecord) -> None:
            for name, value in scalars(record.as_object()).items():
                events.add_scalar(name, value, record.step, walltime=record.time)
            events.flush()

        yield write


@contextmanager
def _weights_and_biases(settings: RunSettings, created: int) -> Iterator[Write]:
    """A W&B run of the run's own name, gone on with after a restart. WANDB_MODE and the like are W&B's own.

    Its id says when the run was begun: a run begun anew under the same name would otherwise go on with the old curve.
    W&B's own count of rows never goes back, and what is behind it is lost: a step is the axis, not the count.
    """
    config = json.loads(to_json(settings))
    del config["redis_url"]  # it may hold a password
    run = importlib.import_module("wandb").init(
        project=settings.trainer.reports.wandb_project,
        name=settings.run,
        id=f"{settings.run}-{created}" if created else settings.run,
        resume="allow",
        dir=str(settings.output_dir),
        config=config,
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    try:
        yield lambda record: run.log(scalars(record.as_object()))
    finally:
        run.finish()


def _check_installed(extra: str, setting: str, module: str) -> None:
    """Raises ConfigError where the package or module is not there that an extra brings, and a setting asks for."""
    for name in (extra, module):
        if sys.modules.get(name) is None and (name in sys.modules or find_spec(name) is None):
            raise ConfigError(
                f"trainer.reports.{setting} is set, but {extra} is not installed: {installed_by(extra)}",
                setting=f"trainer.reports.{setting}",
            )


def finite(value: Any) -> Any:
    """`value` as JSON may hold it: what is not finite becomes None, as JSON has no word for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(inner) for inner in value]
    return value
