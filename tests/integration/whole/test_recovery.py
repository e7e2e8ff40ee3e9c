"""A server that comes back without its newest writes: the run goes on after the trainer's step."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import waits
from every_role import EveryRole
from rolled_back import CONFIG, Loop, Saved
from store_runs import Run

import rlbuffer
import rlbuffer.errors
from rlbuffer.client.reader import Reader
from rlbuffer.client.writer import Writer
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Wait
from rlbuffer.store.records import Claim
from rlbuffer.store.viewer import Viewer
from rlbuffer.testing import make_group

pytest_plugins = ("store_fixtures",)


def train_to(reader: Reader, steps: Iterator[Any], last: int) -> list[Any]:
    done = []
    while not done or done[-1].number < last:
        step = next(steps)
        reader.announce(PolicyVersion(version=step.number))
        reader.trained(step)
        done.append(step)
    return done


def ids_of(store: EveryRole, step: int) -> set[str]:
    return {member.info.rollout_id for part in store.read_parts(step) for member in part.rollouts}


def test_the_run_goes_on_after_the_trainers_step_in_a_new_epoch(run: Run) -> None:
    writer = Writer(run.again(), "w", epoch=run.meta.epoch)
    reader = Reader(run.again(), rank=0, world_size=1, timeout_seconds=20)
    reader.start(0)
    reader.announce(PolicyVersion(version=0))
    loop = Loop(run.again())
    made = (make_group(env="a", size=2, version=0, group_id=f"a.{i}", seed=i) for i in range(100))
    for _ in range(4):
        writer.push(next(made))
    steps = reader.steps()
    train_to(reader, steps, 2)
    for _ in range(6):
        writer.push(next(made))
    time.sleep(0.3)  # both are read, step 3 is packed at the most
    loop.close()
    saved = Saved(run)
    kept = run.store.meta().step
    loop = Loop(run.again())
    train_to(reader, steps, 5)
    trained = {step: ids_of(run.store, step) for step in range(1, 6)}
    pending = len(run.pool())
    loop.close()

    saved.put_back()
    loop = Loop(run.again())
    found = loop.wait_for("recovery")
    assert (found.step, found.forgotten, found.void, pending) == (5, 5 - kept, 0, 0)
    meta = run.store.meta()
    assert (meta.epoch, meta.since) == (run.meta.epoch + 1, run.meta.epoch)
    assert (meta.step, meta.retired) == (5, 5)
    deadline = time.monotonic() + 10
    while run.store.policy().version != 5:  # the trainer says it again
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # Pushes after the save are not known there any more: the writer sends it again, for nothing.
    for _ in range(2):
        writer.push(next(made))
    sixth = next(steps)
    assert (sixth.number, sixth.epoch, sixth.header.checkpoint_now) == (6, meta.epoch, True)
    assert ids_of(run.store, 6) & set().union(*trained.values()) == set()
    reader.trained(sixth)
    deadline = time.monotonic() + 10
    while run.store.meta().checkpoint_now or run.store.trainer().trained < 6:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    total = run.store.ledger().total()
    assert total.trained[0] == 24
    assert not loop.errors
    assert run.store.verify().findings == ()
    reader.close()
    loop.close()


def test_none_of_forty_small_steps_that_the_server_forgot_trains_again(run: Run) -> None:
    old_is_fine = dataclasses.replace(CONFIG, max_age=1000)
    writer = Writer(run.again(), "w", epoch=run.meta.epoch)
    reader = Reader(run.again(), rank=0, world_size=1, timeout_seconds=20)
    reader.start(0)
    reader.announce(PolicyVersion(version=0))
    made = (make_group(env="a", size=2, version=0, group_id=f"a.{i}", seed=i) for i in range(200))
    loop = Loop(run.again(), old_is_fine)
    steps = reader.steps()
    for _ in range(2):
        writer.push(next(made))
    train_to(reader, steps, 1)
    loop.close()
    saved = Saved(run)
    loop = Loop(run.again(), old_is_fine)
    pushed = [next(made) for _ in range(80)]
    for group in pushed:
        writer.push(group)
    train_to(reader, steps, 41)
    trained = [ids_of(run.store, step) for step in range(1, 42)]
    loop.close()

    saved.put_back()
    for key in run.payload_keys():
        run.client.delete(key)
    # A worker whose spool is longer than ours sends all of it again.
    other = Writer(run.again(), "other", epoch=run.meta.epoch)
    for group in pushed:
        other.push(group)
    loop = Loop(run.again(), old_is_fine)
    assert loop.wait_for("recovery").forgotten == 40
    for _ in range(2):
        other.push(next(made))
    last = next(steps)
    assert last.number == 42
    assert ids_of(run.store, 42) & set().union(*trained) == set()
    reader.trained(last)
    assert run.store.verify().findings == ()
    assert not loop.errors
    reader.close()
    loop.close()


def test_nothing_is_committed_before_the_trainer_has_spoken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlbuffer.daemon.watches.ATTEMPT_SECONDS", 0.7)
    attempt = run.store.attempt(uuid="silent", world_size=1, resume_step=0)
    run.store.announce(attempt.number, PolicyVersion(version=0))
    for i in range(2):
        run.push(f"a.{i}")
    loop = Loop(run.again())
    loop.wait_for("ready")
    time.sleep(0.3)
    assert waits.kind(run.store) is Wait.TAKEOVER
    assert run.store.meta().step == 0
    assert loop.wait_for("step").step == 1  # it counts as gone
    loop.close()


@pytest.mark.parametrize("asks_again", [False, True])
def test_a_step_whose_version_is_on_its_way_is_in_hand_when_the_server_loses_it_and_the_next_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, asks_again: bool
) -> None:
    """It is trained, and acknowledged later. No other step 1 is made meanwhile, whatever becomes of step 2."""
    servers_so_far = Viewer.server_id
    writer = Writer(run.again(), "w", epoch=run.meta.epoch)
    reader = Reader(run.again(), rank=0, world_size=1, timeout_seconds=20)
    reader.start(0)
    reader.announce(PolicyVersion(version=0))
    saved = Saved(run)
    loop = Loop(run.again())
    for i in range(4):
        writer.push(make_group(env="a", size=2, version=0, group_id=f"a.{i}", seed=i))
    steps = reader.steps()
    first = next(steps)
    reader.postpones(first)
    if asks_again:  # the ranks held different steps 2
        next(steps)
        steps.close()
    loop.close()
    saved.put_back()
    monkeypatch.setattr(Viewer, "server_id", lambda store: f"after a failover from {servers_so_far(store)}")
    for i in range(4, 8):
        writer.push(make_group(env="a", size=2, version=0, group_id=f"a.{i}", seed=i))
    loop = Loop(run.again())
    loop.wait_for("ready")
    pulled: list[Any] = []
    asked = reader.steps(2) if asks_again else steps
    waiting = threading.Thread(target=lambda: pulled.append(next(asked)))
    waiting.start()
    heard: set[int] = set()
    deadline = time.monotonic() + 20
    while len(heard) < 4:  # reports of the trainer, which the new leader hears
        assert time.monotonic() < deadline
        heard.add(run.store.trainer().seen_ms)
        time.sleep(0.02)
    assert (run.store.meta().step, reader.step) == (0, 0)
    reader.trained(first)
    assert loop.wait_for("recovery").step == 1
    waiting.join(timeout=20)
    assert [step.number for step in pulled] == [2]
    assert not set(pulled[0].header.group_ids) & set(first.header.group_ids)
    assert run.store.verify().findings == ()
    asked.close()
    reader.close()
    loop.close()


def test_a_step_that_one_rank_has_and_the_server_lost_is_let_go_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits for it, rank 0 for rank 1, and the batcher for the trainer's word on what it trains."""
    servers_so_far = Viewer.server_id
    writer = Writer(run.again(), "w", epoch=run.meta.epoch)
    first, second = (Reader(run.again(), rank=rank, world_size=2, timeout_seconds=20) for rank in range(2))
    first.start(0)
    first.announce(PolicyVersion(version=0))
    saved = Saved(run)
    loop = Loop(run.again())
    for i in range(2):
        writer.push(make_group(env="a", size=2, version=0, group_id=f"a.{i}", seed=i))
    steps = first.steps()
    lost = next(steps)
    assert first.still_there(lost)
    loop.close()
    saved.put_back()
    monkeypatch.setattr(Viewer, "server_id", lambda store: f"after a failover from {servers_so_far(store)}")
    for i in range(2, 4):
        writer.push(make_group(env="a", size=2, version=0, group_id=f"a.{i}", seed=i))
    loop = Loop(run.again())
    loop.wait_for("ready")
    pulled: list[Any] = []
    waiting = threading.Thread(target=lambda: pulled.append(second.pull(1)))
    waiting.start()
    time.sleep(1.5)
    assert (run.store.meta().step, first.still_there(lost)) == (0, False)
    waiting.join(timeout=20)
    steps.close()
    assert [step.digest for step in pulled] == [next(first.steps(1)).digest] != [lost.digest]
    assert run.store.verify().findings == ()
    for reader in (first, second):
        reader.close()
    loop.close()


def test_a_checkpoint_ahead_of_the_server_takes_the_run_with_it(run: Run) -> None:
    first = run.step("a.0", world_size=1)
    reader = Reader(run.again(), rank=0, world_size=1, timeout_seconds=20)
    reader.trained(reader.pull(1))
    second = run.step("a.1", world_size=1)
    reader.trained(reader.pull(2))
    state = reader.state_dict()
    assert [step["digest"] for step in state["steps"]] == [first.digest, second.digest]
    reader.close()
    # Step 2 never came to be, and its group is pending again; nor was step 1 acknowledged.
    keys = run.store.keys
    run.client.delete(keys.steps, keys.ledger, keys.trainer, keys.closed)
    run.client.hset(keys.meta, mapping={"step": 0, "digest": ""})
    run.sequence = 0
    run.client.delete(keys.producer("w", "u"))
    run.push("a.1")

    again = Reader(run.again(), rank=0, world_size=1, timeout_seconds=20)
    again.load_state_dict(state)
    again.start()
    run.store.release_lease()
    run.client.delete(run.store.keys.state)  # the state that these tests commit is none of a batcher
    loop = Loop(run.again())
    found = loop.wait_for("recovery")
    assert (found.step, found.forgotten, found.groups, found.entries) == (2, 2, 2, 1)
    assert run.store.ledger().total().trained == run.store.ledger().total().pushed
    assert sorted(run.store.closed_groups()) == ["a.0", "a.1"]
    assert run.store.verify().findings == ()
    again.close()
    loop.close()


def test_steps_of_other_content_than_the_trainers_are_void(run: Run) -> None:
    run.step("a.0", world_size=1)
    reader = Reader(run.again(), rank=0, world_size=1, timeout_seconds=20)
    reader.trained(reader.pull(1))
    saved = reader.state_dict()
    reader.close()
    run.step("a.1", world_size=1)
    other = saved | {"step": 2, "digest": "f" * 64}
    other["steps"] = [*saved["steps"], saved["steps"][0] | {"step": 2, "digest": "f" * 64, "group_ids": ["a.9"]}]
    again = Reader(run.again(), rank=0, world_size=1, timeout_seconds=20)
    again.load_state_dict(other)
    again.start()
    run.store.release_lease()
    run.client.delete(run.store.keys.state)  # the state that these tests commit is none of a batcher
    loop = Loop(run.again())
    found = loop.wait_for("recovery")
    assert (found.step, found.forgotten, found.void) == (2, 1, 1)
    total = run.store.ledger().total()
    assert (total.packed[0], total.trained[0], total.dropped["void"][0]) == (0, 2, 2)
    assert run.store.verify().findings == ()
    again.close()
    loop.close()


def test_a_checkpoint_of_another_run_is_refused(run: Run) -> None:
    run.step("a.0", world_size=1)
    reader = Reader(run.again(), rank=0, world_size=1, timeout_seconds=5)
    for state in ({"step": 4}, {"step": 1}):
        reader.load_state_dict({"epoch": run.meta.epoch - 5000, "digest": "f" * 64} | state)
        with pytest.raises(rlbuffer.errors.RunGone, match="the checkpoint belongs to another run"):
            reader.start()
    reader.close()


# -- an operator takes steps back --------------------------------------------------------------------------------------
def test_void_steps_leave_the_run_and_drop_as_void(run: Run) -> None:
    for i in range(3):
        run.step(f"a.{i}")
    run.push("a.3", version=1)
    attempt = run.train(2)
    run.store.announce(attempt, PolicyVersion(version=2, location="/2"))
    kept = next(iter(run.store.headers(1, 1)))
    run.client.hset(run.store.keys.trainer, "seen", 1)
    found = run.store.void_from(2)
    assert found == {"epoch": run.meta.epoch + 1, "steps": 2, "entries": 0}
    meta, trainer = run.store.meta(), run.store.trainer()
    assert (meta.step, meta.digest, meta.since, meta.epoch) == (1, kept.digest, meta.epoch, found["epoch"])
    assert (trainer.trained, trainer.digest, trainer.number > attempt) == (1, kept.digest, True)
    assert run.store.policy().version == -1
    total = run.store.ledger().total()
    assert (total.trained[0], total.packed[0], total.dropped["void"][0], total.pending[0]) == (2, 0, 4, 2)
    assert run.store.verify().findings == ()
    assert run.lead("another").held
    run.meta = meta
    run.commit()
    assert (run.store.meta().step, run.store.verify().findings) == (2, ())


def test_a_rewind_drops_what_is_pending_too_and_forced_goes_below_retired_steps(run: Run) -> None:
    for i in range(3):
        run.step(f"a.{i}")
    run.push("a.3", version=3)
    run.train(3, oldest_kept=2)
    run.store.retire(2)
    with pytest.raises(rlbuffer.errors.RlbufferError, match=r"was seen [0-9.]+ s ago: stop it first, or use --force"):
        run.store.rewind(2)
    run.client.hset(run.store.keys.trainer, "seen", 1)
    with pytest.raises(rlbuffer.errors.StepRetired, match=r"steps up to 2 of run .* were retired: it can go on from"):
        run.store.rewind(1)
    with pytest.raises(rlbuffer.errors.NotFound, match=r"has no step 4: the last committed one is 3\."):
        run.store.rewind(4)
    assert run.store.rewind(1, force=True) == {"epoch": run.meta.epoch + 1, "steps": 2, "entries": 1}
    meta = run.store.meta()
    assert (meta.step, meta.retired, run.pool()) == (1, 1, [])
    total = run.store.ledger().total()
    assert (total.trained[0], total.dropped["void"][0], total.pending[0]) == (4, 4, 0)
    assert run.store.verify().findings == ()


@pytest.mark.parametrize("amount", ["many", "-3", "1" * 40, ""])
def test_a_rewind_takes_entries_that_no_client_wrote_and_counts_nothing_of_them(run: Run, amount: str) -> None:
    run.step("a.0")
    run.push("a.1", version=1)
    run.client.xadd(run.store.keys.pool, {"env": "a", "group": "x", "key": "y.1", "rollouts": amount, "tokens": amount})
    run.client.xadd(run.store.keys.pool, {"nothing": "of this"})
    assert run.store.rewind(1, force=True)["entries"] == 3
    total = run.store.ledger().total()
    assert (run.pool(), total.dropped["void"][0], total.pending) == ([], 2, (0, 0))


def test_a_run_taken_back_to_its_last_retired_step_goes_on_with_the_same_chain(run: Run) -> None:
    for i in range(3):
        run.step(f"a.{i}")
    second = next(iter(run.store.headers(2, 2))).digest
    run.train(3, oldest_kept=2)
    run.store.retire(2)
    run.client.hset(run.store.keys.trainer, "seen", 1)
    run.store.void_from(3)
    meta = run.store.meta()
    assert (meta.step, meta.retired, meta.digest) == (2, 2, second)


def test_writers_and_trainers_of_before_a_rewind_are_told(run: Run) -> None:
    writer = Writer(run.again(), "v", epoch=run.meta.epoch)
    writer.push(make_group(env="a", size=2, group_id="a.0"))
    number = run.train(0)
    run.store.rewind(0, force=True)
    with pytest.raises(rlbuffer.errors.RunGone, match="it was reset, rewound or recovered"):
        writer.push(make_group(env="a", size=2, group_id="a.1"))
    with pytest.raises(rlbuffer.errors.AttemptFenced):
        run.store.report(number, epoch=run.meta.epoch, trained=0, digest="", oldest_kept=0)


def test_a_run_made_anew_is_in_a_later_epoch_whenever_its_maker_read_the_clock(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batcher that is held up between its look at the clock and its opening must not bring an old epoch back."""
    late, writer = run.again(), Writer(run.again(), "v", epoch=run.meta.epoch)
    run.store.delete_run()
    monkeypatch.setattr(late, "now", lambda: run.meta.epoch / 1000)
    time.sleep(0.005)
    assert late.open_run().epoch > run.meta.epoch
    with pytest.raises(rlbuffer.errors.RunGone):
        writer.push(make_group(env="a", size=2, group_id="a.0"))


def test_a_void_that_comes_late_takes_nothing_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.step("a.0")
    run.step("a.1")
    seen = run.store.meta()
    first = run.store.void_from(2, force=True)
    monkeypatch.setattr(run.store, "meta", lambda: seen)  # what the operator saw before
    with pytest.raises(rlbuffer.errors.EpochChanged) as error:
        run.store.void_from(1, force=True)
    assert str(error.value) == (
        f"run {run.store.run!r} began epoch {first['epoch']} at this moment, by somebody else or by this request after "
        "its answer was lost: look at it (`rlbuffer inspect`), and ask again if it is still needed"
    )
    monkeypatch.undo()
    assert (run.store.meta().step, run.store.meta().epoch) == (1, first["epoch"])


def test_what_a_trainer_hands_back_below_the_retired_steps_stays_until_it_is_carried_out(run: Run) -> None:
    """Its next heartbeat must not take it back: the leader may be away for longer."""
    number = run.store.attempt(uuid="first", world_size=1, resume_step=0).number
    for _ in range(2):
        run.step(f"a.{run.sequence}")
    claim = Claim(step=5, epoch=run.meta.epoch, digest="f" * 64, steps=())
    run.store.report(number, epoch=run.meta.epoch, trained=5, digest="f" * 64, oldest_kept=0, claim=claim)
    assert run.store.recover(run.store.trainer(), ()) is not None
    epoch = run.store.meta().epoch
    run.store.retire(5)
    again = Claim(step=0, epoch=epoch, digest="", steps=())
    second = run.store.attempt(uuid="second", world_size=1, resume_step=0, claim=again)
    run.store.report(second.number, epoch=second.epoch, trained=0, digest="", oldest_kept=0)
    assert run.store.trainer().claim
    found = run.store.recover(run.store.trainer(), ())
    assert found is not None
    assert found["step"] == 0
    assert not run.store.trainer().claim
