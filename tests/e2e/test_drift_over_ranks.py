"""The table by age over ranks, micro-batches and packed rows, against one rollout at a time in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import drift_ranks
import numpy as np
import pytest
from drift_ranks import LOSSES, STEP, WORLD_SIZE, advantage_of, bfloat16_rms, rollouts, tables
from forked import Parent
from numpy.typing import NDArray

from rlbuffer.records.support import SUPPORT
from rlbuffer.weights.model import TINY_QWEN3

Floats = NDArray[np.float64]


def oracle() -> dict[str, dict[str, float]]:
    """The table with the losses' clip and mask, each number from its definition."""
    import torch

    from rlbuffer.weights.model import model_from_config

    torch.manual_seed(0)
    model = model_from_config(TINY_QWEN3, dtype=torch.float64).eval()
    model.double()
    rows: dict[str, list[tuple[float, float, float, float]]] = {}
    for number, rollout in enumerate(rollouts()):
        with torch.no_grad():
            logits = model(input_ids=torch.as_tensor(rollout.tokens.astype(np.int64))[None]).logits[0].double().numpy()
        for at in np.flatnonzero(rollout.loss_mask):
            scores: Floats = logits[at - 1].copy()
            support = rollout.columns.get(SUPPORT)
            if support is not None and rollout.tokens[at] in support[at]:
                kept = np.zeros(len(scores), bool)
                kept[support[at][support[at] >= 0]] = True
                scores[~kept] = -np.inf
            logprobs = scores - scores.max() - math.log(np.exp(scores - scores.max()).sum())
            likely = logprobs[np.isfinite(logprobs)]
            (version,) = [s.policy_version for s in rollout.version_spans if s.start <= at < s.end]
            age = STEP - 1 - version
            entropy = -float((np.exp(likely) * likely).sum())
            row = float(logprobs[rollout.tokens[at]]), float(rollout.logprobs[at]), entropy, advantage_of(number)
            rows.setdefault(str(age) if age < 5 else "rest", []).append(row)
    return {age: measured(np.array(values)) for age, values in rows.items()}


def measured(values: Floats) -> dict[str, float]:
    ours, sampler, entropy, advantages = values.T
    difference, count = ours - sampler, len(ours)
    ratio = np.exp(difference)
    slope, start = np.polyfit(sampler, difference, 1)
    left = difference - slope * sampler - start
    surprise = -sampler - entropy
    return {
        "tokens": count,
        "ratio": ratio.mean(),
        "ratio_error": ratio.std() / math.sqrt(count),
        "ess": ratio.sum() ** 2 / (ratio**2).sum() / count,
        "far": float(((ratio > 1.1) | (ratio < 1 / 1.1)).mean()),
        "mean": difference.mean(),
        "rms": math.sqrt((difference**2).mean()),
        "kl": (ratio - 1 - difference).mean(),
        "slope": slope,
        "slope_error": left.std() / sampler.std() / math.sqrt(count),
        "fit": 1 - left.var() / difference.var(),
        "surprise": surprise.mean(),
        "surprise_error": surprise.std() / math.sqrt(count),
        "entropy": entropy.mean(),
        "clipped": float((((ratio > 1.2) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))).mean()),
        "corrected": float(((ratio > 1.4) | (ratio < 0.8)).mean()),
    }


def check(table: dict[str, Any], expected: dict[str, dict[str, float]], number: int) -> None:
    """The shares that a loss takes are those of the loss which takes them."""
    assert list(table) == ["0", "1", "2", "3", "4", "rest"]
    loss, optimizer = LOSSES[number]
    taken = () if optimizer else ("clipped",) if loss["name"] == "clip" else ("corrected",)
    for age, row in table.items():
        for name, value in expected[age].items():
            if name not in ("clipped", "corrected") or name in taken:
                assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-9), (age, name)
        assert row["corrected"] == 0 or loss["name"] != "clip"


def test_the_table_by_age_is_that_of_one_rollout_at_a_time(parent: Parent, tmp_path: Path) -> None:
    ranks = [
        parent.start([drift_ranks.__file__, str(rank), str(tmp_path)], environment=parent.environment, folder=tmp_path)
        for rank in range(WORLD_SIZE)
    ]
    try:
        for rank in ranks:
            out, errors = rank.communicate(timeout=150)
            assert rank.returncode == 0, out + errors
    finally:
        for rank in ranks:
            rank.kill()
    expected, alone, changed = oracle(), tables(0, 1), bfloat16_rms(0, 1)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    assert told[0] == told[1]  # to the bit
    assert all(0 < rms < 0.1 for rms in changed)
    for number, table in enumerate(alone):
        check(table, expected, number)
        for way in ("ddp", "fsdp"):
            check(told[0][way][0][number], expected, number)
            assert told[0][way][1] == pytest.approx(changed, rel=0.5)  # of each rank's first micro-batch
