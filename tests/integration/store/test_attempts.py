"""ATTEMPT, REPORT and ANNOUNCE."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from store_runs import Run

from rlbuffer.errors import AttemptFenced, EpochChanged, RunGone, StepRetired
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.records import Claim

pytest_plugins = ("store_fixtures",)


def attempt(run: Run, uuid: str = "first", *, resume_step: int = 0):
    return run.store.attempt(uuid=uuid, world_size=2, resume_step=resume_step)


def report(run: Run, number: int, trained: int, *, digest: str = "", oldest_kept: int = 0, epoch: int = 0) -> None:
    epoch = epoch or run.meta.epoch
    run.store.report(number, epoch=epoch, trained=trained, digest=digest, oldest_kept=oldest_kept)


def test_run_without_a_trainer_has_attempt_zero(run):
    assert run.store.trainer().number == 0
    assert run.store.policy() == PolicyVersion(version=-1)


def test_each_attempt_has_a_larger_number_and_a_repeated_one_the_same(run):
    first = attempt(run)
    assert attempt(run).number == first.number
    second = attempt(run, "second")
    assert second.number > first.number
    there = run.store.trainer()
    assert (there.world_size, there.resume_step, there.epoch, there.trained) == (2, 0, run.meta.epoch, 0)
    assert (second.number, second.epoch) == (there.number, there.epoch)
    assert 0 <= there.seen_seconds_ago < 5


@pytest.mark.parametrize("lost", ["number", "uuid", "epoch"])
def test_an_attempt_whose_record_lost_a_field_is_made_anew(run, lost):
    attempt(run)
    run.client.hdel(run.store.keys.trainer, lost)
    again = attempt(run)
    there = run.store.trainer()
    assert (again.number, again.epoch, there.world_size) == (there.number, there.epoch, 2)


def test_an_attempt_that_another_one_follows_at_once_is_fenced(run, monkeypatch):
    """Not given the other one's number: two trainers would be one to the server."""
    move = run.store.move

    def followed(name, *args):
        reply = move(name, *args)
        monkeypatch.setattr(run.store, "move", move)
        found["second"] = attempt(run, "second")
        return reply

    found = {}
    monkeypatch.setattr(run.store, "move", followed)
    first = attempt(run)
    assert first.number < found["second"].number
    with pytest.raises(AttemptFenced):
        report(run, first.number, 0)


def test_older_attempt_is_fenced_from_everything(run):
    run.step("a.0")
    first = attempt(run)
    second = attempt(run, "second")
    before = run.control_keys()
    message = (
        f"attempt {first.number} of run '{run.store.run}' is over: attempt {second.number} has taken over "
        f"({run.store.keys.trainer})"
    )
    with pytest.raises(AttemptFenced) as caught:
        report(run, first.number, 1)
    assert str(caught.value) == message
    with pytest.raises(AttemptFenced) as caught:
        run.store.announce(first.number, PolicyVersion(version=0))
    assert str(caught.value) == message
    assert run.control_keys() == before


def test_newly_trained_steps_move_from_packed_to_trained_once(run):
    headers = [run.step(f"a.{i}", f"b.{i}") for i in range(3)]
    number = attempt(run).number
    report(run, number, 2, digest=headers[1].digest)
    report(run, number, 2, digest=headers[1].digest)
    total = run.store.ledger().total()
    assert total.trained == (8, headers[0].tokens + headers[1].tokens)
    assert total.packed == (4, headers[2].tokens)
    assert (run.store.trainer().trained, run.store.trainer().digest) == (2, headers[1].digest)
    groups = run.client.hmget(run.store.keys.ledger, ["a:packed:groups", "a:trained:groups"])
    assert groups == [b"1", b"2"]
    assert run.store.verify().findings == ()


def test_trained_and_oldest_kept_never_go_back_over_attempts(run):
    for i in range(3):
        run.step(f"a.{i}")
    report(run, attempt(run).number, 3, oldest_kept=2)
    again = attempt(run, "second", resume_step=2)
    report(run, again.number, 2, oldest_kept=1)
    now = run.store.trainer()
    assert (now.resume_step, now.trained, now.oldest_kept) == (2, 3, 2)
    assert run.store.ledger().total().trained[0] == 6


def test_the_newest_checkpoint_of_an_attempt_is_known_from_its_start_on_and_from_each_report_that_names_one(run):
    for i in range(3):
        run.step(f"a.{i}")
    number = attempt(run, resume_step=1).number
    found = [run.store.trainer().checkpoint]
    for checkpoint in (0, 2, 0, 3):
        run.store.report(number, epoch=run.meta.epoch, trained=3, digest="", oldest_kept=1, checkpoint=checkpoint)
        found.append(run.store.trainer().checkpoint)
    assert found == [1, 1, 2, 2, 3]


def test_step_trained_before_is_compared_by_digest_too(run):
    header = run.step("a.0")
    number = attempt(run).number
    report(run, number, 1, digest=header.digest)
    for retired in (0, 1):
        run.store.retire(retired)
        report(run, number, 1, digest=header.digest)
        with pytest.raises(RunGone, match="trained step 1 with digest other"):
            report(run, number, 1, digest="other")


@pytest.mark.parametrize(
    ("retires", "resume", "field", "more", "error"),
    [
        (False, 0, "", 0, None),  # a trainer without a checkpoint knows no epoch
        (False, 2, "", 0, StepRetired),
        (False, 2, "since", 0, None),
        (False, 7, "since", -1, RunGone),
        (False, 7, "since", 0, None),
        (False, 7, "epoch", 100, None),
        (False, 7, "epoch", 101, RunGone),
        (True, 0, "epoch", 0, StepRetired),
        (True, 2, "epoch", 0, StepRetired),
    ],
)
def test_after_a_recovery_a_trainer_of_this_run_alone_hands_back_and_no_step_that_a_checkpoint_may_hold(
    run, retires, resume, field, more, error
):
    # With a recovery retire steps that no checkpoint holds yet; what retires later is held by one.
    run.step("a.0")
    lost = Claim(step=5, epoch=run.meta.epoch, digest="d" * 64, steps=())
    run.store.attempt(uuid="first", world_size=2, resume_step=5, claim=lost)
    assert run.store.recover(run.store.trainer(), ()) is not None
    run.meta = run.store.meta()
    if retires:
        run.step("a.1")
        run.train(6)
        run.store.retire(6)
    claim = Claim(step=resume, epoch=getattr(run.meta, field, 0) + more, digest="e" * 64, steps=())
    with pytest.raises(error) if error else nullcontext():
        assert run.store.attempt(uuid="second", world_size=2, resume_step=resume, claim=claim).newest == resume
    assert bool(run.store.trainer().claim) == (error is None)


@pytest.mark.parametrize("since", [-1, 0, 1])
def test_a_trainer_hears_from_which_epoch_on_it_may_follow_into_another(run, since):
    number, epoch = attempt(run).number, run.meta.epoch
    run.client.hset(run.store.keys.meta, mapping={"epoch": epoch + 5, "since": epoch + since})
    with pytest.raises(EpochChanged) as changed:
        report(run, number, 0, epoch=epoch)
    assert (changed.value.epoch, changed.value.follows(epoch)) == (epoch + 5, since <= 0)


def test_policy_version_only_grows_within_an_epoch(run):
    number = attempt(run).number
    two = PolicyVersion(version=2, location="/w/2", size=10, checksum="c2")
    assert run.store.announce(number, two)
    before = run.control_keys()
    for version in (1, 2):
        assert not run.store.announce(number, PolicyVersion(version=version, location="/other"))
    assert run.control_keys() == before
    assert run.store.policy() == two
    assert run.store.announce(number, PolicyVersion(version=3))
    run.client.hset(run.store.keys.meta, "epoch", run.meta.epoch + 1)
    assert run.store.announce(number, PolicyVersion(version=1))
    assert run.store.policy().version == 1


def test_a_version_that_was_announced_without_weights_is_announced_again_with_them_and_never_without(run):
    number = attempt(run).number
    assert run.store.announce(number, PolicyVersion(version=2))
    before = run.control_keys()
    for version in (1, 2):
        assert not run.store.announce(number, PolicyVersion(version=version))
    assert not run.store.announce(number, PolicyVersion(version=1, location="/w/1", size=10, checksum="c1"))
    assert run.control_keys() == before
    two = PolicyVersion(version=2, location="/w/2", size=10, checksum="c2")
    assert run.store.announce(number, two)
    assert run.store.policy() == two
    assert not run.store.announce(number, PolicyVersion(version=2))
    assert not run.store.announce(number, PolicyVersion(version=2, location="/other", size=10, checksum="c3"))
    assert run.store.policy() == two


def test_each_adapter_has_a_version_of_its_own(run):
    number = attempt(run).number
    run.store.announce(number, PolicyVersion(version=4, adapter="lora"))
    assert run.store.policy().version == -1
    assert run.store.policy("lora") == PolicyVersion(version=4, adapter="lora")
