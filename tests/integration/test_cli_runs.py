"""`runs`, `step void`, `rewind` and `reset` on runs that are there. In memory."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from store_runs import Run

from rlbuffer_cli.main import main

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def made(tmp_path: Path) -> Run:
    run = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    for i in range(3):
        run.step(f"a.{i}")
    run.push("a.3", version=3)
    return run


@pytest.fixture
def call(made: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.chdir(tmp_path)
    for name in ("RLBUFFER_REDIS_URL", "RLBUFFER_RUN", "RLBUFFER_CONFIG"):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setenv("RLBUFFER_HOME", str(tmp_path / "home"))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments, "--redis", made.url])
        return code, *capsys.readouterr()

    return run


def test_runs_lists_what_the_server_holds(made: Run, call: Call) -> None:
    code, out, err = call("runs")
    assert (code, err) == (0, "")
    assert out.startswith(f"{made.store.run:<24} step      3  trained      0         2 rollouts pending  opened 20")
    record = json.loads(call("runs", "--json")[1])
    assert (record["run"], record["step"], record["pending_rollouts"]) == (made.store.run, 3, 2)
    made.store.delete_run()
    assert call("runs")[1].startswith("no runs on memory://")


def test_void_and_rewind_say_from_where_the_run_goes_on(made: Run, call: Call) -> None:
    name, epoch = made.store.run, made.meta.epoch
    code, out, _ = call("step", "void", "3", "--run", name)
    assert code == 0
    assert out == (
        f'run "{name}" goes on from step 2 in epoch {epoch + 1}: 1 steps are void. '
        "Start the trainer again from a checkpoint of step 2 or before.\n"
    )
    newer = made.home / "home" / "runs" / name / "checkpoints" / "step-00000002"
    newer.mkdir(parents=True)
    (newer.parent / "step-00000001").mkdir()
    assert call("rewind", "1", "--run", name) == (
        0,
        (
            f'run "{name}" goes on from step 1 in epoch {epoch + 2}: 1 steps and 1 pending pushes are void. '
            f"Move newer checkpoints away ({newer}), then start the trainer again.\n"
        ),
        "",
    )
    newer.rmdir()
    code, out, _ = call("rewind", "1", "--run", name)
    assert code == 0
    assert out == (
        f'run "{name}" goes on from step 1 in epoch {epoch + 3}: 0 steps and 0 pending pushes are void. '
        "Start the trainer again from a checkpoint of step 1 or before.\n"
    )
    code, _, err = call("rewind", "9", "--run", name)
    assert (code, err) == (1, f"Error: run {name!r} has no step 9: the last committed one is 1.\n")
    assert call("verify", "--run", name)[0] == 0


def test_a_trainer_at_work_is_ended_only_by_force(made: Run, call: Call) -> None:
    made.train(1)
    code, _, err = call("rewind", "1", "--run", made.store.run)
    assert code == 1
    assert err.startswith(f"Error: the trainer of run {made.store.run!r} was seen 0.")
    assert err.endswith(" s ago: stop it first, or use --force, which ends it\n")
    assert call("rewind", "1", "--force", "--run", made.store.run)[0] == 0


def test_reset_asks_for_yes_and_then_removes_everything(made: Run, call: Call) -> None:
    name = made.store.run
    code, _, err = call("reset", name)
    assert code == 2
    message = f'Error: this removes run "{name}" (3 steps, 2 pending rollouts) for good: say so with --yes\n'
    assert err.endswith(message)
    code, out, _ = call("reset", name, "--yes")
    assert (code, out.startswith(f'run "{name}" (3 steps, 2 pending rollouts) is gone: ')) == (0, True)
    assert made.control_keys() == {}
    assert call("reset", name, "--yes")[0] == 1
