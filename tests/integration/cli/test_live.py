"""Live views on a real terminal device."""

from __future__ import annotations

import json
import os
import pty
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from looks import lines_of
from rich.console import Console, ConsoleDimensions
from rich.text import Text

from rlbuffer.config.settings import RunSettings
from rlbuffer_cli import live


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


def steps(settings: RunSettings, *numbers: int) -> None:
    settings.output_dir.mkdir(parents=True, exist_ok=True)
    with (settings.output_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"event": "step", "step": n, "reward": 0.5}) + "\n" for n in numbers)


def test_what_is_said_stays_above_the_view_and_controls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as device:
        with live.shown("the view", keep=False) as shown:
            live.say(shown, "said\x1b[2J")
        text = drawn(device)
    assert text.index("said\\x1b[2J") < text.rindex("the view")
    assert "\x1b[2K" in text[text.rindex("the view") :], "the view is taken away"


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
        watch = live.Watch(settings, asks=False, on_step=on_step)
        with live.shown("the view") as shown, watch:
            talker = threading.Thread(target=live.say, args=(shown, "x" * 1_000_000))  # more than a terminal takes
            talker.start()
            steps(settings, 1, 2, 2, 3)
            assert is_there.wait(60)
            assert talker.is_alive()
            while talker.is_alive():
                drawn(device)
    assert [record.step for record in watch.records] == [1, 2, 3]


def test_made_up_steps_wait_for_no_batcher_and_those_of_before_are_left_out(tmp_path: Path) -> None:
    settings = RunSettings(home=tmp_path)
    steps(settings, 1)
    with live.Watch(settings, opening="the steps are made up", asks=False, from_end=True) as watch:
        assert lines_of(watch) == ["the steps are made up"]
        steps(settings, 2)
    assert [record.step for record in watch.records] == [2]
    assert "step 2 of" in lines_of(watch)[0]


@pytest.mark.parametrize("count", [10, 24, 25, 60])
def test_a_view_that_a_terminal_has_no_room_for_says_what_it_leaves_out(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch) as screen:
        monkeypatch.setattr(Console, "size", ConsoleDimensions(80, 24))
        with live.shown(Text("\n".join(f"<{n}>" for n in range(count))), is_whole=True, keep=False) as shown:
            shown.refresh()
            lines = drawn(screen)
    seen = sum(f"<{n}>" in lines for n in range(count))
    assert seen == (count if count <= 24 else 23)
    assert (f"{count - 23} lines more" in lines) == (count > 24)
    assert ("…" in lines) == (count > 24)
