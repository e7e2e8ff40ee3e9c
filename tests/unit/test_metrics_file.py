"""``metrics.jsonl``: one JSON object a line, readable at once, appended to after a restart."""

from __future__ import annotations

import json
import math
from pathlib import Path

from rlbuffer.trainer.reports.metrics import FILE_NAME, MetricsFile


def read(directory: Path) -> list[dict[str, object]]:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    lines = (directory / FILE_NAME).read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "run")
    metrics.write({"step": 1, "loss": 0.5})
    assert read(tmp_path / "run") == [{"step": 1, "loss": 0.5}]
    metrics.close()


def test_a_value_that_is_not_finite_becomes_null(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.write({"loss": math.nan, "kl": math.inf, "grad_norm": -math.inf, "reward": None, "step": 3})
    metrics.close()
    assert read(tmp_path) == [{"loss": None, "kl": None, "grad_norm": None, "reward": None, "step": 3}]


def test_a_restart_appends(tmp_path: Path) -> None:
    for step in (1, 1, 2):
        metrics = MetricsFile(tmp_path)
        metrics.write({"step": step})
        metrics.close()
    assert read(tmp_path) == [{"step": 1}, {"step": 1}, {"step": 2}]
