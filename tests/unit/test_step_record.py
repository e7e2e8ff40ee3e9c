"""The record of a trained step: each of its fields is in ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from step_headers import step_of

from rlbuffer.config.losses import LossChoice
from rlbuffer.packing.pack import pack
from rlbuffer.process.ranks import Ranks
from rlbuffer.state.metric import metric
from rlbuffer.state.step_record import StepRecord, scalars
from rlbuffer.testing import make_group
from rlbuffer.trainer.reports.mfu import Utilization
from rlbuffer.trainer.reports.sinks import FILE_NAME, MetricsFile
from rlbuffer.trainer.reports.tally import Tally
from rlbuffer.trainer.update.stopwatch import Stopwatch

EXAMPLES: dict[type, Any] = {int: 3, float: 0.5, NoneType: 0.25, str: "text", dict: {"math": 0.5}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Longer(StepRecord):
    """The record with one number more."""

    surprise: float | None = metric("train_surprise", "gauge", "Of a test.", None)


def filled(cls: type[StepRecord]) -> StepRecord:
    """A record with something in every field."""
    given = {part.name: EXAMPLES.get(type(getattr(cls(), part.name)), ["ab"]) for part in fields(cls)}
    further = {"reward_parts": {"math": {"proof": 0.5}}, "ranks": [{"tokens": 3, "wait": 0.5}], "examples": [{}]}
    return cls(**given | further)


def written(folder: Path, record: StepRecord) -> Any:
    file = MetricsFile(folder)
    file.add(record)
    file.write()
    return json.loads((folder / FILE_NAME).read_text().splitlines()[-1])


@pytest.mark.parametrize("cls", [StepRecord, Longer])
def test_every_field_arrives_in_the_file(tmp_path: Path, cls: type[StepRecord]) -> None:
    record = filled(cls)
    line = written(tmp_path, record)
    assert line.keys() == {part.name for part in fields(cls)}
    assert cls.read(line) == record
    numbers = [part.name for part in fields(cls) if type(getattr(cls(), part.name)) in (int, float, NoneType, dict)]
    assert len(numbers) > 30
    assert {path.partition("/")[0] for path in scalars(line)} == set(numbers)


def test_what_was_not_measured_is_left_out_and_a_0_is_not(tmp_path: Path) -> None:
    line = written(tmp_path, StepRecord(step=3, loss=math.nan, kl=0.0, ratio={"max": math.inf}))
    assert "reward" not in line
    assert (line["kl"], line["loss"], line["ratio"]) == (0.0, None, {"max": None})
    assert StepRecord.read(line).loss is None


def test_what_anybody_wrote_is_read_field_by_field() -> None:
    strange = {"step": 2, "loss": "much", "seconds": [1], "ranks": {"a": 1}, "digest": None, "entropy": 1, "more": 1}
    assert StepRecord.read(strange) == StepRecord(step=2, entropy=1)


EMBEDDING = SimpleNamespace(weight=torch.zeros(1))
CONFIG = SimpleNamespace(get_text_config=lambda: None)
WORK = SimpleNamespace(config=CONFIG, get_input_embeddings=lambda: EMBEDDING, get_output_embeddings=lambda: EMBEDDING)


class Halves(Ranks):
    """Two ranks in one process: each gives its own part."""

    def __init__(self) -> None:
        super().__init__(0, 2, torch.device("cpu"))
        self.texts: list[str] = []

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values[None]

    def gather_text(self, text: str) -> list[str]:
        self.texts.append(text)
        return self.texts


def test_a_record_is_of_the_rollouts_of_all_ranks() -> None:
    rewards = [1000.0, 1000.5, 1002.0, 1000.0, 1007.0, 1001.0]
    rollouts = [
        replace(rollout, reward=reward, rewards={"proof": reward / 2}, is_truncated=reward > 1001)
        for rollout, reward in zip(make_group(env="math", size=6).rollouts, rewards, strict=True)
    ]
    steps = [step_of(pack(half, row_tokens=4096), world_size=2) for half in (rollouts[:2], rollouts[2:])]
    ranks = Halves()
    for step in steps:
        tally = Tally(ranks, step, LossChoice())
        tally.sums += 1.0
        record = tally.record(Stopwatch(), Utilization(WORK, 0, ranks.device, passes=1))
    (env,) = record.reward_std  # rows that were packed by hand name none
    assert record.reward_std[env] == pytest.approx(np.std(rewards, ddof=1), rel=1e-9)
    assert record.reward_parts == {env: {"proof": pytest.approx(np.mean(rewards) / 2)}}
    assert record.truncated == record.truncated_by_env[env] == pytest.approx(2 / 6)
    assert record.response_tokens[env] == pytest.approx(np.mean([r.length - r.prompt_tokens for r in rollouts]))
    assert [rank["tokens"] for rank in record.ranks] == [
        sum(r.length for r in half) for half in (rollouts[:2], rollouts[2:])
    ]
