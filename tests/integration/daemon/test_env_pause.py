"""Pausing an env: on a real server and in memory, through the store, the batcher and the command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import waits
from daemon_runs import Served, start_trainer
from looks import allowances
from store_runs import Run

import rlbuffer
from rlbuffer.records.waiting import Wait
from rlbuffer.store.member import Member
from rlbuffer_cli.main import main

pytest_plugins = ("store_fixtures",)

HALVES = {"step_groups": 4, "budgets": {"a": 0.5, "b": 0.5}, "max_age": 8}


def wait_for_step(served: Served, step: int, seconds: float = 10.0) -> Any:
    return served.wait_for(lambda: served.run.store.wait_step(step, block_seconds=0), seconds)


def start(served: Served, **settings: Any) -> Run:
    """One env sends, the other one is silent, and the step waits for it."""
    run = served.run
    start_trainer(run)
    for n in range(8):
        run.push(f"a.{n}")
    served.serve(rlbuffer.BatcherConfig(64, **(HALVES | settings)))
    return run


def test_pause_and_resume_are_remembered_and_say_whether_they_changed_anything(run: Run) -> None:
    assert run.store.paused() == frozenset()
    assert [run.store.pause("a"), run.store.pause("b"), run.store.pause("a")] == [True, True, False]
    assert run.again().paused() == {"a", "b"}
    assert [run.store.resume("a"), run.store.resume("a")] == [True, False]
    assert run.store.paused() == {"b"}


def test_after_a_pause_the_next_step_does_not_wait_for_the_env_any_more(served: Served) -> None:
    run = start(served)
    served.wait_for(lambda: waits.kind(run.store) is Wait.ENV_SHORT)
    assert run.store.wait_step(1, block_seconds=0) is None
    run.store.pause("b")
    assert wait_for_step(served, 1, seconds=5.0).group_ids == ("a.0", "a.1", "a.2", "a.3")
    assert allowances(run.store)["b"] == 0
    assert served.said("env", env="b", state="paused")
    run.store.resume("b")
    served.wait_for(lambda: served.said("env", env="b", state="resumed"))
    served.wait_for(lambda: allowances(run.store)["b"] > 0)
    served.wait_for(lambda: run.store.verify().ok)


def test_an_env_that_was_paused_before_the_batcher_started_is_paused(served: Served) -> None:
    served.run.store.pause("b")
    start(served)
    assert wait_for_step(served, 1).group_ids == ("a.0", "a.1", "a.2", "a.3")


def test_a_dead_env_is_told_of_and_told_of_when_it_is_back(served: Served) -> None:
    run = start(served, env_dead_after_seconds=0.3)
    event = served.wait_for(lambda: served.said("env", env="b", state="dead"))[0]
    assert event["env"] == "b"
    served.wait_for(lambda: waits.kind(run.store) is Wait.ENV_DEAD)
    run.push("b.0")
    served.wait_for(lambda: served.said("env", env="b", state="back"))
    assert "b.0" in wait_for_step(served, 1).group_ids


def test_on_dead_env_stop_tells_every_waiting_rank_why(served: Served) -> None:
    run = start(served, env_dead_after_seconds=0.3, on_dead_env="stop")
    served.wait_for(lambda: served.errors or run.store.meta().error, checks_errors=False)
    error = served.wait_for(lambda: run.store.meta().error, checks_errors=False)
    assert re.match(r"RlbufferError: step 1 cannot be made: b has sent nothing for \d+ s", error)
    assert error.endswith("(batcher.on_dead_env = stop)")


def test_the_command_pauses_and_resumes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with rlbuffer.connect(run="r", config={"home": str(home)}) as buffer:
        buffer.store.role(Member).open_run()
        buffer.store.role(Member).heartbeat("worker", "math-0", {"env": "math"})
        for action in ("pause", "pause", "resume", "resume"):
            assert main(["env", action, "math", "--home", str(home), "--run", "r"]) == 0
            assert buffer.store.paused() == (frozenset({"math"}) if action == "pause" else frozenset())
    for action in ("pause", "done", "resume"):
        assert main(["env", action, "mth", "--home", str(home), "--run", "r"]) == 1
        assert "'mth'. Did you mean math?" in capsys.readouterr().err
    assert main(["env", "pause", "a b", "--home", str(home)]) == 2
