"""TRL's AsyncGRPO behind the buffer: real trainer, rollout process, packing and checkpoints; the engine samples from a
tiny model behind the HTTP side of vLLM."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from forked import Parent
from homes import Home, a_home
from trl_runs import TrlRun, check

import rlbuffer
from rlbuffer.config.settings import ServerSettings
from rlbuffer.doors import trl as door
from rlbuffer.errors import PayloadError, RlbufferError
from rlbuffer.store.operator import OperatorStore
from rlbuffer.store.session import open_store
from rlbuffer.testing import make_group

if TYPE_CHECKING or find_spec("trl"):
    import trl.experimental.async_grpo.async_rollout_worker as trl

STEPS = 3


@pytest.fixture
def home(parent: Parent) -> Iterator[Home]:
    with a_home(parent) as made:
        yield made


# -- runs --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "ranks", "forks"),
    [((), 1, False), (("token_budget=0", "per_device_train_batch_size=4"), 1, True), ((), 2, False)],
    ids=["token budget", "fixed count, several samples a rollout", "two ranks"],
)
def test_without_faults_it_trains_what_was_scored_in_its_order(
    home: Home, options: tuple[str, ...], ranks: int, forks: bool
) -> None:
    home.environment |= {"TRL_FORKS": "1"} if forks else {}
    run = TrlRun(home, options=options, ranks=ranks)
    assert [home.ended(process, 300) for process in run.train(STEPS)] == [0] * ranks, home.logs()
    history = run.history()
    assert history == run.scored()[: len(history)]
    assert len(run.lines("trained")) == STEPS
    check(run)


def test_without_faults_it_trains_what_trl_alone_trains_to_the_same_loss(home: Home) -> None:
    """One answer at a time, by an engine whose weights stay: nothing depends on what comes first."""
    home.environment |= {"TRL_KEEPS_WEIGHTS": "1"}
    options = ("token_budget=0", "per_device_train_batch_size=4", "max_inflight_tasks=1", "max_staleness=1000")
    seen: dict[str, tuple[list[object], list[dict[str, float]]]] = {}
    for mode in ("stock", "door"):
        run = TrlRun(home, mode=mode, options=options)
        (trainer,) = run.train(STEPS)
        assert home.ended(trainer, 300) == 0, home.logs()
        contents = [line["contents"] for line in run.lines("trained") if line["pid"] == trainer.pid]
        seen[mode] = contents, run.lines("finished")[-1]["log"]
        shutil.rmtree(home.path / "out")
    (stock, losses), (behind, its) = seen["stock"], seen["door"]
    assert behind == stock
    assert len(its) == len(losses) >= STEPS
    for one, other in zip(its, losses, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


def test_a_killed_trainer_and_a_killed_rollout_process_lose_and_repeat_nothing(home: Home) -> None:
    run = TrlRun(home)
    (first,) = run.train(9)
    home.wait_until(lambda: run.step >= 4, seconds=300, why="step 4")
    first.kill()
    first.wait()
    run.serving.kill()
    run.serving.wait()
    run.serve()
    (again,) = run.train(9)
    home.wait_until(lambda: run.step >= 5, seconds=300, why="step 5 of the second process")
    os.kill(run.child(), signal.SIGKILL)
    assert home.ended(again, 400) == 0, home.logs()
    assert run.lines("started")[-1]["resume"] == "checkpoint-3"
    assert run.trained_again()
    check(run)


def test_two_hosts_sample_for_one_trainer(home: Home) -> None:
    home.environment |= {"TRL_PUBLISHES": "1"}
    run = TrlRun(home)
    host = run.python("trl_host.py", run.port, run.url, "trl", log="host")
    (trainer,) = run.train(2)
    home.wait_until(lambda: len({line["pid"] for line in run.lines("scored")}) == 2, seconds=300, why="both hosts")
    assert home.ended(trainer, 300) == 0, home.logs()
    host.kill()
    loaded = [line["version"] for line in run.lines("loaded")]
    assert loaded == sorted(set(loaded))
    groups = [line["group"] for line in run.lines("scored")]
    assert len(set(groups)) == len(groups), "a prompt is sampled twice"
    check(run)


# -- the codec ---------------------------------------------------------------------------------------------------------
def sample(*, length: int, reward: float, advantage: float) -> object:
    dice = np.random.default_rng(length)
    mask = (dice.random(length) < 0.5).astype(np.int64)
    mask[0], mask[-1] = 0, 1
    return trl.RolloutSample(
        prompt=[{"role": "user", "content": "é 1 + 1?"}],
        completion=[{"role": "assistant", "content": "2"}],
        input_ids=dice.integers(0, 150_000, length),
        completion_mask=mask,
        old_log_probs=np.where(mask == 1, -dice.random(length) * 9, 0).astype(np.float32),
        advantage=advantage,
        model_version=3,
        group_id=7,
        metrics={"reward": reward, "rewards/digits": reward, "reward_std": 0.1},
    )


@pytest.mark.parametrize("reward", [0.3333333333333333, 0.0, float("nan")])
def test_samples_come_back_as_they_were(reward: float) -> None:
    conversations = [
        [sample(length=5, reward=reward, advantage=-0.1), sample(length=9, reward=reward, advantage=-0.1)],
        [sample(length=7, reward=reward, advantage=1 / 3)],
    ]
    rollouts = tuple(door.rollout_of(samples, 4) for samples in conversations)
    taken = SimpleNamespace(place=8, rollouts=rollouts)
    back = list(door.samples_of(taken))
    for made, given in zip(back, [its for samples in conversations for its in samples], strict=True):
        for name in ("input_ids", "completion_mask", "old_log_probs"):
            there, here = getattr(given, name), getattr(made, name)
            assert (there.dtype, there.tolist()) == (here.dtype, here.tolist())
        assert (made.prompt, made.completion, made.advantage) == (given.prompt, given.completion, given.advantage)
        assert repr(made.metrics) == repr(given.metrics)
        assert int(made.group_id) == 7
    assert all(np.isfinite(rollout.reward) for rollout in rollouts)


def test_a_rollout_of_another_producer_is_refused_in_a_sentence() -> None:
    taken = SimpleNamespace(place=1, rollouts=make_group(lengths=[9], rollout_ids=["a/0"]).rollouts)
    with pytest.raises(PayloadError, match=r"rollout a/0 was pushed by another producer than rlbuffer\.doors\.trl"):
        list(door.samples_of(taken))


# -- the rollout loop --------------------------------------------------------------------------------------------------
SLOTS = 4000
"""So many that some are free while tickets are taken one by one."""


class SmallLoop(trl._AsyncRolloutLoop if find_spec("trl") else object):  # type: ignore[misc]
    """TRL's generating loop, without an engine and rewards: an answer takes a moment."""

    def __init__(self, **given: object) -> None:
        self.__dict__ |= {
            "dataset": [{"prompt": [{"role": "user", "content": f"{number}?"}]} for number in range(10)],
            "num_generations": 2,
            "max_inflight_tasks": SLOTS,
            "rollout_buffer": given["rollout_buffer"],
            "model_version_value": None,
            "environment_factories": None,
            "_multi_environment": False,
            "_env_reward_types": [],
            "_standalone_tools": [],
            "_total_completion_tokens": 0,
            "_heartbeat_value": SimpleNamespace(value=0.0),
            "_model_version_value": SimpleNamespace(value=0),
            "_groups_to_score": asyncio.Queue(maxsize=16),
            "_loop": asyncio.new_event_loop(),
            "_stop_event": asyncio.Event(),
            "_push_metrics": lambda metrics: None,
            "tools": [],
        }

    async def _generate_one(self, prompt: object, **others: object) -> object:
        await asyncio.sleep(0.05)
        return prompt, [1], [None], 0, 0, None

    async def _score_group(self, group: object) -> list[object]:
        return [sample(length=5 + number, reward=1.0, advantage=0.1) for number in range(2)]


def test_answers_under_way_go_on_while_no_ticket_is_to_be_had(home: Home) -> None:
    file = home.path / "trl.toml"
    file.write_text('run = "slow"\n\n[batcher]\nfeeds = "stream"\n')
    home.start("serve", "--config", file, "--display", "plain", log="serve")
    with home.connect("slow") as buffer, buffer.stream(timeout_seconds=60.0) as stream:
        stream.resume()
        stream.version(0)
        loop = door.extended_loop(SmallLoop, lambda: home.connect("slow"), "slow")

        def turn() -> None:
            with suppress(asyncio.CancelledError):
                loop._loop.run_until_complete(loop._run())
            loop._loop.run_until_complete(loop._loop.shutdown_default_executor())
            loop._loop.close()

        async def run() -> None:
            await asyncio.gather(loop._generate_loop(loop._stop_event), score())

        async def score() -> None:
            while (group := await loop._groups_to_score.get()) is not None:
                await loop._score_group(group)

        loop._run = run
        thread = threading.Thread(target=turn)
        thread.start()
        operator = open_store(OperatorStore, home.url, run="slow", home=home.path, server=ServerSettings())
        home.wait_until(lambda: loop._out, seconds=30, why="a ticket")
        operator.pause("slow")
        begun = set(loop._out) | {int(its.split(".")[1]) for its in _pushed(buffer)}
        assert len(begun) < SLOTS // 2, "no slot was free any more"
        home.wait_until(lambda: len(_pushed(buffer)) >= len(begun), seconds=30, why="what was begun is pushed")
        operator.resume("slow")
        operator.close()
        for taken in islice(stream, len(begun) + 5):  # it goes on
            stream.trained(taken)
        loop._loop.call_soon_threadsafe(loop._stop_event.set)
        home.wait_until(lambda: not thread.is_alive(), seconds=120, why="the end, behind what was begun")
        home.wait_until(lambda: not _threads_of_the_door(), seconds=10, why="the end of the door's threads")
        loop._buffer.close()


def _threads_of_the_door() -> set[str]:
    return {thread.name for thread in threading.enumerate()} & {"rlbuffer-tickets", "rlbuffer-asks"}


def _pushed(buffer: rlbuffer.Buffer) -> set[str]:
    return {view.group_id for view in buffer.groups(limit=10_000)}


# -- what it refuses ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("need", door.NEEDED, ids=lambda need: need.name)
def test_a_name_that_trl_lacks_is_said(need: door.Needed, monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"AsyncRolloutWorker": trl.AsyncRolloutWorker, "_AsyncRolloutLoop": trl._AsyncRolloutLoop}
    names = [its.name for its in door.NEEDED if its.owner == "AsyncGRPOTrainer" and its != need]
    trainer = SimpleNamespace(**dict.fromkeys(names))
    if need.owner in owners and need.name != "_process":
        monkeypatch.delattr(owners[need.owner], need.name)
    elif need.name == "_process":
        trainer.rollout_worker = object.__new__(trl.AsyncRolloutWorker)
    with pytest.raises(RlbufferError, match=rf"{need.owner}\.{need.name} .*TRL {metadata.version('trl')}"):
        door.check(trainer)


@pytest.mark.parametrize(("version", "is_known"), [("1.15.9", False), ("1.16.3", True), ("1.17.0", False)])
def test_versions_that_it_does_not_know_are_refused(
    version: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: version)
    trainer = SimpleNamespace(rollout_worker=None, rollout_queue=None, _trained_groups=set())
    if is_known:
        door.check(trainer)
        return
    with pytest.raises(RlbufferError, match=rf"TRL >=1\.16,<1\.17, and this is {version}"):
        door.check(trainer)


def test_a_worker_of_another_kind_is_refused() -> None:
    trainer = SimpleNamespace(rollout_worker=object(), rollout_queue=None, _trained_groups=set())
    with pytest.raises(RlbufferError, match="AsyncRolloutWorker, and this trainer has a object"):
        door.check(trainer)
