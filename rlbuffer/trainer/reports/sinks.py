"""Where the records of steps go: ``metrics.jsonl`` always; TensorBoard, Weights & Biases when asked for.

Both are extras, imported only here and only when a setting asks for them; a package that is missing is said at start.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlbuffer.config.settings import RunSettings, to_json
from rlbuffer.errors import ConfigError
from rlbuffer.state.step_record import StepRecord, scalars

FILE_NAME = "metrics.jsonl"


class Sink(Protocol):
    """Takes one record per step."""

    def write(self, record: StepRecord) -> None:
        """A step was trained."""

    def close(self) -> None:
        """Nothing more comes."""


def sinks_of(settings: RunSettings, *, created: int = 0) -> list[Sink]:
    """Those that the settings ask for.

    Args:
        created: when the run was begun, which tells it from others of its name; 0: nobody knows.

    Raises:
        ConfigError: a package is not installed.
    """
    sinks: list[Sink] = []
    if settings.trainer.reports.tensorboard:
        sinks.append(TensorBoard(settings.output_dir / "tensorboard"))
    if settings.trainer.reports.wandb_project:
        sinks.append(WeightsAndBiases(settings, created))
    return [MetricsFile(settings.output_dir), *sinks]


class MetricsFile:
    """Appends to ``metrics.jsonl``. A step that is trained again after a restart has a second line."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / FILE_NAME).open("a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        """One line, readable at once."""
        self._file.write(json.dumps(finite(record.as_object()), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def finite(value: Any) -> Any:
    """`value` as JSON may hold it: what is not finite becomes None, as JSON has no word for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(inner) for inner in value]
    return value


def _extra(module: str, extra: str, setting: str) -> Any:
    """A module that an extra brings, and a setting asks for."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"trainer.reports.{setting} is set, but {extra} is not installed: pip install 'rlbuffer[{extra}]'",
            setting=f"trainer.reports.{setting}",
        ) from error


class TensorBoard:
    """Event files in a folder: ``tensorboard --logdir FOLDER``."""

    def __init__(self, folder: Path) -> None:
        self._writer = _extra("torch.utils.tensorboard", "tensorboard", "tensorboard").SummaryWriter(str(folder))

    def write(self, record: StepRecord) -> None:
        """Numbers only; a step that is trained again after a restart is written again."""
        for name, value in scalars(record.as_object()).items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


class WeightsAndBiases:
    """A W&B run of the run's own name, gone on with after a restart. WANDB_MODE and the like are W&B's own.

    Its id says when the run was begun: a run begun anew under the same name would otherwise go on with the old curve.
    """

    def __init__(self, settings: RunSettings, created: int) -> None:
        config = json.loads(to_json(settings))
        del config["redis_url"]  # it may hold a password
        self._run = _extra("wandb", "wandb", "wandb_project").init(
            project=settings.trainer.reports.wandb_project,
            name=settings.run,
            id=f"{settings.run}-{created}" if created else settings.run,
            resume="allow",
            dir=str(settings.output_dir),
            config=config,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: StepRecord) -> None:
        """W&B's own count of rows never goes back, and what is behind it is lost: a step is the axis, not the count.
        One that is trained again after a restart is there twice."""
        self._run.log(scalars(record.as_object()))

    def close(self) -> None:
        """Ends the upload."""
        self._run.finish()
