"""Evaluations: one result per version and env, whoever makes it, and only of what that version said."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every_role import EveryRole
from logged import Logged
from looks import evaluations, lines_of
from store_runs import Run
from worker_stage import Stage, eventually

from rlbuffer.client.buffer import Buffer, connect
from rlbuffer.client.run_state import read_run_state
from rlbuffer.config.settings import EvaluationSettings, WorkerSettings
from rlbuffer.errors import ServerRefused
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.spans import VersionSpan
from rlbuffer.store.member import Member
from rlbuffer.store.worker import WorkerStore
from rlbuffer.worker import evaluation
from rlbuffer.worker.envs import Prompt, Skip
from rlbuffer.worker.envs.digits import VCopy
from rlbuffer.worker.evaluation import Evaluator
from rlbuffer.worker.loop import run_worker
from rlbuffer.worker.samplers import Completion, SamplerTraits, Sampling
from rlbuffer_cli.view import run_view

OPTIONS = EvaluationSettings(env="vcopy", env_options={"seed": 9}, prompts=4, every=2)


class Greedy:
    """Answers every prompt with its own first token and the end; its version is up to the test."""

    traits = SamplerTraits(is_exact=True)
    vocab_size = 13
    context = 0

    def __init__(self, version: int) -> None:
        self.version = version
        self.spans: list[int] = []
        """Versions that the next completions name; then the one that serves."""
        self.samplings: list[Sampling] = []

    async def load(self, policy: PolicyVersion) -> None: ...

    async def sample(self, prompt: np.ndarray, *, n: int, sampling: Sampling) -> list[Completion]:
        self.samplings.append(sampling)
        await asyncio.sleep(0)
        version = self.spans.pop(0) if self.spans else self.version
        tokens = np.array([prompt[0], 12], np.int32)
        completion = Completion(
            tokens=tokens,
            logprobs=np.zeros(2, np.float32),
            finish_reason="stop",
            version_spans=(VersionSpan(version, 0, 2),),
        )
        return [completion] * n

    async def close(self) -> None: ...


@asynccontextmanager
async def nothing_held() -> Any:
    yield


@pytest.fixture
def buffer() -> Any:
    with connect("memory://") as buffer:
        buffer.role(Member).open_run()
        yield buffer


def evaluated(
    buffer: Buffer,
    sampler: Greedy,
    seconds: float = 1.0,
    *,
    heard: Callable[[dict[str, Any]], object] | None = None,
    until: str = "",
    rollout_seconds: float = 600.0,
    **changes: Any,
) -> list[Any]:
    """What an evaluator logs in a while, up to an event `until`; `heard` is called with each line at once."""
    logged = Logged("rlbuffer.worker", take=heard)

    async def run() -> None:
        settings = {"held_out": OPTIONS.model_copy(update=changes)}
        evaluator = Evaluator(buffer, sampler, settings, hold=nothing_held, rollout_seconds=rollout_seconds)
        task = asyncio.create_task(evaluator.run())
        for _ in range(round(seconds / 0.02)):
            await asyncio.sleep(0.02)
            if any(until in ("", line["event"]) for line in logged.lines):
                break
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    logged.close()
    return logged.lines


def test_a_version_that_is_due_is_measured_with_the_likeliest_tokens(buffer: Buffer) -> None:
    sampler = Greedy(4)
    events = evaluated(buffer, sampler, 20.0)
    assert [(e["event"], e["env"], e["version"], e["rollouts"]) for e in events] == [("evaluation", "held_out", 4, 4)]
    assert {s.temperature for s in sampler.samplings} == {0.0}
    [result] = evaluations(buffer.store)
    assert 0 < result["reward/mean"] <= 1
    assert {"success/exact", "reward/error", "truncated", "length", "failed", "seconds", "at"} <= result.keys()
    assert buffer.ledger().total().pushed == (0, 0)
    assert buffer.store.read_pool() == []


def test_a_version_is_measured_once_by_whoever_comes_first(buffer: Buffer) -> None:
    assert evaluated(buffer, Greedy(4), 20.0)
    assert evaluated(buffer, Greedy(4)) == []
    assert evaluated(buffer, Greedy(6), 20.0)
    assert [r["version"] for r in evaluations(buffer.store)] == [4, 6]


def test_versions_between_two_evaluations_are_left_out(buffer: Buffer) -> None:
    assert evaluated(buffer, Greedy(5)) == []


def test_a_result_with_a_token_of_another_version_does_not_count_and_is_free_again(buffer: Buffer) -> None:
    sampler = Greedy(4)
    sampler.spans = [4, 5]
    events = evaluated(buffer, sampler, 20.0)
    assert [e["text"] for e in events] == [
        "eval/held_out of version 4 does not count: another version sampled some of it"
    ]
    assert evaluations(buffer.store) == []
    assert evaluated(buffer, Greedy(4), 20.0)[0]["event"] == "evaluation"


def test_a_claim_lapses_and_is_the_owners_alone_until_then(buffer: Buffer) -> None:
    store = buffer.role(EveryRole)
    assert store.claim_evaluation("math", 4, owner="a", ttl_seconds=600)
    assert store.claim_evaluation("math", 4, owner="a", ttl_seconds=0.05)
    store.release_evaluation("math", 4, owner="b")
    assert not store.claim_evaluation("math", 4, owner="b", ttl_seconds=600)
    threading.Event().wait(0.1)
    assert store.claim_evaluation("math", 4, owner="b", ttl_seconds=600)


def test_the_first_of_two_results_counts(buffer: Buffer) -> None:
    for reward in (0.25, 0.75):
        buffer.role(WorkerStore).add_evaluation("math", 4, {"reward/mean": reward})
    assert [r["reward/mean"] for r in evaluations(buffer.store)] == [0.25]


def test_an_evaluation_that_takes_too_long_is_given_up(buffer: Buffer) -> None:
    class Stuck(Greedy):
        async def sample(self, prompt: np.ndarray, *, n: int, sampling: Sampling) -> list[Completion]:
            await asyncio.sleep(600)
            raise AssertionError

    events = evaluated(buffer, Stuck(4), 20.0, rollout_seconds=0.05, prompts=evaluation.CONCURRENT + 1)
    assert len(events) == 1
    assert all(part in events[0]["text"] for part in ("eval/held_out", "version 4", "0.1 s", "timeout_seconds"))
    assert buffer.role(WorkerStore).claim_evaluation("held_out", 4, owner="b", ttl_seconds=1)


class Holes(VCopy):
    """An env with prompts of another kind at some numbers."""

    def prompt(self, number: int) -> Prompt:
        if number < 3:
            raise (Skip("of no use"), KeyError("no such line"), StopIteration("no more lines"))[number]
        if number == 3:
            sys.exit(2)
        return super().prompt(number)


def test_a_prompt_that_cannot_be_had_counts_as_failed_and_one_to_skip_as_none(buffer: Buffer) -> None:
    events = evaluated(buffer, Greedy(4), 20.0, until="evaluation", env=f"{__name__}:Holes", prompts=8)
    assert [(e["rollouts"], e["failed"]) for e in events if e["event"] == "evaluation"] == [(4, 3)]
    assert sorted(e["text"].partition(":")[0] for e in events if e["event"] == "trouble") == [
        f"eval/held_out prompt {number}" for number in (1, 2, 3)
    ]


def test_a_server_that_takes_no_claim_costs_the_evaluation_and_nothing_else(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> bool:
        raise ServerRefused("memory limit")

    monkeypatch.setattr(buffer.role(WorkerStore), "claim_evaluation", refuse)
    events = evaluated(buffer, Greedy(4), 20.0)
    assert ["memory limit" in e["text"] for e in events] == [True]


def test_a_worker_ends_at_once_while_an_evaluation_keeps_a_newer_version_waiting() -> None:
    class Slow(Greedy):
        async def load(self, policy: PolicyVersion) -> None:
            self.version = policy.version

        async def sample(self, prompt: np.ndarray, *, n: int, sampling: Sampling) -> list[Completion]:
            if sampling.temperature == 0:
                at_work.set()
                await asyncio.sleep(30)
            return await super().sample(prompt, n=n, sampling=sampling)

    def work() -> None:
        settings = WorkerSettings(env="vcopy", group_size=1)
        run_worker(stage.buffer, "w", settings, stop=stage.stop, sampler=Slow(-1), evaluations={"held_out": OPTIONS})

    at_work, stage = threading.Event(), Stage()
    stage.thread = threading.Thread(target=work)
    stage.thread.start()
    stage.announce(0)
    assert at_work.wait(20)
    stage.announce(1)
    stage.allow(1, "vcopy")
    eventually(lambda: stage.store.client.zcard(stage.store.keys.tickets("vcopy")) == 1)  # the worker has it
    began = time.monotonic()
    stage.finish()
    assert time.monotonic() - began < 20
    stage.buffer.close()


def test_a_rewind_takes_back_the_results_of_the_versions_beyond_it(tmp_path: Path) -> None:
    def add(version: int, reward: float) -> None:
        run.store.add_evaluation("math", version, {"reward/mean": reward, "reward/error": 0.0, "rollouts": 8})

    def shown() -> tuple[list[int], str]:
        with connect(run.url, run=run.store.run) as buffer:
            state = read_run_state(buffer.store)
        [line] = [line for line in lines_of(run_view(state)) if line.startswith("eval math")]
        return [result["version"] for result in state.evaluations], line.partition(" at ")[2].partition(" (")[0]

    run = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    try:
        for number in range(6):
            run.step(f"a.{number}")
        for version in (0, 2, 4, 6):
            add(version, 0.1 * version)
        assert shown() == ([0, 2, 4, 6], "version 6")
        late = run.again()
        assert late.claim_evaluation("math", 5, owner="w", ttl_seconds=60)
        run.store.rewind(3)
        assert shown() == ([0, 2], "version 2")
        run.token, run.meta = 0, run.store.meta()
        for number in range(10, 13):  # step 6 again; version 4 of the new line is measured, 6 not yet
            run.step(f"a.{number}")
        add(4, 0.9)
        late.add_evaluation("math", 5, {"reward/mean": 0.5, "reward/error": 0.0, "rollouts": 8})
        assert shown() == ([0, 2, 4], "version 4")
    finally:
        run.close()


def test_all_envs_that_are_due_are_measured_before_a_newer_version_takes_its_place(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "EVALUATION_POLL_SECONDS", 3600.0)
    sampler, logged = Greedy(-1), Logged("rlbuffer.worker")

    @asynccontextmanager
    async def held() -> Any:
        yield
        sampler.version += 1  # it has waited for this

    async def run() -> None:
        settings = {"one": OPTIONS, "two": OPTIONS}
        evaluator = Evaluator(buffer, sampler, settings, hold=held, rollout_seconds=600.0)
        task = asyncio.create_task(evaluator.run())
        await asyncio.sleep(0.05)
        sampler.version = 4
        evaluator.wake()  # as when it is loaded: nobody waits for the next look
        deadline = time.monotonic() + 20
        while len(logged.lines) < 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert [(e["env"], e["version"]) for e in logged.lines] == [("one", 4), ("two", 4)]
