"""A leader whose steps wait for slow groups: by the tickets that live, over a takeover too, and for no dead holder."""

from __future__ import annotations

import waits
from daemon_runs import Served, start_trainer
from looks import allowances
from store_runs import Run

import rlbuffer
from rlbuffer.records.waiting import Wait

pytest_plugins = ("store_fixtures",)

CONFIG = rlbuffer.BatcherConfig(64, step_groups=2, max_age=0, lookahead=0, slow="wait", slow_wait_seconds=600)


def serve(served: Served) -> None:
    heard = len(served.said("ready"))
    served.serve(CONFIG)
    served.wait_for(lambda: len(served.said("ready")) > heard, 20)


def tickets(served: Served, n: int, *, ttl_seconds: float) -> None:
    served.wait_for(lambda: allowances(served.run.store), 20)
    assert served.run.store.take_tickets("a", n, ttl_seconds=ttl_seconds) == [*range(n)]


def group_ids(run: Run) -> list[str]:
    (header,) = run.store.headers()
    return list(header.group_ids)


def test_a_takeover_goes_on_waiting_for_the_tickets_that_live(served: Served) -> None:
    run = served.run
    start_trainer(run)
    serve(served)
    tickets(served, 2, ttl_seconds=600)
    for number in (1, 2):  # the last one has no ticket
        run.push(f"a.{number}")
    served.wait_for(lambda: waits.kind(run.store) is Wait.SLOW, 20)
    served.stop()
    serve(served)
    served.wait_for(lambda: waits.kind(run.store) is Wait.SLOW, 20)
    assert run.store.meta().step == 0
    run.push("a.0")
    served.wait_for(lambda: run.store.meta().step == 1, 20)
    assert group_ids(run) == ["a.0", "a.1"]


def test_a_ticket_that_nobody_renews_is_not_waited_for(served: Served) -> None:
    run = served.run
    start_trainer(run)
    serve(served)
    tickets(served, 2, ttl_seconds=1)
    for number in (1, 2):
        run.push(f"a.{number}")
    served.wait_for(lambda: run.store.meta().step == 1, 20)
    assert group_ids(run) == ["a.1", "a.2"]


def test_a_ticket_that_was_taken_anew_counts_with_its_new_version(served: Served) -> None:
    run = served.run
    number = start_trainer(run)
    serve(served)
    tickets(served, 1, ttl_seconds=600)
    run.store.release_tickets("a", [0])
    for name in ("a.1", "a.2"):
        run.push(name)
    served.wait_for(lambda: run.store.meta().step == 1, 20)
    run.store.announce(number, rlbuffer.PolicyVersion(version=1))
    run.store.report(number, epoch=run.meta.epoch, trained=1, digest="", oldest_kept=0)
    served.wait_for(lambda: run.store.take_tickets("a", 1, ttl_seconds=600) == [0], 20)
    for name in ("a.3", "a.4"):
        run.push(name, version=1)
    served.wait_for(lambda: waits.kind(run.store) is Wait.SLOW, 20)
    run.push("a.0", version=1)
    served.wait_for(lambda: run.store.meta().step == 2, 20)
    assert [header.group_ids for header in run.store.headers()][-1] == ("a.0", "a.3")
