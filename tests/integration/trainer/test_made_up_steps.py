"""`rlbuffer train --fake-data` with a loss that reads further columns: made-up rollouts have them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlbuffer.config.settings import RunSettings
from rlbuffer.state.step_record import StepRecord
from rlbuffer.trainer.fake import FakeRun
from rlbuffer.trainer.loop import train
from rlbuffer.weights.model import TINY_QWEN3

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
UNKNOWN = {"mfu", "buffer", "reward_parts", "correction_weight", "experts_unrecorded", "support"}
"""A CPU's peak, a pool where there is no server, parts of a reward that is made up, corrections that nobody named, and
records of experts and of restricted sampling that neither model nor settings have."""
SMALL = dict(TINY_QWEN3, hidden_size=32, intermediate_size=32, num_hidden_layers=1)


@pytest.mark.parametrize(
    "loss",
    [
        {"kl_beta": 0.1},
        {"name": "teacher:loss", "columns": ["teacher_logprobs"], "options": {"clip": 0.4}},
    ],
    ids=["kl_beta", "columns"],
)
def test_a_loss_that_reads_a_column_trains_on_made_up_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: dict[str, Any]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    wanted = RunSettings(
        home=tmp_path,
        batcher={"row_tokens": 64},
        model={"config": SMALL},
        trainer={"steps": 1, "output": tmp_path, "device": "cpu", "loss": loss},
    )
    assert train(wanted, rank=0, world_size=1, source=FakeRun)
    (record,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert np.isfinite(record["loss"])
    measured = {f.name for f in fields(StepRecord) if not isinstance(getattr(StepRecord(), f.name), str | tuple)}
    assert measured - record.keys() == UNKNOWN, "what Tally.record gives no value; UNKNOWN says of which that is right"


def test_further_columns_change_no_token_of_a_made_up_step() -> None:
    buffer = FakeRun(RunSettings(batcher={"row_tokens": 64}), vocabulary=13)
    with_columns = next(buffer.reader(columns=("ref_logprobs", "entropy")).steps())
    without = next(buffer.reader().steps())
    for mine, theirs in zip(with_columns, without, strict=True):
        assert mine.input_ids.tolist() == theirs.input_ids.tolist()
        assert mine.columns["ref_logprobs"][mine.loss_mask].max() <= 0.0
        assert set(mine.columns) == {"ref_logprobs", "entropy"}
