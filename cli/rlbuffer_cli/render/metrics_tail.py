"""Following ``metrics.jsonl`` while the trainer writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlbuffer.state.step_record import StepRecord

TAIL_POLL_SECONDS = 0.2
ASK_SECONDS = 1.0


class MetricsTail:
    """New steps since the last look; a step that was trained again after a restart is given once."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self.last_step = 0
        self._rest = b""
        self._at = path.stat().st_size if from_end and path.exists() else 0

    def new(self) -> list[StepRecord]:
        """Records of whole lines that appeared since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as stream:
            stream.seek(self._at)
            data = stream.read()
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        records = []
        for line in lines:
            values = step_of(line)
            if values is not None and values["step"] > self.last_step:
                self.last_step = values["step"]
                records.append(StepRecord.read(values))
        return records


def step_of(line: bytes) -> dict[str, Any] | None:
    """What a line says of a trained step; None where it is none."""
    try:
        values = json.loads(line)
    except ValueError:
        return None  # a line that a killed trainer left half-written
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None
