"""Exact texts: what the store refuses, on a real server and in memory. {run} and the like are filled in per run."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    RlbufferError,
    RunGone,
    StepRetired,
    TrainerAhead,
)
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.step_plan import EntryUse, RolloutRef
from rlbuffer.store.records import Claim, TrainedStep
from rlbuffer.testing import make_group

pytest_plugins = ("store_fixtures",)


def attempt(run: Run, *, resume_step: int = 0, claim: Claim | None = None) -> int:
    return run.store.attempt(uuid=uuid.uuid4().hex, world_size=2, resume_step=resume_step, claim=claim).number


def report(run: Run, number: int, trained: int, *, digest: str = "", epoch: int = 0) -> None:
    run.store.report(number, epoch=epoch or run.meta.epoch, trained=trained, digest=digest, oldest_kept=0)


def gone(run: Run) -> None:
    run.client.delete(run.store.keys.meta)


def push(run: Run, sequence: int, *, epoch: int = 0) -> None:
    run.store.push(
        make_group(group_id="a.9"), producer="w", incarnation="u", sequence=sequence, epoch=epoch or run.meta.epoch
    )


# -- trainers ----------------------------------------------------------------------------------------------------------
def resumes_beyond_the_end(run: Run) -> None:
    attempt(run, resume_step=3)


def resumes_after_another_step(run: Run) -> None:
    run.step("a.0")
    attempt(run, resume_step=1, claim=Claim(step=1, epoch=1, digest="other", steps=()))


def resumes_before_retired_steps(run: Run) -> None:
    run.step("a.0")
    run.train(1, oldest_kept=1)
    run.store.retire(1)
    attempt(run)


def resumes_in_no_run(run: Run) -> None:
    gone(run)
    attempt(run)


def reports_in_another_epoch(run: Run) -> None:
    report(run, attempt(run), 0, epoch=7)


def reports_beyond_the_end(run: Run) -> None:
    report(run, attempt(run), 5)


def reports_another_step(run: Run) -> None:
    run.step("a.0")
    report(run, attempt(run), 1, digest="other")


def reports_over_a_lost_step(run: Run) -> None:
    run.step("a.0")
    run.step("a.1")
    run.client.xdel(run.store.keys.steps, "1-0")
    report(run, attempt(run), 2)


def reports_under_a_lost_attempt(run: Run) -> None:
    report(run, 10**15, 0)


TRAINERS: list[tuple[Callable[[Run], None], type[RlbufferError], str]] = [
    (
        resumes_beyond_the_end,
        RunGone,
        (
            "the trainer resumes after step 3, but run {run!r} ends at step 0: the checkpoint belongs to another run "
            "or to steps that were taken back, or the server lost its newest steps. The trainer takes its newest "
            "checkpoint: move later ones away, or use another run name"
        ),
    ),
    (
        resumes_after_another_step,
        RunGone,
        (
            "the trainer resumes after step 1, but run {run!r} has another step 1 ({digest:.12}): the checkpoint "
            "belongs to another run or to a step that was taken back. The trainer takes its newest checkpoint: move "
            "later ones away, or use another run name"
        ),
    ),
    (
        resumes_before_retired_steps,
        StepRetired,
        (
            "the trainer resumes after step 0, but steps up to 1 of run {run!r} were retired: resume from a "
            "checkpoint of step 1 or later, start another run, or take this one back to step 0 with "
            "`rlbuffer runs rewind 0 --force`"
        ),
    ),
    (resumes_in_no_run, RunGone, "run {run!r} is not on the server ({{rlb:{run}}}:meta): open it first"),
    (
        reports_in_another_epoch,
        EpochChanged,
        "run {run!r} is in epoch {epoch}, the trainer in 7: it was reset or rewound",
    ),
    (
        reports_beyond_the_end,
        TrainerAhead,
        (
            "the trainer has trained step 5, but run {run!r} ends at step 0: the server lost acknowledged writes "
            "(power cut or failover)"
        ),
    ),
    (
        reports_another_step,
        TrainerAhead,
        "the trainer trained step 1 with digest other, but run {run!r} has {digest} there",
    ),
    (
        reports_over_a_lost_step,
        RlbufferError,
        "run {run!r} has lost step 1, which was never trained ({{rlb:{run}}}:steps)",
    ),
    (
        reports_under_a_lost_attempt,
        AttemptForgotten,
        (
            "run {run!r} is not on the server any more, nor is attempt 1000000000000000 of its trainer "
            "({{rlb:{run}}}:trainer): the server was emptied, or it lost its data"
        ),
    ),
]


# -- the leader, producers and operators -------------------------------------------------------------------------------
def leads_without_a_run(run: Run) -> None:
    gone(run)
    run.lead()


def reads_meta_without_a_run(run: Run) -> None:
    gone(run)
    run.store.meta()


def retires_without_the_lease(run: Run) -> None:
    run.lead("somebody")
    run.token -= 1
    run.store.retire(1)


def commits_out_of_order(run: Run) -> None:
    run.lead()
    run.push()
    run.commit(3)


def commits_a_group_without_rollouts(run: Run) -> None:
    run.lead()
    run.push()
    run.commit(group_ids=("a.0", "a.7"))


def commits_half_of_an_entry(run: Run) -> None:
    run.lead()
    run.push()
    entries = run.pool()
    plan = plan_of(entries, 1)
    use = plan.entries[0]
    half = EntryUse(entry_id=use.entry_id, env="a", packed_rollouts=1, packed_tokens=use.packed_tokens)
    used = {e.entry_id: e for e in entries}
    run.store.commit(changed(plan, entries=(half,)), used, meta=run.store.meta(), state={})


def plans_a_rollout_that_the_entry_does_not_hold(run: Run) -> None:
    run.lead()
    run.push()
    entries = run.pool()
    plan = plan_of(entries, 1)
    ref = plan.rollouts[0]
    values = {name: getattr(ref, name) for name in RolloutRef.__dataclass_fields__}
    refs = (RolloutRef(**(values | {"rollout_id": "other"})), *plan.rollouts[1:])
    used = {e.entry_id: e for e in entries}
    run.store.commit(changed(plan, rollouts=refs), used, meta=run.store.meta(), state={})


def pushes_after_a_gap(run: Run) -> None:
    push(run, 3)


def pushes_into_another_epoch(run: Run) -> None:
    push(run, 1, epoch=7)


def pushes_into_no_run(run: Run) -> None:
    gone(run)
    push(run, 1)


def waits_for_step_0(run: Run) -> None:
    run.store.wait_step(0, block_seconds=0.0)


def voids_step_0(run: Run) -> None:
    run.store.void_from(0)


def voids_a_step_to_come(run: Run) -> None:
    run.step("a.0")
    run.store.void_from(4)


def voids_a_retired_step(run: Run) -> None:
    run.step("a.0")
    run.train(1, oldest_kept=1)
    run.store.retire(1)
    run.client.hset(run.store.keys.trainer, "seen", "0")  # it is gone
    run.store.void_from(1)


def rewinds_to_before_a_retired_step(run: Run) -> None:
    run.step("a.0")
    run.train(1, oldest_kept=1)
    run.store.retire(1)
    run.client.hset(run.store.keys.trainer, "seen", "0")  # it is gone
    run.store.rewind(0)


def voids_under_a_trainer(run: Run) -> None:
    run.step("a.0")
    attempt(run)
    run.client.hset(run.store.keys.trainer, "seen", str(round(1000 * run.store.now()) - 1500))
    run.store.void_from(1)


def rewinds_before_the_beginning(run: Run) -> None:
    run.store.rewind(-1)


def rewinds_no_run(run: Run) -> None:
    gone(run)
    run.store.rewind(0)


OTHERS: list[tuple[Callable[[Run], None], type[RlbufferError], str]] = [
    (leads_without_a_run, RunGone, "run {run!r} is not on the server ({{rlb:{run}}}:meta)"),
    (reads_meta_without_a_run, RunGone, "run {run!r} is not on the server ({{rlb:{run}}}:meta)"),
    (
        retires_without_the_lease,
        LeaseLost,
        "the lease of run {run!r} is not this batcher's any more: somebody holds it ({{rlb:{run}}}:lease)",
    ),
    (
        commits_out_of_order,
        LeaseLost,
        (
            "step 3 of run {run!r} follows step 0 of epoch {epoch}, but the run is at step 0 of epoch {epoch}, or has "
            "another digest: read everything again"
        ),
    ),
    (
        commits_a_group_without_rollouts,
        RlbufferError,
        "the plan of step 1 names groups without a rollout: a.7",
    ),
    (
        commits_half_of_an_entry,
        RlbufferError,
        "the plan of step 1 does not account for all of pool entry {entry}, which holds 2 rollouts and {tokens} tokens",
    ),
    (
        plans_a_rollout_that_the_entry_does_not_hold,
        RlbufferError,
        "entry {entry} does not hold rollout other at index 0",
    ),
    (
        pushes_after_a_gap,
        ProducerGap,
        (
            "push 3 of producer 'w' came, but the server's last is 0: it lost acknowledged writes "
            "({{rlb:{run}}}:producer:w:u)"
        ),
    ),
    (
        pushes_into_another_epoch,
        EpochChanged,
        "run {run!r} is in epoch {epoch}, this producer works in epoch 7: it was reset or rewound",
    ),
    (pushes_into_no_run, RunGone, "run {run!r} is not on the server any more ({{rlb:{run}}}:meta)"),
    (waits_for_step_0, NotFound, "steps start at 1, there is no step 0"),
    (voids_step_0, NotFound, "steps start at 1, there is no step 0"),
    (voids_a_step_to_come, NotFound, "run {run!r} has no step 4: the last committed one is 1."),
    (
        voids_a_retired_step,
        StepRetired,
        "steps up to 1 of run {run!r} were retired: it can go on from step 1 or a later one",
    ),
    (
        rewinds_to_before_a_retired_step,
        StepRetired,
        (
            "steps up to 1 of run {run!r} were retired: it can go on from step 1 or a later one, or from this one with "
            "`rlbuffer runs rewind 0 --force`"
        ),
    ),
    (
        voids_under_a_trainer,
        RlbufferError,
        "the trainer of run {run!r} was seen 1.5 s ago: stop it first, or use --force, which ends it",
    ),
    (rewinds_before_the_beginning, NotFound, "a run can be taken back to step 0 at most, not to -1"),
    (rewinds_no_run, RunGone, "run {run!r} is not on the server ({{rlb:{run}}}:meta)"),
]


@pytest.mark.parametrize(("do", "error", "text"), TRAINERS + OTHERS, ids=lambda v: getattr(v, "__name__", ""))
def test_what_does_not_fit_the_run_is_refused_in_these_words(
    run: Run, do: Callable[[Run], None], error: type[RlbufferError], text: str
) -> None:
    with pytest.raises(error) as caught:
        do(run)
    entries = run.pool()
    header = run.store.wait_step(1, block_seconds=0.0) if "{digest" in text else None
    said = str(caught.value)
    if do is voids_under_a_trainer:  # a clock is a clock
        said = f"{said.partition('seen ')[0]}seen 1.5 s ago{said.partition(' s ago')[2]}"
    assert said == text.format(
        run=run.store.run,
        epoch=run.meta.epoch,
        digest=header.digest if header else "",
        entry=entries[0].entry_id if entries else "",
        tokens=entries[0].tokens if entries else 0,
    )


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Run]:
    made = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    yield made
    made.close()


def test_a_version_below_zero_cannot_be_announced(bare: Run) -> None:
    with pytest.raises(ValueError) as caught:
        bare.store.announce(attempt(bare), PolicyVersion(version=-1))
    assert str(caught.value) == "policy version -1 must not be negative"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 2**53}, "policy version: 9007199254740992 is outside -1..9007199254740991"),
        ({"version": 0, "size": 2**64}, "policy size: 18446744073709551616 is outside 0..9007199254740991"),
        ({"version": 0, "location": "x" * 8193}, "policy location: expected a string of at most 8192 characters"),
        ({"version": 0, "adapter": "x" * 129}, "policy adapter: expected a string of at most 128 characters"),
    ],
)
def test_a_version_that_nobody_could_read_is_not_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRollout, match=f"^{re.escape(message)}"):
        PolicyVersion(**fields)


@pytest.mark.parametrize("sequence", [0, -1, 2**53, True])
def test_a_push_whose_sequence_the_server_could_not_count_is_refused(bare: Run, sequence: int) -> None:
    writer = Writer(bare.store, "w", epoch=bare.meta.epoch)
    with pytest.raises(InvalidRollout, match=r"^push: sequence: "):
        writer.push(make_group(), sequence=sequence)
    assert bare.pool() == []
    assert writer.push(make_group()).status == "stored"


def test_a_script_that_answers_something_else_is_named(bare: Run) -> None:
    assert str(bare.store.unexpected("commit", [b"WHAT", 3])) == (
        f"script commit answered ['WHAT', '3'] for run {bare.store.run!r}"
    )


def test_a_payload_that_is_not_stored_whole_is_refused(bare: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlbuffer.errors import ServerRefused

    key = bare.store.keys.unnamed_payload("a.9", "u.1")
    bare.client.hset(key, "0", "left over")
    monkeypatch.setattr(redis.client.Pipeline, "unlink", redis.client.Pipeline.exists)  # so that it stays
    with pytest.raises(ServerRefused) as caught:
        push(bare, 1)
    assert str(caught.value) == f"the server answered [1, 3, 1] when 4 fields were stored under {key}"


def test_an_entry_that_changed_since_it_was_read_stops_a_recovery(bare: Run) -> None:
    from rlbuffer.store.claim import encode_claim

    bare.lead()
    bare.push("a.0")
    [entry] = bare.pool()
    lost = TrainedStep(step=1, digest="d", group_ids=("a.0",), envs={"a": (2, entry.tokens)})
    claim = encode_claim(Claim(step=1, epoch=bare.meta.epoch, digest="d", steps=(lost,)))
    bare.client.hset(bare.store.keys.trainer, mapping={"number": 1, "claim": claim})
    with pytest.raises(RlbufferError) as caught:
        bare.store.recover(bare.store.trainer(), [replace(entry, rollouts=5)])
    assert str(caught.value) == (
        f"pool entry {entry.entry_id} holds 2 rollouts and {entry.tokens} tokens, which is not what was read before"
    )
