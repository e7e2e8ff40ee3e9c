"""Following ``metrics.jsonl`` while the trainer writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TAIL_POLL_SECONDS = 0.2
ASK_SECONDS = 1.0


class MetricsTail:
    """New step records since the last look; a step that was trained again after a restart is given once."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self.last_step = 0
        self._rest = b""
        self._at = path.stat().st_size if from_end and path.exists() else 0

    def new(self) -> list[dict[str, Any]]:
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
            record = step_record(line)
            if record is not None and record["step"] > self.last_step:
                self.last_step = record["step"]
                records.append(record)
        return records


def step_record(line: bytes) -> dict[str, Any] | None:
    """The record of a trained step in a line; None where it is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None  # a line that a killed trainer left half-written
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
