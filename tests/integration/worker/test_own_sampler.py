"""A sampler from outside is checked by `rlbuffer.testing.check_sampler`, which tells what it does not do."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import ConfigError
from rlbuffer.records.spans import VersionSpan
from rlbuffer.testing import check_sampler
from rlbuffer.worker.samplers import Completion, Sampling, make_sampler, wrong_sampler
from rlbuffer.worker.samplers.conformance import PLAIN, check
from rlbuffer.worker.samplers.decoding import Decoder
from rlbuffer.worker.samplers.transformers import Batched
from rlbuffer.worker.samplers.vllm import BENDING, VllmOptions
from rlbuffer.worker.samplers.vllm import OWN as OWN_ARGUMENTS

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
OWN = "own_sampler:OwnSampler"


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """The documented sampler, importable."""
    monkeypatch.syspath_prepend(EXAMPLES)
    threads = torch.get_num_threads()
    import own_sampler

    yield own_sampler.OwnSampler
    torch.set_num_threads(threads)
    sys.modules.pop("own_sampler")


def test_the_documented_sampler_does_what_a_worker_relies_on(tmp_path: Path) -> None:
    check_sampler(OWN, tmp_path, temperature=0.7)


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        ({"logprobs": lambda c: c.logprobs - 0.01}, "logprobs are those of the published weights"),
        ({"version_spans": lambda c: (VersionSpan(0, 0, len(c.tokens) - 1),)}, "version spans"),
        ({"finish_reason": lambda c: "length"}, "what does not stop has the limit's length"),
    ],
    ids=["logprobs", "spans", "end"],
)
def test_a_sampler_that_does_not_say_the_truth_is_told_what_is_wrong(
    own: type, lie: dict, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = own.sample

    async def sample(self, prompt, *, n, sampling):
        completions = await true(self, prompt, n=n, sampling=sampling)
        return [replace(c, **{name: bend(c) for name, bend in lie.items()}) for c in completions]

    monkeypatch.setattr(own, "sample", sample)
    with pytest.raises(AssertionError, match=told):
        check_sampler(OWN, tmp_path)


def test_the_experts_that_a_sampler_names_are_those_that_it_took(tmp_path: Path) -> None:
    check_sampler("transformers", tmp_path, record_experts=True)


@pytest.mark.parametrize(
    ("bend", "told"),
    [
        (lambda rows: None, "says which experts"),
        (lambda rows: rows[:, :, [0, 0, 1]], "has its experts"),
        (lambda rows: (rows + 1) % 8, "logprobs are those of the published weights"),
    ],
    ids=["none", "no record", "others"],
)
def test_a_sampler_that_names_other_experts_is_told(bend: Any, told: str, tmp_path: Path) -> None:
    class Lies(Batched):
        async def sample(self, prompt: Any, *, n: int, sampling: Sampling) -> list[Completion]:
            made = await super().sample(prompt, n=n, sampling=sampling)
            return [replace(c, routed_experts=bend(c.routed_experts)) for c in made]

    sampler = Lies(Decoder(seed=0, records_experts=True))
    with pytest.raises(AssertionError, match=told):
        asyncio.run(check(sampler, tmp_path, (PLAIN,), records_experts=True))


def test_a_sampler_that_cannot_record_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        check_sampler(OWN, tmp_path, record_experts=True)
    assert refused.value.setting == "record_experts"


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"sampler": "vlm"}, "sampler"),
        ({"sampler": "no_such_module:Sampler"}, "sampler"),
        ({"sampler": "own_sampler:NoSuchClass"}, "sampler"),
        ({"sampler": "own_sampler:SamplerTraits"}, "sampler"),
        ({"sampler_options": {"port": 1}}, "sampler_options.port"),
        ({"sampler": OWN, "sampler_options": {"thread": 1}}, "sampler_options.thread"),
        ({"sampler": OWN, "sampler_options": {"threads": "many"}}, "sampler_options.threads"),
        ({"sampler": OWN, "sampler_options": {"top_k": 3}}, "sampler_options.top_k"),
        ({"sampler": OWN, "top_p": 0.9}, "top_p"),
        ({"sampler": OWN, "top_k": 5}, "top_k"),
    ],
)
def test_what_a_worker_cannot_have_of_a_sampler_is_refused_by_its_setting(settings: dict, setting: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_sampler(WorkerSettings(env="vcopy", **settings))
    assert refused.value.setting == setting


@pytest.mark.parametrize("name", [*BENDING, *OWN_ARGUMENTS])
def test_what_would_bend_what_an_engine_draws_from_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"sampler_options.{name}"):
        VllmOptions(**{"dtype": "float32", name: 1})


def test_a_samplers_traits_decide_what_its_worker_may_ask_for(own: type, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = partial(wrong_sampler, OWN, {}, temperature=0.3, top_p=0.9)
    assert not list(asked())
    less = {"least_temperature": 0.5, "nucleus_at_any_temperature": False, "needs": ("no_such_module",)}
    monkeypatch.setattr(own, "traits", replace(own.traits, **less))
    found = [setting for setting, *_ in asked(is_deterministic=True)]
    assert sorted(found) == ["sampler", "sampler", "temperature", "top_p"]
    assert "top_k" in [setting for setting, *_ in asked(top_k=5)]
    monkeypatch.setattr(own, "traits", replace(own.traits, needs=(), least_temperature=0.0, records_support=True))
    assert not list(asked(top_k=5)), "of the tokens that are left logprobs are at any temperature"
    assert not list(wrong_sampler("transformers", {}, temperature=0.3, top_p=0.9, is_deterministic=True))
