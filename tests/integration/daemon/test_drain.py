"""A run that gives no more tickets: it comes to rest, and goes on when it is told to."""

from __future__ import annotations

import waits
from daemon_runs import Served, start_trainer
from looks import allowances
from store_runs import Run

import rlbuffer
from rlbuffer.records.waiting import Wait

pytest_plugins = ("store_fixtures",)

CONFIG = rlbuffer.BatcherConfig(64, step_groups=2, max_age=8)


def start(served: Served) -> int:
    """A leader that has heard its trainer, and gives tickets."""
    run = served.run
    number = start_trainer(run)
    served.serve(CONFIG)
    served.wait_for(lambda: served.said("ready"), 20)
    beat(run, number)
    served.wait_for(lambda: allowances(run.store), 20)
    return number


def beat(run: Run, number: int, trained: int = 0) -> None:
    run.store.report(number, epoch=run.meta.epoch, trained=trained, digest="", oldest_kept=0)


def test_what_is_out_is_finished_and_steps_are_made_while_they_can_be(served: Served) -> None:
    run = served.run
    number = start(served)
    tickets = run.store.take_tickets("a", 3, ttl_seconds=60)
    assert len(tickets) == 3
    run.store.ask_drain()
    assert run.store.take_tickets("a", 1, ttl_seconds=60) == []
    assert allowances(run.store) == {}
    served.wait_for(lambda: waits.kind(run.store) is Wait.DRAINING, 20)
    for ticket in tickets:
        run.push(f"a.{ticket}")
    served.wait_for(lambda: run.store.meta().step == 1, 20)
    beat(run, number, trained=1)
    served.wait_for(lambda: len(run.pool()) == 1 and waits.kind(run.store) is Wait.DRAINING, 20)
    assert [entry.group_id for entry in run.pool()] == [f"a.{tickets[2]}"]
    assert run.store.take_tickets("a", 1, ttl_seconds=60) == []
    assert run.store.ask_undrain() is True
    assert run.store.ask_undrain() is False
    served.wait_for(lambda: run.store.take_tickets("a", 1, ttl_seconds=60), 20)


def test_a_drain_outlives_the_leader_that_heard_of_it(served: Served) -> None:
    run = served.run
    start(served)
    since = run.store.ask_drain()
    served.stop()
    served.serve(CONFIG)
    served.wait_for(lambda: served.said("ready") and waits.kind(run.store) is Wait.DRAINING, 20)
    assert run.store.ask_drain() == since == run.store.meta().draining_ms
    assert run.store.take_tickets("a", 1, ttl_seconds=60) == []


def test_a_silent_env_stops_no_run_that_drains(served: Served) -> None:
    run = served.run
    number = start_trainer(run)
    run.store.ask_drain()
    for n in range(8):
        run.push(f"a.{n}")
    halves = {"budgets": {"a": 0.5, "b": 0.5}, "env_dead_after_seconds": 0.3, "on_dead_env": "stop"}
    served.serve(rlbuffer.BatcherConfig(64, step_groups=4, max_age=8, **halves))
    served.wait_for(lambda: served.said("ready"), 20)
    beat(run, number)
    served.wait_for(lambda: waits.kind(run.store) is Wait.DRAINING, 30)
    assert not served.said("env", state="dead")
    assert not served.errors


def test_a_request_that_comes_late_does_not_drain_a_run_that_goes_on_again(served: Served) -> None:
    run = served.run
    keys = run.store.keys
    epoch = run.store.meta().epoch
    late = ("drain", epoch, 0)  # sent, lost on its way, and sent again by the operator
    run.store.ask_drain()
    run.store.ask_undrain()
    assert run.store.move("ask", (keys.meta, keys.allowance), late) == [b"CHANGED"]
    assert (run.store.meta().asked, run.store.meta().draining_ms) == (2, 0)
    run.store.ask_drain()
    assert run.store.move("ask", (keys.meta, keys.allowance), ("undrain", epoch, 1)) == [b"CHANGED"]
    assert run.store.meta().draining_ms
