"""A worker's report of an env that fails: the kind, the place in the user's file, and what does not come back."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections.abc import Iterator

import numpy as np
import pytest
from logged import Logged

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import GroupFailed, InvalidRollout, SamplerBusy
from rlbuffer.process.threads import places_of_thread
from rlbuffer.records.group import Ticket
from rlbuffer.records.spans import VersionSpan
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.worker import failures, heartbeat
from rlbuffer.worker.envs import Prompt, Score
from rlbuffer.worker.failures import MOST_KINDS, Failures, RunningCalls, place_of, traceback_of
from rlbuffer.worker.faults import FIRST_PAUSE_SECONDS, Backoff
from rlbuffer.worker.group_maker import GroupMaker, check_prompt
from rlbuffer.worker.heartbeat import WorkerHeartbeat
from rlbuffer.worker.samplers.base import Completion

SOURCE = """
class Theirs:
    name, vocab_size, eos_token_ids, max_new_tokens = "theirs", 13, (12,), 2

    def prompt(self, number):
        return self.given

    def score(self, prompt, tokens, *, finish_reason):
        return self.earned()

    def render(self, tokens):
        return ""

def raises():
    return {}["verdict"]

def again():
    try:
        raises()
    except KeyError as error:
        raise error from error

def in_a_circle():
    try:
        again()
    except KeyError as error:
        raise ValueError("of it") from error
"""
"""An env in a file of the user's; line 9 calls what raises in line 15."""


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    module = types.ModuleType("theirs")
    exec(compile(SOURCE, "/home/user/theirs.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "theirs", module)
    return module


class Sampler:
    """Says two tokens."""

    version, vocab_size, context = 0, 13, 0

    async def sample(self, prompt, *, n, sampling):
        tokens = np.array([3, 12], np.int32)
        spans = (VersionSpan(0, 0, 2),)
        logprobs = np.zeros(2, np.float32)
        return [Completion(tokens=tokens, logprobs=logprobs, finish_reason="stop", version_spans=spans)] * n


def maker(env: object, needs: tuple[str, ...] = ()) -> GroupMaker:
    settings = WorkerSettings(env="theirs:Theirs", group_size=2)
    return GroupMaker(env, Sampler(), settings, worker="w", needs=needs)  # type: ignore[arg-type]


def failure(env: object) -> BaseException:
    """The error that costs the group of an env."""
    prompt = Prompt(prompt_id="p", tokens=np.array([1], np.int32))
    with pytest.raises(GroupFailed) as caught:
        asyncio.run(maker(env).make(Ticket(env="theirs", number=0, group_id="theirs.0"), prompt))
    assert caught.value.__cause__ is not None
    return caught.value.__cause__


@pytest.mark.parametrize(
    ("earned", "kind", "text", "place"),
    [
        ("raises", KeyError, "'verdict'", "/home/user/theirs.py:15 in raises"),
        (lambda: 1.0, TypeError, "score() gave a float in place of a Score", "/home/user/theirs.py:8 in score"),
        (
            lambda: Score(reward=float("nan")),
            InvalidRollout,
            "reward: expected a finite number, got nan",
            "/home/user/theirs.py:8 in score",
        ),
    ],
)
def test_a_failure_is_placed_in_the_users_file(theirs, earned, kind, text, place) -> None:
    env = theirs.Theirs()
    env.earned = theirs.raises if earned == "raises" else earned
    error = failure(env)
    assert (type(error), str(error)) == (kind, text)
    assert place_of(error, env, "score") == place
    assert traceback_of(error).splitlines()[-1].endswith(text)
    assert traceback_of(ValueError("half a pair: \ud83d")).encode()


def test_a_group_without_rewards_fails_unless_a_scorer_adds_them(theirs) -> None:
    env = theirs.Theirs()
    env.earned = lambda: Score(reward=None)
    ticket, prompt = (
        Ticket(env="theirs", number=0, group_id="theirs.0"),
        Prompt(prompt_id="p", tokens=np.array([1], np.int32)),
    )
    with pytest.raises(GroupFailed) as caught:
        asyncio.run(maker(env).make(ticket, prompt))
    assert str(caught.value) == ("score() gave no reward, and no scorer adds one: give a number, or add a [score.NAME]")
    group = asyncio.run(maker(env, needs=("reward",)).make(ticket, prompt))
    assert (group.needs, [rollout.reward for rollout in group.rollouts]) == (("reward",), [None, None])


@pytest.mark.parametrize("way", ["again", "in_a_circle"])
def test_an_error_that_is_its_own_cause_is_placed(theirs, way: str) -> None:
    env, found = theirs.Theirs(), []
    env.earned = getattr(theirs, way)
    error = failure(env)
    looking = threading.Thread(target=lambda: found.append(place_of(error, env, "score")), daemon=True)
    looking.start()
    looking.join(10.0)
    assert found == ["/home/user/theirs.py:15 in raises"]


def test_an_episode_must_end_in_a_score() -> None:
    class Plays:
        name, vocab_size, eos_token_ids, max_new_tokens = "plays", 13, (12,), 2

        async def play(self, prompt, episode):
            await episode.sample()

    assert str(failure(Plays())) == "play() gave a NoneType in place of a Score"


@pytest.mark.parametrize(
    ("given", "kind"),
    [({"tokens": [1]}, TypeError), *((ids, InvalidRollout) for ids in ([], ["a"], [0.5], [[1]], [1, 12, 13], [-1]))],
)
def test_a_prompt_that_a_sampler_cannot_take_is_refused_before_it_is_asked(theirs, given, kind) -> None:
    env = theirs.Theirs()
    env.given = given if isinstance(given, dict) else Prompt(prompt_id="p", tokens=given)
    with pytest.raises(kind):
        maker(env).prompt(0)


def test_the_largest_id_and_any_id_of_an_unknown_vocabulary_are_taken() -> None:
    check_prompt(np.array([0, 12], np.int32), 13)
    check_prompt(np.array([99], np.int32), 0)


def test_the_most_frequent_kinds_of_failures_are_told() -> None:
    found = Failures()
    for number in range(100):
        found.note(f"Kind{number}", str(number))
    found.note("Kind98", "again")
    assert (len(found.record()), next(iter(found.record())), found.last) == (MOST_KINDS, "Kind98", "again")


def test_a_call_that_does_not_come_back_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch, theirs) -> None:
    monkeypatch.setattr(failures, "LONG_SECONDS", 0.0)
    calls, begun, over = RunningCalls(), threading.Event(), threading.Event()
    theirs.__dict__.update(begun=begun, over=over)
    exec(compile("\n\ndef slow():\n    begun.set()\n    over.wait()", "/home/user/slow.py", "exec"), theirs.__dict__)

    def run() -> None:
        with calls.running("score"):
            theirs.slow()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    said = ""
    while ":5 " not in said:
        said = calls.sentence()
    over.set()
    thread.join()
    assert said == "score() has run for 0 s (/home/user/slow.py:5 in slow)"
    assert calls.sentence() == ""
    assert places_of_thread(None) == []


@pytest.mark.parametrize("way", ["play", "rollout"])
def test_sampling_for_an_env_is_no_work_of_the_envs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "LONG_SECONDS", 0.0)
    said: dict[str, str] = {}

    class Asks(Sampler):
        async def sample(self, prompt, *, n, sampling):
            said["sampling"] = made.calls.sentence()
            return await super().sample(prompt, n=n, sampling=sampling)

    class Theirs:
        name, vocab_size, eos_token_ids, max_new_tokens = "theirs", 13, (12,), 2

    async def play(self, prompt, episode):
        said["before"] = made.calls.sentence()
        await episode.sample()

    async def rollout(self, prompt, policy):
        said["before"] = made.calls.sentence()
        await asyncio.create_task(policy.ask(prompt.tokens, policy.sampling))  # as a server that asks for it does

    setattr(Theirs, way, {"play": play, "rollout": rollout}[way])
    made = GroupMaker(Theirs(), Asks(), WorkerSettings(env="theirs:Theirs", group_size=1), worker="w")  # type: ignore[arg-type]
    prompt = Prompt(prompt_id="p", tokens=np.array([1], np.int32))
    with pytest.raises(GroupFailed):
        asyncio.run(made.make(Ticket(env="theirs", number=0, group_id="theirs.0"), prompt))
    assert said["sampling"] == ""
    assert said["before"].startswith(f"{way}() has run for 0 s (")


def test_the_first_failure_of_a_kind_is_said_with_its_traceback_and_the_others_are_counted() -> None:
    logged, worker = Logged("rlbuffer.worker"), WorkerHeartbeat(Deaf(), "w", "math")
    worker.failure("KeyError", "group m.0 abandoned", trace="Traceback: line 3")
    for number in range(1, 5):
        worker.failure("KeyError", f"group m.{number} abandoned", trace="Traceback: line 3")
    worker.failure("ValueError", "group m.5 abandoned", trace="Traceback: line 4")
    logged.close()
    said = [line["text"] for line in logged.lines if line["level"] == "WARNING"]
    assert said == ["group m.0 abandoned\nTraceback: line 3", "group m.5 abandoned\nTraceback: line 4"]
    assert [line["kind"] for line in logged.lines] == ["KeyError"] * 5 + ["ValueError"]


def test_a_trouble_and_a_wait_that_last_are_said_once_a_minute_though_their_numbers_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "SAY_WAITING_SECONDS", 0.0)
    logged, worker = Logged("rlbuffer.worker"), WorkerHeartbeat(Deaf(), "w", "math")
    for groups in range(3):
        worker.trouble("the server is away; asked again in 1 s")
        for kind in (Wait.TICKET, Wait.WEIGHTS):
            worker.waits(Waiting(kind=kind, groups=groups))
    logged.close()
    assert [line["level"] for line in logged.lines] == ["WARNING", "INFO", "INFO"] + ["DEBUG"] * 6


@pytest.mark.parametrize("is_async", [False, True])
def test_an_env_that_calls_exit_fails_and_ends_nobody(is_async: bool) -> None:
    class Leaves:
        name, vocab_size, eos_token_ids, max_new_tokens = "theirs", 13, (12,), 2

        def score(self, prompt, tokens, *, finish_reason):
            sys.exit(3)

    class LeavesLater(Leaves):
        async def score(self, prompt, tokens, *, finish_reason):
            sys.exit(3)

    env = LeavesLater() if is_async else Leaves()
    error = failure(env)
    assert str(error) == "sys.exit(3) was called"
    assert "test_failures.py:" in place_of(error, env, "score")


@pytest.mark.parametrize("way", ["score", "later", "play"])
def test_an_env_that_is_cancelled_by_what_it_waits_for_fails_as_any_other(way: str) -> None:
    class Cancelled:
        name, vocab_size, eos_token_ids, max_new_tokens = "theirs", 13, (12,), 2

    async def cancelled(*_, **__):
        waiting = asyncio.create_task(asyncio.sleep(9))
        waiting.cancel()
        await waiting

    env = Cancelled()
    setattr(env, way.replace("later", "score"), cancelled)
    if way == "score":
        env.score = lambda *_, **__: asyncio.run(cancelled())
    error = failure(env)
    assert "was cancelled" in str(error)
    assert "test_failures.py:" in place_of(error, env, "score")


class Deaf:
    def heartbeat(self, kind: str, name: str, record: dict) -> None: ...


def test_a_request_that_fails_during_the_pause_of_another_waits_too_where_a_third_has_worked_meanwhile() -> None:
    patience = Backoff()
    for error in (SamplerBusy("429", seconds=20.0), SamplerBusy("503", seconds=0.0), SamplerBusy("503", seconds=0.0)):
        assert patience.pause(error) >= FIRST_PAUSE_SECONDS
        patience.works()
