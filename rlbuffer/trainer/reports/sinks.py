"""Where the records of steps go: ``metrics.jsonl`` always; TensorBoard, Weights & Biases when asked for.

Both are extras, imported only here and only when a setting asks for them; a package that is missing is said at start.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlbuffer.config.settings import RunSettings, to_json
from rlbuffer.errors import ConfigError
from rlbuffer.state.step_record import StepRecord, scalars

FILE_NAME = "metrics.jsonl"


Write = Callable[[StepRecord], None]
"""Takes the record of a step. A step that is trained again after a restart has a second one."""


@contextmanager
def sinks_of(settings: RunSettings, *, created: int = 0) -> Iterator[list[Write]]:
    """Those that the settings ask for, open within the block.

    Args:
        created: when the run was begun, which tells it from others of its name; 0: nobody knows.

    Raises:
        ConfigError: a package is not installed.
    """
    with ExitStack() as stack:
        sinks = [stack.enter_context(_metrics_file(settings.output_dir))]
        if settings.trainer.reports.tensorboard:
            sinks.append(stack.enter_context(_tensorboard(settings.output_dir / "tensorboard")))
        if settings.trainer.reports.wandb_project:
            sinks.append(stack.enter_context(_weights_and_biases(settings, created)))
        yield sinks


@contextmanager
def _metrics_file(folder: Path) -> Iterator[Write]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE_NAME).open("a", encoding="utf-8") as file:

        def write(record: StepRecord) -> None:
            file.write(json.dumps(finite(record.as_object()), allow_nan=False) + "\n")
            file.flush()

        yield write


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Write]:
    """Event files in a folder: ``tensorboard --logdir FOLDER``. Numbers only."""
    with _extra("torch.utils.tensorboard", "tensorboard", "tensorboard").SummaryWriter(str(folder)) as events:

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
    run = _extra("wandb", "wandb", "wandb_project").init(
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


def _extra(module: str, extra: str, setting: str) -> Any:
    """A module that an extra brings, and a setting asks for."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"trainer.reports.{setting} is set, but {extra} is not installed: pip install 'rlbuffer[{extra}]'",
            setting=f"trainer.reports.{setting}",
        ) from error


def finite(value: Any) -> Any:
    """`value` as JSON may hold it: what is not finite becomes None, as JSON has no word for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(inner) for inner in value]
    return value
