"""The code of somebody who knows DESIGN 9 only: a worker and a trainer of ten lines each, around a batcher."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from model_families import LLAMA, made

import rlbuffer
from rlbuffer.daemon import Daemon
from rlbuffer.errors import BatchTimeout, InvalidRollout, NotFound, RlbufferError


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


@contextmanager
def running(*loops: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs each loop in a thread; what one of them raises fails the test."""
    stop, errors = threading.Event(), []

    def guard(loop: Callable[[threading.Event], None]) -> None:
        try:
            loop(stop)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guard, args=(loop,)) for loop in loops]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=20)
    assert errors == []


def batcher(url: str, config: rlbuffer.BatcherConfig) -> Callable[[threading.Event], None]:
    def serve(stop: threading.Event) -> None:
        with rlbuffer.connect(url) as buffer:
            Daemon(buffer, config).run(stop)

    return serve


def worker(url: str, env: str) -> Callable[[threading.Event], None]:
    def work(stop: threading.Event) -> None:
        rng = np.random.default_rng(0)
        with rlbuffer.connect(url) as buffer:
            writer = buffer.writer(f"worker-{env}")
            while not stop.is_set():
                for ticket in writer.take(env, 2, timeout_seconds=0.2):
                    version = buffer.policy.version
                    rollouts = [completion(rng, version) for _ in range(4)]
                    assert writer.push(ticket, rollouts, answer="42").status == "stored"

    return work


def completion(rng: np.random.Generator, version: int) -> rlbuffer.Rollout:
    sampled = rng.integers(0, 50, int(rng.integers(2, 12)))
    return rlbuffer.Rollout.from_completion(
        prompt_ids=[1, 2, 3],
        token_ids=sampled,
        logprobs=-rng.random(len(sampled)),
        reward=float(rng.random()),
        policy_version=version,
    )


def train(buffer: rlbuffer.Buffer, steps: int, *, start: int | None = None) -> list[rlbuffer.Step]:
    reader, policy, done = buffer.reader(timeout_seconds=20), buffer.policy, []
    for step in reader.steps(start):
        for micro_batch in step:
            assert micro_batch.input_ids.shape == micro_batch.targets.shape
        done.append(step)
        policy.announce(step.number, location=f"/weights/{step.number}", size=1, checksum="c")
        if step.number == steps:
            reader.trained(step)
            reader.checkpointed(step.number, oldest_kept=0)
            break
    return done


def test_a_worker_and_a_trainer_of_ten_lines_train_ten_accounted_steps(url: str) -> None:
    config = rlbuffer.BatcherConfig(32, step_groups=4, budgets={"a": 0.5, "b": 0.5})
    with (
        rlbuffer.connect(url) as buffer,
        running(batcher(url, config), worker(url, "a"), worker(url, "b")),
    ):
        steps = train(buffer, 10)
        assert [step.number for step in steps] == list(range(1, 11))
        assert all(step.rollouts == 16 and step.groups == 4 for step in steps)
        samples = [sample for step in steps for micro_batch in step for sample in micro_batch.samples]
        assert len({sample.rollout_id for sample in samples}) == len(samples) == 160
        assert {sample.env for sample in samples} == {"a", "b"}
        assert {sample.answer for sample in samples} == {"42"}
        assert buffer.policy.wait(10, timeout_seconds=5).location == "/weights/10"
        assert sum(env.trained[0] for env in buffer.ledger().envs.values()) == 160
        assert buffer.step(10).header.digest == steps[-1].digest
        assert {view.state for view in buffer.groups("state=trained", limit=5)} == {"trained"}
        assert buffer.verify().findings == ()
        with pytest.raises(NotFound, match="has no step 99"):
            buffer.step(99)


@pytest.mark.parametrize(("lookahead", "ahead"), [(0, 1), (2, 3)])
def test_so_many_steps_are_committed_ahead_of_the_trainer_and_no_more(url: str, lookahead: int, ahead: int) -> None:
    config = rlbuffer.BatcherConfig(256, step_groups=1, lookahead=lookahead, max_age=9)
    with rlbuffer.connect(url) as buffer, running(batcher(url, config)):
        writer = buffer.writer("w")
        for seed in range(6):
            writer.push(rlbuffer.testing.make_group(seed=seed))
        steps = buffer.reader(timeout_seconds=20).steps()
        next(steps)
        wait_until(lambda: buffer.store.meta().step == ahead)
        time.sleep(0.2)
        assert buffer.store.meta().step == ahead
        next(steps)
        wait_until(lambda: buffer.store.meta().step == ahead + 1)


def wait_until(is_so: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_steps_are_acknowledged_and_checkpointed_by_number_too(url: str) -> None:
    config = rlbuffer.BatcherConfig(256, step_groups=1, lookahead=2, max_age=9)
    with rlbuffer.connect(url) as buffer, running(batcher(url, config)):
        writer = buffer.writer("w")
        for seed in range(4):
            writer.push(rlbuffer.testing.make_group(seed=seed))
        reader = buffer.reader(timeout_seconds=20)
        first = next(reader.steps())
        reader.trained(1)
        state = reader.state_dict()
        assert [step["digest"] for step in state.pop("steps")] == [first.digest]
        assert state == {"step": 1, "epoch": first.epoch, "digest": first.digest}
        assert buffer.store.trainer().trained == 1
        with pytest.raises(NotFound, match=r"has no step 99: the last committed one is [1-4]\.$"):
            reader.trained(99)
        reader.checkpointed(first)
        wait_until(lambda: buffer.store.meta().retired == 1)


def test_a_reader_begins_again_where_it_is_told(url: str) -> None:
    config = rlbuffer.BatcherConfig(256, step_groups=1, max_age=9)
    with rlbuffer.connect(url) as buffer, running(batcher(url, config)):
        writer = buffer.writer("w")
        for seed in range(4):
            writer.push(rlbuffer.testing.make_group(seed=seed))
        reader = buffer.reader(timeout_seconds=20)
        steps = reader.steps()
        digests = [next(steps).digest for _ in range(3)]
        again = reader.steps(start=2)
        assert [next(again).digest for _ in range(2)] == digests[1:]


def test_a_trainer_may_announce_its_first_weights_before_it_reads(url: str) -> None:
    with rlbuffer.connect(url) as buffer:
        reader = buffer.reader()
        assert buffer.policy.announce(0, location="/weights/0", size=3, checksum="abc")
        assert reader.attempt == buffer.store.trainer().number
        assert buffer.policy.current() == rlbuffer.PolicyVersion(
            version=0, location="/weights/0", size=3, checksum="abc"
        )
        assert not buffer.policy.announce(0, location="/other", size=3, checksum="abc")


def test_a_version_is_announced_by_a_trainer_and_waited_for_by_anybody(url: str) -> None:
    with rlbuffer.connect(url) as buffer:
        with pytest.raises(RlbufferError, match=r"reader\.start"):
            buffer.policy.announce(0, location="", size=0, checksum="")
        with pytest.raises(BatchTimeout, match=r"version 3 .* -1"):
            buffer.policy.wait(3, timeout_seconds=0.0)


@pytest.mark.parametrize(
    ("config", "setting", "value"),
    [
        (rlbuffer.BatcherConfig(77), "row_tokens", 77),
        ({"batcher": {"row_tokens": 77, "max_age": 3}}, "max_age", 3),
        ({"batcher": {"max_age": 2}}, "max_age", 2),
        ({"batcher": {"max_age": 2}}, "row_tokens", 8192),
        (None, "row_tokens", 8192),
    ],
)
def test_connect_takes_settings_as_a_record_or_a_mapping(url: str, config: object, setting: str, value: int) -> None:
    with rlbuffer.connect(url, config=config) as buffer:  # type: ignore[arg-type]
        assert getattr(buffer.settings.batcher, setting) == value


def test_a_wrong_mapping_is_a_config_error(url: str) -> None:
    with pytest.raises(rlbuffer.errors.ConfigError, match=r"^trainer\.stepz "):
        rlbuffer.connect(url, config={"trainer": {"stepz": 3}})
    with pytest.raises(rlbuffer.errors.ConfigError, match=r"^batcher\.max_age = -1"):
        rlbuffer.connect(url, config={"batcher": {"row_tokens": 64, "max_age": -1}})


def test_a_ticket_and_its_rollouts_are_the_group_that_has_its_names(url: str) -> None:
    rng, ticket = np.random.default_rng(0), rlbuffer.Ticket(env="a", number=7, group_id="a.7")
    rollouts = [completion(rng, 0) for _ in range(2)]
    with rlbuffer.connect(url) as buffer:
        writer = buffer.writer("w-3")
        writer.push(ticket, rollouts)
        writer.push(replace(ticket, group_id="a.8"), iter(rollouts), prompt_id="2 + 2", planned_size=3, answer="4")
        plain, named = (buffer.group(name) for name in ("a.7", "a.8"))
        assert (plain.view.prompt_id, plain.view.env, plain.view.state) == ("7", "a", "ready")
        assert (plain.view.worker, len(plain.members)) == ("w-3", 2)
        assert (named.view.prompt_id, named.view.state, named.answer) == ("2 + 2", "forming", "4")


def test_what_is_no_group_or_no_env_is_refused_at_the_writer(url: str) -> None:
    with rlbuffer.connect(url) as buffer:
        writer = buffer.writer("w")
        rollouts, ticket = rlbuffer.testing.make_group().rollouts, rlbuffer.Ticket(env="a", number=0, group_id="a.0")
        with pytest.raises(InvalidRollout, match=r"^push: expected a Group, got a value of type Rollout$"):
            writer.push(rollouts[0])  # type: ignore[arg-type]
        with pytest.raises(InvalidRollout, match=r"^push: ticket a\.0 comes without rollouts"):
            writer.push(ticket)  # type: ignore[call-overload]
        with pytest.raises(InvalidRollout, match=r"^push: rollouts and fields go with a Ticket, got a value of type"):
            writer.push(rlbuffer.testing.make_group(), rollouts)  # type: ignore[call-overload]
        with pytest.raises(InvalidRollout, match=r"^push: 'answers' is no field of a Group: prompt_id, "):
            writer.push(ticket, rollouts, answers="42")
        with pytest.raises(ValueError, match=r"^take: env: expected the name of an env, .*, got 'a b'$"):
            writer.take("a b")
        with pytest.raises(ValueError, match=r"^take: n: expected an integer from 1 on, got 0$"):
            writer.take("a", 0)
        assert buffer.ledger().envs == {}


@pytest.mark.parametrize(
    "arguments",
    [
        {"columns": "ref_logprobs"},
        {"columns": ["ref_logprobs", 3]},
        {"columns": None},
        {"timeout_seconds": float("nan")},
        {"timeout_seconds": -1},
        {"timeout_seconds": "30"},
        {"pad_to_multiple_of": 0},
        {"pad_token_id": None},
        {"world_size": 4 / 2},
        {"world_size": 0},
        {"rank": True, "world_size": 2},
        {"rank": -1},
    ],
)
def test_an_argument_of_a_reader_that_cannot_be_meant_is_refused(url: str, arguments: dict[str, Any]) -> None:
    with rlbuffer.connect(url) as buffer:
        with pytest.raises(ValueError, match=f"^reader: {next(iter(arguments))}: "):
            buffer.reader(**arguments)
        with pytest.raises(rlbuffer.RlbufferError, match="no reader"):
            buffer.policy.publish(made(LLAMA), 0)


def test_a_reader_takes_numbers_of_numpy_and_waits_without_end_where_told(url: str) -> None:
    with rlbuffer.connect(url) as buffer:
        with pytest.raises(ValueError, match="rank 2 "):
            buffer.reader(2, 2)
        reader = buffer.reader(np.int64(1), np.int32(2), timeout_seconds=float("inf"), columns=["ref_logprobs"])
        assert (reader.rank, type(reader.rank), reader.world_size) == (1, int, 2)


def test_a_run_that_is_named_counts_before_that_of_the_config(url: str) -> None:
    for named, run in (({}, "math"), ({"run": "default"}, "default"), ({"run": "code"}, "code")):
        with rlbuffer.connect(url, config={"run": "math"}, **named) as buffer:
            assert buffer.run == run
