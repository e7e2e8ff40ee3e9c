"""What does not fit the run is refused by its own error, with the values that it is about and what to do."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import redis
from store_runs import Run, changed, plan_of

from rlbuffer.client.writer import Writer
from rlbuffer.errors import (
    AttemptForgotten,
    EpochChanged,
    InvalidRollout,
    LeaseLost,
    NotFound,
    ProducerGap,
    ResumeRefused,
    ResumeRetired,
    RlbufferError,
    RunGone,
    ServerRefused,
    StepRetired,
    TrainerAhead,
)
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.step_plan import Drop, PlannedRollouts, StepPlan
from rlbuffer.store.claim import encode_claim
from rlbuffer.store.records import Claim, PoolEntry, TrainedStep
from rlbuffer.testing import make_group

pytest_plugins = ("store_fixtures",)


def attempt(run: Run, *, resume_step: int = 0, claim: Claim | None = None) -> int:
    return run.store.attempt(uuid=uuid.uuid4().hex, world_size=2, resume_step=resume_step, claim=claim).number


def report(run: Run, trained: int, *, digest: str = "", epoch: int = 0, number: int = 0) -> None:
    number = number or run.store.trainer().number
    run.store.report(number, epoch=epoch or run.meta.epoch, trained=trained, digest=digest, oldest_kept=0)


def push(run: Run, sequence: int, *, epoch: int = 0) -> None:
    run.store.push(
        make_group(group_id="a.9"), producer="w", incarnation="u", sequence=sequence, epoch=epoch or run.meta.epoch
    )


# -- before the move ---------------------------------------------------------------------------------------------------
def nothing(run: Run) -> None:
    """The run is as it was made."""


def gone(run: Run) -> None:
    run.client.delete(run.store.keys.meta)


def step(run: Run) -> None:
    run.step("a.0")


def two_steps(run: Run) -> None:
    run.step("a.0")
    run.step("a.1")


def trainer(run: Run) -> None:
    run.step("a.0")
    attempt(run)


def retired(run: Run) -> None:
    two_steps(run)
    run.train(2, oldest_kept=1)
    run.store.retire(1)
    run.client.hset(run.store.keys.trainer, "seen", "0")  # it is gone


def lost_step(run: Run) -> None:
    trainer(run)
    run.step("a.1")
    run.client.xdel(run.store.keys.steps, "1-0")


def pending(run: Run) -> None:
    run.lead()
    run.push()


def other_epoch(run: Run) -> None:
    pending(run)
    run.client.hset(run.store.keys.meta, "epoch", 9)


def other_digest(run: Run) -> None:
    pending(run)
    run.client.hset(run.store.keys.meta, "digest", "other")


def outdated_token(run: Run) -> None:
    run.lead("somebody")
    run.token -= 1


# -- moves -------------------------------------------------------------------------------------------------------------
def commit(change: Callable[[StepPlan], StepPlan]) -> Callable[[Run], object]:
    """Commits a changed plan of what is pending."""

    def move(run: Run) -> None:
        entries = run.pool()
        used = {entry.entry_id: entry for entry in entries}
        run.store.commit(change(plan_of(entries, 1)), used, meta=run.meta, columns={}, state={})

    return move


def half_of_an_entry(plan: StepPlan) -> StepPlan:
    (use,) = plan.entries
    return changed(plan, rollouts=PlannedRollouts([msgspec.structs.replace(use, joined=[0])]))


def twice(plan: StepPlan) -> StepPlan:
    return changed(plan, rollouts=PlannedRollouts(2 * plan.entries), advantages=np.zeros(4, np.float32))


OTHER = Claim(step=1, epoch=1, digest="other", steps=())
DROP = Drop("a.0", "a", "operator", 2, 16, entry_ids=("1-0",))
ENTRY = PoolEntry(entry_id="1-0", info=None, payload_key="k", env="a", group_id="a.0", rollouts=2, tokens=16)
Row = tuple[Callable[[Run], object], Callable[[Run], object], type[RlbufferError], tuple[str, ...]]
ROWS: dict[str, Row] = {
    "resumes beyond the end": (retired, lambda run: attempt(run, resume_step=3), ResumeRefused, ("step 3", "step 2")),
    "resumes after another step": (
        step,
        lambda run: attempt(run, resume_step=1, claim=OTHER),
        ResumeRefused,
        ("another step 1", "checkpoint"),
    ),
    "resumes after another step than the last but one": (
        two_steps,
        lambda run: attempt(run, resume_step=1, claim=OTHER),
        ResumeRefused,
        ("another step 1", "checkpoint"),
    ),
    "resumes before retired steps": (retired, attempt, ResumeRetired, ("up to 1", "`rlbuffer runs rewind 0 --force`")),
    "resumes in no run": (gone, attempt, RunGone, (":meta",)),
    "reports in another epoch": (trainer, lambda run: report(run, 0, epoch=7), EpochChanged, ("in 7",)),
    "reports beyond the end": (trainer, lambda run: report(run, 5), TrainerAhead, ("step 5", "step 1")),
    "reports another step": (trainer, lambda run: report(run, 1, digest="other"), TrainerAhead, ("digest other",)),
    "reports over a lost step": (lost_step, lambda run: report(run, 2), RlbufferError, ("step 1",)),
    "reports under a lost attempt": (
        trainer,
        lambda run: report(run, 0, number=10**15),
        AttemptForgotten,
        (":trainer",),
    ),
    "leads without a run": (gone, lambda run: run.lead(), RunGone, (":meta",)),
    "reads no run": (gone, lambda run: run.store.meta(), RunGone, (":meta",)),
    "retires without the lease": (outdated_token, lambda run: run.store.retire(1), LeaseLost, ("somebody", ":lease")),
    "commits out of order": (pending, commit(lambda plan: changed(plan, step=3)), LeaseLost, ("step 3", "step 0")),
    "commits into another epoch": (other_epoch, commit(lambda plan: plan), LeaseLost, ("epoch 9",)),
    "commits after another step": (other_digest, commit(lambda plan: plan), LeaseLost, ("another digest",)),
    "commits an entry twice": (
        pending,
        commit(twice),
        RlbufferError,
        ("twice",),
    ),
    "commits half of an entry": (pending, commit(half_of_an_entry), RlbufferError, ("holds 2 rollouts",)),
    "pushes after a gap": (nothing, lambda run: push(run, 3), ProducerGap, ("push 3", "is 0", ":producer:w:u")),
    "pushes into another epoch": (nothing, lambda run: push(run, 1, epoch=7), EpochChanged, ("epoch 7",)),
    "pushes into no run": (gone, lambda run: push(run, 1), RunGone, (":meta",)),
    "waits for step 0": (nothing, lambda run: run.store.wait_step(0, block_seconds=0.0), NotFound, ("step 0",)),
    "waits for no number of a step": (
        nothing,
        lambda run: run.store.wait_step(10**25, block_seconds=0.0),
        NotFound,
        (f"step {10**25}",),
    ),
    "voids step 0": (nothing, lambda run: run.store.void_from(0), NotFound, ("step 0",)),
    "voids a step to come": (step, lambda run: run.store.void_from(4), NotFound, ("step 4", "is 1")),
    "voids a retired step": (retired, lambda run: run.store.void_from(1), StepRetired, ("up to 1",)),
    "voids under a trainer": (trainer, lambda run: run.store.void_from(1), RlbufferError, ("--force",)),
    "rewinds before a retired step": (
        retired,
        lambda run: run.store.rewind(0),
        StepRetired,
        ("up to 1", "`rlbuffer runs rewind 0 --force`"),
    ),
    "rewinds before the beginning": (nothing, lambda run: run.store.rewind(-1), NotFound, ("-1",)),
    "rewinds no run": (gone, lambda run: run.store.rewind(0), RunGone, (":meta",)),
    "asks settings of no run": (gone, lambda run: run.store.ask_config({}, "d", seen=run.meta), RunGone, ()),
    "drains no run": (gone, lambda run: run.store.ask_drain(), RunGone, ()),
    "undrains no run": (gone, lambda run: run.store.ask_undrain(), RunGone, ()),
    "drops from no run": (gone, lambda run: run.store.drop_pending([(DROP, [ENTRY])]), RunGone, ()),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_does_not_fit_the_run_is_refused_by_its_own_error_and_changes_nothing(run: Run, name: str) -> None:
    prepare, move, error, words = ROWS[name]
    prepare(run)
    before = run.control_keys()
    with pytest.raises(RlbufferError) as caught:
        move(run)
    assert type(caught.value) is error
    assert [word for word in words if word not in str(caught.value)] == []
    assert run.control_keys() == before


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Run]:
    made = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    "fields", [{"version": 2**53}, {"size": 2**64}, {"location": "x" * 8193}, {"adapter": "x" * 129}]
)
def test_a_version_that_nobody_could_read_is_not_made(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRollout, match=f"^policy {next(iter(fields))}: "):
        PolicyVersion(**{"version": 0} | fields)


def test_a_version_below_zero_cannot_be_announced(bare: Run) -> None:
    with pytest.raises(ValueError, match="-1"):
        bare.store.announce(attempt(bare), PolicyVersion(version=-1))


@pytest.mark.parametrize("sequence", [0, -1, 2**53, True])
def test_a_push_whose_sequence_the_server_could_not_count_is_refused(bare: Run, sequence: int) -> None:
    writer = Writer(bare.store, "w", epoch=bare.meta.epoch)
    with pytest.raises(InvalidRollout, match=r"^push: sequence: "):
        writer.push(make_group(), sequence=sequence)
    assert bare.pool() == []
    assert writer.push(make_group()).status == "stored"


def test_a_payload_that_is_not_stored_whole_is_refused(bare: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    key = bare.store.keys.unnamed_payload("a.9", "u.1")
    bare.client.hset(key, "0", "left over")
    monkeypatch.setattr(redis.client.Pipeline, "unlink", redis.client.Pipeline.exists)  # so that it stays
    with pytest.raises(ServerRefused, match="4 fields"):
        push(bare, 1)


def test_an_entry_that_changed_since_it_was_read_stops_a_recovery(bare: Run) -> None:
    pending(bare)
    [entry] = bare.pool()
    lost = TrainedStep(step=1, digest="d", group_ids=(entry.group_id,), envs={"a": (2, entry.tokens)})
    claim = encode_claim(Claim(step=1, epoch=bare.meta.epoch, digest="d", steps=(lost,)))
    bare.client.hset(bare.store.keys.trainer, mapping={"number": 1, "claim": claim})
    with pytest.raises(RlbufferError, match=f"entry {entry.entry_id} holds 2 rollouts"):
        bare.store.recover(bare.store.trainer(), [msgspec.structs.replace(entry, rollouts=5)])
