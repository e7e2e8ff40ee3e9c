"""A leader whose step takes longer to make than its lease lasts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from daemon_runs import Served, start_trainer
from store_runs import Run

from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.daemon import lease_keeper, pending
from rlbuffer.daemon.lease_keeper import LeaseKeeper
from rlbuffer.errors import LeaseLost
from rlbuffer.records.waiting import Wait, Waiting

pytest_plugins = ("store_fixtures",)

LEASE_SECONDS = 1.0
"""Lease of the daemons here (daemon_runs)."""
SLOW = BatcherConfig(64, step_groups=1, advantage=f"{__name__}:think", lookahead=5)


IS_THINKING = threading.Event()


def think(rewards: Any, lengths: Any, group: Any) -> Any:
    """An estimator that takes two and a half leases."""
    IS_THINKING.set()
    time.sleep(2.5 * LEASE_SECONDS)
    return rewards - rewards.mean()


def until(what: Callable[[], Any]) -> Any:
    while not (value := what()):
        time.sleep(0.01)
    return value


def test_steps_that_take_longer_than_the_lease_are_made_by_one_leader_while_another_stands_by(served: Served) -> None:
    run = served.run
    number = start_trainer(run)
    run.push("a.0")
    for _ in range(2):
        served.serve(SLOW)
    run.store.report(number, epoch=run.meta.epoch, trained=0, digest="", oldest_kept=0)
    served.wait_for(lambda: served.said("step", step=1), 60.0)
    assert len(served.said("ready")) == 1
    assert not served.said("leader", state="lost")


def test_a_part_that_came_in_time_joins_however_late_the_leader_reads_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "POOL_PAGE", 1)
    run = served.run
    start_trainer(run)
    IS_THINKING.clear()
    served.serve(replace(SLOW, group_timeout_seconds=LEASE_SECONDS, min_group_size=2))
    run.push("a.0")
    assert IS_THINKING.wait(60)
    for first in (0, 2):
        run.push("a.1", rollout_ids=[f"a.1/{first}", f"a.1/{first + 1}"], planned_size=4)
    served.wait_for(lambda: served.said("step", step=2), 60.0)
    assert run.store.ledger().total().dropped == {}


def test_whoever_waits_is_told_that_a_step_takes_long_to_make(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_keeper, "SLOW_RENEWAL_SECONDS", 0.0)
    run.lead("leader", ttl_seconds=0.6)
    said: list[Waiting] = []
    with LeaseKeeper(run.store, lease_seconds=0.6, say=said.append) as keeper:
        keeper.check(7)
        until(lambda: said)
    assert (said[0].kind, said[0].step) == (Wait.BUILDING, 7)


def test_a_leader_whom_the_server_leaves_without_an_answer_is_not_said_to_be_slow(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over a connection that was cut on the way, while others are served: the lease is renewed meanwhile."""
    monkeypatch.setattr(lease_keeper, "SLOW_RENEWAL_SECONDS", 0.5)
    run.lead("leader", ttl_seconds=0.6)
    said: list[Waiting] = []
    with LeaseKeeper(run.store, lease_seconds=0.6, say=said.append) as keeper:
        keeper.check(7)
        run.store.look(lambda client: until(lambda: said))
        assert (said[0].kind, said[0].step) == (Wait.UNANSWERED, 7)
        assert "slow function" not in str(said[0])
        said.clear()
        until(lambda: said)
    assert said[0].kind is Wait.BUILDING


def test_a_leader_that_hangs_loses_its_lease_to_the_standby(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_keeper, "LONGEST_TURN_SECONDS", 0.5)
    run.lead("hangs", ttl_seconds=0.6)
    other = run.again()
    with LeaseKeeper(run.store, lease_seconds=0.6, say=print) as keeper:
        taken = until(lambda: (found := other.lease("standby", ttl_seconds=60)).held and found)
        assert taken.token > run.token
        with pytest.raises(LeaseLost):
            keeper.check()


def test_a_lease_that_expired_in_between_is_lost_although_nobody_else_took_it(run: Run) -> None:
    run.lead("leader", ttl_seconds=60)
    with LeaseKeeper(run.store, lease_seconds=0.3, say=print) as keeper:
        keeper.check()
        run.client.hset(run.store.keys.lease, "until", 1)  # as after a halt of the whole process

        with pytest.raises(LeaseLost):
            until(keeper.check)
