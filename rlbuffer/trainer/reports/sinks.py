"""The sinks of metrics beside ``metrics.jsonl``, when asked for: TensorBoard, Weights & Biases.

Both are extras, imported only here and only when a setting asks for them; a package that is missing is said at start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlbuffer.config.settings import RunSettings, to_json
from rlbuffer.errors import ConfigError


class Sink(Protocol):
    """Takes one record per step."""

    def write(self, record: Mapping[str, Any]) -> None:
        """A step's record, as in ``metrics.jsonl``."""

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
        for name, (bounds, counts, total) in histograms(record).items():
            self._writer.add_histogram_raw(
                *(name, bounds[0], bounds[-1], sum(counts), total),
                sum_squares=sum(count * bound**2 for count, bound in zip(counts, bounds[1:], strict=True)),
                bucket_limits=bounds[1:],
                bucket_counts=counts,
                global_step=record["step"],
                walltime=record["time"],
            )
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


class WeightsAndBiases:
    """A W&B run of the run's own name, gone on with after a restart. WANDB_MODE and the like are W&B's own.

    Its id says when the run was begun: a run begun anew under the same name would otherwise go on with the old curve.
    """

    def __init__(self, settings: RunSettings, created: int) -> None:
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
        self._histogram: Any = wandb.Histogram
        self._run: Any = wandb.init(
            project=settings.trainer.reports.wandb_project,
            name=settings.run,
            id=f"{settings.run}-{created}" if created else settings.run,
            resume="allow",
            dir=str(settings.output_dir),
            config=config,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        """W&B's own count of rows never goes back, and what is behind it is lost: a step is the axis, not the count.
        One that is trained again after a restart is there twice."""
        drawn = {
            name: self._histogram(np_histogram=(np.array(counts), np.array(bounds)))
            for name, (bounds, counts, _) in histograms(record).items()
        }
        self._run.log(scalars(record) | drawn)

    def close(self) -> None:
        """Ends the upload."""
        self._run.finish()


def scalars(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The record's numbers by path: ``rewards/math``, ``ratio/p99``. Lists, texts and histograms are left out."""
    out: dict[str, float] = {}
    for name, value in record.items():
        if is_histogram(value):
            continue
        if isinstance(value, Mapping):
            out |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            out[f"{prefix}{name}"] = float(value)
    return out


def histograms(record: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[list[float], list[int], float]]:
    """The record's histograms by path -> bounds (one more than counts), counts, sum of the values; empty ones are left
    out.

    The lowest bound is 0, or 1 below a first one of 0; what is above the last one is drawn up to twice that.

    Example:
        >>> histograms({"age": {"math": {"buckets": {"1.0": 2, "2.0": 3, "+Inf": 4}, "sum": 9.0, "count": 4}}})
        {'age/math': ([0.0, 1.0, 2.0, 4.0], [2, 1, 1], 9.0)}
    """
    out: dict[str, tuple[list[float], list[int], float]] = {}
    for name, value in record.items():
        if is_histogram(value):
            *bounds, _ = value["buckets"]
            uppers = [float(bound) for bound in bounds]
            ups = list(value["buckets"].values())
            counts = [int(after - before) for before, after in pairwise([0, *ups])]
            if ups[-1]:
                lowest = 0.0 if uppers[0] > 0 else uppers[0] - 1.0
                out[f"{prefix}{name}"] = [lowest, *uppers, 2 * uppers[-1]], counts, float(value["sum"])
        elif isinstance(value, Mapping):
            out |= histograms(value, f"{prefix}{name}/")
    return out


def is_histogram(value: Any) -> bool:
    """True for a histogram, as a record has it."""
    return (
        isinstance(value, Mapping)
        and set(value) == {"buckets", "sum", "count"}
        and isinstance(value["buckets"], Mapping)
        and len(value["buckets"]) > 1
    )
