"""A server of 16 MB that fills up: checkpoints are asked for, trained steps retire, pushes wait, nothing fails."""

from __future__ import annotations

import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import waits
from daemon_runs import Served
from store_runs import Run

import rlbuffer
from rlbuffer.client.writer import Writer
from rlbuffer.config.settings import ServerSettings
from rlbuffer.daemon.memory_rules import stored_bytes
from rlbuffer.errors import RlbufferError, ServerFull, ServerRefused, StepRetired
from rlbuffer.records.group import Group
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Trouble
from rlbuffer.store.producer import WEEK_MS
from rlbuffer.store.server import embedded
from rlbuffer.testing import make_group

pytestmark = pytest.mark.server
pytest_plugins = ("store_fixtures",)

CONFIG = rlbuffer.BatcherConfig(64, step_groups=2, max_age=100, order="oldest_first")
SECONDS = 60.0


@pytest.fixture
def run(server_binary: object) -> Iterator[Run]:
    """A run on a small server of its own."""
    home = Path(tempfile.mkdtemp(prefix="rlb-"))
    running = embedded.ensure(home, ServerSettings(appendfsync="no", maxmemory="16mb"))
    made = Run(running.address, home)
    yield made
    made.close()
    running.release()
    shutil.rmtree(home, ignore_errors=True)


def heavy(number: int) -> Group:
    """A group of 256 KiB."""
    column = {"x": np.zeros((8, 4096), np.float32)}
    return make_group(env="a", lengths=[8, 8], columns=[column] * 2, group_id=f"a.{number}")


class Trainer:
    """Trains whatever comes; what it does about checkpoints is up to the test."""

    def __init__(self, run: Run, *, resume_step: int = 0) -> None:
        self.store = run.again()
        self.attempt = self.store.attempt(uuid=uuid.uuid4().hex, world_size=1, resume_step=resume_step)
        self.store.announce(self.attempt.number, PolicyVersion(version=resume_step))
        self.checkpoints: list[int] = []
        self.asked: list[int] = []

    def train(self, step: int, *, obeys: bool = False) -> None:
        header = self.store.wait_step(step, block_seconds=SECONDS)
        assert header is not None, waits.said(self.store)
        if header.checkpoint_now:
            self.asked.append(step)
            self.checkpoints += [step] if obeys else []
        self.report(step, digest=header.digest, oldest_kept=self.checkpoints[-2] if len(self.checkpoints) > 1 else 0)

    def report(self, step: int, *, digest: str = "", oldest_kept: int = 0) -> None:
        self.store.report(
            self.attempt.number,
            epoch=self.attempt.epoch,
            trained=step,
            digest=digest,
            oldest_kept=oldest_kept,
            checkpoint=max(self.checkpoints, default=0),
        )

    def close(self) -> None:
        self.store.close()


@pytest.fixture
def trainer(run: Run) -> Iterator[Trainer]:
    made = Trainer(run)
    yield made
    made.close()


def heavy_step(run: Run, trainer: Trainer, step: int, *, obeys: bool = False) -> None:
    """Pushes what the step needs, and trains it."""
    Writer(run.store, "w", epoch=run.meta.epoch).push_many([heavy(2 * step), heavy(2 * step + 1)])
    trainer.train(step, obeys=obeys)


def share(run: Run) -> float:
    facts = run.store.server()
    return (facts["used_memory"] - facts["buffers"]) / facts["maxmemory"]


def retirements_told(served: Served) -> bool:
    """Steps have retired early, and the newest of them was reported."""
    early, meta = served.said("memory", state="retired early"), served.run.store.meta()
    return bool(early) and meta.retired == meta.early == early[-1]["last"]


def test_a_run_without_any_checkpoint_goes_on_because_trained_steps_retire_early(
    served: Served, trainer: Trainer
) -> None:
    run = served.run
    served.serve(CONFIG)
    for step in range(1, 61):
        heavy_step(run, trainer, step)
    served.wait_for(lambda: share(run) < 0.85 and retirements_told(served))
    served.stop()
    early = served.said("memory", state="retired early")
    meta = run.store.meta()
    assert run.store.server()["maxmemory"] > early[-1]["used"] >= 0.75 * run.store.server()["maxmemory"]
    served.wait_for(lambda: trainer.asked == [e["step"] for e in served.said("memory", state="checkpoint")])
    assert next(r for r in run.store.history() if r["event"] == "retired early")["step"] == meta.early
    assert [h.step for h in run.store.headers()] == list(range(meta.retired + 1, 61))
    assert run.store.verify().findings == ()
    assert run.store.ledger().total().trained[0] == 240
    with pytest.raises(StepRetired, match=f"resume from a checkpoint of step {meta.retired} or later"):
        Trainer(run)
    with pytest.raises(StepRetired, match=f"steps up to {meta.retired} are gone"):
        run.store.wait_step(1, block_seconds=0)
    Trainer(run, resume_step=meta.retired).close()


def test_a_trainer_that_writes_what_it_is_asked_for_can_always_start_again(
    served: Served, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = served.run
    leader = served.serve(CONFIG)
    looks: list[int] = []

    def look() -> dict[str, Any]:
        facts: dict[str, Any] = leader.connection.describe()
        if not facts["unfreed"]:  # else the leader waits for what the server is still giving back
            looks.append(0)
        return facts

    monkeypatch.setattr(leader, "server", look)
    for step in range(1, 61):
        heavy_step(run, trainer, step, obeys=True)
        if share(run) > 0.6:  # a real step takes longer than this one: the leader has seen what it needs
            before = len(looks)
            served.wait_for(lambda before=before: len(looks) > before + 2, SECONDS)
    # Steps of 3 % each: two checkpoints may come too late for the oldest steps, but not the first of the two.
    assert [e for e in served.said("memory", state="retired early") if e["last"] > e["checkpoint"]] == []
    assert 2 <= len(trainer.checkpoints) <= 20
    assert trainer.checkpoints[-2] <= run.store.meta().retired <= trainer.checkpoints[-1]
    assert run.store.verify().findings == ()


def test_producers_without_tickets_fill_the_server_and_wait_until_everything_is_trained(
    served: Served, trainer: Trainer
) -> None:
    run = served.run
    served.serve(CONFIG)
    said: list[RlbufferError] = []
    writer = Writer(run.store, "w", epoch=run.meta.epoch, on_retry=said.append)

    def produce() -> None:
        for number in range(120):
            writer.push(heavy(number))

    producer = threading.Thread(target=produce)
    producer.start()
    served.wait_for(lambda: said, SECONDS)
    for step in range(1, 61):
        trainer.train(step)
    producer.join()
    assert {type(error) for error in said} == {ServerFull}
    assert run.store.ledger().total().trained[0] == 240
    assert run.pool() == []
    assert run.store.verify().findings == ()


def test_while_no_trainer_is_at_work_or_one_trains_again_nothing_that_it_needs_retires(
    served: Served, trainer: Trainer
) -> None:
    run = served.run
    served.serve(CONFIG)
    for step in range(1, 11):
        heavy_step(run, trainer, step)
    run.client.hset(run.store.keys.trainer, "seen", 1)
    run.client.config_set("maxmemory", run.store.server()["used_memory"])
    served.wait_for(lambda: waits.problem(run.store, Trouble.MEMORY), SECONDS)
    assert run.store.meta().retired == 0
    again = Trainer(run)
    again.report(4)
    served.wait_for(lambda: run.store.meta().retired == 4, SECONDS)
    assert (run.store.trainer().at, run.store.trainer().trained) == (4, 10)
    again.close()


def test_what_a_leader_left_to_sweep_is_swept_by_the_next(served: Served, trainer: Trainer) -> None:
    run = served.run
    run.lead()
    for step in range(1, 4):
        run.step(f"a.{step}")
        trainer.train(step)
    run.client.delete(run.store.keys.state)
    keys = run.store.keys
    all_keys = (keys.lease, keys.meta, keys.steps, keys.trainer, keys.history)
    run.store.move("retire", all_keys, (run.token, 2, "", 99))
    assert len(run.payload_keys()) == 3
    run.store.release_lease()
    served.serve(CONFIG)
    served.wait_for(lambda: len(run.payload_keys()) == 1)


# -- strays ------------------------------------------------------------------------------------------------------------
MIB = 2**20


def store_stray(run: Run, kind: str, number: int) -> str:
    """Stores 1 MiB that nobody announces. -> its key."""
    keys = run.store.keys
    if kind == "of a dead writer":
        key = keys.unnamed_payload(f"a.{1000 + number}", "dead.1")
        run.client.hset(key, "0", b"x" * MIB)
        run.client.pexpire(key, WEEK_MS)
    elif kind == "under a name":
        key = keys.payload(f"a.{1000 + number}", f"x.{number}")
        run.client.hset(key, "0", b"x" * MIB)
    elif kind == "under no name of rlbuffer":
        key = f"{keys.payload_prefix}{{evil{number}}}"
        run.client.hset(key, "0", b"x" * MIB)
    else:
        key = f"{keys.payload_prefix}{{evil{number}}}"
        run.client.set(key, b"x" * MIB)
    return key


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strays have less time to live, and the next sweep comes sooner."""
    monkeypatch.setattr("rlbuffer.daemon.strays.LIFE_SECONDS", 0.5)
    monkeypatch.setattr("rlbuffer.daemon.strays.REST_SECONDS", 0.2)


STRAYS = ("of a dead writer", "under a name", "under no name of rlbuffer", "no hash")


@pytest.mark.parametrize("kind", STRAYS)
def test_payloads_that_nobody_announced_go_before_a_trained_step_does(
    served: Served, trainer: Trainer, quick: None, kind: str
) -> None:
    run = served.run
    served.serve(CONFIG)
    for step in range(1, 6):
        heavy_step(run, trainer, step)
    strays = [store_stray(run, kind, number) for number in range(10)]
    assert share(run) > 0.85

    def trained_on() -> bool:
        trainer.report(5)  # it is at work: steps may retire
        return not run.client.exists(*strays)

    served.wait_for(trained_on, SECONDS)
    (said,) = served.wait_for(lambda: served.said("memory", state="swept"))
    assert said["payloads"] == 10
    for step in range(6, 9):
        heavy_step(run, trainer, step)
    served.stop()
    assert run.store.meta().early == 0
    assert [header.step for header in run.store.headers()] == [*range(1, 9)]
    assert len(run.payload_keys()) == 16
    assert run.store.verify().findings == ()


def test_while_memory_is_not_short_payloads_of_nobody_stay(served: Served, trainer: Trainer, quick: None) -> None:
    run = served.run
    served.serve(CONFIG)
    strays = [store_stray(run, kind, number) for number, kind in enumerate(STRAYS)]
    for step in range(1, 6):
        heavy_step(run, trainer, step)
    assert 0.3 < share(run) < 0.85
    lives = [run.client.pttl(key) for key in strays]
    assert lives[0] > WEEK_MS - 600_000
    assert lives[1:] == [-1] * 3


def test_without_a_trainer_strays_go_all_the_same_and_again(served: Served, quick: None) -> None:
    run = served.run
    served.serve(CONFIG)
    for _ in range(2):
        strays = [store_stray(run, STRAYS[number % len(STRAYS)], number) for number in range(13)]
        assert share(run) > 0.85
        served.wait_for(lambda strays=strays: not run.client.exists(*strays), SECONDS)


def test_where_strays_were_not_enough_trained_steps_retire(served: Served, trainer: Trainer, quick: None) -> None:
    run = served.run
    served.serve(CONFIG)
    for step in range(1, 24):
        heavy_step(run, trainer, step)
    stray = store_stray(run, "of a dead writer", 0)
    run.client.config_set("maxmemory", run.store.server()["used_memory"] - MIB)

    def retired() -> bool:
        trainer.report(23)
        return run.store.meta().early > 0

    served.wait_for(retired, SECONDS)
    assert not run.client.exists(stray)
    assert run.store.verify().findings == ()


def test_a_push_whose_payload_was_taken_for_a_stray_is_stored_once(
    served: Served, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = served.run
    served.serve(CONFIG)
    said: list[RlbufferError] = []
    writer = Writer(run.store, "w", epoch=run.meta.epoch, on_retry=said.append)
    send, slow = run.store._send, threading.Event()

    def wait_behind_the_payload(source: Any, batch: Any, replies: list[Any]) -> None:
        if not slow.is_set():
            slow.set()
            run.store._store_payloads(batch)
            run.client.config_set("maxmemory", run.store.server()["used_memory"])
            served.wait_for(lambda: not run.client.exists(batch[0].key), SECONDS)
            run.client.config_set("maxmemory", "16mb")
            monkeypatch.setattr(
                "rlbuffer.store.producer._add_payload", lambda pipe, push, **how: (pipe.ping(), ("ping",))[1]
            )
            monkeypatch.setattr(
                "rlbuffer.store.producer._fault", lambda push, commands, answers: (next(answers), None)[1]
            )
        send(source, batch, replies)
        monkeypatch.undo()

    monkeypatch.setattr(run.store, "_send", wait_behind_the_payload)
    assert writer.push(heavy(1)).status == "stored"
    assert [type(error) for error in said] == [ServerRefused]
    assert len(run.pool()) == len(run.payload_keys()) == 1
    assert run.store.verify().findings == ()


def test_a_step_takes_what_the_forecast_says(served: Served, trainer: Trainer) -> None:
    run = served.run
    run.client.config_set("maxmemory", "256mb")
    run.lead()

    def make(first: int, last: int) -> None:
        for step in range(first, last + 1):
            for part in "xy":
                run.push(f"a.{step}{part}", lengths=[512] * 8, version=step - 1)
            run.commit(world_size=2)
            trainer.train(step)

    make(1, 2)  # the server keeps the scripts, too
    before = run.store.server()["used_memory"]
    make(3, 32)
    said = sum(stored_bytes(payload_bytes=h.bytes, sequences=h.sequences) for h in run.store.headers(first=3))
    assert run.store.server()["used_memory"] - before == pytest.approx(said, rel=0.15)
