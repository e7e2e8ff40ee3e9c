"""The duties of every sampler, written once: `test_sampler_conformance.py` and `tests/real_vllm` run it on each of
them.

A check takes a :class:`Stage`: a sampler, and policies whose models are here, so that what it says it sampled from can
be computed again by one forward pass.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rlbuffer.config.settings import ModelSettings, WorkerSettings
from rlbuffer.errors import PromptTooLong, WeightsError
from rlbuffer.packing.pack import pack
from rlbuffer.records.group import Ticket
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.trainer.model.packed_policy import prepare
from rlbuffer.trainer.update.update import trained_tokens
from rlbuffer.weights.files import publish
from rlbuffer.weights.model import TINY_QWEN3, build_model, config_of
from rlbuffer.worker.envs.vcopy import VCopy
from rlbuffer.worker.group_maker import GroupMaker
from rlbuffer.worker.samplers import Completion, Sampler, Sampling

CONTEXT = 256
CONFIG = {**TINY_QWEN3, "head_dim": 32, "max_position_embeddings": CONTEXT}
"""vLLM on the CPU wants heads of 32 at least."""
PROMPTS = [np.array(p, np.int32) for p in ([1, 2, 10, 10, 11], [3], [3, 7, 11], [4, 5, 6, 7, 8, 9, 0, 11])]
PLAIN = Sampling(max_new_tokens=6, stop_token_ids=(12,))
TOLERANCE = 1e-4
RATIO_TOLERANCE = 1e-5
OF_THE_MODEL = {
    "do_sample": True,
    "temperature": 0.3,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.2,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.7,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": [3, 4],
    "bad_words_ids": [[5]],
    "eos_token_id": [7],
    "min_new_tokens": 3,
}
"""A `generation_config.json` that sets all that a server or an engine may take where a request says nothing."""
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1.5": {"temperature": 1.5},
    "max_new_tokens": {"max_new_tokens": 2},
    "top_p": {"top_p": 0.6},
}
"""Settings of sampling that a worker may have, of every sampler."""


@dataclass
class Stage:
    """A sampler that serves version 0, and versions 0 to 3 with their models."""

    sampler: Sampler
    models: list[PreTrainedModel]
    policies: list[PolicyVersion]
    tmp: Path
    samplings: tuple[Sampling, ...] = (PLAIN, replace(PLAIN, temperature=0.7))
    """Settings that the sampler was made for."""


def policies(directory: Path, count: int = 4) -> tuple[list[PreTrainedModel], list[PolicyVersion]]:
    """Models that differ in every weight, published."""
    models = [build_model(ModelSettings(config=dict(CONFIG)), seed=seed).eval() for seed in range(count)]
    published = [
        publish(directory, version, state=model.state_dict(), config=config_of(model), keep=count)
        for version, model in enumerate(models)
    ]
    for policy in published:
        (Path(policy.location) / "generation_config.json").write_text(json.dumps(OF_THE_MODEL))
    return models, published


def expected_logprobs(model: PreTrainedModel, prompt: np.ndarray, tokens: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Logprobs of the sampled tokens by one forward pass, over the whole vocabulary at the temperature."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / sampling.temperature
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def worst_error(stage: Stage, prompt: np.ndarray, completion: Completion, sampling: Sampling) -> float:
    """Largest difference between told and computed logprobs, each token with the version that its span names."""
    position, worst = 0, 0.0
    for version, start, end in completion.version_spans:
        assert start == position < end
        position = end
        expected = expected_logprobs(stage.models[version], prompt, completion.tokens, sampling)[start:end]
        worst = max(worst, float(np.abs(completion.logprobs[start:end] - expected).max()))
    assert position == len(completion.tokens)
    return worst


async def n_completions_come_for_every_prompt(stage: Stage) -> None:
    groups = await asyncio.gather(*(stage.sampler.sample(p, n=3, sampling=PLAIN) for p in PROMPTS))
    assert [len(group) for group in groups] == [3] * len(PROMPTS)
    for group in groups:
        for c in group:
            assert (c.tokens.dtype, c.logprobs.dtype) == (np.int32, np.float32)
            assert c.tokens.shape == c.logprobs.shape
            assert (c.logprobs <= 0).all()
    several = {tuple(c.tokens.tolist()) for group in groups for c in group}
    assert len(several) > 4, "completions of one prompt must differ"


async def completions_end_with_a_stop_token_or_at_the_limit(stage: Stage) -> None:
    found = set()
    for c in await stage.sampler.sample(PROMPTS[0], n=64, sampling=PLAIN):
        found.add(c.finish_reason)
        stops = np.flatnonzero(c.tokens == 12).tolist()
        if c.finish_reason == "stop":
            assert stops == [len(c.tokens) - 1]
        else:
            assert (stops, len(c.tokens)) == ([], 6)
    assert found == {"stop", "length"}


async def logprobs_are_those_that_a_trainer_computes(stage: Stage) -> None:
    for sampling in stage.samplings:
        for prompt in PROMPTS:
            for c in await stage.sampler.sample(prompt, n=4, sampling=sampling):
                assert worst_error(stage, prompt, c, sampling) < TOLERANCE, sampling


async def tokens_are_drawn_from_the_whole_vocabulary(stage: Stage) -> None:
    """A `generation_config.json` beside the model may say anything: ratios of the tokens that are left would be 1 all
    the same."""
    one = replace(PLAIN, max_new_tokens=1)
    groups = [await stage.sampler.sample(PROMPTS[1], n=64, sampling=one) for _ in range(4)]
    drawn = {int(c.tokens[0]) for group in groups for c in group}
    with torch.no_grad():
        logits = stage.models[0](input_ids=torch.from_numpy(PROMPTS[1].astype(np.int64))[None]).logits[0, -1]
    frequent = torch.nonzero(torch.softmax(logits, -1) > 0.05)[:, 0].tolist()  # 256 draws miss one once in 500,000
    assert len(frequent) > OF_THE_MODEL["top_k"]
    assert set(frequent) <= drawn


async def ratios_to_the_trainer(sampler: Sampler, model: PreTrainedModel, changed: dict[str, Any]) -> np.ndarray:
    """[N] ratios at age 0 of every token that a worker with such settings would push, as `rlbuffer train` has them."""
    settings = WorkerSettings(env="vcopy", group_size=8, **changed)
    maker = GroupMaker(VCopy(), sampler, settings, worker="w")
    groups = [
        await maker.make(Ticket(env="vcopy", number=number, group_id=f"vcopy.{number}"), maker.prompt(number))
        for number in range(4)
    ]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    row = pack(rollouts, row_tokens=sum(rollout.length for rollout in rollouts))
    with torch.no_grad():
        tokens = trained_tokens(prepare(copy.deepcopy(model)), row.to("cpu"))
    assert len(tokens.logprobs) >= len(rollouts) == 32
    return (tokens.logprobs.double() - tokens.inference_logprobs.double()).exp().numpy()


async def a_long_prompt_is_truncated_or_refused(stage: Stage) -> None:
    fits = np.arange(CONTEXT - 2, dtype=np.int32) % 12
    for c in await stage.sampler.sample(fits, n=2, sampling=replace(PLAIN, stop_token_ids=())):
        assert (c.finish_reason, len(c.tokens)) == ("length", 2)
        assert worst_error(stage, fits, c, replace(PLAIN, stop_token_ids=())) < TOLERANCE
    with pytest.raises(PromptTooLong, match=f"a prompt of {CONTEXT} tokens leaves no room in a context of {CONTEXT}"):
        await stage.sampler.sample(np.arange(CONTEXT, dtype=np.int32) % 12, n=1, sampling=PLAIN)
    assert len(await stage.sampler.sample(PROMPTS[0], n=1, sampling=PLAIN)) == 1


async def what_is_cancelled_is_given_up_and_the_rest_goes_on(stage: Stage) -> None:
    long = Sampling(max_new_tokens=CONTEXT - 10)
    tasks = [asyncio.create_task(stage.sampler.sample(PROMPTS[0], n=2, sampling=long)) for _ in range(4)]
    await asyncio.sleep(0.1)
    for task in tasks[:3]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(o) for o in outcomes[:3]] == [asyncio.CancelledError] * 3
    assert [len(c.tokens) for c in outcomes[3]] == [CONTEXT - 10] * 2  # type: ignore[union-attr]
    assert len(await stage.sampler.sample(PROMPTS[0], n=1, sampling=PLAIN)) == 1


async def sixty_four_groups_at_once_come_back_to_who_asked(stage: Stage) -> None:
    asked = [PROMPTS[i % len(PROMPTS)] for i in range(64)]
    groups = await asyncio.gather(*(stage.sampler.sample(p, n=2, sampling=PLAIN) for p in asked))
    for prompt, group in zip(asked, groups, strict=True):
        assert len(group) == 2
        for c in group:
            assert worst_error(stage, prompt, c, PLAIN) < TOLERANCE


async def a_version_that_is_loaded_meanwhile_samples_from_then_on(stage: Stage) -> None:
    long = Sampling(max_new_tokens=CONTEXT - 10)
    running = [asyncio.create_task(stage.sampler.sample(PROMPTS[0], n=2, sampling=long)) for _ in range(3)]
    for version in (1, 2, 3):
        await asyncio.sleep(0.15)
        await stage.sampler.load(stage.policies[version])
        assert stage.sampler.version == version
        fresh = await stage.sampler.sample(PROMPTS[2], n=2, sampling=PLAIN)
        assert {s.policy_version for c in fresh for s in c.version_spans} == {version}
        for c in fresh:
            assert worst_error(stage, PROMPTS[2], c, PLAIN) < TOLERANCE
    for group in await asyncio.gather(*running):
        for c in group:
            assert worst_error(stage, PROMPTS[0], c, long) < TOLERANCE


async def wrong_weights_are_refused_and_the_old_version_serves_on(stage: Stage) -> None:
    good = stage.policies[1]
    before = stage.sampler.version
    for policy, message in (
        (truncated(stage), "announced were"),
        (replace(good, location=str(stage.tmp / "nowhere")), "No such file"),
        (foreign(stage), "do not fit the model"),
    ):
        with pytest.raises(WeightsError, match=message):
            await stage.sampler.load(policy)
        assert stage.sampler.version == before
        c = (await stage.sampler.sample(PROMPTS[0], n=1, sampling=PLAIN))[0]
        assert {s.policy_version for s in c.version_spans} == {before}
        assert worst_error(stage, PROMPTS[0], c, PLAIN) < TOLERANCE
    await stage.sampler.load(good)
    assert stage.sampler.version == 1


def truncated(stage: Stage) -> PolicyVersion:
    policy = publish(
        stage.tmp / "short", 7, state=stage.models[1].state_dict(), config=config_of(stage.models[1]), keep=2
    )
    file = Path(policy.location) / "model.safetensors"
    file.write_bytes(file.read_bytes()[: policy.size // 2])
    return policy


def foreign(stage: Stage) -> PolicyVersion:
    model = build_model(ModelSettings(config={**CONFIG, "num_hidden_layers": 3}), seed=9)
    return publish(stage.tmp / "foreign", 8, state=model.state_dict(), config=config_of(model), keep=2)


Check = Callable[[Stage], Awaitable[None]]
CHECKS: list[Check] = [
    n_completions_come_for_every_prompt,
    completions_end_with_a_stop_token_or_at_the_limit,
    logprobs_are_those_that_a_trainer_computes,
    tokens_are_drawn_from_the_whole_vocabulary,
    a_long_prompt_is_truncated_or_refused,
    what_is_cancelled_is_given_up_and_the_rest_goes_on,
    sixty_four_groups_at_once_come_back_to_who_asked,
    a_version_that_is_loaded_meanwhile_samples_from_then_on,
    wrong_weights_are_refused_and_the_old_version_serves_on,
]
"""In this order on a sampler that serves version 0; the last two change the version."""


def check_name(check: Any) -> str:
    """For test ids."""
    return check.__name__ if callable(check) else str(check)
