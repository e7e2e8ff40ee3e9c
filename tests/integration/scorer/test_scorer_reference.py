"""Reference logprobs: computed packed, equal to those of the library's own forward pass, one rollout at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import trees
from scorer_stage import Stage, eventually

from rlbuffer.records.failure import Failure
from rlbuffer.records.rollout import TokenSequence
from rlbuffer.testing import make_group
from rlbuffer.weights.model import TINY_QWEN3, build_model

SEED = 5
CONFIG = {**TINY_QWEN3, "vocab_size": 1024, "initializer_range": 0.3}


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    stage = Stage(
        model={"config": CONFIG},
        seed=SEED,
        trainer={"layout": getattr(request, "param", "packed")},
        batcher={"row_tokens": 64},
        score={"one": {"model": "initial", "device": "cpu"}},
    )
    yield stage
    stage.finish()
    stage.buffer.close()


def expected(stage: Stage, rollout: TokenSequence, temperature: float = 1.0) -> np.ndarray:
    """By the library's attention and head, this rollout alone."""
    model = build_model(stage.settings.model, seed=SEED).eval()
    tokens = torch.from_numpy(rollout.tokens.astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1] / temperature
    found = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0].numpy()
    return np.where(rollout.loss_mask, np.concatenate([[0.0], found]), 0.0)


@pytest.mark.parametrize("stage", ["packed", "padded"], indirect=True)
def test_packed_reference_logprobs_are_those_of_separate_forward_passes(stage: Stage):
    groups = [make_group(env="a", seed=n, needs=["ref_logprobs"], answer=n, metadata={"k": n}) for n in range(6)]
    for group in groups:
        stage.writer.push(group)
    before = stage.buffer.ledger()
    stage.start()
    eventually(lambda: not stage.waiting_groups())
    stage.finish()
    assert stage.raised is None
    assert stage.buffer.ledger() == before
    pool = stage.pool()
    for group in groups:
        needs, rollouts, rest = pool[group.group_id]
        assert (needs, rest) == ((), (group.answer, group.metadata))
        for rollout, original in zip(rollouts, group.rollouts, strict=True):
            found = rollout.columns["ref_logprobs"]
            assert found.dtype == np.float32
            assert np.abs(found - expected(stage, original)).max() < 1e-5
            assert (found[original.loss_mask] < -0.1).all()
            assert np.array_equal(rollout.tokens, original.tokens)
            assert (rollout.reward, rollout.version_spans) == (original.reward, original.version_spans)
    assert [line.gives for line in stage.told("ready")] == [["ref_logprobs"]]
    assert sorted(event.group_id for event in stage.told("scored")) == [f"a.{n}" for n in range(6)]
    (ended,) = stage.told("stopped")
    assert (ended.groups, ended.rollouts, ended.late, ended.failed_groups) == (6, 24, 0, 0)
    assert stage.buffer.verify().findings == ()


def test_a_failed_attempt_gets_no_reference_logprobs_and_costs_its_group_nothing(stage: Stage):
    groups = [make_group(env="a", seed=n, size=2, needs=["ref_logprobs"]) for n in range(2)]
    beyond = groups[0].rollouts[0].tokens + 1024  # no token of the model's
    failed = replace(groups[0].rollouts[0], tokens=beyond, failure=Failure("tool", "away"))
    stage.writer.push(replace(groups[0], rollouts=(failed, groups[0].rollouts[1])))
    stage.writer.push(replace(groups[1], rollouts=[replace(r, failure=failed.failure) for r in groups[1].rollouts]))
    stage.start()
    eventually(lambda: not stage.waiting_groups())
    pool = stage.pool()
    assert [sorted(r.columns) for name in ("a.0", "a.1") for r in pool[name][1]] == [[], ["ref_logprobs"], [], []]


def test_each_sequence_of_a_rollout_gets_the_logprobs_of_its_own_forward_pass(stage: Stage):
    groups = [replace(group, needs=("ref_logprobs",)) for group in trees.groups(3, 4, 3)]
    assert max(len(rollout.sequences) for group in groups for rollout in group.rollouts) > 2
    for group in groups:
        stage.writer.push(group)
    stage.start()
    eventually(lambda: not stage.waiting_groups())
    stage.finish()
    pool = stage.pool()
    for group in groups:
        its = [sequence for rollout in pool[group.group_id][1] for sequence in rollout.sequences]
        for found, original in zip(its, group.sequences(), strict=True):
            assert np.array_equal(found.tokens, original.tokens)
            assert np.abs(found.columns["ref_logprobs"] - expected(stage, original)).max() < 1e-5
    assert stage.buffer.verify().findings == ()


def test_the_temperature_that_a_rollout_carries_counts_and_its_other_columns_stay(stage: Stage):
    columns = [
        {"temperatures": np.full(20, 0.5, np.float32), "entropy": np.ones(20, np.float32)},
        {"routes": np.ones((20, 2), np.int16)},
    ]
    group = make_group(env="a", lengths=[20, 20], columns=columns, needs=["ref_logprobs"])
    stage.writer.push(group)
    stage.start()
    eventually(lambda: not stage.waiting_groups())
    warm, plain = stage.pool()["a.0"][1]
    assert np.abs(warm.columns["ref_logprobs"] - expected(stage, group.rollouts[0], 0.5)).max() < 1e-5
    assert np.abs(plain.columns["ref_logprobs"] - expected(stage, group.rollouts[1])).max() < 1e-5
    assert (sorted(warm.columns), sorted(plain.columns)) == (
        ["entropy", "ref_logprobs", "temperatures"],
        ["ref_logprobs", "routes"],
    )


def test_a_rollout_longer_than_a_row_is_scored_too_and_a_token_that_the_model_does_not_have_is_said(stage: Stage):
    stage.writer.push(make_group(env="a", seed=1, lengths=[100, 10], needs=["ref_logprobs"]))
    strange = make_group(env="a", seed=2, lengths=[10, 10], needs=["ref_logprobs"])
    strange.rollouts[0].tokens.flags.writeable = True
    strange.rollouts[0].tokens[3] = 5000
    stage.writer.push(strange)
    stage.start()
    eventually(lambda: stage.told("scored"))
    assert "rollout a.2/0: token 5000 is outside" in eventually(lambda: stage.told("trouble"))[0].text
    assert stage.waiting_groups() == ["a.2"]
    assert stage.pool()["a.1"][1][0].columns["ref_logprobs"].shape == (100,)


def test_only_the_envs_and_needs_that_a_scorer_is_for_are_touched(stage: Stage):
    stage.writer.push(make_group(env="a", seed=1, needs=["ref_logprobs", "rewards.judge"]))
    stage.writer.push(make_group(env="a", seed=2, needs=["reward"]))
    stage.writer.push(make_group(env="a", seed=3))
    stage.start()
    eventually(lambda: stage.told("scored"))
    stage.finish()
    assert {name: needs for name, (needs, _, _) in stage.pool().items()} == {
        "a.1": ("rewards.judge",),
        "a.2": ("reward",),
        "a.3": (),
    }
