"""The duties of every sampler, as :func:`rlbuffer.testing.check_sampler` and the tests of this project's own check
them.

A check takes a :class:`Stage`: a sampler, and policies whose models are here, so that what it says it sampled from can
be computed again by one forward pass. Imports torch and transformers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from rlbuffer.config.settings import ModelSettings
from rlbuffer.errors import PromptTooLong, RlbufferError, WeightsError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.routed import is_record
from rlbuffer.weights.experts import Experts, experts_of
from rlbuffer.weights.files import publish
from rlbuffer.weights.model import TINY_QWEN3, build_model, config_of
from rlbuffer.worker.samplers.base import Completion, Sampler, Sampling
from rlbuffer.worker.samplers.selfcheck import logprobs_of

CONTEXT = 256
CONFIG = {**TINY_QWEN3, "head_dim": 32, "max_position_embeddings": CONTEXT}
"""vLLM on the CPU wants heads of 32 at least."""
WITH_EXPERTS = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
"""For a sampler that records them."""
PROMPTS = [np.array(p, np.int32) for p in ([1, 2, 10, 10, 11], [3], [3, 7, 11], [4, 5, 6, 7, 8, 9, 0, 11])]
Ids = NDArray[np.int32]
END = 12
PLAIN = Sampling(max_new_tokens=6, stop_token_ids=(END,))
TOLERANCE = 1e-4
"""Of one logprob, in nats."""
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


@dataclass
class Stage:
    """A sampler that serves version 0, and versions 0 to 3 with their models."""

    sampler: Sampler
    models: list[PreTrainedModel]
    policies: list[PolicyVersion]
    tmp: Path
    samplings: tuple[Sampling, ...] = (PLAIN, replace(PLAIN, temperature=0.7))
    """Settings that the sampler was made for."""
    config: Mapping[str, Any] = field(default_factory=lambda: CONFIG)
    """Of the models."""
    experts: tuple[Experts, ...] = ()
    """Those of the models, where the sampler records which ones it takes."""

    def replaying(self, version: int, completion: Completion) -> AbstractContextManager[None]:
        """Inside, the model of a version takes the experts that the completion names, where one version sampled it: an
        engine need not record again what it computes again with the next weights."""
        if not self.experts:
            return nullcontext()
        rows = completion.routed_experts
        assert rows is not None, "a completion says which experts took its tokens in"
        assert is_record(rows[:-1]).all(), "every token but the last, which is not taken in, has its experts"
        is_of_one = len(completion.version_spans) == 1
        return self.experts[version].replaying(torch.from_numpy(rows.astype(np.int64)) if is_of_one else None)


def policies(
    directory: Path, count: int = 4, config: Mapping[str, Any] = CONFIG
) -> tuple[list[PreTrainedModel], list[PolicyVersion]]:
    """Models that differ in every weight, published."""
    models = [build_model(ModelSettings(config=dict(config)), seed=seed).train(False) for seed in range(count)]
    published = [
        publish(directory, version, state=model.state_dict(), config=config_of(model), keep=count)
        for version, model in enumerate(models)
    ]
    for policy in published:
        (Path(policy.location) / "generation_config.json").write_text(json.dumps(OF_THE_MODEL))
    return models, published


def must_be_true(stage: Stage, prompt: Ids, completion: Completion, sampling: Sampling) -> None:
    """Each token's logprob is that of the version that its span names."""
    tokens, logprobs = completion.tokens, completion.logprobs
    assert tokens.dtype == np.int32, "tokens are int32"
    assert logprobs.dtype == np.float32, "logprobs are float32"
    assert tokens.shape == logprobs.shape, "a token has a logprob"
    position, spans = 0, completion.version_spans
    for version, start, end in spans:
        assert start == position < end, f"version spans are ascending and leave nothing out: {spans}"
        position = end
        with stage.replaying(version, completion):
            expected = logprobs_of(stage.models[version], prompt, tokens, sampling, completion.support)[start:end]
        worst = float(np.abs(logprobs[start:end] - expected).max())
        assert worst < TOLERANCE, f"logprobs are those of the published weights, to {TOLERANCE:g}: {worst:g} off"
    assert position == len(tokens), f"version spans cover all tokens: {spans}"


async def must_raise(error: type[RlbufferError], call: Awaitable[object]) -> None:
    """`call` is refused with `error`."""
    try:
        await call
    except error:
        return
    raise AssertionError(f"{error.__name__} must be raised")


async def completions_end_with_a_stop_token_or_at_the_limit(stage: Stage) -> None:
    """A completion ends with a stop token that was asked for, or at its length."""
    found = set()
    for c in await stage.sampler.sample(PROMPTS[0], n=64, sampling=PLAIN):
        found.add(c.finish_reason)
        stops = np.flatnonzero(c.tokens == END).tolist()
        if c.finish_reason == "stop":
            assert stops == [len(c.tokens) - 1], "a stop token is the last one"
        else:
            assert (stops, len(c.tokens)) == ([], PLAIN.max_new_tokens), "what does not stop has the limit's length"
    assert found == {"stop", "length"}, f"completions end by a stop token and by the limit, here by {sorted(found)}"


async def logprobs_are_those_that_a_trainer_computes(stage: Stage) -> None:
    """Of every setting that it was made for."""
    for sampling in stage.samplings:
        for prompt in PROMPTS:
            for c in await stage.sampler.sample(prompt, n=4, sampling=sampling):
                must_be_true(stage, prompt, c, sampling)


async def tokens_are_drawn_from_the_whole_vocabulary(stage: Stage) -> None:
    """A `generation_config.json` beside the model may say anything: ratios of the tokens that are left would be 1 all
    the same."""
    one = replace(PLAIN, max_new_tokens=1)
    groups = [await stage.sampler.sample(PROMPTS[1], n=64, sampling=one) for _ in range(4)]
    drawn = {int(c.tokens[0]) for group in groups for c in group}
    with torch.no_grad():
        logits = stage.models[0](input_ids=torch.from_numpy(PROMPTS[1].astype(np.int64))[None]).logits[0, -1]
    frequent = torch.nonzero(torch.softmax(logits, -1) > 0.05)[:, 0].tolist()  # 256 draws miss one once in 500,000
    assert set(frequent) <= drawn, f"every likely token is drawn, also {sorted(set(frequent) - drawn)}"


async def a_long_prompt_is_truncated_or_refused(stage: Stage) -> None:
    """By the context of the model."""
    fits = np.arange(CONTEXT - 2, dtype=np.int32) % 12
    for c in await stage.sampler.sample(fits, n=2, sampling=replace(PLAIN, stop_token_ids=())):
        assert (c.finish_reason, len(c.tokens)) == ("length", 2), "a completion ends with the model's context"
        must_be_true(stage, fits, c, replace(PLAIN, stop_token_ids=()))
    full = np.arange(CONTEXT, dtype=np.int32) % 12
    await must_raise(PromptTooLong, stage.sampler.sample(full, n=1, sampling=PLAIN))
    assert len(await stage.sampler.sample(PROMPTS[0], n=1, sampling=PLAIN)) == 1, "others are served after a refusal"


async def what_is_cancelled_is_given_up_and_the_rest_goes_on(stage: Stage) -> None:
    """Of requests at once."""
    long = Sampling(max_new_tokens=CONTEXT - 10)
    tasks = [asyncio.create_task(stage.sampler.sample(PROMPTS[0], n=2, sampling=long)) for _ in range(4)]
    await asyncio.sleep(0.1)
    for task in tasks[:3]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(o) for o in outcomes[:3]] == [asyncio.CancelledError] * 3, "what is cancelled ends so"
    left = outcomes[3]
    assert not isinstance(left, BaseException), f"the rest goes on: {left}"
    assert [len(c.tokens) for c in left] == [CONTEXT - 10] * 2, "the rest is whole"
    assert len(await stage.sampler.sample(PROMPTS[0], n=1, sampling=PLAIN)) == 1, "others are served afterwards"


async def sixty_four_groups_at_once_come_back_to_who_asked(stage: Stage) -> None:
    """However they are batched."""
    asked = [PROMPTS[i % len(PROMPTS)] for i in range(64)]
    groups = await asyncio.gather(*(stage.sampler.sample(p, n=2, sampling=PLAIN) for p in asked))
    assert [len(group) for group in groups] == [2] * len(asked), "n completions come for every prompt"
    for prompt, c in ((prompt, c) for prompt, group in zip(asked, groups, strict=True) for c in group):
        must_be_true(stage, prompt, c, PLAIN)
    assert len({tuple(c.tokens.tolist()) for group in groups for c in group}) > 4, "completions of one prompt differ"


async def a_version_that_is_loaded_meanwhile_samples_from_then_on(stage: Stage) -> None:
    """Requests in flight go on, and say which version sampled what."""
    long = Sampling(max_new_tokens=CONTEXT - 10)
    running = [asyncio.create_task(stage.sampler.sample(PROMPTS[0], n=2, sampling=long)) for _ in range(3)]
    for version in (1, 2, 3):
        await asyncio.sleep(0.15)
        await stage.sampler.load(stage.policies[version])
        assert stage.sampler.version == version, "what is loaded serves"
        fresh = await stage.sampler.sample(PROMPTS[2], n=2, sampling=PLAIN)
        told = {s.policy_version for c in fresh for s in c.version_spans}
        assert told == {version}, f"version {version} samples once it is loaded, not {told}"
        for c in fresh:
            must_be_true(stage, PROMPTS[2], c, PLAIN)
    for c in (c for group in await asyncio.gather(*running) for c in group):
        must_be_true(stage, PROMPTS[0], c, long)


async def wrong_weights_are_refused_and_the_old_version_serves_on(stage: Stage) -> None:
    """A file that is torn, one that is not there, and one of another model."""
    good = stage.policies[1]
    before = stage.sampler.version
    for policy in (truncated(stage), replace(good, location=str(stage.tmp / "nowhere")), foreign(stage)):
        await must_raise(WeightsError, stage.sampler.load(policy))
        assert stage.sampler.version == before, "the version before a refusal serves on"
        c = (await stage.sampler.sample(PROMPTS[0], n=1, sampling=PLAIN))[0]
        assert {s.policy_version for s in c.version_spans} == {before}, "the version before a refusal is named"
        must_be_true(stage, PROMPTS[0], c, PLAIN)
    await stage.sampler.load(good)
    assert stage.sampler.version == good.version, "what is loaded after a refusal serves"


def truncated(stage: Stage) -> PolicyVersion:
    """Weights of which half is there."""
    policy = publish(
        stage.tmp / "short", 7, state=stage.models[1].state_dict(), config=config_of(stage.models[1]), keep=2
    )
    file = Path(policy.location) / "model.safetensors"
    file.write_bytes(file.read_bytes()[: policy.size // 2])
    return policy


def foreign(stage: Stage) -> PolicyVersion:
    """Weights of another model."""
    model = build_model(ModelSettings(config={**stage.config, "num_hidden_layers": 3}), seed=9)
    return publish(stage.tmp / "foreign", 8, state=model.state_dict(), config=config_of(model), keep=2)


Check = Callable[[Stage], Awaitable[None]]
CHECKS: tuple[Check, ...] = (
    completions_end_with_a_stop_token_or_at_the_limit,
    logprobs_are_those_that_a_trainer_computes,
    tokens_are_drawn_from_the_whole_vocabulary,
    a_long_prompt_is_truncated_or_refused,
    what_is_cancelled_is_given_up_and_the_rest_goes_on,
    sixty_four_groups_at_once_come_back_to_who_asked,
    a_version_that_is_loaded_meanwhile_samples_from_then_on,
    wrong_weights_are_refused_and_the_old_version_serves_on,
)
"""In this order on a sampler that serves version 0; the last two change the version."""


async def check(
    sampler: Sampler, directory: Path, samplings: tuple[Sampling, ...], *, records_experts: bool = False
) -> None:
    """All of them, one after the other, and the sampler's end."""
    config = WITH_EXPERTS if records_experts else CONFIG
    models, published = policies(directory, config=config)
    experts = tuple(experts_of(model) for model in models) if records_experts else ()
    try:
        await sampler.load(published[0])
        stage = Stage(sampler, models, published, directory, samplings, config, experts)
        for one in CHECKS:
            await one(stage)
    finally:
        await sampler.close()
