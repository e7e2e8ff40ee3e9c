"""The transformers sampler against the real tiny model: what it says it sampled from is what it sampled from."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rlbuffer.config.settings import ModelSettings
from rlbuffer.errors import ConfigError, WeightsError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.files import publish
from rlbuffer.weights.model import TINY_QWEN3, build_model, config_of
from rlbuffer.worker.samplers import Completion, Sampling
from rlbuffer.worker.samplers.decoding import Decoder

EOS = 12


UNEQUAL = [np.array(p, np.int32) for p in ([1, 2, 10, 10, 11], [3], [3, 7, 11], [4, 5, 6, 7, 8, 9, 0, 11])]
EQUAL = [np.array(p, np.int32) for p in ([1, 2, 11], [3, 7, 11])]


def published(
    directory: Path, version: int = 0, *, seed: int = 0, **config: object
) -> tuple[PreTrainedModel, PolicyVersion]:
    model = build_model(ModelSettings(config={**TINY_QWEN3, **config}), seed=seed).eval()
    return model, publish(directory, version, state=model.state_dict(), config=config_of(model), keep=4)


def sampler_of(policy: PolicyVersion, seed: int = 0) -> Decoder:
    sampler = Decoder(seed=seed)
    sampler.load(policy)
    return sampler


def sample(
    sampler: Decoder,
    prompts: list[np.ndarray] = UNEQUAL,
    *,
    n: int = 8,
    stopped: Callable[[], bool] | None = None,
    **changes: Any,
) -> list[list[Completion]]:
    sampling = replace(Sampling(max_new_tokens=6, stop_token_ids=(EOS,)), **changes)
    return sampler.sample(prompts, n=n, sampling=sampling, stopped=stopped)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_model_gets_its_cache_under_the_name_that_it_has_for_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of transformers before 5.24, and those with code of their own, say ``past_key_values``."""
    _, policy = published(tmp_path)
    sampler = sampler_of(policy)
    expected = sample(sampler_of(policy))
    model = sampler._model
    assert model is not None
    forward = model.forward
    own = "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"

    def today(*, cache: object = None, **others: object) -> object:
        return forward(**{own: cache}, **others)

    def before(*, past_key_values: object = None, **others: object) -> object:
        return forward(**{own: past_key_values}, **others)

    monkeypatch.setattr(model, "forward", today if name == "cache" else before)
    for one, other in zip(sample(sampler), expected, strict=True):
        assert [c.tokens.tolist() for c in one] == [c.tokens.tolist() for c in other]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tokens_are_drawn_from_the_distribution_that_is_reported(tmp_path: Path, temperature: float) -> None:
    _, policy = published(tmp_path)
    prompt = [np.array([5, 11], np.int32)]
    group = sample(sampler_of(policy), prompt, n=20_000, max_new_tokens=1, temperature=temperature)[0]
    counts = np.bincount([int(c.tokens[0]) for c in group], minlength=13) / len(group)
    told = np.zeros(13)
    for completion in group:
        told[completion.tokens[0]] = np.exp(completion.logprobs[0])
    assert np.abs(counts - told).max() < 0.015  # four standard deviations of the likeliest count


def test_generation_ends_early_when_every_row_has_finished(tmp_path: Path) -> None:
    sampler = sampler_of(published(tmp_path)[1])
    asked = []
    sample(sampler, stop_token_ids=tuple(range(13)), max_new_tokens=1000, stopped=lambda: asked.append(1) is not None)
    assert asked == []


def test_being_told_to_stop_aborts_what_is_unfinished(tmp_path: Path) -> None:
    sampler = sampler_of(published(tmp_path)[1])
    answers = iter([False, True])
    completions = [c for g in sample(sampler, max_new_tokens=50, stopped=lambda: next(answers)) for c in g]
    assert {c.finish_reason for c in completions} == {"abort", "stop"}
    assert all(len(c.tokens) == 2 for c in completions if c.finish_reason == "abort")


def test_the_seed_alone_decides_what_is_sampled(tmp_path: Path) -> None:
    _, policy = published(tmp_path)

    def tokens(seed: int) -> list[list[int]]:
        return [c.tokens.tolist() for group in sample(sampler_of(policy, seed)) for c in group]

    state = torch.random.get_rng_state()
    first = tokens(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    assert first == tokens(1)
    assert first != tokens(2)


def truncated(policy: PolicyVersion, directory: Path) -> PolicyVersion:
    file = Path(policy.location) / "model.safetensors"
    file.write_bytes(file.read_bytes()[: policy.size // 2])
    return policy


def test_a_first_load_that_fails_leaves_a_sampler_without_weights(tmp_path: Path) -> None:
    policy = truncated(published(tmp_path)[1], tmp_path)
    sampler = Decoder(seed=0)
    with pytest.raises(WeightsError):
        sampler.load(policy)
    assert (sampler.version, sampler.vocab_size) == (-1, 0)
    with pytest.raises(ConfigError, match="no weights yet"):
        sample(sampler)


def test_the_nucleus_is_what_is_drawn_from_and_the_whole_vocabulary_what_is_reported(tmp_path: Path) -> None:
    _, policy = published(tmp_path)
    sampler, prompt = sampler_of(policy), [np.array([5, 11], np.int32)]
    full = {
        int(c.tokens[0]): float(np.exp(c.logprobs[0])) for c in sample(sampler, prompt, n=5000, max_new_tokens=1)[0]
    }
    cut = {
        int(c.tokens[0]): float(np.exp(c.logprobs[0]))
        for c in sample(sampler, prompt, n=5000, max_new_tokens=1, top_p=0.5)[0]
    }
    expected, mass = [], 0.0
    for token in sorted(full, key=lambda t: -full[t]):
        if mass >= 0.5:
            break
        expected.append(token)
        mass += full[token]
    assert sorted(cut) == sorted(expected)
    assert cut == {token: full[token] for token in expected}


def test_at_temperature_zero_the_likeliest_token_comes_for_certain(tmp_path: Path) -> None:
    model, policy = published(tmp_path)
    for prompt, group in zip(UNEQUAL, sample(sampler_of(policy), temperature=0.0), strict=True):
        assert len({tuple(c.tokens.tolist()) for c in group}) == 1
        assert all((c.logprobs == 0).all() for c in group)
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(prompt.astype(np.int64))[None], use_cache=False).logits
        assert int(group[0].tokens[0]) == int(logits[0, -1].argmax())
