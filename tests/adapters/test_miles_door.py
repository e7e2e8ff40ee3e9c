"""miles' data buffer behind a run: its own samples, filters and bounds; the loops have the shape of its training."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from door_loops import Loops
from homes import Home, a_home

from rlbuffer.doors import miles as door
from rlbuffer.errors import InvalidRollout, PayloadError, RlbufferError
from rlbuffer.testing import make_group

if TYPE_CHECKING or find_spec("miles"):
    from miles.rollout import fully_async_data_buffer as theirs
    from miles.utils.types import Sample
    from miles_loop import BATCH, SIZE, digest, made

RUN = "miles"
KILLS = int(os.environ.get("RLBUFFER_MILES_KILLS", "20"))
SETTINGS = '[server]\nappendfsync = "no"\n\n[batcher]\nfeeds = "stream"\nmax_age = 1000\n'


def loops_of(home: Home, settings: str = SETTINGS) -> Loops:
    return Loops(home, RUN, "miles_loop.py", settings)


@pytest.fixture
def home() -> Iterator[Home]:
    with a_home() as opened:
        yield opened


def buffer_of(loops: Loops, monkeypatch: pytest.MonkeyPatch, **others: Any) -> tuple[Any, list[Any]]:
    """A buffer of the door, and what its handler of unused groups got."""
    monkeypatch.setenv("RLBUFFER_RUN", RUN)
    monkeypatch.setenv("RLBUFFER_REDIS_URL", loops.url)
    values: dict[str, Any] = {
        "rollout_batch_size": 1,
        "num_rollout": 100,
        "num_epoch": None,
        "save_interval": None,
        "save_trigger_sentinel": None,
        "reward_key": None,
        "max_weight_staleness": None,
        "async_data_buffer_capacity_factor": 1000.0,
        "dynamic_sampling_filter_path": None,
    }
    unused: list[Any] = []
    given = theirs.DataBufferConstructorInput(Namespace(**values | others), unused.append)
    return door.DataBuffer(given), unused


class Source:
    """miles' data source, as its rollout manager calls it."""

    dataset: Any = None

    def save(self, rollout_id: int) -> None:
        """Nothing of it is kept."""

    def close(self) -> None:
        """Nothing is to do."""


async def put(buffer: Any, group: list[Any]) -> None:
    await buffer.put(theirs.DataBufferInput(prompt_group=group, group=group))


def test_killed_processes_lose_and_repeat_no_group(home: Home) -> None:
    """Each train call that is made again has the groups that it had, bit for bit."""
    loops, dice = loops_of(home), random.Random(7)
    for _ in range(KILLS):
        pid = loops.start("10000")
        home.wait_until(lambda pid=pid: loops.lines_of(pid, "trained"), seconds=60, why="a train call")
        time.sleep(dice.uniform(0.0, 0.3))
        os.kill(pid, signal.SIGKILL)
    done = max(line["call"] for line in loops.lines("trained"))
    last = loops.start(f"{done + 5}")
    home.wait_until(lambda: loops.lines_of(last, "ended"), seconds=60, why="the end")
    loops.close()
    calls: dict[int, list[list[str]]] = {}
    for line in loops.lines("trained"):
        calls.setdefault(line["call"], []).append(line["digests"])
    assert sorted(calls) == list(range(done + 5))
    assert all(again == first for first, *others in calls.values() for again in others)
    trained = [its for call in sorted(calls) for its in calls[call][-1]]
    sampled, pushed = ({line["digest"] for line in loops.lines(kind)} for kind in ("sampled", "pushed"))
    assert len(set(trained)) == len(trained) == BATCH * (done + 5)
    assert set(trained) <= sampled, "a group is another one than was pushed"
    with home.connect(RUN) as buffer:
        report, account = buffer.verify(), buffer.ledger().envs["miles"]
        groups, run_has_ended = buffer.groups(limit=10_000), buffer.store.trainer().is_finished
    assert report.ok, report.findings
    assert account.dropped == {}
    assert account.trained[0] == SIZE * len(trained), "the account is what the calls have trained, the last ones too"
    assert run_has_ended
    waiting = Counter(str(view.state) for view in groups)
    assert len(pushed - set(trained)) <= sum(waiting.values()), "a pushed group is nowhere"


def test_every_attribute_of_a_sample_comes_back_bit_for_bit() -> None:
    for prompt in range(12):
        for item in made(prompt, 3):
            assert digest([door.item_of(door.rollout_of(item, None, 3))]) == digest([item])


def test_a_sample_without_tokens_or_with_an_own_reward_is_one_too() -> None:
    empty = Sample(index=1, response="ok", response_length=1, reward={"score": float("nan")})
    back = door.item_of(door.rollout_of(empty, "score", 0))
    assert (back.tokens, back.response_length, list(back.reward)) == ([], 1, ["score"])
    other = Sample(index=1, tokens=[1, 2], response_length=1, reward={"score": 0.5})
    assert door.rollout_of(other, "score", 0).reward == 0.5


def test_a_group_of_which_no_token_is_trained_reaches_the_train_call(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, _ = buffer_of(loops_of(home), monkeypatch)
    group = [Sample(group_index=1, index=i, tokens=[1, 2, 3], response_length=2, loss_mask=[0, 0]) for i in range(2)]

    async def run() -> None:
        await buffer.begins(0, Source())
        await put(buffer, group)
        assert digest((await buffer.get(current_version=1)).group) == digest(group)

    try:
        asyncio.run(run())
    finally:
        buffer.close()


def test_what_cannot_be_kept_is_refused_by_its_path() -> None:
    sample = Sample(group_index=4, index=9, tokens=[1, 2], response_length=1, metadata={"images": [object()]})
    with pytest.raises(InvalidRollout, match=r"sample 9 of group 4\['sample'\]\['metadata'\]\['images'\]\[0\]: a obj"):
        door.rollout_of(sample, None, 0)


def test_filters_and_bounds_are_miles_own(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, unused = buffer_of(loops_of(home), monkeypatch, async_data_buffer_capacity_factor=2.0)

    async def run() -> None:
        await buffer.begins(0, Source())
        aborted = made(0, 1)
        theirs.first_sample(aborted).status = Sample.Status.ABORTED
        await put(buffer, aborted)
        assert unused == [aborted]
        groups = [made(prompt, 1) for prompt in range(1, 4)]
        for group in groups[:2]:
            await put(buffer, group)
        blocked = asyncio.create_task(put(buffer, groups[2]))
        await asyncio.sleep(0.2)
        assert not blocked.done()
        assert buffer.get_metrics()["rollout/fully_async/queue_size"] == 2
        got = [(await buffer.get(current_version=1, some_future_key=2)).group]
        await blocked
        got += [(await buffer.get(current_version=version)).group for version in (1, 2)]
        assert list(map(digest, got)) == list(map(digest, groups))
        metrics = buffer.get_metrics()
        assert metrics["rollout/fully_async/max_staleness"] == 1
        assert metrics["rollout/fully_async/queue_size"] == 0
        waits = asyncio.create_task(buffer.get(current_version=2))
        await asyncio.sleep(0.1)
        waits.cancel()  # miles gives up a wait, and asks again
        last = made(9, 2)
        await put(buffer, last)
        assert digest((await buffer.get(current_version=2)).group) == digest(last)

    try:
        asyncio.run(run())
    finally:
        buffer.close()


def test_a_group_that_grew_too_old_goes_to_the_handler(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS.replace("max_age = 1000", "max_age = 1\nlookahead = 1")
    buffer, unused = buffer_of(loops_of(home, settings), monkeypatch)

    async def run() -> None:
        await buffer.begins(0, Source())
        groups = [made(prompt, version) for prompt, version in enumerate((1, 1, 1, 1, 9))]
        for version in (1, 2, 9):  # the run counts three of miles' versions
            await asyncio.to_thread(buffer.run.version, version)
        for group in groups:
            await put(buffer, group)
        assert digest((await buffer.get(current_version=9)).group) == digest(groups[-1])
        while len(unused) < 4:  # a wait that gives up, and notices meanwhile
            with suppress(TimeoutError):
                await asyncio.wait_for(buffer.get(current_version=9), 0.3)
        assert sorted(map(digest, unused)) == sorted(map(digest, groups[:-1]))
        assert buffer.get_metrics()["rollout/fully_async/stale_groups_filtered"] == 4

    try:
        asyncio.run(run())
    finally:
        buffer.close()


@pytest.mark.parametrize(
    ("calls", "trained", "has_ended"), [(3, 3, True), (9, 2, False)], ids=["the last call", "an exit for debugging"]
)
def test_a_training_that_ends_says_what_it_has_trained(
    home: Home, monkeypatch: pytest.MonkeyPatch, calls: int, trained: int, has_ended: bool
) -> None:
    """Three calls have begun. An exit for debugging leaves the one that was asked for ahead."""
    buffer, _ = buffer_of(loops_of(home), monkeypatch, num_rollout=None, num_epoch=calls)
    source = Source()
    source.dataset = [None]

    async def run() -> None:
        for call in range(3):
            await buffer.begins(call, source)
            await put(buffer, made(call, 1))
            await buffer.get(current_version=1)

    asyncio.run(run())
    source.close()
    with home.connect(RUN) as seen:
        assert seen.store.trainer().trained == trained
        assert seen.store.trainer().is_finished == has_ended


def test_groups_behind_the_checkpoint_before_the_newest_one_are_kept(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, _ = buffer_of(loops_of(home), monkeypatch, save_interval=1)
    source = Source()

    async def run() -> None:
        for call in range(4):
            await buffer.begins(call, source)
            await put(buffer, made(call, 1))
            await buffer.get(current_version=1)
            if call:
                source.save(call - 1)

    try:
        asyncio.run(run())
        with home.connect(RUN) as seen:
            trainer = seen.store.trainer()
        assert (trainer.trained, trainer.checkpoint, trainer.oldest_kept) == (3, 3, 2)
    finally:
        buffer.close()


def test_a_group_of_another_producer_is_refused_in_a_sentence(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, _ = buffer_of(loops_of(home), monkeypatch)

    async def run() -> None:
        await buffer.begins(0, Source())
        with home.connect(RUN) as other:
            other.writer("other").push(make_group(columns=[{"support": np.ones((9, 1), np.int32)}], lengths=[9]))
        await buffer.get(current_version=1)

    try:
        with pytest.raises(PayloadError, match="pushed, with the tokens that restricted sampling left, by"):
            asyncio.run(run())
    finally:
        buffer.close()


def test_what_the_door_needs_is_checked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(theirs, "iter_samples")
    with pytest.raises(
        RlbufferError, match=r"needs miles\.rollout\.fully_async_data_buffer\.iter_samples, and this miles"
    ):
        door.check()


def test_a_second_judge_of_staleness_is_refused(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RlbufferError, match="--max-weight-staleness is 3, and rlbuffer judges"):
        buffer_of(loops_of(home), monkeypatch, max_weight_staleness=3)
