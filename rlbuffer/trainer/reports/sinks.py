"""The sinks of metrics beside ``metrics.jsonl``, when asked for: TensorBoard, Weights & Biases.

Both are extras, imported only here and only when a setting asks for them; a package that is missing is said at start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rlbuffer.config.settings import RunSettings, to_json
from rlbuffer.errors import ConfigError


class Sink(Protocol):
    """Takes one record per step."""

    def write(self, record: Mapping[str, Any]) -> None:
        """A step's record, as in ``metrics.jsonl``."""

    def close(self) -> None:
        """Nothing more comes."""


def sinks_of(settings: RunSettings) -> list[Sink]:
    """Those that the settings ask for.

    Raises:
        ConfigError: a package is not installed.
    """
    sinks: list[Sink] = []
    if settings.trainer.reports.tensorboard:
        sinks.append(TensorBoard(settings.output_dir / "tensorboard"))
    if settings.trainer.reports.wandb_project:
        sinks.append(WeightsAndBiases(settings))
    return sinks


class TensorBoard:
    """Event files in a folder: ``tensorboard --logdir FOLDER``."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "trainer.reports.tensorboard = true, but tensorboard is not installed: "
                "pip install 'rlbuffer[tensorboard]'",
                setting="trainer.reports.tensorboard",
            ) from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, record: Mapping[str, Any]) -> None:
        """Numbers only; a step that is trained again after a restart is written again."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"], walltime=record["time"])
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


class WeightsAndBiases:
    """A W&B run of the run's own name, gone on with after a restart. WANDB_MODE and the like are W&B's own."""

    def __init__(self, settings: RunSettings) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"trainer.reports.wandb_project = {settings.trainer.reports.wandb_project!r}, but wandb is not "
                "installed: pip install 'rlbuffer[wandb]'",
                setting="trainer.reports.wandb_project",
            ) from error
        config = json.loads(to_json(settings))
        del config["redis_url"]  # it may hold a password
        self._run: Any = wandb.init(
            project=settings.trainer.reports.wandb_project,
            name=settings.run,
            id=settings.run,
            resume="allow",
            dir=str(settings.output_dir),
            config=config,
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """W&B takes no step twice: those that are trained again after a restart stay as they were."""
        self._run.log(scalars(record), step=record["step"])

    def close(self) -> None:
        """Ends the upload."""
        self._run.finish()


def scalars(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The record's numbers by path: ``rewards/math``, ``ratio/p99``. Lists and texts are left out."""
    out: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            out |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            out[f"{prefix}{name}"] = float(value)
    return out
