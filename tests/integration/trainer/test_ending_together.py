"""The launcher's watch over its ranks: who is gone, who has just begun, who is done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlbuffer.trainer.launch import end_together
from rlbuffer.trainer.launch.end_together import EndTogether, note_end, note_start


def note(directory: Path, rank: int, pid: int, begin: str) -> None:
    (directory / f"{rank}.pid").write_text(f"{pid} {begin}")


def test_a_rank_that_begins_while_the_others_are_looked_for_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = end_together.os.kill

    def look_while_another_begins(pid: int, number: int) -> None:
        note_start(tmp_path, 1)
        real(pid, number)

    note_start(tmp_path, 0)
    monkeypatch.setattr(end_together.os, "kill", look_while_another_begins)
    assert not EndTogether(tmp_path)._has_failed()


def test_a_rank_that_is_done_while_it_is_looked_for_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_while_it_ends(pid: int, number: int) -> None:
        note_end(tmp_path, 0)
        raise ProcessLookupError

    note_start(tmp_path, 0)
    monkeypatch.setattr(end_together.os, "kill", look_while_it_ends)
    assert not EndTogether(tmp_path)._has_failed()


def test_a_rank_whose_number_another_process_has_by_now_is_gone_and_the_other_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_together, "END_SECONDS", 0.0)
    monkeypatch.setattr(end_together, "RANKS_LOOK_SECONDS", 0.01)
    sleeps = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with (
        subprocess.Popen(sleeps, stdin=subprocess.PIPE) as stranger,
        subprocess.Popen(sleeps, stdin=subprocess.PIPE) as hanging,
    ):
        note(tmp_path, 0, stranger.pid, "1")
        note(tmp_path, 1, hanging.pid, end_together._begin_of(hanging.pid))
        with EndTogether(tmp_path) as together:
            assert hanging.wait(60) == -9
        assert together.killed == {1}
        assert stranger.poll() is None
        stranger.communicate()


@pytest.mark.parametrize("content", [b"", b"12", b"x y", b"1 2 3", b"\xff\xfe"])
def test_a_file_that_no_rank_wrote_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(end_together, "END_SECONDS", 0.0)
    monkeypatch.setattr(end_together, "RANKS_LOOK_SECONDS", 0.01)
    (tmp_path / "0.pid").write_bytes(content)
    (tmp_path / "1.pid").mkdir()
    (tmp_path / "rank-0.json").write_bytes(content)  # a rank that left a report has failed, whatever is in it
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as hanging:
        note(tmp_path, 2, hanging.pid, end_together._begin_of(hanging.pid))
        with EndTogether(tmp_path) as together:
            assert hanging.wait(60) == -9
        assert together.killed == {2}
