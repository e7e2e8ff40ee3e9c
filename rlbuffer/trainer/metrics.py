"""What a trained step leaves behind: one JSON object per step in ``metrics.jsonl``, written by rank 0."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rlbuffer.batches import Step
from rlbuffer.trainer.update import SUMS

FILE_NAME = "metrics.jsonl"


class Stopwatch:
    """Seconds per part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Adds the block's time to `part`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start


def step_record(
    step: Step,
    sums: Tensor,
    *,
    gradient_norm: float,
    learning_rate: float,
    damaged_tokens: int,
    seconds: Mapping[str, float],
    world_size: int,
) -> dict[str, Any]:
    """The object of one step.

    Shapes: ``sums`` [len(SUMS)] float64, over all ranks and updates. Units: nats, seconds, policy versions (ages).
    """
    totals = dict(zip(SUMS, sums.tolist(), strict=True))
    trained = max(1.0, totals["loss_tokens"])
    header = step.header
    envs: Mapping[str, Mapping[str, Any]] = header.get("envs", {})
    rounded = {part: round(value, 6) for part, value in seconds.items()}
    return {
        "event": "step",
        "step": step.number,
        "epoch": step.epoch,
        "digest": step.digest,
        "time": time.time(),
        "reward": header.get("reward"),
        "rewards": {env: values.get("reward") for env, values in envs.items()},
        "loss": totals["loss"],
        "entropy": totals["entropy"] / trained,
        "kl": totals["kl"] / trained,
        "clip_fraction": totals["clipped"] / trained,
        "grad_norm": gradient_norm,
        "learning_rate": learning_rate,
        "age": header.get("age"),
        "max_age": header.get("max_age"),
        "ages": {env: values.get("age") for env, values in envs.items()},
        "tokens": header.get("tokens", int(totals["tokens"])),
        "tokens_by_env": {env: values.get("tokens") for env, values in envs.items()},
        "loss_tokens": step.normalizers.loss_tokens,
        "damaged_tokens": damaged_tokens,
        "rollouts": step.rollouts,
        "groups": step.groups,
        "world_size": world_size,
        "seconds": rounded | {"total": round(sum(seconds.values()), 6)},
    }


class MetricsFile:
    """Appends to ``metrics.jsonl``. A step that is trained again after a restart has a second line."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / FILE_NAME
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """One line, readable at once. What is not finite becomes null, as JSON has no word for it."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
