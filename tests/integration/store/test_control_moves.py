"""Writes of the control moves: times are the server's own, numbers go back exactly as far as they must."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_runs import Run

from rlbuffer.errors import RlbufferError
from rlbuffer.store.claim import ATTEMPT_SECONDS
from rlbuffer.store.hand import Hand
from rlbuffer.store.records import Claim, TrainedStep

pytest_plugins = ("store_fixtures",)


NOW_MS = 1_700_000_000_000
AHEAD_MS = NOW_MS * 2
"""Far ahead of every clock here."""


@pytest.fixture
def trained(run: Run) -> Run:
    """Three steps, two of them trained, and a group that is pending."""
    for i in range(3):
        run.step(f"a.{i}")
    run.train(2)
    run.push("a.9", version=3)
    return run


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """The same on a server whose clock stands still, at :data:`NOW_MS`."""
    clock = SimpleNamespace(time=lambda: NOW_MS / 1000)
    monkeypatch.setattr("fakeredis.commands_mixins.server_mixin.time", clock)  # of `memory://` alone
    run = Run(f"memory://{tmp_path.name}", tmp_path)
    for i in range(3):
        run.step(f"a.{i}")
    run.train(2)
    yield run
    run.close()


def handed_back(run: Run, *groups: str) -> None:
    """The trainer is at step 4, which the server does not know; it has trained `groups` in it."""
    step = TrainedStep(step=4, digest="d" * 64, group_ids=groups, envs={})
    claim = Claim(step=4, epoch=run.meta.epoch, digest=step.digest, steps=(step,))
    run.store.attempt(uuid="another", world_size=2, resume_step=4, claim=claim)
    assert run.store.recover(run.store.trainer(), run.pool()) is not None


def field(run: Run, key: str, name: str) -> Any:
    value = run.client.hget(getattr(run.store.keys, key), name)
    return None if value is None else int(value)


def test_void_takes_the_trainer_back_to_the_step_that_stays(trained: Run) -> None:
    trained.store.void_from(2, force=True)
    trainer, meta = trained.store.trainer(), trained.store.meta()
    assert (trainer.trained, trainer.epoch, trainer.seen_ms, trainer.claim) == (1, meta.epoch, 0, b"")
    assert (meta.step, meta.since, meta.epoch) == (1, meta.epoch, trained.meta.epoch + 1)
    header = trained.store.wait_step(1, block_seconds=0)
    assert header is not None
    assert (meta.digest, trainer.digest) == (header.digest, header.digest)


def test_what_is_late_of_a_group_that_left_with_a_rewind_is_known_as_late(trained: Run) -> None:
    assert "a.9" not in trained.store.closed_groups()
    trained.store.rewind(2, force=True)
    assert {"a.2", "a.9"} <= set(trained.store.closed_groups())


def test_a_run_that_is_taken_back_below_its_retired_steps_forgets_the_digest_of_the_last(trained: Run) -> None:
    trained.store.retire(2)
    trained.store.rewind(1, force=True)
    meta = trained.store.meta()
    assert (meta.step, meta.retired, meta.digest) == (1, 1, "")
    assert trained.client.hget(trained.store.keys.meta, "retired_digest") is None
    trained.store.rewind(1, force=True)
    assert trained.store.meta().digest == ""


def test_a_trainer_that_begins_has_nothing_in_hand(trained: Run) -> None:
    number, epoch = trained.store.trainer().number, trained.meta.epoch
    hand = Hand(4, "f" * 64)
    trained.store.report(number, epoch=epoch, trained=2, digest="", oldest_kept=0, hand=hand)
    assert trained.store.trainer().hand == hand
    trained.store.attempt(uuid="another", world_size=2, resume_step=2)
    assert trained.store.trainer().hand == Hand()


@pytest.mark.parametrize("takes", [False, True])
def test_a_trainer_that_hands_steps_back_has_in_hand_what_its_loop_was_given_and_nothing_that_it_is_yet_to_be(
    trained: Run, takes: bool
) -> None:
    number, epoch, hand = trained.store.trainer().number, trained.meta.epoch, Hand(6, "f" * 64)
    claim = Claim(step=5, epoch=epoch, digest="d" * 64, steps=())
    trained.store.report(
        number, epoch=epoch, trained=5, digest=claim.digest, oldest_kept=0, claim=claim, hand=hand, takes=takes
    )
    assert trained.store.trainer().hand == (Hand() if takes else hand)


def test_void_leaves_a_trainer_that_is_behind_where_it_is(trained: Run) -> None:
    before = trained.store.trainer()
    trained.store.void_from(3, force=True)
    after = trained.store.trainer()
    assert (after.trained, after.digest, after.oldest_kept) == (2, before.digest, before.oldest_kept)
    assert after.number > before.number


def test_a_recovery_goes_on_from_the_first_epoch_and_counts_what_was_committed_here(trained: Run) -> None:
    trained.client.hset(trained.store.keys.meta, "ended", "3")
    handed_back(trained)
    meta = trained.store.meta()
    assert (meta.since, meta.step, meta.retired, meta.ended) == (trained.meta.since, 4, 4, None)
    assert field(trained, "ledger", "a:packed:rollouts") == 0
    assert field(trained, "ledger", "a:trained:rollouts") == 6


def test_a_recovery_counts_a_rollout_that_was_pushed_twice_once_and_the_repeat_as_dropped(run: Run) -> None:
    run.lead()
    run.push("a.0")
    run.push("a.0")
    first, second = run.pool()
    step = TrainedStep(step=1, digest="d" * 64, group_ids=("a.0",), envs={"a": (2, first.tokens)})
    claim = Claim(step=1, epoch=run.meta.epoch, digest=step.digest, steps=(step,))
    run.store.attempt(uuid="trainer", world_size=2, resume_step=1, claim=claim)
    assert run.store.recover(run.store.trainer(), [first, second]) is not None
    total = run.store.ledger().total()
    assert (total.pushed[0], total.trained) == (4, (first.rollouts, first.tokens))
    assert field(run, "ledger", "a:trained:groups") == 1
    assert total.dropped == {"duplicate": (second.rollouts, second.tokens)}
    assert run.pool() == []


def test_the_digest_of_the_last_retired_step_stays(trained: Run) -> None:
    headers = {step: trained.store.wait_step(step, block_seconds=0) for step in (1, 2)}
    for step, header in headers.items():
        assert header is not None
        trained.store.retire(step)
        assert trained.client.hget(trained.store.keys.meta, "retired_digest") == header.digest.encode()


def test_what_was_handed_back_is_forgotten_once_the_trainer_is_at_the_retired_step(trained: Run) -> None:
    trained.store.retire(2)
    trained.client.hset(trained.store.keys.trainer, "claim", b"of before")
    trained.train(2)
    assert trained.store.trainer().claim == b""


def test_steps_that_are_taken_back_stand_in_the_history(trained: Run) -> None:
    before = len(trained.store.history())
    trained.store.void_from(3, force=True)
    assert len(trained.store.history()) == before + 1
    record = trained.store.history(count=1)[0]
    assert (record["event"], record["step"]) == ("void", 2)
    assert [group[0] for group in record["groups"]] == ["a.2"]


def test_nothing_goes_back_where_the_clock_was_set_back(trained: Run) -> None:
    keys, client = trained.store.keys, trained.client
    client.zadd(keys.closed, {"of the future": AHEAD_MS})
    handed_back(trained, "a.9")
    assert client.zscore(keys.closed, "a.9") == AHEAD_MS
    client.hset(keys.trainer, "number", AHEAD_MS)
    client.hset(keys.lease, "token", AHEAD_MS)
    trained.store.void_from(5, force=True)
    assert (field(trained, "trainer", "number"), field(trained, "lease", "token")) == (AHEAD_MS + 1, AHEAD_MS + 1)


def test_in_its_last_millisecond_a_lease_lets_its_owner_s_moves_through(frozen: Run) -> None:
    frozen.client.hset(frozen.store.keys.lease, "until", NOW_MS)
    assert not frozen.again().lease("another", ttl_seconds=5).held
    frozen.store.set_error("is heard")
    frozen.push("a.3", version=3)
    assert frozen.commit()[0] == "ok"
    frozen.push("a.4", version=3)
    frozen.drop("stale", frozen.pool())
    frozen.store.retire(1)
    assert (frozen.store.meta().retired, frozen.pool()) == (1, [])
    claim = Claim(step=5, epoch=frozen.meta.epoch, digest="d" * 64, steps=())
    frozen.store.attempt(uuid="another", world_size=2, resume_step=5, claim=claim)
    assert frozen.store.recover(frozen.store.trainer(), []) is not None


def test_a_run_is_not_taken_back_from_a_trainer_that_was_seen_and_the_refusal_says_when(frozen: Run) -> None:
    def seen(seconds: float) -> None:
        frozen.client.hset(frozen.store.keys.trainer, "seen", NOW_MS - round(1000 * seconds))

    seen(2.5)
    with pytest.raises(RlbufferError, match=r"was seen 2\.5 s ago"):
        frozen.store.void_from(3)
    seen(ATTEMPT_SECONDS)
    assert frozen.store.void_from(3)["steps"] == 1


@pytest.mark.parametrize("is_refused", [True, False])
def test_nothing_stays_of_settings_that_were_asked_for_once_they_are_answered(run: Run, is_refused: bool) -> None:
    run.lead()
    run.store.ask_config({"max_age": 3}, "asked", seen=run.store.meta())
    assert run.store.meta().wanted == {"max_age": 3}
    if is_refused:
        run.store.refuse_config("asked", "no")
    else:
        run.store.set_config({"max_age": 3}, "asked", settles="asked")
    meta = run.store.meta()
    assert (meta.wanted, meta.wanted_digest) == ({}, "")
    assert meta.config_digest == ("asked" if not is_refused else run.meta.config_digest)
