"""The ranks' processes leave when they are asked to, however long their step and their checkpoint take."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from rlbuffer.config.settings import RunSettings
from rlbuffer.trainer.launch import processes
from rlbuffer.trainer.launch.processes import INTERRUPTED, LEAVE_SECONDS, RankEnd, leave_seconds, run_ranks


def busy_rank(folder: str, seconds: float) -> None:
    """Ends its step and writes its checkpoint once it was asked to stop."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    Path(folder, f"works-{os.environ['RANK']}").touch()
    asked.wait()
    time.sleep(seconds)
    Path(folder, "checkpoint").touch()
    raise SystemExit(INTERRUPTED)


def failing_rank(folder: str, seconds: float) -> None:
    """Fails instead."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    Path(folder, f"works-{os.environ['RANK']}").touch()
    asked.wait()
    if os.environ["RANK"] == "0":
        raise SystemExit(1)
    time.sleep(seconds)


def refused_rank(folder: str, seconds: float) -> None:
    """Cannot write its checkpoint."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    Path(folder, f"works-{os.environ['RANK']}").touch()
    asked.wait()
    lost = os.environ["RANK"] == "0"
    RankEnd(exit_code=1, text="a peer is lost" if lost else "no space left", is_consequence=lost).leave()
    raise SystemExit(1)


def asked_to_leave(main: Any, folder: Path, seconds: float, leave: float, world_size: int = 1) -> tuple[RankEnd, float]:
    stop, context = threading.Event(), get_context("forkserver")
    ends: list[RankEnd] = []
    began = 0.0

    def run() -> None:
        arguments = (str(folder), seconds)
        ends.append(run_ranks(context, main, arguments, world_size=world_size, stop=stop, leave_seconds=leave))

    thread = threading.Thread(target=run)
    thread.start()
    while len([*folder.glob("works-*")]) < world_size:
        time.sleep(0.02)
    began = time.monotonic()
    stop.set()
    thread.join()
    return ends[0], time.monotonic() - began


def test_ranks_that_are_asked_to_leave_end_their_step_and_their_checkpoint(tmp_path: Path) -> None:
    end, _ = asked_to_leave(busy_rank, tmp_path, 1.0, 60.0)
    assert end.exit_code == INTERRUPTED
    assert (tmp_path / "checkpoint").exists()


def test_a_rank_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    asked_to_leave(busy_rank, tmp_path, 600.0, 0.5)
    assert not (tmp_path / "checkpoint").exists()


def test_what_a_rank_could_not_do_while_it_left_is_said(tmp_path: Path) -> None:
    end, _ = asked_to_leave(refused_rank, tmp_path, 0.0, 60.0, world_size=2)
    assert (end.exit_code, end.text, end.is_final) == (INTERRUPTED, "no space left", True)


def test_a_rank_that_can_leave_no_word_says_it_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What /tmp holds is swept after some days, and it may be full: a rank that fails there must end all the same."""
    monkeypatch.setenv("RANK_ENDS_FOLDER", str(tmp_path / "swept"))
    monkeypatch.setenv("RANK", "0")
    RankEnd(exit_code=1, text="Rank 0 failed").leave()
    assert capsys.readouterr().err == "Rank 0 failed\n"


def test_nobody_waits_for_the_others_of_a_rank_that_fails_while_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "END_SECONDS", 0.5)
    _, seconds = asked_to_leave(failing_rank, tmp_path, 600.0, 600.0, world_size=2)
    assert seconds < 300


def test_ranks_have_the_time_of_an_exchange_to_leave() -> None:
    settings = RunSettings.model_validate({"run": "r", "trainer": {"timeout_seconds": 1000.0}})
    assert leave_seconds(settings) == 1000.0 + LEAVE_SECONDS
