"""Lines at the foot of a real terminal device: what a person sees when it is written to, and when its size changes."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminals import Screen

from rlbuffer.checks.loading import load
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer_cli.commands.serve import _Status
from rlbuffer_cli.render.foot import Foot


class Terminal:
    """A device, and the screen behind it."""

    def __init__(self, width: int) -> None:
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w")
        self._screen = Screen(width)
        self.resize(width)

    def resize(self, width: int) -> None:
        self.read()
        self._screen.width = width
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))

    def read(self) -> None:
        """Takes in what was written."""
        os.set_blocking(self._master, False)
        text = b""
        try:
            while chunk := os.read(self._master, 65536):
                text += chunk
        except BlockingIOError:
            pass
        self._screen.feed(text.decode())

    @property
    def rows(self) -> list[str]:
        """The visible rows."""
        self.read()
        return self._screen.rows

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal(60)
    yield made
    made.close()


def test_lines_stay_at_the_foot_and_what_is_said_stays_above(terminal: Terminal) -> None:
    lines = ["step 1"]
    foot = Foot(lambda width: lines, terminal.stream)
    foot.say("begun")
    assert terminal.rows == ["begun", "step 1"]
    lines[:] = ["step 2", "and more"]
    foot.say("! an error")
    assert terminal.rows == ["begun", "! an error", "step 2", "and more"]
    lines[:] = ["step 3"]
    foot.say("another")
    assert terminal.rows == ["begun", "! an error", "another", "step 3"]
    foot.close()
    assert terminal.rows == ["begun", "! an error", "another", ""]


@pytest.mark.parametrize("widths", [(40, 20, 60), (25, 100), (59, 58, 57), (20, 60, 20)])
def test_another_width_leaves_nothing_of_the_old_lines(terminal: Terminal, widths: tuple[int, ...]) -> None:
    foot = Foot(lambda width: ["x" * width, ("words " * 15).rstrip(), "end"], terminal.stream)
    foot.say("begun")
    said = ["begun"]
    for width in widths:
        terminal.resize(width)
        foot.say(str(width))
        said.append(str(width))
        rows = textwrap.wrap("words " * 15, width - 1)
        assert terminal.rows == [*said, "x" * (width - 1), *rows, "end"]
    foot.close()
    assert terminal.rows == ["begun", *map(str, widths), ""]


def test_the_lines_are_drawn_anew_without_anything_said(terminal: Terminal) -> None:
    import threading

    drawn = threading.Event()
    asked: list[int] = []

    def lines(width: int) -> list[str]:
        asked.append(width)
        if len(asked) > 2:
            drawn.set()
        return [f"drawn {min(len(asked), 2)}"]

    with Foot(lines, terminal.stream):
        assert drawn.wait(30)
        assert terminal.rows == ["drawn 2"]
    assert terminal.rows == [""]


def test_the_last_lines_may_stay(terminal: Terminal) -> None:
    foot = Foot(lambda width: ["done"], terminal.stream)
    foot.close(keep=True)
    assert terminal.rows == ["done", ""]


SERVER = {"name": "valkey", "version": "7.2", "address": "unix:///s"}
READY = {"event": "ready", "run": "math", "step": 2, "server": SERVER}


def test_serve_shows_what_it_waits_for_until_it_waits_no_more() -> None:
    status = _Status(load())
    assert "connecting" in status.lines(80)[0]
    status.take(READY)
    status.take({"event": "waiting", "sentence": "nothing there"})
    assert status.lines(80)[0].endswith("s: nothing there")
    status.take({"event": "step", "step": 3})
    assert status.lines(80) == ["step 3 · at work"]


@pytest.mark.parametrize("width", [40, 60, 200])
def test_serve_shows_a_sentence_to_its_end_however_narrow_the_terminal_is(terminal: Terminal, width: int) -> None:
    sentence = str(Waiting(kind=Wait.TRAINER_GONE, step=2, seconds=20.0))
    status = _Status(load())
    status.take(READY)
    status.take({"event": "waiting", "sentence": sentence})
    terminal.resize(width)
    foot = Foot(status.lines, terminal.stream)
    for _ in range(2):
        foot.say("step 2")
    seen = terminal.rows
    assert seen[:2] == ["step 2"] * 2
    assert " ".join(seen[2:]) == f"step 2 · waiting 0 s: {sentence}"
    foot.close()
    assert terminal.rows == ["step 2", "step 2", ""]


def test_nothing_is_shown_where_nobody_looks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from rlbuffer_cli.starting import clear, starting

    starting("loading")
    clear()
    assert capfd.readouterr() == ("", "")
