"""Groups, a batcher and a trainer together on a real server: what everybody hears when one of them fails."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import waits
from daemon_runs import Served, start_trainer
from store_runs import Run

import rlbuffer
from rlbuffer.client.reader import Reader
from rlbuffer.errors import BatcherFailed, ConfigError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Wait, Waiting

pytest_plugins = ("store_fixtures",)

CONFIG = rlbuffer.BatcherConfig(64, step_groups=2, max_age=8)


def push_groups(run: Run, *names: str) -> None:
    for name in names:
        run.push(name, rewards=[0.0, 1.0])


def a_reader(run: Run, seconds: float) -> Reader:
    return run.closes(Reader(run.again(), rank=0, world_size=1, timeout_seconds=seconds))


def test_an_estimator_that_fails_stops_the_batcher_and_every_waiting_rank_hears_why(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("estimators_of_a_test")
    module.half = lambda rewards, lengths, group: rewards[1:]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "estimators_of_a_test", module)
    run = served.run
    served.serve(
        rlbuffer.BatcherConfig(64, step_groups=2, max_age=8, envs={"a": {"advantage": "estimators_of_a_test:half"}})
    )
    push_groups(run, "a.0", "a.1")
    sentence = (
        r"ConfigError: batcher.envs.a.advantage = 'estimators_of_a_test:half' gave numbers of shape \[1\] for group "
        r"\S+ of env a: it must be one for each of 2 rollouts"
    )
    with pytest.raises(BatcherFailed, match=rf"the batcher of run .* failed: {sentence}"):
        next(a_reader(run, 30).steps())
    assert isinstance(served.wait_for(lambda: served.errors, checks_errors=False)[0], ConfigError)
    account = run.store.ledger().envs["a"]
    assert (account.pending[0], dict(account.dropped)) == (4, {})


def test_a_group_that_lost_payloads_of_several_parts_before_the_commit_drops_as_a_whole(served: Served) -> None:
    run = served.run
    start_trainer(run)
    for part in range(3):
        run.push("a.0", size=1, rewards=[float(part)], planned_size=3, rollout_ids=[f"a.0/{part}"])
    keys = [entry.payload_key for entry in run.pool()]
    for key in keys[:2]:
        run.client.delete(key)
    push_groups(run, "a.1", "a.2")
    served.serve(CONFIG)
    served.wait_for(lambda: run.store.meta().step == 1 and run.store.ledger().envs["a"].pending[0] == 0)
    account = run.store.ledger().envs["a"]
    assert (account.pushed[0], account.packed[0], account.dropped["invalid"][0]) == (7, 4, 3)


def test_a_trainer_that_has_gone_silent_is_named_as_what_everybody_waits_for(served: Served) -> None:
    run = served.run
    served.serve(CONFIG)
    reader = a_reader(run, 60)
    reader.start(0)
    reader.announce(PolicyVersion(version=0))
    push_groups(run, *(f"a.{n}" for n in range(6)))
    busy = Waiting(kind=Wait.TRAINER_BUSY, step=2, limit=1, at=0)
    served.wait_for(lambda: waits.said(run.store) == busy)
    reader.close()
    run.client.hset(run.store.keys.trainer, "seen", int(1000 * (run.store.now() - 25)))
    gone = Waiting(kind=Wait.TRAINER_GONE, step=2, seconds=20.0)
    served.wait_for(lambda: waits.said(run.store) == gone)
