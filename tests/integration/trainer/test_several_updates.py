"""Steps of several updates through the whole trainer: what they count, what they compare with, and resuming."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbuffer.config.schedules import learning_rate_at
from rlbuffer.config.settings import RunSettings
from rlbuffer.trainer.fake import FakeRun
from rlbuffer.trainer.loop import train
from rlbuffer.trainer.update import update
from rlbuffer.trainer.update.update import trained_tokens
from rlbuffer.weights.model import TINY_QWEN3

SMALL = dict(TINY_QWEN3, hidden_size=32, intermediate_size=32, num_hidden_layers=1)


SEVERAL = {"passes": 2, "updates_per_pass": 2, "schedule": "linear"}


def settings(output: Path, optimizer: Mapping[str, Any] | None = None, **trainer: Any) -> RunSettings:
    values = {"steps": 2, "checkpoint": {"every": 1, "keep": 9}, "output": output, "device": "cpu"}
    return RunSettings(
        home=output,
        batcher={"row_tokens": 64, "rows_per_micro_batch": 2},
        model={"config": SMALL},
        trainer=values | {"optimizer": SEVERAL | dict(optimizer or {})} | trainer,
    )


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def trained(output: Path, **trainer: Any) -> list[dict[str, Any]]:
    assert train(settings(output, **trainer), rank=0, world_size=1, source=FakeRun)
    return records(output)


@pytest.mark.parametrize("updates_per_pass", [1, 2, 64])  # no step has 64 micro-batches
def test_every_step_takes_its_share_of_the_schedule_however_many_updates_it_makes(
    tmp_path: Path, updates_per_pass: int
) -> None:
    optimizer = {"updates_per_pass": updates_per_pass, "warmup_updates": updates_per_pass}
    made = trained(tmp_path, steps=3, optimizer=optimizer)
    told = settings(tmp_path, optimizer, steps=3).trainer
    rates = [learning_rate_at(2 * updates_per_pass * step, told) for step in (1, 2, 3)]
    assert [r["learning_rate"] for r in made] == rates
    assert rates == pytest.approx([told.optimizer.learning_rate * share for share in (0.8, 0.4, 0.0)])


@pytest.mark.parametrize(("old", "is_still"), [("recomputed", True), ("inference", False)])
def test_the_first_update_is_at_ratio_one_to_the_recomputed_policy(tmp_path: Path, old: str, is_still: bool) -> None:
    """With a rate of nearly 0 the policy stays where it was, so against itself no ratio ever leaves the clip."""
    few = trained(
        tmp_path,
        steps=1,
        optimizer={"learning_rate": 1e-12},
        loss={"old_logprobs": old, "options": {"clip_low": 1e-4, "clip_high": 1e-4}},
    )
    assert (few[0]["clip_fraction"] == 0.0) is is_still


def test_one_update_needs_no_pass_of_its_own_to_know_the_old_policy(tmp_path: Path, monkeypatch: Any) -> None:
    passes = []

    def counted(*arguments: Any, **options: Any) -> Any:
        passes.append(torch.is_grad_enabled())
        return trained_tokens(*arguments, **options)

    monkeypatch.setattr(update, "trained_tokens", counted)
    once = trained(tmp_path / "one", steps=1, optimizer={"passes": 1, "updates_per_pass": 1}, loss={"name": "tis"})
    assert once[0]["clip_fraction"] == 0.0
    of_numerics = 2  # what bfloat16 changes in the first micro-batch of a process
    assert passes.count(False) == of_numerics
    passes.clear()
    trained(tmp_path / "two", steps=1, optimizer={"passes": 2, "updates_per_pass": 1}, loss={"name": "tis"})
    assert passes.count(False) > of_numerics
