"""The writer against servers that lose what they had acknowledged, in memory and for real."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from every_role import EveryRole, stands_in
from rolled_back import roll_back

import rlbuffer
from rlbuffer.client import producer
from rlbuffer.errors import RlbufferError, RunGone, ServerRefused, ServerUnreachable
from rlbuffer.store.member import Member
from rlbuffer.store.worker import WorkerStore
from rlbuffer.testing import make_group


@pytest.fixture
def buffer(redis_url: str) -> Iterator[rlbuffer.Buffer]:
    with rlbuffer.connect(redis_url, run=f"writer-{uuid.uuid4().hex[:8]}") as made:
        yield made


def group(seed: int) -> rlbuffer.Group:
    return make_group(seed=seed, size=2, lengths=[8, 8])


def pending(buffer: rlbuffer.Buffer) -> list[str]:
    return [entry.group_id for entry in buffer.store.read_pool()]


class Failing:
    """A store whose calls of one name fail by themselves at chosen times, counted from when `errors` are set."""

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name, self._calls = store, name, 0
        self.errors: dict[int, Exception] = {}

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(self._store, name)
        self._calls += bool(self.errors)
        if self._calls in self.errors:
            raise self.errors[self._calls]
        found: Callable[..., Any] = getattr(self._store, name)
        return found


def test_a_server_that_goes_away_while_the_missing_pushes_are_sent_is_waited_for(buffer: rlbuffer.Buffer) -> None:
    store = stands_in(Failing(buffer.store.role(WorkerStore), "push"), buffer)
    writer = buffer.writer("w")
    for seed in range(4):
        writer.push(group(seed))
    roll_back(buffer.store, writer, to=1)
    # The first call meets the gap; the second one sends push 3 again, after push 2.
    away = ServerUnreachable("away")
    store.errors = {3: away, 5: away}
    assert writer.push(group(4)).status == "stored"
    assert pending(buffer) == ["a.0", "a.1", "a.2", "a.3", "a.4"]
    assert buffer.verify().ok


def test_a_full_server_gives_no_tickets_and_ends_no_worker(buffer: rlbuffer.Buffer) -> None:
    store = stands_in(Failing(buffer.store.role(WorkerStore), "take_tickets"), buffer)
    store.errors = dict.fromkeys(range(1, 99), ServerRefused("memory limit"))
    writer = buffer.writer("w")
    assert writer.take("a", timeout_seconds=0.1) == []


@pytest.mark.parametrize("error", [ServerRefused("the disk is full"), ServerUnreachable("away")])
def test_the_end_of_an_env_is_said_however_long_the_server_takes_no_writes(
    buffer: rlbuffer.Buffer, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "LAST_DELAY_SECONDS", 0.01)
    store = stands_in(Failing(buffer.store.role(WorkerStore), "say_done"), buffer)
    heard: list[RlbufferError] = []
    writer = buffer.writer("w", on_retry=heard.append)
    writer.push(group(1))
    store.errors = {1: error, 2: error}
    writer.done("a")
    assert heard == [error, error]
    assert buffer.store.sources().done == {"a"}


class ForgetfulStore:
    """A store whose next push takes effect, but whose answer never comes."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.loses_reply = False
        self.step_heard = 0

    def meta(self) -> Any:
        return self._store.meta()

    def push(self, *args: Any, **values: Any) -> tuple[str, str]:
        answer: tuple[str, str] = self._store.push(*args, **values)
        if self.loses_reply:
            raise ServerUnreachable("the answer was lost")
        return answer


@pytest.mark.parametrize("again", [True, False])
def test_a_push_that_was_given_up_does_not_cost_the_next_group(buffer: rlbuffer.Buffer, again: bool) -> None:
    epoch = buffer.store.role(Member).open_run().epoch
    store = ForgetfulStore(buffer.store.role(WorkerStore))
    writer = rlbuffer.Writer(store, "w", epoch=epoch, patience_seconds=0.01)  # type: ignore[arg-type]
    store.loses_reply = True
    with pytest.raises(ServerUnreachable, match="the answer was lost"):
        writer.push(group(1))
    store.loses_reply = False
    if again:
        assert writer.push(group(1)).status == "duplicate"
    assert writer.push(group(2)).status == "stored"
    assert pending(buffer) == ["a.1", "a.2"]
    assert buffer.ledger().envs["a"].pushed == (4, 32)


def test_nothing_is_left_under_the_name_of_a_run_that_was_deleted(buffer: rlbuffer.Buffer) -> None:
    store = buffer.store.role(EveryRole)
    store.open_run()
    store.lease("me", ttl_seconds=60)
    keys, client = store.keys, store.client  # type: ignore[attr-defined]
    client.delete(keys.meta)
    with pytest.raises(RunGone, match="is not on the server"):
        store.set_error("a bug")
    with pytest.raises(RunGone, match="is not on the server"):
        store.lease("me", ttl_seconds=60)
    assert not client.exists(keys.meta)
    assert store.open_run().step == 0


def test_a_group_whose_push_another_thread_has_settled_is_pushed_again(buffer: rlbuffer.Buffer) -> None:
    """A repeated call is recognized only where no other came between; what it stores again drops as a duplicate."""
    epoch = buffer.store.role(Member).open_run().epoch
    store = ForgetfulStore(buffer.store.role(WorkerStore))
    writer = rlbuffer.Writer(store, "w", epoch=epoch, patience_seconds=0.01)  # type: ignore[arg-type]
    store.loses_reply = True
    with pytest.raises(ServerUnreachable, match="the answer was lost"):
        writer.push(group(1))
    store.loses_reply = False
    other = threading.Thread(target=writer.push, args=(group(2),))
    other.start()
    other.join()
    assert writer.push(group(1)).status == "stored"
    assert pending(buffer) == ["a.1", "a.2", "a.1"]


def ended_well(work: Callable[[], bool]) -> bool:
    """What `work` answers in a forked process; False when it fails there, or does not end."""
    child = os.fork()
    if child == 0:
        is_well = False
        try:
            is_well = work()
        finally:
            os._exit(0 if is_well else 1)
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_forked_process_pushes_under_an_incarnation_of_its_own(redis_url: str, is_busy: bool) -> None:
    """Under the parent's sequence its groups would be answered as duplicates, and a thread may hold the lock."""
    began, goes_on = threading.Event(), threading.Event()

    def hold_the_lock(_: object) -> None:
        began.set()
        goes_on.wait(30.0)

    with rlbuffer.connect(redis_url, run=f"writer-{uuid.uuid4().hex[:8]}") as buffer:
        store = ForgetfulStore(buffer.store.role(WorkerStore))
        writer = rlbuffer.Writer(store, "w", epoch=buffer.store.role(Member).open_run().epoch, on_retry=hold_the_lock)  # type: ignore[arg-type]
        writer.push(group(0))
        store.loses_reply = is_busy
        pushing = threading.Thread(target=writer.push, args=(group(1),))
        pushing.start()
        assert not is_busy or began.wait(30.0)
        if not is_busy:
            pushing.join()
        store.loses_reply = False
        try:
            assert ended_well(lambda: [writer.push(group(seed)).status for seed in (2, 3)] == ["stored"] * 2)
        finally:
            goes_on.set()
            pushing.join()
        assert writer.push(group(4)).status == "stored"
        assert sorted(pending(buffer)) == [group(seed).group_id for seed in range(5)]
        assert buffer.verify().ok


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_does_not_push_under_an_incarnation_that_its_parent_was_given(redis_url: str) -> None:
    def is_refused() -> bool:
        with pytest.raises(RlbufferError, match=r"the incarnation of writer 'w' .* forked from"):
            writer.push(group(0))
        return True

    with rlbuffer.connect(redis_url, run=f"writer-{uuid.uuid4().hex[:8]}") as buffer:
        writer = buffer.writer("w", incarnation="mine")
        assert ended_well(is_refused)
        assert writer.push(group(0)).status == "stored"


@pytest.mark.parametrize(
    ("logprobs", "is_said"),
    [([0.0, 0.0, 0.0], True), ([0.0, -1e-7, 0.0], False), ([-0.5, -1.5, -0.1], False), ([0.0], False)],
)
def test_a_rollout_of_which_every_logprob_is_0_is_said_once(
    logprobs: list[float], is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rollout = rlbuffer.Rollout.from_completion(
        prompt_ids=[1, 2], token_ids=[3] * len(logprobs), logprobs=logprobs, reward=1.0, policy_version=0
    )
    with rlbuffer.connect("memory://") as buffer:
        writer = buffer.writer("w")
        for seed in (1, 2):
            made = make_group(seed=seed, size=2, lengths=[8, 8])
            pushed = replace(made, rollouts=(made.rollouts[0], replace(rollout, rollout_id=f"{made.group_id}/1")))
            assert writer.push(pushed).status == "stored"
    said = [message for message in caplog.messages if "a.1/1" in message]
    assert (len(said), len(caplog.messages)) == (int(is_said), int(is_said))


def zeros(name: str, tokens: int, *, untrained: float = 0.0) -> rlbuffer.Rollout:
    """A rollout of a first turn whose logprobs are `untrained` and which is not trained, and of `tokens` of 0."""
    rollout = rlbuffer.Rollout.from_completion(
        prompt_ids=[1, 2],
        token_ids=[3] * (2 + tokens),
        logprobs=[untrained] * 2 + [0.0] * tokens,
        reward=1.0,
        policy_version=0,
    )
    mask = np.array([False] * 4 + [True] * tokens)
    return replace(rollout, loss_mask=mask, rollout_id=name)


@pytest.mark.parametrize(
    ("rollouts", "is_said"),
    [
        ([zeros("a/0", 3, untrained=-0.5)], True),  # what is not trained tells nothing
        ([zeros("a/0", 1), zeros("a/1", 1)], True),  # each of one token
        ([zeros("a/0", 1)], False),
    ],
)
def test_zeros_are_those_of_the_trained_tokens_of_a_group(
    rollouts: list[rlbuffer.Rollout], is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with rlbuffer.connect("memory://") as buffer:
        size = len(rollouts)
        made = rlbuffer.Group(group_id="a", env="a", prompt_id="p", planned_size=size, rollouts=tuple(rollouts))
        assert buffer.writer("w").push(made).status == "stored"
    assert ["every trained logprob of rollout a/0 is 0" in message for message in caplog.messages] == [True] * is_said


@pytest.mark.parametrize(("logprobs", "which"), [((0.0, -1.0), 0), ((-1.0, 0.0), 1), ((-1.0, -1.0), None)])
def test_zeros_are_those_of_each_sequence(
    logprobs: tuple[float, ...], which: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent and its helper may have engines of their own."""
    turns = [
        [{"role": "user", "tokens": [1]}, {"role": "assistant", "tokens": [2, 3 + n], "logprobs": [logprob] * 2}]
        for n, logprob in enumerate(logprobs)
    ]
    sequences = [rlbuffer.TokenSequence.from_turns(one, policy_version=0) for one in turns]
    rollout = replace(rlbuffer.Rollout.from_sequences(sequences, reward=1.0), rollout_id="a/0")
    with rlbuffer.connect("memory://") as buffer:
        buffer.writer("w").push(
            rlbuffer.Group(group_id="a", env="a", prompt_id="p", planned_size=1, rollouts=(rollout,))
        )
    said = [f"every trained logprob of sequence {which} of rollout a/0 is 0" in message for message in caplog.messages]
    assert said == [True] * (which is not None)


def test_zeros_are_said_once_of_each_env(caplog: pytest.LogCaptureFixture) -> None:
    with rlbuffer.connect("memory://") as buffer:
        writer = buffer.writer("w")
        for env, number in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
            name = f"{env}.{number}"
            its = (zeros(f"{name}/0", 3),)
            pushed = rlbuffer.Group(group_id=name, env=env, prompt_id="p", planned_size=1, rollouts=its)
            assert writer.push_many([pushed])[0].status == "stored"
    assert [message.partition(":")[0] for message in caplog.messages] == ["group a.0 of env a", "group b.0 of env b"]
