"""Names that come again in other groups, names at their full length, and names without end."""

from __future__ import annotations

import pytest
from store_runs import Run

from rlbuffer.store import worker
from rlbuffer.store.operator import LISTED
from rlbuffer.testing import make_group
from rlbuffer.wire import payload

pytest_plugins = ["store_fixtures"]


def test_rollouts_of_two_groups_may_have_the_same_ids(run: Run) -> None:
    """Parts name their rollouts themselves, and nobody says that they must know the names of other groups."""
    for group_id in ("a.0", "a.1"):
        run.push(group_id, size=1, planned_size=2, rollout_ids=["first"])
        run.push(group_id, size=1, planned_size=2, rollout_ids=["second"])
    run.lead()
    first = [entry for entry in run.pool() if entry.group_id == "a.0"]
    run.commit(entries=first)
    run.commit()
    assert run.store.meta().step == 2
    report = run.store.verify()
    assert report.findings == ()
    run.store.count_damaged(1, ["a.0 first", "a.1 first"])
    assert run.store.ledger().damaged == 2


def test_a_rollout_that_is_in_two_steps_is_still_found(run: Run) -> None:
    run.step("a.0")
    run.push("a.0", version=1)
    run.commit()
    found = [finding.message for finding in run.store.verify().findings if finding.invariant == "I1"]
    assert "rollout a.0/0 of group a.0 is in step 1 and in step 2" in found


def test_the_history_of_a_rewind_names_thousands_of_groups_with_the_longest_names(run: Run) -> None:
    groups = [make_group(size=1, env="e" * 64, group_id=f"{i:0128d}", lengths=[2]) for i in range(LISTED)]
    with run.client.pipeline(transaction=False) as pipe:
        for group in groups:
            info = group.info()
            fields = {"env": info.env, "group": info.group_id, "key": "u.1", "rollouts": 1, "tokens": 2}
            pipe.xadd(run.store.keys.pool, {**fields, "metadata": payload.encode_info(info)})
        pipe.execute()
    assert run.store.rewind(0)["entries"] == LISTED
    (record,) = run.store.history()
    assert (record["event"], len(record["groups"]), record["unlisted"]) == ("rewind", LISTED, 0)
    assert {row[0] for row in record["groups"]} == {group.group_id for group in groups}


def test_the_visits_of_prompts_that_never_come_again_do_not_fill_the_server(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MOST_VISITS", 20)
    for i in range(60):
        run.store.note_visits("a", f"prompt {i}", "s")
    assert run.client.hlen(run.store.keys.visits("a")) == 20

    monkeypatch.setattr(worker, "MOST_VISITS", 5)  # a run from before there was this limit
    monkeypatch.setattr(worker, "FORGOTTEN_AT_ONCE", 4)
    for i in range(5):
        run.store.note_visits("a", f"later {i}", "m")
    assert run.client.hlen(run.store.keys.visits("a")) == 5
