"""What is sampled under top_k, top_p and min_p is trained as it was sampled: the ratio on policy is 1."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlbuffer.config.settings import ModelSettings, WorkerSettings
from rlbuffer.errors import WrongLogprobs
from rlbuffer.packing.pack import pack
from rlbuffer.records.group import Ticket
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.support import SUPPORT, left_out
from rlbuffer.scorer.reference import Reference
from rlbuffer.testing import make_group
from rlbuffer.trainer.model.packed_policy import PackedPolicy, prepare
from rlbuffer.trainer.update.update import trained_tokens
from rlbuffer.weights.files import publish
from rlbuffer.weights.model import TINY_QWEN3, build_model, config_of
from rlbuffer.worker.envs import Prompt, Score
from rlbuffer.worker.group_maker import GroupMaker
from rlbuffer.worker.samplers import Sampling, make_sampler
from rlbuffer.worker.samplers.decoding import Decoder
from rlbuffer.worker.samplers.selfcheck import Drawn, check_sampler, compared

VOCABULARY = 300
SETTINGS = [(20, 0.9, 0.05), (50, 0.95, 0.0), (20, 1.0, 0.0)]
"""top_k, top_p, min_p."""


class Story:
    """An env of long completions, for any tokens."""

    name, max_new_tokens, eos_token_ids = "story", 60, (7,)

    def prompt(self, number: int) -> Prompt:
        return Prompt(prompt_id=f"{number}", tokens=np.arange(3 + 2 * number, dtype=np.int32) + 20 * number)

    def score(self, prompt: Prompt, tokens: np.ndarray, **_: Any) -> Any:
        return Score(reward=1.0)

    def render(self, tokens: np.ndarray) -> str:
        return ""


def played(directory: Path, **settings: Any) -> tuple[PackedPolicy, list[Rollout], float]:
    """The trainer's policy, what a worker with these settings would push of it, and what its self check finds."""
    model = build_model(ModelSettings(config={**TINY_QWEN3, "vocab_size": VOCABULARY}), seed=3).eval()
    version = publish(directory, 0, state=model.state_dict(), config=config_of(model), keep=2)
    worker = WorkerSettings(env="story", group_size=4, **settings)

    async def run() -> tuple[list[Rollout], float]:
        sampler = make_sampler(worker, seed=5)
        try:
            await sampler.load(version)
            env: Any = Story()
            maker = GroupMaker(env, sampler, worker, worker="w")
            tickets = [Ticket(env="story", number=number, group_id=f"story.{number}") for number in range(3)]
            groups = [await maker.make(ticket, maker.prompt(ticket.number)) for ticket in tickets]
            assert {name: groups[0].metadata.get(name, 0) for name in ("top_k", "min_p")} == {
                name: settings.get(name, 0) for name in ("top_k", "min_p")
            }
            off = await check_sampler(sampler, version, maker.prompt(0).tokens, maker.sampling)
            return [rollout for group in groups for rollout in group.rollouts], off
        finally:
            await sampler.close()

    rollouts, off = asyncio.run(run())
    return prepare(copy.deepcopy(model)), rollouts, off


def ratios(policy: PackedPolicy, rollouts: list[Rollout]) -> np.ndarray:
    row = pack(rollouts, row_tokens=sum(rollout.length for rollout in rollouts))
    with torch.no_grad():
        tokens = trained_tokens(policy, row.to("cpu"))
    assert len(tokens.logprobs) > 300
    found: np.ndarray = (tokens.logprobs.double() - tokens.inference_logprobs.double()).exp().numpy()
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), SETTINGS)
def test_the_ratio_on_policy_is_1_and_far_from_it_without_the_record(
    tmp_path: Path, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    policy, rollouts, off = played(tmp_path, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert np.abs(ratios(policy, rollouts) - 1).max() < 5e-6
    assert off < 1e-5
    bare = [
        Rollout(**{f: getattr(r, f) for f in ("tokens", "loss_mask", "logprobs", "version_spans")}, columns=columns)
        for r in rollouts
        for columns in [{name: values for name, values in r.columns.items() if name != SUPPORT}]
    ]
    assert np.abs(ratios(policy, bare) - 1).max() > 0.1
    for rollout in rollouts:
        support, mask = rollout.columns[SUPPORT], rollout.loss_mask
        sizes = (support >= 0).sum(axis=1)
        assert (support.dtype, support.shape[1]) == (np.int32, sizes.max())
        assert 1 <= sizes[mask].min() <= sizes[mask].max() <= top_k
        assert not left_out(support, rollout.tokens, VOCABULARY)[np.arange(len(support)), rollout.tokens].any()
        assert (left_out(support, rollout.tokens, VOCABULARY).sum(axis=1)[mask] >= VOCABULARY - top_k).all()


def test_reference_logprobs_are_of_the_same_tokens(tmp_path: Path) -> None:
    """Beside a rollout that was sampled from all tokens, in the same row."""
    policy, rollouts, _ = played(tmp_path, temperature=0.7, top_k=20, top_p=0.9)
    _, plain, _ = played(tmp_path / "plain", temperature=0.7)
    mixed = [rollouts[0], plain[0], *rollouts[1:4]]
    found = Reference(policy, row_tokens=512, temperature=1.0).logprobs(mixed)
    for rollout, logprobs in zip(mixed, found, strict=True):
        assert np.abs(logprobs - rollout.logprobs)[rollout.loss_mask].max() < 5e-6
    assert SUPPORT not in plain[0].columns


def test_a_greedy_answer_of_an_evaluation_records_nothing(tmp_path: Path) -> None:
    model = build_model(ModelSettings(config={**TINY_QWEN3}), seed=3).eval()
    version = publish(tmp_path, 0, state=model.state_dict(), config=config_of(model), keep=2)
    worker = WorkerSettings(env="story", top_k=5)

    async def run() -> Any:
        sampler = make_sampler(worker)
        try:
            await sampler.load(version)
            env: Any = Story()
            maker = GroupMaker(env, sampler, worker, worker="w", temperature=0.0)
            return (await sampler.sample(np.array([1, 2], np.int32), n=1, sampling=maker.sampling))[0]
        finally:
            await sampler.close()

    answer = asyncio.run(run())
    assert answer.support is None
    assert not answer.logprobs.any()


def test_the_self_check_finds_logprobs_that_are_not_of_the_tokens_that_are_said(tmp_path: Path) -> None:
    model = build_model(ModelSettings(config={**TINY_QWEN3, "vocab_size": VOCABULARY}), seed=3).eval()
    version = publish(tmp_path, 0, state=model.state_dict(), config=config_of(model), keep=2)
    decoder = Decoder(seed=0)
    decoder.load(version)
    prompt, sampling = np.array([1, 2, 3], np.int32), Sampling(max_new_tokens=8, top_k=20)
    (answers,) = decoder.sample([prompt], n=2, sampling=sampling)
    drawn = Drawn(prompt=prompt, completions=answers, sampling=sampling)
    assert compared(version, drawn) < 1e-5
    lies = [replace(a, support=None if a.support is None else a.support[:, :10]) for a in answers]
    with pytest.raises(WrongLogprobs):
        compared(version, replace(drawn, completions=lies))


def test_a_worker_says_at_its_start_what_a_record_takes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rlbuffer")
    asyncio.run(make_sampler(WorkerSettings(env="story", sampler="transformers", top_k=20)).close())
    assert "what top_k leaves is recorded: at most 128 bytes a token (top_k 20, " in caplog.text
    caplog.clear()
    asyncio.run(make_sampler(WorkerSettings(env="story", sampler="transformers")).close())
    assert caplog.text == ""


@pytest.mark.parametrize("column", [np.zeros(8, np.float32), np.zeros((8, 2000), np.int32), np.full((8, 2), 2**40)])
def test_a_column_of_another_kind_fails_no_scoring(column: np.ndarray) -> None:
    """Any worker may push one; the batcher drops it, and a scorer scores its neighbours."""
    policy = prepare(build_model(ModelSettings(config={**TINY_QWEN3, "vocab_size": VOCABULARY}), seed=3).eval())
    plain = make_group(lengths=[8, 9]).rollouts
    strange = [replace(plain[0], columns={SUPPORT: column}), plain[1]]
    scored = [Reference(policy, row_tokens=64, temperature=1.0).logprobs(its) for its in (plain, strange)]
    for mine, other in zip(*scored, strict=True):
        assert np.array_equal(mine, other)
