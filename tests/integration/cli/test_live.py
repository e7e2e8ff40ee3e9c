"""Live views on a real terminal device."""

from __future__ import annotations

import json
import os
import pty
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from looks import lines_of
from rich.console import Console, ConsoleDimensions
from rich.text import Text

from rlbuffer.config.settings import RunSettings
from rlbuffer_cli import live

ALTERNATE_SCREEN_OFF = "\x1b[?1049l"


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A terminal in place of stdout. -> its other side."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        yield ours
    os.close(ours)


def drawn(terminal: int) -> str:
    os.set_blocking(terminal, False)
    text = b""
    try:
        while chunk := os.read(terminal, 65536):
            text += chunk
    except BlockingIOError:
        pass
    return text.decode()


def until(terminal: int, holds: Callable[[str], bool]) -> str:
    """What is drawn until it holds."""
    text, deadline = "", time.monotonic() + 60
    while not holds(text):
        assert time.monotonic() < deadline, text
        text += drawn(terminal)
        time.sleep(0.02)
    return text


def drain(terminal: int, over: threading.Event) -> None:
    while not over.wait(0.01):
        drawn(terminal)


def steps(settings: RunSettings, *numbers: int) -> None:
    settings.output_dir.mkdir(parents=True, exist_ok=True)
    with (settings.output_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"event": "step", "step": n, "reward": 0.5}) + "\n" for n in numbers)


def test_what_is_said_stands_in_the_log_and_stays_when_the_screen_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    watch = live.LiveRun(RunSettings(home=tmp_path), opening="the opening", asks=False)
    with terminal(monkeypatch) as device:
        with live.shown(watch):
            watch.say("said\x1b[2J\nbehind it")
            print("printed by a library")
            shown = until(device, lambda text: "printed by a library" in text)
        end = drawn(device)
    assert shown.index("said\\x1b[2J") < shown.index("behind it") < shown.index("printed by a library")
    assert ALTERNATE_SCREEN_OFF in end
    kept = end[end.index(ALTERNATE_SCREEN_OFF) :]
    assert kept.index("said\\x1b[2J") < kept.index("behind it") < kept.index("printed by a library")
    assert "\x1b[2J" not in shown + end


def test_a_terminal_that_is_halted_holds_up_nothing_that_is_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = RunSettings(home=tmp_path)
    seen, is_there = [], threading.Event()

    def on_step(record: object) -> None:
        seen.append(record)
        if len(seen) == 3:
            is_there.set()

    with terminal(monkeypatch) as device:
        watch = live.LiveRun(settings, asks=False, on_step=on_step)
        talker = threading.Thread(target=sys.stdout.write, args=("x" * 1_000_000,))  # more than a terminal takes
        with live.shown(watch), watch:
            talker.start()
            watch.say("x" * 1_000_000)
            steps(settings, 1, 2, 2, 3)
            assert is_there.wait(60)
            assert talker.is_alive()
            over = threading.Event()
            reader = threading.Thread(target=drain, args=(device, over))
            reader.start()
        talker.join()
        over.set()
        reader.join()
    assert [record.step for record in watch.records] == [1, 2, 3]


def test_made_up_steps_wait_for_no_batcher_and_those_of_before_are_left_out(tmp_path: Path) -> None:
    settings = RunSettings(home=tmp_path)
    steps(settings, 1)
    with live.LiveRun(settings, opening="the steps are made up", asks=False, from_end=True) as watch:
        assert lines_of(watch) == ["the steps are made up"]
        steps(settings, 2)
    assert [record.step for record in watch.records] == [2]
    assert "step 2 of" in lines_of(watch)[0]


@pytest.mark.parametrize("count", [10, 24, 25, 60])
def test_a_view_that_a_terminal_has_no_room_for_says_what_it_leaves_out(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch) as device:
        monkeypatch.setattr(Console, "size", ConsoleDimensions(80, 24))
        with live.Screen(Text("\n".join(f"<{n}>" for n in range(count)))) as shown:
            shown.refresh()
            lines = drawn(device)
    seen = sum(f"<{n}>" in lines for n in range(count))
    assert seen == (count if count <= 24 else 23)
    assert (f"{count - 23} lines more" in lines) == (count > 24)
    assert ("…" in lines) == (count > 24)
