"""A process that cannot work says so before the run begins: it leaves none behind. And how a run ended is said."""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import waits
from daemon_runs import Served
from store_runs import Run

import rlbuffer
from rlbuffer.client.reader import Reader
from rlbuffer.config.settings import RunSettings, ScoreSettings, WorkerSettings
from rlbuffer.daemon import Daemon
from rlbuffer.errors import ConfigError, RunGone
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Wait, Waiting

pytest_plugins = ("store_fixtures",)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[rlbuffer.Buffer]:
    """A server without a run, and a module whose functions refuse."""
    module = ModuleType("refusing")
    vars(module)["judge"] = vars(module)["pick"] = 3
    monkeypatch.setitem(sys.modules, "refusing", module)
    settings = RunSettings(home=tmp_path, score={"s": ScoreSettings(reward="refusing:judge")})
    with rlbuffer.connect(f"memory://{uuid.uuid4().hex}", run="r", config=settings) as buffer:
        yield buffer


def nothing_is_left(buffer: rlbuffer.Buffer) -> bool:
    with pytest.raises(RunGone):
        buffer.store.meta()
    return buffer.store.runs() == {}


def test_a_worker_whose_env_is_refused_begins_no_run(fresh: rlbuffer.Buffer) -> None:
    from rlbuffer.worker.loop import run_worker

    with pytest.raises(ConfigError, match=r"^env 'nosuch' is not one of"):
        run_worker(fresh, "w", WorkerSettings(env="nosuch"), stop=threading.Event())
    assert nothing_is_left(fresh)


def test_a_scorer_whose_function_is_refused_begins_no_run(fresh: rlbuffer.Buffer) -> None:
    from rlbuffer.scorer.loop import run_scorer

    with pytest.raises(ConfigError, match="is not callable"):
        run_scorer(fresh, "s", "s", fresh.settings, stop=threading.Event())
    assert nothing_is_left(fresh)


def test_a_batcher_whose_selector_is_refused_begins_no_run(fresh: rlbuffer.Buffer) -> None:
    daemon = Daemon(fresh, rlbuffer.BatcherConfig(64, order="refusing:pick"))
    with pytest.raises(ConfigError, match="is not callable"):
        daemon.run(threading.Event())
    assert nothing_is_left(fresh)


def test_a_trainer_that_has_made_its_steps_is_not_called_silent_and_nobody_is_told_to_start_it(
    served: Served,
) -> None:
    run = served.run
    reader = Reader(run.again(), rank=0, world_size=1, timeout_seconds=60)
    reader.start(0)
    reader.announce(PolicyVersion(version=0))
    served.serve(rlbuffer.BatcherConfig(64, step_groups=1, max_age=8, lookahead=0))
    run.push("a.0")
    reader.trained(reader.pull(1))
    reader.finished()
    reader.close()
    ended = Waiting(kind=Wait.ENDED, step=1)
    served.wait_for(lambda: waits.said(run.store) == ended, 20)
    run.push("a.1")  # a step ahead of the trainer, and then no more
    served.wait_for(lambda: run.store.meta().step == 2, 20)
    served.wait_for(lambda: waits.said(run.store) == ended, 20)


def test_a_group_shows_its_rewards_in_the_order_of_its_rollouts(run: Run) -> None:
    """A step holds them in the order of its rows: the longest first."""
    run.push("a.0", lengths=[4, 30, 8, 16], rewards=[0.1, 0.2, 0.3, 0.4])
    run.step()
    with rlbuffer.connect(run.url, run=run.store.run) as buffer:
        assert buffer.group("a.0").view.rewards == (0.1, 0.2, 0.3, 0.4)
        (view,) = buffer.groups("state:packed")
        assert view.rewards == (0.1, 0.2, 0.3, 0.4)
