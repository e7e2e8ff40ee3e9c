"""Values per token that a trainer keeps of a few rollouts: ``rlbuffer train --debug-samples N``.

They stand in a file of the trainer's output folder, a line of JSON per rollout, so they are seen on that host alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.records.rollout import Rollout

SAMPLES_FILE = "debug_samples.jsonl"
SAMPLE_SCHEMA = "rlbuffer.debug_sample/1"
MOST_BYTES = 64 * 2**20
"""The newest part of the file that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerValues:
    """The trainer's look at one rollout."""

    step: int
    """Step in which it was trained; 0 where nothing is kept."""
    logprobs: NDArray[np.float32] | None = None
    """[T] float32; of each trained token under the weights of the step, 0 elsewhere; nats."""
    entropy: NDArray[np.float32] | None = None
    """[T] float32; of the distribution that each trained token comes from, 0 elsewhere; nats."""


NONE = TrainerValues(step=0)


class KeptValues:
    """The values that the trainer of a run has kept, read once more when the file has changed."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / SAMPLES_FILE
        self._stamp: tuple[int, int] = (0, 0)
        self._lines: dict[tuple[str, str], Mapping[str, Any]] = {}

    def of(self, group_id: str, rollout: Rollout) -> TrainerValues:
        """The values of a rollout; :data:`NONE` where nothing is kept of it, or of other tokens."""
        self._read()
        record = self._lines.get((group_id, rollout.rollout_id))
        if record is None:
            return NONE
        columns = {name: _spread(record.get(name), rollout) for name in ("logprobs", "entropy")}
        return TrainerValues(step=int(record["step"]), **columns)

    def _read(self) -> None:
        try:
            stat = self._file.stat()
            if (stat.st_mtime_ns, stat.st_size) == self._stamp:
                return
            with self._file.open("rb") as file:
                file.seek(max(0, stat.st_size - MOST_BYTES))
                lines = file.read(MOST_BYTES).splitlines()
        except OSError:
            return
        self._stamp = (stat.st_mtime_ns, stat.st_size)
        for line in lines:
            try:
                record = json.loads(line)
                if record["schema"] == SAMPLE_SCHEMA and isinstance(record["step"], int):
                    self._lines[str(record["group_id"]), str(record["rollout_id"])] = record
            except (ValueError, TypeError, KeyError, RecursionError):
                continue  # cut at the beginning, being written at the end, or not ours


def _spread(values: Any, rollout: Rollout) -> NDArray[np.float32] | None:
    """[T] of the values of the trained tokens; None where they are not as many."""
    try:
        trained = np.asarray(values, np.float32)
    except (TypeError, ValueError):
        return None
    if trained.shape != (rollout.loss_tokens,) or not np.isfinite(trained).all():
        return None
    column = np.zeros(rollout.length, np.float32)
    column[rollout.loss_mask] = trained
    return column
