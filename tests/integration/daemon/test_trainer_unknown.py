"""Nothing is sampled, and nothing kept, for a trainer of which the leader does not know what it can still train."""

from __future__ import annotations

import pytest
from daemon_runs import Served
from looks import allowances
from store_runs import Run

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.records.policy_version import PolicyVersion

pytest_plugins = ("store_fixtures",)

CONFIG = BatcherConfig(64, step_groups=2, max_age=1, lookahead=0)


def left_behind(run: Run) -> None:
    """A leader of before has let 4 groups be sampled; one of them is pushed."""
    run.lead()
    run.store.set_allowances({"a": 4})
    assert run.store.take_tickets("a", 4, ttl_seconds=60.0) == [0, 1, 2, 3]
    run.push("a.0")
    run.store.release_lease()


@pytest.mark.parametrize("trainer", ["none", "without weights", "of the server before its restart"])
def test_an_allowance_of_before_ends_with_the_takeover_of_a_leader_that_knows_no_trainer(
    run: Run, served: Served, trainer: str
) -> None:
    if trainer != "none":
        number = run.store.attempt(uuid="t", world_size=1, resume_step=0).number
        run.store.report(number, epoch=run.meta.epoch, trained=0, digest="", oldest_kept=0)
        if trainer != "without weights":
            run.store.announce(number, PolicyVersion(version=0))
            run.client.hset(run.store.keys.trainer, "server", "another")
    left_behind(run)
    served.serve(CONFIG)
    tickets = run.store.keys.tickets("a")
    served.wait_for(lambda: run.client.zcard(tickets) == 3)  # the one whose group is read is closed
    assert run.store.take_tickets("a", 4, ttl_seconds=60.0) == []
    run.push("a.1")
    served.wait_for(lambda: run.client.zcard(tickets) == 2)
    assert run.store.take_tickets("a", 4, ttl_seconds=60.0) == []


def test_what_is_too_old_for_the_open_step_goes_while_the_trainer_is_away(run: Run, served: Served) -> None:
    for step in (1, 2, 3):
        run.step(f"a.{step}")
    number = run.train(2)
    run.client.delete(run.store.keys.state)  # of a test, and none that a batcher wrote
    run.store.announce(number, PolicyVersion(version=2))
    run.store.release_lease()
    served.serve(CONFIG)
    served.wait_for(lambda: allowances(run.store))
    run.push("a.10", version=1)  # of weights of before: step 4 trains versions 2 and 3
    run.push("a.11", version=2)
    served.wait_for(lambda: [entry.group_id for entry in run.pool()] == ["a.11"])
    assert run.store.meta().step == 3
    served.wait_for(lambda: [drop["reason"] for drop in served.said("drop")] == ["stale"])
