"""`drop`: pending groups that an operator does not want, with and without a leader."""

from __future__ import annotations

from daemon_runs import Served, start_trainer
from store_runs import Run

import rlbuffer
from rlbuffer.client.operations import choose

pytest_plugins = ("store_fixtures",)


def test_what_the_filter_chooses_goes_whole_and_is_counted(run: Run) -> None:
    run.push("a.0", size=2, planned_size=4, rollout_ids=["a.0/0", "a.0/1"], lengths=[8, 8])
    run.push("a.0", size=1, planned_size=4, rollout_ids=["a.0/2"], lengths=[8])
    run.push("a.1", lengths=[9, 9])
    run.push("b.0", lengths=[8, 8])
    chosen = choose(run.store, "env:a state:forming")
    assert [drop.group_id for drop, _ in chosen.drops] == ["a.0"]
    assert (chosen.rollouts, chosen.tokens, chosen.envs()) == (3, 24, {"a": (1, 3, 24)})
    assert run.store.drop_pending(chosen.drops) == 2
    assert run.store.drop_pending(chosen.drops) == 0  # repeated: nothing is counted twice
    assert sorted(entry.group_id for entry in run.pool()) == ["a.1", "b.0"]
    account = run.store.ledger().envs["a"]
    assert (account.dropped, account.pending) == ({"operator": (3, 24)}, (2, 18))
    assert run.client.hget(run.store.keys.ledger, "a:dropped:operator:groups") == b"1"
    (record,) = run.store.history()
    assert (record["reason"], record["detail"]) == ("operator", "rlbuffer drop --where 'env:a state:forming'")
    assert run.store.closed_groups() == ["a.0"]
    assert run.store.verify().ok


def test_a_part_that_comes_after_the_drop_is_late(served: Served) -> None:
    run = served.run
    start_trainer(run)
    run.push("a.0", size=2, planned_size=4, rollout_ids=["a.0/0", "a.0/1"])
    served.serve(rlbuffer.BatcherConfig(64, step_groups=1, max_age=8))
    served.wait_for(lambda: served.said("ready"))
    run.store.drop_pending(choose(run.store, "id:a.0").drops)
    served.wait_for(lambda: served.said("read again"), 20)
    run.push("a.0", size=2, planned_size=4, rollout_ids=["a.0/2", "a.0/3"])
    (late,) = served.wait_for(lambda: served.said("drop", reason="late"), 20)
    assert late["group_id"] == "a.0"
    dropped = run.store.ledger().envs["a"].dropped
    assert {reason: rollouts for reason, (rollouts, _) in dropped.items()} == {"operator": 2, "late": 2}


def test_what_is_in_a_step_already_is_passed_over(run: Run) -> None:
    run.push("a.0")
    run.push("a.1")
    chosen = choose(run.store, "env:a")
    run.lead()
    run.commit(entries=[entry for entry in run.pool() if entry.group_id == "a.0"])
    assert run.store.drop_pending(chosen.drops) == 1
    ledger = run.client.hgetall(run.store.keys.ledger)
    assert ledger[b"a:dropped:operator:groups"] == b"1"
    assert ledger[b"a:packed:groups"] == b"1"
    assert run.store.verify().ok


def test_a_step_that_was_planned_with_a_dropped_group_is_planned_again_without_it(run: Run) -> None:
    run.push("a.0")
    run.push("a.1")
    run.lead()
    planned = run.pool()
    run.store.drop_pending(choose(run.store, "id:a.0").drops)
    status, gone = run.commit(entries=planned)
    assert (status, gone) == ("gone", [planned[0].entry_id])
    assert run.commit()[0] == "ok"
    assert run.store.verify().ok
