"""What a load sets on a server that is somebody else's is taken back, whoever dies in between and whatever fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from holding_engine import HoldingEngine

from rlbuffer.errors import RequestFailed, RlbufferError, SamplerUnavailable
from rlbuffer.process.identity import identity
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.files import publish
from rlbuffer.worker.samplers import Completion, Sampling
from rlbuffer.worker.samplers.openai import OpenAIOptions, OpenAISampler

PROMPT = np.array([1, 2], np.int32)
FOUR = Sampling(max_new_tokens=4)
CALLS = ("/pause", "/update_weight_version", "/collective_rpc", "/reset_prefix_cache", "/resume")
HANG_SECONDS = 60.0


def published(directory: Path, number: int) -> PolicyVersion:
    state = {"number": torch.full((2,), float(number))}
    return publish(directory, number, state=state, config={"vocab_size": 13}, keep=9)


@asynccontextmanager
async def sampler_of(engine: HoldingEngine, *, updates: bool = True) -> AsyncIterator[OpenAISampler]:
    sampler = OpenAISampler(OpenAIOptions(servers=(engine.url,), updates_weights=updates))
    try:
        yield sampler
    finally:
        await sampler.close()


async def sampled(sampler: OpenAISampler) -> Completion:
    async with asyncio.timeout(HANG_SECONDS):
        return (await sampler.sample(PROMPT, n=1, sampling=FOUR))[0]


async def serves(sampler: OpenAISampler, engine: HoldingEngine, number: int) -> None:
    """It samples, and the version that it names is the one that the engine really has."""
    completion = await sampled(sampler)
    assert completion.tokens.tolist() == [number] * 4
    assert [span.policy_version for span in completion.version_spans] == [number]
    assert not engine.is_dead


async def until(fact: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while not fact():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("label", ["1", "default", "no version", json.dumps({"loads": 1, "pid": 2**22 + 1})])
def test_a_server_that_a_dead_worker_has_left_paused_is_resumed_before_it_is_asked(tmp_path: Path, label: str) -> None:
    async def main(engine: HoldingEngine) -> None:
        engine.runs.clear()
        engine.label = label
        async with sampler_of(engine) as sampler:
            await sampler.load(published(tmp_path, 1))
            assert engine.asked.index("/resume") < engine.asked.index("/inference/v1/generate")
            await serves(sampler, engine, 1)

    with HoldingEngine() as engine:
        asyncio.run(main(engine))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("times", [1, 2])
def test_a_load_of_which_a_call_fails_is_made_again(tmp_path: Path, call: str, times: int) -> None:
    async def main(engine: HoldingEngine) -> None:
        async with sampler_of(engine) as sampler:
            await sampler.load(published(tmp_path, 1))
            engine.refuses[call] = times
            second = published(tmp_path, 2)
            for _ in range(times):
                with pytest.raises(SamplerUnavailable, match="paused and cannot" if call == "/resume" else call):
                    await sampler.load(second)
            await sampler.load(second)
            await serves(sampler, engine, 2)

    with HoldingEngine() as engine:
        asyncio.run(main(engine))


@pytest.mark.parametrize("call", CALLS)
def test_a_load_that_is_cancelled_leaves_no_server_paused(tmp_path: Path, call: str) -> None:
    """Twice, as the end of an event loop does, so that not even its end can be waited for."""

    async def main(engine: HoldingEngine) -> None:
        sampler = OpenAISampler(OpenAIOptions(servers=(engine.url,)))
        await sampler.load(published(tmp_path, 1))
        engine.control_seconds = engine.load_seconds = 0.2
        load = asyncio.create_task(sampler.load(published(tmp_path, 2)))
        await until(lambda: engine.under_way[call])
        for _ in range(2):
            load.cancel()
            await asyncio.sleep(0.01)
        await asyncio.gather(load, return_exceptions=True)
        await sampler.close()
        await until(engine.runs.is_set)
        async with sampler_of(engine) as successor:
            await successor.load(published(tmp_path, 3))
            await serves(successor, engine, 3)

    with HoldingEngine() as engine:
        asyncio.run(main(engine))


def test_weights_that_were_half_loaded_have_no_version(tmp_path: Path) -> None:
    """A worker died in a load, and somebody resumes the server: what it samples is of no version of the run."""

    async def main(engine: HoldingEngine) -> None:
        async with sampler_of(engine) as sampler, sampler_of(engine, updates=False) as other:
            await sampler.load(published(tmp_path, 1))
            await other.load(published(tmp_path, 1))
            engine.refuses["/collective_rpc"] = 1
            with pytest.raises(SamplerUnavailable):
                await sampler.load(published(tmp_path, 2))
            assert engine.runs.is_set()
            assert not engine.label.isdigit()
            with pytest.raises(SamplerUnavailable):
                await sampled(other)

    with HoldingEngine() as engine:
        asyncio.run(main(engine))


def of_process(process: subprocess.Popen[bytes]) -> str:
    return json.dumps(identity() | {"pid": process.pid, "loads": 7, "at": time.time(), "load": "x"})


def test_a_server_that_another_process_is_loading_is_left_alone_until_that_one_dies(tmp_path: Path) -> None:
    async def main(engine: HoldingEngine) -> None:
        engine.runs.clear()
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as loader:
            engine.label = of_process(loader)
            async with sampler_of(engine) as sampler:
                with pytest.raises(SamplerUnavailable, match=f"pid {loader.pid} on .* loads version 7 into it"):
                    await sampler.load(published(tmp_path, 1))
                assert "/resume" not in engine.asked
                os.kill(loader.pid, signal.SIGKILL)
                loader.wait()
                await sampler.load(published(tmp_path, 1))
                await serves(sampler, engine, 1)

    with HoldingEngine() as engine:
        asyncio.run(main(engine))


def test_two_samplers_that_share_a_server_do_not_load_into_each_others_pause(tmp_path: Path) -> None:
    async def main(engine: HoldingEngine) -> None:
        first = published(tmp_path, 1)
        async with sampler_of(engine) as sampler, sampler_of(engine) as second:
            load = asyncio.create_task(sampler.load(first))
            await until(lambda: engine.under_way["/collective_rpc"])
            refused = 0
            while refused < 99:
                try:
                    await second.load(first)
                    break
                except SamplerUnavailable:
                    refused += 1
            await load
            await serves(second, engine, 1)

    with HoldingEngine(load_seconds=0.5) as engine:
        asyncio.run(main(engine))


@pytest.mark.parametrize(("updates", "stays"), [(False, False), (True, True)])
def test_a_server_that_stays_paused_is_called_paused(tmp_path: Path, updates: bool, stays: bool) -> None:
    """The one worker must not resume it, the other cannot; and when it runs again, both go on."""

    async def main(engine: HoldingEngine) -> None:
        engine.runs.clear()
        engine.label = "1"
        engine.refuses["/resume"] = 99 * stays
        async with sampler_of(engine, updates=updates) as sampler:
            with pytest.raises(SamplerUnavailable, match="is paused"):
                await sampler.load(published(tmp_path, 1))
            assert ("/resume" in engine.asked) == updates
            assert "/inference/v1/generate" not in engine.asked
            engine.refuses.clear()
            engine.runs.set()
            engine.weights = 1
            await sampler.load(published(tmp_path, 1))
            await serves(sampler, engine, 1)

    with HoldingEngine() as engine:
        asyncio.run(main(engine))


# -- what a server does not say ----------------------------------------------------------------------------------------
STOPPING = Sampling(max_new_tokens=4, stop_token_ids=(1,))


@pytest.mark.parametrize(
    ("reason", "sampling", "expected"),
    [
        *((reason, FOUR, "length") for reason in (None, "length", "eos", "")),
        *((reason, STOPPING, "stop") for reason in (None, "eos", "stop")),
        ("abort", FOUR, "abort"),
        ("short", FOUR, RequestFailed),
    ],
)
def test_a_completion_without_a_finish_reason_is_judged_by_its_tokens(
    tmp_path: Path, reason: str | None, sampling: Sampling, expected: str | type[RlbufferError]
) -> None:
    """ "short": two tokens of four, and null. Nobody knows whether that is whole."""

    async def main(engine: HoldingEngine) -> None:
        async with sampler_of(engine) as sampler:
            await sampler.load(published(tmp_path, 1))
            engine.finish_reason = reason
            asking: Awaitable[list[Completion]] = sampler.sample(PROMPT, n=1, sampling=sampling)
            if isinstance(expected, str):
                assert [completion.finish_reason for completion in await asking] == [expected]
            else:
                with pytest.raises(expected, match="finish_reason None"):
                    await asking

    with HoldingEngine() as engine:
        asyncio.run(main(engine))
