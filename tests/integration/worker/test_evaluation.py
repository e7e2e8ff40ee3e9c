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
from typing import Any, ClassVar

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
from rlbuffer.errors import GroupFailed, PromptTooLong, SamplerUnavailable, ServerRefused
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.records.spans import VersionSpan
from rlbuffer.store.member import Member
from rlbuffer.store.worker import WorkerStore
from rlbuffer.worker import evaluation
from rlbuffer.worker.envs import Prompt, Score, Skip
from rlbuffer.worker.envs.digits import VCopy
from rlbuffer.worker.envs.episode import Episode
from rlbuffer.worker.evaluation import TIMED_OUT, TOO_LONG, Evaluator, result_of, summary
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
        buffer.store.role(Member).open_run()
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


def test_a_claim_expires_and_is_the_owners_alone_until_then(buffer: Buffer) -> None:
    store = buffer.store.role(EveryRole)
    assert store.claim_evaluation("math", 4, owner="a", ttl_seconds=600)
    assert store.claim_evaluation("math", 4, owner="a", ttl_seconds=0.05)
    store.release_evaluation("math", 4, owner="b")
    assert not store.claim_evaluation("math", 4, owner="b", ttl_seconds=600)
    threading.Event().wait(0.1)
    assert store.claim_evaluation("math", 4, owner="b", ttl_seconds=600)


def test_the_first_of_two_results_counts(buffer: Buffer) -> None:
    for reward in (0.25, 0.75):
        buffer.store.role(WorkerStore).add_evaluation("math", 4, {"reward/mean": reward})
    assert [r["reward/mean"] for r in evaluations(buffer.store)] == [0.25]


class Stuck(Greedy):
    """Never answers prompts that begin with one of some tokens."""

    def __init__(self, version: int, *firsts: int) -> None:
        super().__init__(version)
        self.firsts = firsts

    async def sample(self, prompt: np.ndarray, *, n: int, sampling: Sampling) -> list[Completion]:
        if int(prompt[0]) in self.firsts:
            await asyncio.sleep(600)
        return await super().sample(prompt, n=n, sampling=sampling)


def test_an_evaluation_whose_prompts_do_not_come_is_given_up(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "SLACK_SECONDS", 0.05)
    over = threading.Event()
    monkeypatch.setattr(VCopy, "prompt", lambda env, number: over.wait(60))
    events = evaluated(buffer, Greedy(4), 20.0, rollout_seconds=0.05, prompts=evaluation.CONCURRENT + 1)
    over.set()
    assert len(events) == 1
    assert all(part in events[0]["text"] for part in ("eval/held_out", "version 4", "0.15 s", "timeout_seconds"))
    assert buffer.store.role(WorkerStore).claim_evaluation("held_out", 4, owner="b", ttl_seconds=1)


def test_rollouts_that_run_out_of_time_are_wrong_however_many_there_are(buffer: Buffer) -> None:
    prompts = evaluation.CONCURRENT + 1
    [event] = evaluated(buffer, Stuck(4, *range(10)), 20.0, rollout_seconds=0.05, prompts=prompts, samples=2)
    [result] = evaluations(buffer.store)
    assert {name: result[name] for name in NUMBERS} == {
        "reward/mean": 0.0,
        "reward/error": 0.0,
        "pass@1/reward": 0.0,
        "prompts": prompts,
        "samples": 2,
        "rollouts": 2 * prompts,
        "timed_out": 2 * prompts,
        "failed": 0,
    }
    assert f"mean@2 0.000 ± 0.000  version 4  over {prompts} prompts, {2 * prompts} rollouts, " in event["text"]
    assert f"{2 * prompts} timed out, pass@2/reward 0.000 in " in event["text"]


class Digit(VCopy):
    """Prompt n is the digit n; what is earned, and how it fails, is up to the digit."""

    def prompt(self, number: int) -> Prompt:
        return Prompt(prompt_id=str(number), tokens=np.array([number], np.int32))

    def score(self, prompt: Prompt, tokens: np.ndarray, *, finish_reason: str) -> Score:
        if tokens[0] == 2:
            raise KeyError("no such answer")
        return Score(reward=None if tokens[0] == 3 else 4.0, successes={"found": True})


def test_what_ran_out_of_time_is_counted_as_wrong_and_what_failed_is_left_out(buffer: Buffer) -> None:
    """Of six prompts 0, 4 and 5 earn 4, 1 runs out of time, 2 fails in its reward and 3 has none."""
    events = evaluated(
        buffer, Stuck(4, 1), 20.0, until="evaluation", rollout_seconds=1.0, env=f"{__name__}:Digit", prompts=6
    )
    [result] = evaluations(buffer.store)
    assert result["reward/mean"] == pytest.approx((4 + 0 + 4 + 4) / 4)
    assert result["reward/error"] == pytest.approx(2 / 4**0.5)  # (1, 3, 1, 1) away from 3: 12 / 3 = 4
    assert result["success/found"] == result["pass@1/found"] == pytest.approx(3 / 4)
    assert (result["prompts"], result["rollouts"], result["timed_out"], result["failed"]) == (4, 4, 1, 2)
    troubles = sorted(e["text"] for e in events if e["event"] == "trouble")
    assert [text.partition(": ")[0] for text in troubles] == ["eval/held_out prompt 2", "eval/held_out prompt 3"]
    assert "KeyError" in troubles[0]
    assert "has no reward" in troubles[1]
    assert "over 4 prompts, 1 timed out, 2 failed and not counted in " in events[-1]["text"]


def test_an_engine_that_is_away_makes_no_answer_wrong(buffer: Buffer) -> None:
    class Away(Greedy):
        async def sample(self, prompt: np.ndarray, *, n: int, sampling: Sampling) -> list[Completion]:
            if prompt[0] < self.away:
                raise SamplerUnavailable("it died")
            return await super().sample(prompt, n=n, sampling=sampling)

        away = 1

    env, sampler = f"{__name__}:Four", Away(4)
    evaluated(buffer, sampler, 20.0, until="evaluation", env=env, prompts=4, samples=2, temperature=1.0)
    [result] = evaluations(buffer.store)
    assert (result["reward/mean"], result["prompts"], result["rollouts"], result["failed"]) == (4.0, 3, 6, 2)
    sampler.version, sampler.away = 6, 2
    events = evaluated(buffer, sampler, 2.0, until="never", env=env, prompts=4, samples=2, temperature=1.0)
    assert events[-1]["text"] == "eval/held_out of version 6 does not count: 4 of 8 rollouts failed"
    assert len(evaluations(buffer.store)) == 1


class Four(Digit):
    """Every answer earns 4."""

    def score(self, prompt: Prompt, tokens: np.ndarray, *, finish_reason: str) -> Score:
        return Score(reward=4.0)


class Play(Digit):
    """Of two turns; the second one of some prompts does not fit, and one prompt's first play fails."""

    plays: ClassVar[list[str]] = []

    async def play(self, prompt: Prompt, episode: Episode) -> Score:
        self.plays.append(prompt.prompt_id)
        await episode.sample()
        if prompt.prompt_id == "1":
            raise PromptTooLong("no room")
        if prompt.prompt_id == "2" and self.plays.count("2") == 1:
            raise KeyError("once")
        return Score(reward=1.0)


def test_a_play_that_fills_the_context_is_wrong_and_none_is_tried_again(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Play, "plays", [])
    evaluated(buffer, Greedy(4), 20.0, until="evaluation", env=f"{__name__}:Play", prompts=4)
    [result] = evaluations(buffer.store)
    assert sorted(Play.plays) == ["0", "1", "2", "3"]
    assert (result["reward/mean"], result["too_long"], result["failed"], result["rollouts"]) == (2 / 3, 1, 1, 3)


def test_an_evaluation_of_which_every_prompt_is_skipped_does_not_count(buffer: Buffer) -> None:
    [event] = evaluated(buffer, Greedy(4), 20.0, env=f"{__name__}:Holes", prompts=1)
    assert event["text"].endswith("does not count: its env skips all prompts (1)")
    assert evaluations(buffer.store) == []


NUMBERS = ("reward/mean", "reward/error", "pass@1/reward", "prompts", "samples", "rollouts", "timed_out", "failed")


def rollout(reward: float, **changes: Any) -> Rollout:
    """One that version 4 sampled, of two tokens."""
    return Rollout.from_completion(
        prompt_ids=[1], token_ids=[2, 12], logprobs=[-1.0, -1.0], reward=reward, policy_version=4, **changes
    )


def exact(*right: int) -> list[Rollout]:
    return [rollout(float(is_right), successes={"exact": bool(is_right)}) for is_right in right]


def test_the_numbers_of_several_rollouts_are_those_that_one_computes_by_hand() -> None:
    """Prompts of which 1, 4 and 0 of 4 rollouts are right: means 1/4, 1 and 0; C(3, 2) / C(4, 2) = 1/2."""
    found = summary([exact(1, 0, 0, 0), exact(1, 1, 1, 1), exact(0, 0, 0, 0)], samples=4, version=4)
    variance = ((1 / 4 - 5 / 12) ** 2 + (1 - 5 / 12) ** 2 + (0 - 5 / 12) ** 2) / 2
    assert found == pytest.approx(
        {
            "reward/mean": 5 / 12,
            "reward/error": (variance / 3) ** 0.5,
            "success/exact": 5 / 12,
            "pass@1/exact": 5 / 12,
            "pass@2/exact": (1 / 2 + 1 + 0) / 3,
            "pass@4/exact": 2 / 3,
            "truncated": 0.0,
            "length": 2.0,
            "prompts": 3,
            "samples": 4,
            "rollouts": 12,
            "failed": 0,
            "timed_out": 0,
            "too_long": 0,
        }
    )


def test_one_rollout_of_each_prompt_has_the_mean_and_pass_at_1_alone() -> None:
    found = summary([exact(1), exact(0), exact(0), exact(1)], samples=1, version=4)
    assert (found["reward/mean"], found["pass@1/exact"], found["success/exact"]) == (0.5, 0.5, 0.5)
    assert found["reward/error"] == pytest.approx((1 / 3 / 4) ** 0.5)
    assert [name for name in found if name.startswith("pass@")] == ["pass@1/exact"]


def test_one_prompt_has_no_standard_error() -> None:
    found = summary([exact(1, 0)], samples=2, version=4)
    assert (found["reward/mean"], found["pass@2/exact"]) == (0.5, 1.0)
    assert "reward/error" not in found


def test_without_a_named_success_a_reward_of_1_or_more_is_one() -> None:
    found = summary([[rollout(-2.0), rollout(3.0)], [rollout(0.9), rollout(1.0)]], samples=2, version=4)
    assert found["reward/mean"] == pytest.approx((0.5 + 0.95) / 2)
    assert (found["pass@1/reward"], found["pass@2/reward"]) == (0.5, 1.0)
    assert not [name for name in found if name.startswith("success/")]


@pytest.mark.parametrize("parts", [(0.7, 0.2, 0.1), (0.1,) * 10, (0.35, 0.35, 0.2, 0.1), (1.0,)])
def test_a_reward_of_weighted_parts_that_are_all_right_is_a_success(parts: tuple[float, ...]) -> None:
    """The first two sums are 0.9999999999999999."""
    total = 0.0
    for part in parts:
        total += part
    found = summary([[rollout(total), rollout(total - 0.01)]], samples=2, version=4)
    assert (found["pass@1/reward"], found["pass@2/reward"]) == (0.5, 1.0)


def test_a_prompt_counts_under_the_names_that_it_is_judged_by() -> None:
    """Two prompts of mathematics (2 of 2, 1 of 2), one of code (0 of 2), and one that nobody knows: no answer ended."""

    def judged(name: str, *right: int) -> list[Rollout]:
        return [rollout(float(r), rewards={name: float(r)}, successes={name: bool(r)}) for r in right]

    results = [judged("maths", 1, 1), judged("maths", 1, 0), judged("code", 0, 0), [TIMED_OUT, TIMED_OUT]]
    found = summary(results, samples=2, version=4)
    for what in ("reward", "success", "pass@1"):
        assert found[f"{what}/maths"] == pytest.approx((1 + 1 / 2 + 0) / 3)
        assert found[f"{what}/code"] == 0
    assert (found["pass@2/maths"], found["pass@2/code"]) == (pytest.approx(2 / 3), 0)
    assert (found["reward/mean"], found["prompts"]) == (pytest.approx(3 / 8), 4)


def test_a_limit_is_wrong_in_every_mean_and_a_failure_is_in_none() -> None:
    """Three of the first prompt's four count (1, 0, 0), two of the second's (1, 0), none of the third's."""
    away = GroupFailed("away")
    results = [
        [*exact(1), TIMED_OUT, TOO_LONG, away],
        [*exact(1), TIMED_OUT, away, away],
        [away] * 0,
    ]
    found = summary(results, samples=4, version=4)
    mean = (1 / 3 + 1 / 2) / 2
    for name in ("reward/mean", "success/exact", "pass@1/exact"):
        assert found[name] == pytest.approx(mean)
    assert found["pass@2/exact"] == pytest.approx((2 / 3 + 1) / 2)  # 1 - C(2, 2) / C(3, 2), and 1
    assert "pass@4/exact" not in found  # no prompt has four that count
    assert found["reward/error"] == pytest.approx((1 / 2 - 1 / 3) / 2)  # of two: half their difference
    assert (found["prompts"], found["rollouts"], found["failed"]) == (2, 5, 3)
    assert (found["timed_out"], found["too_long"], found["length"]) == (2, 1, 2.0)


def test_a_limit_is_worth_no_more_than_the_worst_answer() -> None:
    good, bad = rollout(1.0, rewards={"quality": 0.5}), rollout(-1.0, rewards={"quality": -2.0})
    found = summary([[good, TIMED_OUT], [bad, TOO_LONG]], samples=2, version=4)
    assert found["reward/mean"] == pytest.approx(((1 - 1) / 2 + (-1 - 1) / 2) / 2)
    assert found["reward/quality"] == pytest.approx(((0.5 - 2) / 2 + (-2 - 2) / 2) / 2)
    assert found["pass@1/reward"] == pytest.approx(1 / 4)


def test_named_rewards_and_several_verdicts_have_numbers_of_their_own() -> None:
    rollouts = [
        rollout(0.5, rewards={"style": 1.0}, successes={"a": True, "b": False}),
        rollout(0.5, rewards={"style": 0.0}, successes={"a": False}),
    ]
    found = summary([rollouts], samples=2, version=4)
    assert (found["reward/style"], found["success/a"], found["success/b"]) == (0.5, 0.5, 0.0)
    assert (found["pass@2/a"], found["pass@2/b"]) == (1.0, 0.0)


def test_rollouts_of_several_sequences_count_as_one_each() -> None:
    main, helper = (
        TokenSequence(
            tokens=np.array([1, 2, 12], np.int32),
            loss_mask=np.array([False, True, True]),
            logprobs=np.array([0.0, -1.0, -1.0], np.float32),
            version_spans=(VersionSpan(4, 1, 3),),
            name=name,
        )
        for name in ("main", "helper")
    )
    both = Rollout.from_sequences([main, helper], reward=1.0, successes={"exact": True})
    found = summary([[both, *exact(0)]], samples=2, version=4)
    assert (found["rollouts"], found["reward/mean"], found["pass@2/exact"]) == (2, 0.5, 1.0)


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        (TimeoutError("of the rollout"), TIMED_OUT),
        (rollout(0.0, failure=("AgentTimeoutError", "")), TIMED_OUT),
        (rollout(0.0, failure=("timeout", "no answer within 30 s")), TIMED_OUT),
        (PromptTooLong("full"), TOO_LONG),
        (rollout(0.0, failure=("KeyError", "x")), "KeyError: x"),
        (SamplerUnavailable("away"), "SamplerUnavailable: away"),
        (ValueError("a bug"), "ValueError: a bug"),
    ],
    ids=str,
)
def test_what_becomes_of_an_attempt_that_was_not_scored(attempt: Any, expected: str) -> None:
    assert str(result_of(attempt)) == expected


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

    monkeypatch.setattr(buffer.store.role(WorkerStore), "claim_evaluation", refuse)
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
