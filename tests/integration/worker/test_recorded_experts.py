"""A sampler that records experts, and a trainer that computes with them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from expert_families import config_of, made
from model_families import QWEN3
from model_families import made as made_dense
from transformers import PreTrainedModel

from rlbuffer.config.settings import RunSettings, WorkerSettings
from rlbuffer.config.trainer import TrainerSettings
from rlbuffer.errors import ConfigError
from rlbuffer.packing.pack import pack
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.group import Group, Ticket
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.routed import ROUTED_EXPERTS, is_record
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.trainer.model.packed_policy import PackedPolicy, prepare
from rlbuffer.trainer.reports.debug_samples import show_samples
from rlbuffer.trainer.update.update import SUMS, Updates
from rlbuffer.weights.experts import experts_of
from rlbuffer.weights.files import publish
from rlbuffer.weights.model import config_of as described
from rlbuffer.worker.envs.digits import VCopy
from rlbuffer.worker.group_maker import GroupMaker
from rlbuffer.worker.samplers import Sampling, make_sampler
from rlbuffer.worker.samplers.decoding import Decoder

PROMPTS = [np.array(p, np.int32) for p in ([1, 2, 10, 10, 11], [3], [4, 5, 6, 7, 8, 9, 0, 11])]


def published(folder: Path, model: PreTrainedModel) -> PolicyVersion:
    return publish(folder, 0, state=model.state_dict(), config=described(model), keep=4)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_a_completion_says_which_experts_took_each_of_its_tokens_in(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = made(config_of(family), torch.float32)
    sampler = Decoder(seed=1, records_experts=True)
    with caplog.at_level(logging.INFO):
        sampler.load(published(tmp_path, model))
    assert "experts are recorded: 6 bytes a token (2 layers, 3 of 8 experts)" in caplog.text
    sampling = Sampling(max_new_tokens=6, stop_token_ids=(12, 13, 14, 15))
    experts, lengths = experts_of(model), set()
    for prompt, completions in zip(PROMPTS, sampler.sample(PROMPTS, n=4, sampling=sampling), strict=True):
        for completion in completions:
            whole = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))
            with torch.inference_mode(), experts.recording() as recording:
                model(input_ids=whole[None], use_cache=False)
            alone, rows = recording.rows().numpy(), completion.routed_experts
            assert rows is not None
            assert (rows.dtype, rows.shape) == (np.uint8, (len(whole), 2, 3))
            assert np.array_equal(np.sort(rows[:-1]), np.sort(alone[:-1]))
            assert not is_record(rows[-1]).any()  # nothing took the last token in
            lengths.add(len(completion.tokens))
    assert len(lengths) > 1  # some ended early


def test_a_model_without_experts_has_none_to_record(tmp_path: Path) -> None:
    sampler = Decoder(seed=0, records_experts=True)
    with pytest.raises(ConfigError, match="qwen3 has no experts") as refused:
        sampler.load(published(tmp_path, made_dense(QWEN3)))
    assert refused.value.setting == "record_experts"


def test_a_sampler_that_cannot_record_is_refused() -> None:
    settings = WorkerSettings(env="vcopy", sampler="test_recorded_experts:Silent", record_experts=True)
    with pytest.raises(ConfigError, match="does not say which experts") as refused:
        make_sampler(settings)
    assert refused.value.setting == "record_experts"


class Silent:
    """A sampler of somebody else."""

    from rlbuffer.worker.samplers.transformers import TransformersSampler as _Other

    traits = replace(_Other.traits, records_experts=False)
    Options, make, load, sample, close = _Other.Options, _Other.make, _Other.load, _Other.sample, _Other.close


def group_of(policy: PolicyVersion) -> Group:
    """What a worker makes with a sampler of its settings."""
    settings = WorkerSettings(env="vcopy", group_size=8, record_experts=True)

    async def work() -> Group:
        sampler = make_sampler(settings)
        await sampler.load(policy)
        try:
            maker = GroupMaker(VCopy(), sampler, settings, worker="w")
            return await maker.make(Ticket(env="vcopy", number=0, group_id="vcopy.0"), maker.prompt(0))
        finally:
            await sampler.close()

    return asyncio.run(work())


def step_of(rollouts: list[Any]) -> Step:
    """A step of one row."""
    row = pack(rollouts, row_tokens=sum(rollout.length for rollout in rollouts))
    counts = Normalizers(loss_tokens=sum(r.loss_tokens for r in rollouts), rollouts=len(rollouts), groups=1)
    return Step(
        number=1,
        epoch=0,
        digest="",
        world_size=1,
        normalizers=counts,
        rollouts=len(rollouts),
        groups=1,
        micro_batches=(row,),
    )


def sums_of(policy: PackedPolicy, rollouts: list[Any], **settings: Any) -> dict[str, float]:
    """What the trainer counts in a step of these rollouts."""
    step = step_of(rollouts)
    updates = Updates(policy, step, TrainerSettings(**settings), Ranks(0, 1, torch.device("cpu")), longest=64)
    (part,) = updates.parts
    return dict(zip(SUMS, updates.accumulate(part).tolist(), strict=True))


def test_a_workers_record_is_what_the_trainer_computes_with(tmp_path: Path) -> None:
    model = made({**config_of("qwen3_moe"), "vocab_size": 13}, torch.float32)
    rollouts = list(group_of(published(tmp_path, model)).rollouts)
    assert all(rollout.columns[ROUTED_EXPERTS].shape == (rollout.length, 2, 3) for rollout in rollouts)
    policy = prepare(model)
    sums = sums_of(policy, rollouts)
    assert sums["kl"] / sums["loss_tokens"] < 1e-9
    assert (sums["routed/tokens"], sums["routed/unrecorded"]) == (sum(r.length - 1 for r in rollouts), 0)

    rolled = [np.roll(rollout.columns[ROUTED_EXPERTS], 1, axis=0) for rollout in rollouts]
    other = [replace(r, columns={ROUTED_EXPERTS: rows}) for r, rows in zip(rollouts, rolled, strict=True)]
    assert sums_of(policy, other)["kl"] > 1e-3
    unused = sums_of(policy, other, replay_experts=False)
    assert unused["kl"] / unused["loss_tokens"] < 1e-9
    assert unused["routed/tokens"] == 0


def test_tokens_without_a_record_are_counted(tmp_path: Path) -> None:
    model = made({**config_of("qwen3_moe"), "vocab_size": 13}, torch.float32)
    rollouts = list(group_of(published(tmp_path, model)).rollouts)
    rollouts[0] = replace(rollouts[0], columns={})
    signed = rollouts[1].columns[ROUTED_EXPERTS].astype(np.int16)
    signed[:2] = -1
    rollouts[1] = replace(rollouts[1], columns={ROUTED_EXPERTS: signed})
    sums = sums_of(prepare(model), rollouts)
    assert sums["routed/unrecorded"] == rollouts[0].length - 1 + 2
    assert sums["kl"] / sums["loss_tokens"] < 1e-9


def test_samples_that_are_shown_for_debugging_leave_the_column_unused_where_training_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = made({**config_of("qwen3_moe"), "vocab_size": 13}, torch.float32)
    rollouts = list(group_of(published(tmp_path, model)).rollouts)
    dense = prepare(made_dense({**QWEN3, "vocab_size": 13}))
    ranks = Ranks(0, 1, torch.device("cpu"))
    for replays in (False, True):
        settings = RunSettings(home=tmp_path, trainer={"output": tmp_path, "replay_experts": replays})
        session: Any = SimpleNamespace(module=dense, ranks=ranks, settings=settings, is_first=True)
        show_samples(session, step_of(rollouts), 2)
        assert ("has no experts. The column is not used" in caplog.text) == replays
    assert "vcopy" in capsys.readouterr().err


def test_a_record_of_another_model_counts_as_none(tmp_path: Path) -> None:
    model = made({**config_of("qwen3_moe"), "vocab_size": 13}, torch.float32)
    rollouts = list(group_of(published(tmp_path, model)).rollouts)
    policy = prepare(model)
    for wrong in (lambda rows: rows[:, :1], lambda rows: rows[:, 0, 0], lambda rows: rows + 100):
        columns = [{ROUTED_EXPERTS: wrong(rollout.columns[ROUTED_EXPERTS])} for rollout in rollouts]
        others = [replace(rollout, columns=its) for rollout, its in zip(rollouts, columns, strict=True)]
        sums = sums_of(policy, others)
        assert sums["routed/unrecorded"] == sums["routed/tokens"] > 0
