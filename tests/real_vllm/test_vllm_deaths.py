"""The process of the engine is killed, wherever a worker may be with it: the sampler starts another one and goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_kills import run_engine_kills
from vllm_server import ENGINE

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import SamplerUnavailable
from rlbuffer.worker.samplers import make_sampler
from rlbuffer.worker.samplers.conformance import CONTEXT, PLAIN, PROMPTS, Stage, must_be_true, policies

LONG = replace(PLAIN, max_new_tokens=CONTEXT - 10, stop_token_ids=())
BOUND_SECONDS = 600.0
"""Until the sampler goes on: a start of the engine on a busy machine. Without a bound it waited for ever."""


@pytest.fixture(scope="module")
def stage(runner: asyncio.Runner, folder: Path) -> Iterator[Stage]:
    models, published = policies(folder)
    options = {**ENGINE, "max_model_len": CONTEXT}
    sampler = make_sampler(WorkerSettings(env="vcopy", sampler="vllm", sampler_options=options))
    runner.run(sampler.load(published[0]))
    yield Stage(sampler, models, published, folder)
    runner.run(sampler.close())


def command_of(child: psutil.Process) -> str:
    """Its command line; "" of an engine that has ended and that nobody has waited for yet."""
    try:
        return " ".join(child.cmdline())
    except psutil.Error:
        return ""


def kill_engine() -> None:
    """SIGKILL to the engine's own process, which is a child of this one."""
    children = psutil.Process().children()
    engines = [child for child in children if "EngineCore" in command_of(child)]
    assert engines, [command_of(child) for child in children]
    for engine in engines:
        os.kill(engine.pid, signal.SIGKILL)


def killing(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` of an engine that dies as it is asked."""

    def killed(*args: Any, **options: Any) -> Any:
        kill_engine()
        return call(*args, **options)

    return killed


@pytest.mark.parametrize(
    "call",
    ["pause_generation", "collective_rpc", "update_weight_version", "reset_prefix_cache", "resume_generation"],
)
def test_an_engine_that_dies_while_a_version_is_loaded_is_started_again_with_it(
    call: str, stage: Stage, runner: asyncio.Runner
) -> None:
    async def run() -> None:
        sampler: Any = stage.sampler
        version = (sampler.version + 1) % 2
        in_flight = asyncio.create_task(sampler.sample(PROMPTS[0], n=2, sampling=LONG))
        engine = await sampler._alive()
        await asyncio.sleep(0)
        setattr(engine, call, killing(getattr(engine, call)))
        with pytest.raises(SamplerUnavailable, match=f"while it loaded version {version} .*it is started again with"):
            await asyncio.wait_for(sampler.load(stage.policies[version]), BOUND_SECONDS)
        with pytest.raises(SamplerUnavailable):
            await asyncio.wait_for(in_flight, BOUND_SECONDS)
        await goes_on(stage, version)

    runner.run(run())


def test_a_load_that_is_given_up_leaves_a_sampler_that_samples(stage: Stage, runner: asyncio.Runner) -> None:
    async def run() -> None:
        sampler: Any = stage.sampler
        version = sampler.version
        engine, asked = await sampler._alive(), asyncio.Event()

        async def never(*args: Any, **options: Any) -> None:
            asked.set()
            await asyncio.Event().wait()

        engine.collective_rpc = never
        loading = asyncio.create_task(sampler.load(stage.policies[(version + 1) % 2]))
        await asyncio.wait_for(asked.wait(), BOUND_SECONDS)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        await goes_on(stage, version)

    runner.run(run())


def test_an_engine_that_dies_while_it_samples_is_started_again(stage: Stage, runner: asyncio.Runner) -> None:
    async def run() -> None:
        version = stage.sampler.version
        tasks = [asyncio.create_task(stage.sampler.sample(p, n=2, sampling=LONG)) for p in PROMPTS]
        await asyncio.sleep(0.05)
        kill_engine()
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), BOUND_SECONDS)
        assert {type(outcome) for outcome in outcomes} == {SamplerUnavailable}
        await goes_on(stage, version)

    runner.run(run())


def test_a_worker_goes_on_after_each_of_three_kills_while_versions_are_loaded(tmp_path: Path) -> None:
    outcome = run_engine_kills(tmp_path, seed=2, kills=3, say=print)
    assert outcome.findings == []
    assert len(outcome.kills) == 3


def test_a_start_that_fails_is_the_answer_to_all_who_waited_for_it(
    stage: Stage, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    tries: list[int] = []

    def fails(arguments: Any) -> None:
        tries.append(1)
        raise RuntimeError("no memory")

    async def run() -> None:
        await stage.sampler.close()
        waiting = [stage.sampler.sample(prompt, n=1, sampling=PLAIN) for prompt in PROMPTS]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(o) for o in outcomes] == ["the vLLM engine does not start: RuntimeError: no memory"] * len(PROMPTS)
        assert len(tries) == 1

    monkeypatch.setattr(AsyncLLM, "from_engine_args", fails)
    runner.run(run())


async def goes_on(stage: Stage, version: int) -> None:
    """Every token is of the version that was to serve, with the logprobs of its weights."""
    for completion in await asyncio.wait_for(stage.sampler.sample(PROMPTS[0], n=2, sampling=PLAIN), BOUND_SECONDS):
        assert [sampled for sampled, _, _ in completion.version_spans] == [version]
        must_be_true(stage, PROMPTS[0], completion, PLAIN)
    assert stage.sampler.version == version
