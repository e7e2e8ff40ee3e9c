"""A version number means one set of weights: where it could come to mean two, a new line of versions begins."""

from __future__ import annotations

import pytest
from looks import evaluations
from store_runs import Run

from rlbuffer.client.reader import Reader
from rlbuffer.client.writer import Writer
from rlbuffer.errors import EpochChanged, PayloadError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.records import Claim
from rlbuffer.testing import make_group

pytest_plugins = ("store_fixtures",)


@pytest.fixture
def trained(run: Run) -> Run:
    """Three steps, two of them trained and announced by attempt 1."""
    run.lead()
    for i in range(3):
        run.step(f"a.{i}")
    number = run.train(2)
    for version in (1, 2):
        run.store.announce(number, PolicyVersion(version=version))
    return run


def push(run: Run, epoch: int) -> None:
    group = make_group(env="a", size=2, version=2, group_id="a.9")
    run.store.push(group, producer="other", incarnation="o", sequence=1, epoch=epoch)


def restart(run: Run) -> None:
    """The server is another one than the trainer last spoke to, and may have lost its newest writes."""
    run.client.hset(run.store.keys.trainer, "server", "the one before")


def is_given_up(run: Run, epoch: int) -> bool:
    """True when writers of `epoch` must begin again."""
    try:
        push(run, epoch)
    except EpochChanged as change:
        return not change.follows(epoch)
    return False


def test_attempt_on_the_same_server_goes_on_in_the_line(trained: Run) -> None:
    attempt = trained.store.attempt(uuid="second", world_size=2, resume_step=1)
    assert (attempt.epoch, attempt.newest) == (trained.meta.epoch, 3)
    assert not is_given_up(trained, trained.meta.epoch)
    assert trained.store.policy().version == 2


def test_attempt_on_another_server_begins_a_line(trained: Run) -> None:
    restart(trained)
    attempt = trained.store.attempt(uuid="second", world_size=2, resume_step=1)
    assert attempt.epoch == trained.store.meta().epoch == trained.meta.epoch + 1
    assert is_given_up(trained, trained.meta.epoch)
    assert not is_given_up(trained, attempt.epoch)
    # Trained again with the same bytes: what is here of versions is of this line, too.
    assert trained.store.policy().version == 2
    # And the same attempt again changes nothing, nor does the next one.
    assert trained.store.attempt(uuid="second", world_size=2, resume_step=1).epoch == attempt.epoch
    assert trained.store.attempt(uuid="third", world_size=2, resume_step=1).epoch == attempt.epoch


def test_a_version_that_nobody_announced_spoils_no_look_at_the_trainer(trained: Run) -> None:
    store = trained.store
    for junk in (b"junk", b"1 x \x93\xa0\x00\xa0", b"1 2 \x91\xa0"):
        trained.client.hset(store.keys.policy, "a", junk)
        trainer = store.trainer()
        assert trainer.trained == 2
        with pytest.raises(PayloadError) as caught:
            assert trainer.policies
        assert "adapter 'a'" in str(caught.value)


def test_a_line_of_another_server_keeps_no_version_that_may_be_given_up(trained: Run) -> None:
    number = trained.store.trainer().number
    trained.store.announce(number, PolicyVersion(version=7, adapter="a"))
    restart(trained)
    trained.store.attempt(uuid="second", world_size=2, resume_step=1)
    # Its last steps are here, and made again with the same bytes; of an adapter's own steps nobody here knows that.
    assert {name: policy.version for name, policy in trained.store.trainer().policies.items()} == {"": 2}


def test_attempt_begins_a_line_when_a_version_of_a_step_that_is_not_here_was_announced(trained: Run) -> None:
    """Somebody may have sampled from it, and the version of this number will be another one."""
    trained.store.announce(trained.store.trainer().number, PolicyVersion(version=4))
    attempt = trained.store.attempt(uuid="second", world_size=2, resume_step=1)
    assert attempt.epoch == trained.store.meta().epoch == trained.meta.epoch + 1
    assert is_given_up(trained, trained.meta.epoch)
    assert trained.store.trainer().policies == {}


def name_the_server(monkeypatch: pytest.MonkeyPatch, reader: Reader, name: str) -> None:
    monkeypatch.setattr(reader._store, "server_id", lambda: name)


def test_while_a_step_is_trained_the_trainer_names_the_server_that_had_it(
    trained: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeat alone is no word on that step, which the server after a failover may have lost."""
    before = trained.store.server_id()
    reader = Reader(trained.store, rank=0, world_size=2, timeout_seconds=10.0)
    try:
        steps = reader.steps(2)
        step = next(steps)
        name_the_server(monkeypatch, reader, "after a failover")
        reader.checkpointed(1)
        assert trained.store.trainer().server == before
        reader.trained(step)
        assert trained.store.trainer().server == "after a failover"
        next(steps)
        name_the_server(monkeypatch, reader, "after another")
        reader.checkpointed(2)
        assert trained.store.trainer().server == "after a failover"
        # A rank that asks again trains nothing meanwhile.
        assert list(reader.steps(4, until=lambda: True)) == []
        reader.checkpointed(2)
        assert trained.store.trainer().server == "after another"
    finally:
        reader.close()


def test_a_writer_that_says_done_does_not_follow_into_another_line(trained: Run) -> None:
    writer = Writer(trained.store, "other", epoch=trained.meta.epoch)
    restart(trained)
    attempt = trained.store.attempt(uuid="second", world_size=2, resume_step=1)
    with pytest.raises(EpochChanged):
        writer.done("a")
    with pytest.raises(EpochChanged):
        writer.push(make_group(env="a", size=2, version=2, group_id="a.9"))
    Writer(trained.store, "other", epoch=attempt.epoch).done("a")
    assert trained.store.sources().declared == {"a"}


def test_attempt_that_hands_steps_back_begins_a_line_and_takes_all_versions_back(trained: Run) -> None:
    claim = Claim(step=5, epoch=trained.meta.epoch, digest="d" * 64, steps=())
    attempt = trained.store.attempt(uuid="second", world_size=2, resume_step=5, claim=claim)
    assert attempt.epoch == trained.meta.epoch + 1
    assert is_given_up(trained, trained.meta.epoch)
    assert trained.store.policy().version == -1
    assert attempt.newest == 5
    # The recovery goes on in it: who began since then need not begin again.
    found = trained.store.recover(trained.store.trainer(), [])
    assert found is not None
    assert found["epoch"] > attempt.epoch
    assert not is_given_up(trained, found["epoch"])
    with pytest.raises(EpochChanged) as caught:
        push(trained, attempt.epoch)
    assert caught.value.follows(attempt.epoch)


@pytest.mark.parametrize("loss", ["shorter", "another server", "none"])
@pytest.mark.parametrize("at", [1, 3])
def test_attempt_that_trains_steps_again_begins_a_line_when_the_server_may_have_lost_some(
    trained: Run, loss: str, at: int
) -> None:
    attempt = trained.store.attempt(uuid="second", world_size=2, resume_step=1)
    header = next(trained.store.headers(at, at))
    if loss == "another server":
        restart(trained)
    newest = attempt.newest + (loss == "shorter")

    def report(epoch: int, newest: int) -> None:
        trained.store.report(
            attempt.number, epoch=epoch, trained=at, digest=header.digest, oldest_kept=0, newest=newest
        )

    if loss == "none" or (loss == "another server" and at == 3):
        report(attempt.epoch, newest)
        assert not is_given_up(trained, attempt.epoch)
        assert trained.store.policy().version == 2
        return
    with pytest.raises(EpochChanged) as caught:
        report(attempt.epoch, newest)
    assert caught.value.follows(attempt.epoch)  # the trainer itself goes on
    assert is_given_up(trained, attempt.epoch)
    assert trained.store.policy().version == (-1 if at == 1 else 2)
    report(caught.value.epoch, at)
    assert trained.store.meta().epoch == caught.value.epoch


def test_rewind_begins_a_line_whatever_line_was_there(trained: Run) -> None:
    restart(trained)
    epoch = trained.store.attempt(uuid="second", world_size=2, resume_step=1).epoch
    trained.store.rewind(1, force=True)
    assert is_given_up(trained, epoch)
    assert not is_given_up(trained, trained.store.meta().epoch)


def test_a_version_of_a_new_line_is_evaluated_again_and_its_result_counts(trained: Run) -> None:
    store = trained.store

    def evaluate(loss: float) -> bool:
        if not store.claim_evaluation("e", 2, owner="w", ttl_seconds=60):
            return False
        store.add_evaluation("e", 2, {"loss": loss})
        return True

    assert (evaluate(1.0), evaluate(2.0)) == (True, False)
    restart(trained)
    store.attempt(uuid="second", world_size=2, resume_step=1)
    assert (evaluate(3.0), evaluate(4.0)) == (True, False)
    assert [found["loss"] for found in evaluations(store)] == [3.0]


def test_what_was_evaluated_when_the_line_changed_counts_for_the_old_one(trained: Run) -> None:
    store = trained.store
    assert store.claim_evaluation("e", 2, owner="w", ttl_seconds=60)
    restart(trained)
    store.attempt(uuid="second", world_size=2, resume_step=1)
    store.add_evaluation("e", 2, {"loss": 1.0})
    assert trained.again().claim_evaluation("e", 2, owner="v", ttl_seconds=60)


def test_a_writer_never_goes_back_to_an_epoch_before_its_own(trained: Run) -> None:
    restart(trained)
    epoch = trained.store.attempt(uuid="second", world_size=2, resume_step=1).epoch
    writer = Writer(trained.store, "w", epoch=epoch)
    trained.client.hset(trained.store.keys.meta, "epoch", epoch - 1)  # the server has lost the line that began
    trained.client.hdel(trained.store.keys.meta, "line")
    with pytest.raises(EpochChanged):
        writer.push(make_group(env="a", size=2, version=2, group_id="a.9"))
