"""Groups that more than one step trains, on the server: the reuse record, the ledger, garbage and takeover."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from daemon_runs import Served
from store_runs import Run, changed, plan_of

import rlbuffer
from rlbuffer.client.buffer import Buffer
from rlbuffer.config.settings import RunSettings
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.step_plan import Drop, PlannedRollouts, StepPlan
from rlbuffer.store.records import Claim, EnvLedger, PoolEntry, TrainedStep
from rlbuffer.testing import make_group

pytest_plugins = ("store_fixtures",)

THRICE = rlbuffer.BatcherConfig(64, step_groups=2, max_uses=3, replay_fraction=1.0, max_age=8)


def reusing(plan: StepPlan, uses: int, *, kept: bool) -> StepPlan:
    """The plan with its groups used `uses` times before."""
    entries = [msgspec.structs.replace(e, uses=uses, is_kept=kept) for e in plan.entries]
    return changed(plan, rollouts=PlannedRollouts(entries))


def use(run: Run, entries: list[PoolEntry], uses: int, *, kept: bool) -> tuple[str, Any]:
    meta = run.store.meta()
    plan = reusing(plan_of(entries, meta.step + 1), uses, kept=kept)
    by_id = {e.entry_id: e for e in entries}
    run.store.pin(plan.rollouts, by_id)
    return run.store.commit(plan, by_id, meta=meta, columns={}, state={"schema": 1, "envs": {}})


def led(run: Run) -> list[PoolEntry]:
    """One pushed group under a config that allows three uses."""
    run.lead()
    run.store.set_config(THRICE.as_dict(), "x")
    run.push("a.0")
    return run.pool()


def account(run: Run) -> EnvLedger:
    return run.store.ledger().envs["a"]


def groups(run: Run) -> tuple[int, ...]:
    """Groups that are packed, and trained."""
    found = run.client.hmget(run.store.keys.ledger, "a:packed:groups", "a:trained:groups")
    return tuple(int(value or 0) for value in found)


def test_the_record_follows_the_uses_and_garbage_comes_after_the_last(run: Run) -> None:
    entries = led(run)
    key = entries[0].payload_key
    for uses, kept in ((0, True), (1, True)):
        assert use(run, entries, uses, kept=kept)[0] == "ok"
        (group,) = run.store.reused()
        assert (group.group_id, group.uses, group.step, group.entries) == ("a.0", uses + 1, uses + 1, tuple(entries))
        assert run.client.zscore(run.store.keys.garbage, key) is None
        assert run.store.verify().findings == ()
    assert use(run, entries, 2, kept=False)[0] == "ok"
    assert run.store.reused() == []
    assert not run.client.exists(run.store.keys.reuse)
    assert run.client.zscore(run.store.keys.garbage, key) == 3
    assert run.store.verify().findings == ()


def test_a_group_is_packed_and_trained_once_and_its_further_uses_are_counted_beside(run: Run) -> None:
    entries = led(run)
    size = (entries[0].rollouts, entries[0].tokens)
    use(run, entries, 0, kept=True)
    assert (account(run).pushed, account(run).packed, account(run).reused) == (size, size, (0, 0))
    assert groups(run) == (1, 0)
    run.train(1)
    use(run, entries, 1, kept=True)
    assert groups(run) == (0, 1)
    assert (account(run).packed, account(run).trained, account(run).reused) == ((0, 0), size, size)
    run.train(2)
    use(run, entries, 2, kept=False)
    run.train(3)
    assert (account(run).pushed, account(run).trained) == (size, size)
    assert account(run).reused == (2 * size[0], 2 * size[1])
    assert account(run).pending == (0, 0)
    assert [h.uses for h in run.store.headers()] == [{}, {"a.0": 1}, {"a.0": 2}]
    assert run.store.verify().findings == ()


@pytest.mark.parametrize("assumed", [0, 1, 3])
def test_a_plan_that_assumes_other_uses_than_recorded_is_refused(run: Run, assumed: int) -> None:
    entries = led(run)
    use(run, entries, 0, kept=True)
    use(run, entries, 1, kept=True)
    before = run.control_keys()
    assert use(run, entries, assumed, kept=True) == ("gone", [entries[0].entry_id])
    assert run.control_keys() == before


def test_a_used_group_that_is_dropped_is_released_and_the_ledger_stays(run: Run) -> None:
    entries = led(run)
    use(run, entries, 0, kept=True)
    before = run.store.ledger()
    run.drop("stale", entries)
    assert (run.store.reused(), run.store.ledger()) == ([], before)
    assert run.client.zscore(run.store.keys.garbage, entries[0].payload_key) == 1
    assert [r["event"] for r in run.store.history()] == ["step"]
    assert run.store.verify().findings == ()


def test_retiring_the_first_step_keeps_the_payload_for_the_next_use(run: Run) -> None:
    entries = led(run)
    use(run, entries, 0, kept=True)
    run.train(1, oldest_kept=1)
    assert run.store.retire(1) == 0
    assert run.payload_keys() == [entries[0].payload_key]
    use(run, entries, 1, kept=False)
    run.train(2, oldest_kept=2)
    assert run.store.retire(2) == 1
    assert run.payload_keys() == []
    assert run.store.verify().findings == ()


def test_verify_judges_a_step_by_the_uses_that_its_own_settings_allowed(run: Run) -> None:
    entries = led(run)
    use(run, entries, 0, kept=True)
    use(run, entries, 1, kept=True)
    once = replace(THRICE, max_uses=1)
    run.store.set_config(once.as_dict(), "y")
    assert run.store.verify().findings == ()  # what was allowed then
    use(run, entries, 2, kept=False)
    assert [f.invariant for f in run.store.verify().findings] == ["I1"] * entries[0].rollouts
    run.train(3, oldest_kept=2)
    run.store.retire(2)  # how often it was used before stands in the step
    assert [f.invariant for f in run.store.verify().findings] == ["I1"] * entries[0].rollouts


def test_verify_finds_garbage_that_is_still_to_be_used(run: Run) -> None:
    entries = led(run)
    use(run, entries, 0, kept=True)
    run.client.zadd(run.store.keys.garbage, {entries[0].payload_key: 1})
    assert [(f.invariant, f.message) for f in run.store.verify().findings] == [
        ("I11", f"group a.0 may be used again, but its payload is marked as garbage ({entries[0].payload_key})")
    ]


def test_steps_repeat_groups_up_to_max_uses_over_a_takeover(served: Served) -> None:
    run = served.run
    attempt = run.store.attempt(uuid="t", world_size=1, resume_step=0)
    run.store.announce(attempt.number, PolicyVersion(version=0, location="", size=0, checksum=""))
    for n in range(2):
        run.push(f"a.{n}")
    served.serve(THRICE)
    header = served.wait_for(lambda: run.store.wait_step(1, block_seconds=0))
    assert (header.group_ids, header.uses, header.max_uses) == (("a.0", "a.1"), {}, 3)
    served.stop()
    run.train(1)
    served.serve(THRICE)
    header = served.wait_for(lambda: run.store.wait_step(3, block_seconds=0))
    assert header.uses == {"a.0": 2, "a.1": 2}
    run.train(3)
    assert run.store.reused() == []
    buffer = Buffer(run.store, settings=RunSettings())
    assert sorted((g.group_id, g.step, g.uses) for g in buffer.groups()) == [
        (group, step, step) for group in ("a.0", "a.1") for step in (1, 2, 3)
    ]
    assert {m.step for m in buffer.group("a.0").members} == {3}
    assert run.store.ledger().envs["a"].trained[0] == run.store.ledger().envs["a"].pushed[0] == 4
    assert run.store.verify().findings == ()


def test_a_batcher_with_fewer_uses_releases_what_it_may_not_use_any_more(run: Run, served: Served) -> None:
    entries = led(run)
    use(run, entries, 0, kept=True)
    run.store.set_config(rlbuffer.BatcherConfig(64).as_dict(), "")
    run.store.release_lease()
    run.client.hset(run.store.keys.meta, "config_digest", "")
    served.serve(rlbuffer.BatcherConfig(64))
    served.wait_for(lambda: served.said("ready"))
    assert run.store.reused() == []
    assert run.store.verify().findings == ()


def test_a_use_that_the_server_has_lost_is_no_use_that_is_left(run: Run) -> None:
    """The trainer used it in a step that is not here: how often is not known here, so it is let go."""
    entries = led(run)
    attempt = run.store.attempt(uuid="trainer", world_size=2, resume_step=0)
    use(run, entries, 0, kept=True)
    run.push("a.1")
    use(run, [entry for entry in run.pool() if entry.group_id == "a.1"], 0, kept=True)
    lost = TrainedStep(
        step=3, digest="f" * 64, group_ids=("a.0",), envs={"a": (entries[0].rollouts, entries[0].tokens)}
    )
    claim = Claim(step=3, epoch=run.meta.epoch, digest=lost.digest, steps=(lost,))
    run.store.report(attempt.number, epoch=run.meta.epoch, trained=3, digest=lost.digest, oldest_kept=0, claim=claim)
    assert run.store.recover(run.store.trainer(), ()) is not None
    assert [group.group_id for group in run.store.reused()] == ["a.1"]
    assert run.client.zscore(run.store.keys.garbage, entries[0].payload_key) == 3
    assert run.store.verify().findings == ()


def test_an_operator_who_has_read_a_part_of_a_group_does_not_take_it_out_of_reuse(run: Run) -> None:
    """It was pending when the operator looked, and has been trained since: that passes it over, whole."""
    led(run)
    rest = make_group(env="a", size=4, group_id="a.0")
    rest = replace(rest, rollouts=rest.rollouts[2:])
    run.store.push(rest, producer="w", incarnation="u", sequence=2, epoch=run.meta.epoch)
    entries = run.pool()
    assert len(entries) == 2
    assert use(run, entries, 0, kept=True)[0] == "ok"
    seen = entries[0]
    drop = Drop(
        group_id="a.0",
        env="a",
        reason="operator",
        rollouts=seen.rollouts,
        tokens=seen.tokens,
        entry_ids=(seen.entry_id,),
    )
    assert run.store.drop_pending([(drop, [seen])]) == 0
    (group,) = run.store.reused()
    assert group.entries == tuple(entries)
    assert run.store.verify().findings == ()


@pytest.mark.parametrize("move", ["void", "rewind"])
@pytest.mark.parametrize("keep", [0, 1, 2], ids=lambda keep: f"to step {keep}")
@pytest.mark.parametrize("trained", [0, 1, 3], ids=lambda step: f"trained to {step}")
def test_groups_of_steps_taken_back_are_trained_no_more(run: Run, move: str, keep: int, trained: int) -> None:
    """Step 1 trains a.0, step 2 a.1, step 3 a.0 once more; a third use is allowed."""
    run.store.attempt(uuid="t", world_size=2, resume_step=0)
    first = led(run)
    use(run, first, 0, kept=True)
    run.push("a.1")
    second = run.pool()
    use(run, second, 0, kept=True)
    use(run, first, 1, kept=True)
    run.train(trained)

    if move == "void":
        run.store.void_from(keep + 1, force=True)
    else:
        run.store.rewind(keep, force=True)

    assert [group.group_id for group in run.store.reused()] == (["a.1"] if keep == 2 else [])
    size = (first[0].rollouts + second[0].rollouts, first[0].tokens + second[0].tokens)
    fates = account(run)
    stay = {"a.0": keep >= 1, "a.1": keep >= 2}
    void = [entries[0] for name, entries in (("a.0", first), ("a.1", second)) if not stay[name]]
    dropped = sum(entry.rollouts for entry in void), sum(entry.tokens for entry in void)
    assert fates.dropped.get("void", (0, 0)) == dropped
    assert tuple(a + b for a, b in zip(fates.packed, fates.trained, strict=True)) == (
        size[0] - dropped[0],
        size[1] - dropped[1],
    )
    assert fates.reused == (0, 0)
    assert run.store.verify().findings == ()
    # The payload goes when the last step that holds it does, at once where none does.
    released = {entry.payload_key: keep for entry in [first[0], *([] if keep == 2 else [second[0]])]}
    garbage = run.client.zrange(run.store.keys.garbage, 0, -1, withscores=True)
    assert {key.decode(): int(score) for key, score in garbage} == released


def test_a_group_of_a_step_that_a_recovery_replaces_is_trained_no_more(run: Run) -> None:
    attempt = run.store.attempt(uuid="trainer", world_size=2, resume_step=0)
    first = led(run)
    use(run, first, 0, kept=True)
    run.push("a.1")
    use(run, run.pool(), 0, kept=True)  # the trainer has another step 2
    theirs = TrainedStep(step=2, digest="f" * 64, group_ids=("a.9",), envs={"a": (2, 51)})
    claim = Claim(step=2, epoch=run.meta.epoch, digest=theirs.digest, steps=(theirs,))
    run.store.report(attempt.number, epoch=run.meta.epoch, trained=2, digest=theirs.digest, oldest_kept=0, claim=claim)
    assert run.store.recover(run.store.trainer(), ()) is not None
    assert [group.group_id for group in run.store.reused()] == ["a.0"]
    assert account(run).dropped["void"] == (2, account(run).pushed[1] - first[0].tokens)
    assert run.store.verify().findings == ()


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_further_uses_of_steps_taken_back_are_counted_no_more(run: Run, keep: int) -> None:
    entries = led(run)
    for uses in (0, 1, 2):
        use(run, entries, uses, kept=uses < 2)
    size = (entries[0].rollouts, entries[0].tokens)
    assert account(run).reused == (2 * size[0], 2 * size[1])

    run.store.void_from(keep + 1, force=True)

    left = max(0, keep - 1)
    assert account(run).reused == (left * size[0], left * size[1])
    assert run.store.verify().findings == ()


def test_a_further_use_that_a_recovery_replaces_is_counted_no_more(run: Run) -> None:
    attempt = run.store.attempt(uuid="trainer", world_size=2, resume_step=0)
    entries = led(run)
    use(run, entries, 0, kept=True)
    use(run, entries, 1, kept=True)  # the trainer has another step 2
    theirs = TrainedStep(step=2, digest="f" * 64, group_ids=("a.9",), envs={"a": (2, 51)})
    claim = Claim(step=2, epoch=run.meta.epoch, digest=theirs.digest, steps=(theirs,))
    run.store.report(attempt.number, epoch=run.meta.epoch, trained=2, digest=theirs.digest, oldest_kept=0, claim=claim)
    assert run.store.recover(run.store.trainer(), ()) is not None
    assert account(run).reused == (0, 0)
    assert run.store.verify().findings == ()


@pytest.mark.parametrize("then", ["at once", "after the step is there again", "after it is used again"])
def test_verify_finds_what_waits_for_another_use_although_its_step_was_taken_back(run: Run, then: str) -> None:
    entries = led(run)
    use(run, entries, 0, kept=True)
    left = run.client.hgetall(run.store.keys.reuse)
    run.store.void_from(1, force=True)
    run.client.zrem(run.store.keys.garbage, entries[0].payload_key)
    run.client.hset(run.store.keys.reuse, mapping=left)  # as a void that leaves it would
    run.lead("again")
    run.meta = run.store.meta()
    if then == "after it is used again":
        assert use(run, entries, 1, kept=True)[0] == "ok"
    elif then == "after the step is there again":
        run.push("a.1")
        use(run, run.pool(), 0, kept=False)
    findings = [(finding.invariant, "a.0" in finding.message) for finding in run.store.verify().findings]
    assert findings == [("I1", True)], run.store.verify().findings


@pytest.mark.parametrize("move", ["void", "rewind"])
@pytest.mark.parametrize("is_led", [True, False], ids=["while serve leads", "while none leads"])
def test_a_leader_trains_nothing_of_a_step_taken_back(served: Served, move: str, is_led: bool) -> None:
    run = served.run
    attempt = run.store.attempt(uuid="t", world_size=1, resume_step=0)
    run.store.announce(attempt.number, PolicyVersion(version=0, location="", size=0, checksum=""))
    for n in range(2):
        run.push(f"a.{n}")
    served.serve(replace(THRICE, lookahead=0))
    served.wait_for(lambda: run.store.wait_step(1, block_seconds=0))
    if not is_led:
        served.stop()
    if move == "void":
        run.store.void_from(1, force=True)
    else:
        run.store.rewind(0, force=True)
    if not is_led:
        served.serve(replace(THRICE, lookahead=0))
    attempt = run.store.attempt(uuid="u", world_size=1, resume_step=0)
    run.store.announce(attempt.number, PolicyVersion(version=0, location="", size=0, checksum=""))
    run.meta = run.store.meta()
    run.push("a.2")  # it would be half of a step, were groups of the void one there to fill it

    def has_read() -> bool:
        envs = run.store.heartbeats("batcher").get("leader", {}).get("envs", {})
        return envs.get("a", {}).get("groups_ready") == 1

    served.wait_for(has_read)
    run.push("a.3")
    header = served.wait_for(lambda: run.store.wait_step(1, block_seconds=0))
    assert set(header.group_ids) == {"a.2", "a.3"}
    assert run.store.ledger().envs["a"].dropped["void"][0] == 4
    assert run.store.verify().findings == ()
