"""Writes of the control moves: times are the server's own, numbers go back exactly as far as they must."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from alike import held
from store_call_rows import ROWS, calls_of
from store_runs import Run

from rlbuffer.errors import RlbufferError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.states import ReportStatus
from rlbuffer.store.claim import ATTEMPT_SECONDS
from rlbuffer.store.records import Claim, TrainedStep
from rlbuffer.store.step_in_hand import StepInHand
from rlbuffer.store.viewer import Viewer

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


def stop_clock(monkeypatch: pytest.MonkeyPatch, at_ms: int) -> None:
    """That of `memory://`, for scripts."""
    clock = SimpleNamespace(time=lambda: at_ms / 1000)
    monkeypatch.setattr("fakeredis.commands_mixins.server_mixin.time", clock)


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """The same on a server whose clock stands still, at :data:`NOW_MS`."""
    stop_clock(monkeypatch, NOW_MS)
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
    hand = StepInHand(4, "f" * 64)
    trained.store.report(number, epoch=epoch, trained=2, digest="", oldest_kept=0, hand=hand)
    assert trained.store.trainer().hand == hand
    trained.store.attempt(uuid="another", world_size=2, resume_step=2)
    assert trained.store.trainer().hand == StepInHand()


@pytest.mark.parametrize("takes", [False, True])
def test_a_trainer_that_hands_steps_back_has_in_hand_what_its_loop_was_given_and_nothing_that_it_is_yet_to_be(
    trained: Run, takes: bool
) -> None:
    number, epoch, hand = trained.store.trainer().number, trained.meta.epoch, StepInHand(6, "f" * 64)
    claim = Claim(step=5, epoch=epoch, digest="d" * 64, steps=())
    trained.store.report(
        number, epoch=epoch, trained=5, digest=claim.digest, oldest_kept=0, claim=claim, hand=hand, takes=takes
    )
    assert trained.store.trainer().hand == (StepInHand() if takes else hand)


@pytest.mark.parametrize("how", ["void_from", "rewind"])
def test_a_run_that_is_taken_back_has_no_step_in_hand(trained: Run, how: str) -> None:
    """The word of an attempt that is over: a rank of the next one must not take it for that of its rank 0."""
    header = trained.store.wait_step(3, block_seconds=0)
    assert header is not None
    number, epoch, hand = trained.store.trainer().number, trained.meta.epoch, StepInHand(3, header.digest)
    trained.store.report(number, epoch=epoch, trained=2, digest="", oldest_kept=0, hand=hand)
    assert trained.store.rank_0().hand == hand
    getattr(trained.store, how)(2, force=True)
    assert trained.store.rank_0().hand == StepInHand()


@pytest.mark.parametrize("digest", ["right", "of another step", "of nothing"])
def test_a_loop_is_given_the_step_that_is_here_and_no_other_of_its_number(trained: Run, digest: str) -> None:
    second, third = (trained.store.wait_step(step, block_seconds=0) for step in (2, 3))
    assert second is not None
    assert third is not None
    given = {"right": third.digest, "of another step": second.digest, "of nothing": "f" * 64}[digest]
    number, epoch, is_right = trained.store.trainer().number, trained.meta.epoch, digest == "right"
    status = trained.store.report(
        number, epoch=epoch, trained=2, digest="", oldest_kept=0, hand=StepInHand(3, given), takes=True
    )
    assert status is (ReportStatus.OK if is_right else ReportStatus.LOST)
    assert trained.store.rank_0().hand == (StepInHand(3, given) if is_right else StepInHand())


def test_a_loop_is_not_given_a_step_that_is_not_here(trained: Run) -> None:
    number, epoch = trained.store.trainer().number, trained.meta.epoch
    hand = StepInHand(4, "f" * 64)
    status = trained.store.report(number, epoch=epoch, trained=2, digest="", oldest_kept=0, hand=hand, takes=True)
    assert (status, trained.store.rank_0().hand) == (ReportStatus.LOST, StepInHand())


def test_what_is_taken_back_is_swept_with_the_steps_that_are_retired_already(trained: Run) -> None:
    """Nothing needs it any more: payloads of void steps, and of what was pending."""
    trained.store.retire(1)
    assert len(trained.payload_keys()) == 3
    trained.store.rewind(1, force=True)
    trained.lead()
    trained.store.retire(1)
    assert trained.payload_keys() == []
    assert trained.store.verify().findings == ()


def test_garbage_of_the_steps_that_stay_is_swept_when_they_retire(trained: Run) -> None:
    trained.store.void_from(3, force=True)
    scores = dict(trained.client.zrange(trained.store.keys.garbage, 0, -1, withscores=True))
    assert sorted(scores.values()) == [1.0, 2.0, 2.0]


@pytest.mark.parametrize(("resume", "newest"), [(0, 3), (2, 3), (3, 3)])
def test_earlier_attempts_may_have_made_the_versions_of_all_steps(trained: Run, resume: int, newest: int) -> None:
    assert trained.store.attempt(uuid="next", world_size=2, resume_step=resume).newest == newest
    assert field(trained, "trainer", "newest") == newest
    again = trained.store.attempt(uuid="next", world_size=2, resume_step=resume)
    assert again.newest == newest


def test_an_attempt_that_hands_back_makes_all_versions_behind_its_own_again(trained: Run) -> None:
    claim = Claim(step=5, epoch=trained.meta.epoch, digest="d" * 64, steps=())
    assert trained.store.attempt(uuid="ahead", world_size=2, resume_step=5, claim=claim).newest == 5
    other = Claim(step=2, epoch=trained.meta.epoch, digest="e" * 64, steps=())
    assert trained.store.attempt(uuid="other", world_size=2, resume_step=2, claim=other).newest == 2


def test_a_version_above_the_steps_that_are_here_begins_a_line(trained: Run) -> None:
    """The server lost the steps that it was made of: what is made again differs."""
    number = trained.store.trainer().number
    trained.store.announce(number, PolicyVersion(version=4))
    epoch = trained.store.meta().epoch
    assert trained.store.attempt(uuid="next", world_size=2, resume_step=2).epoch == epoch + 1
    assert trained.store.policy().version == -1


def test_a_version_of_the_newest_step_begins_no_line(trained: Run) -> None:
    number = trained.store.trainer().number
    trained.store.announce(number, PolicyVersion(version=3))
    epoch = trained.store.meta().epoch
    assert trained.store.attempt(uuid="next", world_size=2, resume_step=2).epoch == epoch
    assert trained.store.policy().version == 3


def test_a_step_is_a_duplicate_of_the_committed_one_by_its_digest_alone(trained: Run) -> None:
    """A leader with another step of this number must read again, and not take its own for the committed one."""
    meta, pool = trained.store.meta(), trained.pool()
    args: list[Any] = []
    move = trained.store.move

    def noted(script: str, keys: Any, words: Any, **options: Any) -> Any:
        args.extend(words if script == "commit" else ())
        return move(script, keys, words, **options)

    trained.store.move = noted  # type: ignore[method-assign]
    trained.commit(entries=pool)
    names = ("lease", "pool", "steps", "meta", "ledger", "closed", "garbage", "history", "summary", "state", "reuse")
    keys = [getattr(trained.store.keys, name) for name in names]
    assert move("commit", keys, args)[0] == b"DUP"
    other = [*args[:4], "f" * 64, *args[5:]]
    assert move("commit", keys, other)[0] == b"ORDER"
    assert trained.store.meta().step == meta.step + 1


def test_a_run_with_something_pending_does_not_end(trained: Run) -> None:
    trained.lead()
    step = trained.store.meta().step
    assert not trained.store.set_ended(step)
    assert trained.store.meta().ended is None
    trained.drop("operator", trained.pool())
    assert not trained.store.set_ended(step + 1)
    assert not trained.store.set_ended(step, {b"a": b"5"}), "somebody has let an env go on since"
    assert trained.store.meta().ended is None
    assert trained.store.set_ended(step)
    assert trained.store.meta().ended == step


def test_void_leaves_a_trainer_that_is_behind_where_it_is(trained: Run) -> None:
    before = trained.store.trainer()
    trained.store.void_from(3, force=True)
    after = trained.store.trainer()
    assert (after.trained, after.digest, after.oldest_kept) == (2, before.digest, before.oldest_kept)
    assert after.number > before.number


def test_a_recovery_goes_on_from_the_first_epoch_and_counts_what_was_committed_here(trained: Run) -> None:
    trained.client.hset(trained.store.keys.meta, "ended", "3")
    handed_back(trained, "a.7", "a.8", "a.9")
    meta = trained.store.meta()
    assert (meta.since, meta.step, meta.retired, meta.ended) == (trained.meta.since, 4, 4, None)
    assert field(trained, "ledger", "a:packed:rollouts") == 0
    assert field(trained, "ledger", "a:trained:rollouts") == 8
    assert field(trained, "ledger", "a:trained:groups") == 4
    assert {"a.7", "a.8", "a.9"} <= set(trained.store.closed_groups())


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


@pytest.mark.parametrize("move", ["drop", "void"])
@pytest.mark.parametrize(("written", "counted"), [("9" * 15, 10**15 - 1), ("9" * 16, 0)])
def test_what_leaves_the_pool_counts_as_written_there_where_a_client_could_have_written_it(
    run: Run, move: str, written: str, counted: int
) -> None:
    run.lead()
    by_hand = {"env": "a", "group": "a.0", "key": "u.1", "rollouts": written, "tokens": written, "metadata": b""}
    run.client.xadd(run.store.keys.pool, by_hand)
    if move == "drop":
        run.drop("void", run.pool())
    else:
        run.store.rewind(0)
    assert run.pool() == []
    assert [field(run, "ledger", f"a:dropped:void:{unit}") for unit in ("rollouts", "tokens")] == [counted] * 2


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
    assert field(trained, "trainer", "number") == AHEAD_MS + 1
    assert trained.lead().token == AHEAD_MS + 1


@pytest.mark.parametrize("name", sorted(ROWS.keys() - calls_of(Viewer) - {"close"}))
def test_where_the_clock_stands_elsewhere_every_time_that_a_call_leaves_stands_as_far_from_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []
    for clock_ms in (NOW_MS, NOW_MS + 3_875):
        stop_clock(monkeypatch, clock_ms)
        run = Run(f"memory://{tmp_path.name}-{clock_ms}", tmp_path, "run")
        ROWS[name].prepare(run)
        stop_clock(monkeypatch, clock_ms + 5_250)
        ROWS[name].call(run.store, run)
        left.append(held(run, clock_ms=clock_ms))
        run.close()
    assert left[0] == left[1]


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
