"""Agents with real clients, through a gateway, before a real vLLM server that takes other weights meanwhile."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_agents import CHAT_TOOLS, KINDS
from gateway_stage import Agent, Stage
from own_server import OwnServer
from taught_model import ASK, CONTEXT, COUNT, NUMBERS, SAID, taught_versions, tokenizer
from transformers import PreTrainedModel
from vllm_server import VllmServer

from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.rollout import Rollout
from rlbuffer.worker.samplers.base import Sampling
from rlbuffer.worker.samplers.openai import OpenAIOptions, OpenAISampler
from rlbuffer.worker.samplers.selfcheck import logprobs_of

TOLERANCE = 1e-5
"""Of one logprob, in nats."""
TEMPERATURE = 0.9
VERSIONS = 4
CROSSED, TRIES = 3, 8
"""Changes of weights within answers that must be met, and groups in which they may be."""
BABBLE = "tool user assistant plant"
"""Nobody taught an answer to this: what comes is drawn from many tokens."""


@dataclass
class Served:
    """A vLLM server, and whoever loads versions into it."""

    engine: VllmServer
    models: list[PreTrainedModel]
    policies: list[PolicyVersion]
    loader: OpenAISampler
    runner: asyncio.Runner
    store_url: str

    def load(self, version: int) -> None:
        """As a worker with ``sampler = "openai"`` does."""
        self.runner.run(self.loader.load(self.policies[version]))


@pytest.fixture(scope="module")
def served(runner: asyncio.Runner, folder: Path) -> Iterator[Served]:
    models, published, directory = taught_versions(folder, VERSIONS)
    more = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with (
        OwnServer(folder / "store") as store,
        VllmServer(directory, folder / "log", context=CONTEXT, more=more) as engine,
    ):
        runner.run(engine.until_ready())
        loader = OpenAISampler(OpenAIOptions(servers=(engine.url,)))
        yield Served(engine, models, published, loader, runner, store.url)
        runner.run(loader.close())


@pytest.fixture
def stage(served: Served) -> Iterator[Stage]:
    served.load(0)
    made = Stage(
        served.store_url,
        f"t-{uuid.uuid4().hex[:12]}",
        batcher={"max_age": 50},
        engine_url=served.engine.url,
        temperature=TEMPERATURE,
    )
    yield made
    made.close()


def worst_difference(rollout: Rollout, models: list[PreTrainedModel]) -> float:
    """The largest difference between a recorded logprob and a forward pass of the version that its span names."""
    worst, sampling = 0.0, Sampling(max_new_tokens=CONTEXT, temperature=TEMPERATURE)
    for sequence in rollout.sequences:
        for version, start, end in sequence.version_spans:
            expected = logprobs_of(models[version], sequence.tokens[:start], sequence.tokens[start:end], sampling)
            trained = sequence.loss_mask[start:end]
            worst = max(worst, float(np.abs(sequence.logprobs[start:end] - expected)[trained].max(initial=0.0)))
    print(f"{sum(int(s.loss_mask.sum()) for s in rollout.sequences)} tokens, largest difference {worst:.1e}")
    return worst


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_with_tools_trains_exactly_what_vllm_sampled(
    stage: Stage, served: Served, kind: str, streams: bool
) -> None:
    make, turn = KINDS[kind]
    opened = stage.begin()["open_rollouts"][0]
    client, messages = make(opened, timeout=300), list[Any]([{"role": "user", "content": ASK}])
    heard = [turn(client, messages, streams=streams)]
    assert heard[0].calls == [{"word": "tree"}]
    heard.append(turn(client, messages, streams=streams))
    assert heard[1].text == SAID
    for question in (COUNT, BABBLE, BABBLE):
        messages.append({"role": "user", "content": question})
        heard.append(turn(client, messages, streams=streams))
    client.close()
    assert Agent(stage, opened).end(reward=1.0).status_code == 200
    (rollout,) = stage.rollouts()
    assert [answer.id for answer in heard] == rollout.metadata["calls"]
    main, words = rollout.sequences[0], tokenizer()
    system = [] if kind == "chat" else [{"role": "system", "content": "Solve it."}]
    asked = [*system, {"role": "user", "content": ASK}]
    head = words.apply_chat_template(asked, tools=CHAT_TOOLS, add_generation_prompt=True, return_dict=False)
    assert main.tokens[: len(head)].tolist() == head
    assert NUMBERS in words.decode(main.tokens)  # later turns go on behind what was sampled
    assert sum(int(sequence.loss_mask.sum()) for sequence in rollout.sequences) > 100
    assert worst_difference(rollout, served.models) < TOLERANCE


def crossings(rollout: Rollout) -> int:
    """Changes of weights within sampled answers."""
    return sum(
        before.end == after.start and bool(sequence.loss_mask[[before.end - 1, after.start]].all())
        for sequence in rollout.sequences
        for before, after in pairwise(sequence.version_spans)
    )


def count_aloud(stage: Stage, opened: dict[str, Any], kind: str, streams: bool) -> None:
    make, turn = KINDS[kind]
    client, messages = make(opened, timeout=300), list[Any]()
    for _ in range(3):
        messages.append({"role": "user", "content": COUNT})
        turn(client, messages, streams=streams)
    client.close()
    assert Agent(stage, opened).end(reward=float(streams)).status_code == 200


def test_answers_across_a_change_of_weights_name_the_version_of_each_token(stage: Stage, served: Served) -> None:
    for version in range(1, VERSIONS):
        stage.buffer.policy.announce(version, location="", size=0, checksum="")
    kinds = [(kind, streams) for kind in ("chat", "messages") for streams in (False, True)]
    version, rollouts = 0, list[Rollout]()
    for tries in range(1, TRIES + 1):
        group = stage.begin(size=len(kinds))["open_rollouts"]
        with ThreadPoolExecutor(len(kinds)) as agents:
            at_work = [agents.submit(count_aloud, stage, one, *how) for one, how in zip(group, kinds, strict=True)]
            while not all(agent.done() for agent in at_work):
                version = (version + 1) % VERSIONS
                served.load(version)
            for agent in at_work:
                agent.result()
        rollouts = stage.rollouts(tries * len(kinds))
        if sum(map(crossings, rollouts)) >= CROSSED:
            break
    assert sum(map(crossings, rollouts)) >= CROSSED, "loads must come under answers that are being sampled"
    assert max(worst_difference(rollout, served.models) for rollout in rollouts) < TOLERANCE
    assert stage.buffer.verify().ok
