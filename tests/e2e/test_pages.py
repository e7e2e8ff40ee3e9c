"""The commands of the pages, run as they stand there: each must print what its page shows."""

from __future__ import annotations

import difflib
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from forked import Parent
from homes import Home, a_home
from page_blocks import Command, File, blocks, prints, shape
from terminals import ANSI, typed

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OWN_RUN = DOCS / "tutorial" / "your_own_run.md"
AT_WORK = (
    "guide/operate/doctor.md",
    "guide/operate/top.md",
    "guide/operate/pause_env.md",
    "guide/operate/drop.md",
    "guide/operate/change_settings.md",
    "guide/operate/stop.md",
    "guide/inspect.md",
    "guide/recorded.md",
)
"""Pages for a run at work; each leaves it as it was."""
STOPPED = ("guide/operate/plot.md", "guide/operate/rewind.md", "guide/operate/remove.md")
"""Pages for a run that has ended; the last one removes it."""
ALONE = ("tutorial/first_run.md",)
"""Pages that begin in an empty folder."""
SECONDS = 60.0
COLUMNS = 100
END_OF_SCREEN = b"\x1b[?1049l"
"""What a program sends when it leaves a screen of its own."""
SEEN_STEPS = 20
"""Steps that a run has made before it is looked at."""
FIRST, LAST = 0.4, 0.6
"""Mean reward of the first five steps at most, and of the last twenty at least."""


class Reader:
    """Somebody in an empty folder who does what a page says."""

    def __init__(self, home: Home) -> None:
        self.home = home
        # No other file of settings is found; a checkout's commands come first.
        home.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{home.environment['PATH']}"
        home.environment |= {"COLUMNS": str(COLUMNS), "NO_COLOR": "1"}

    def follows(self, page: Path) -> None:
        """Writes the files of a page and types its commands; what stays at work is ended with the page."""
        staying = []
        for block in blocks(page):
            if isinstance(block, File):
                (self.home.path / block.name).write_text(block.text, encoding="utf-8")
            elif block.stays:
                staying.append(self.begins(block))
            elif block.in_terminal:
                _, *words = shlex.split(block.text)
                place, long = self.home.path, 5 * SECONDS
                drawn = typed(words, place, until=b"", keys=b"", columns=COLUMNS, seconds=long, **self.home.environment)
                printed = ANSI.sub(b"", drawn.rpartition(END_OF_SCREEN)[2]).decode().splitlines()
                assert prints(printed, block.output), _difference(block, printed)
            else:
                process, log = self._starts(block)
                self.home.ended(process, SECONDS)
                assert prints(_lines(log), block.output), _difference(block, _lines(log))
        for process in reversed(staying):
            process.send_signal(signal.SIGINT)
            self.home.ended(process, SECONDS)

    def begins(self, command: Command) -> Any:
        """Starts what stays, and waits until it has printed what the page shows. -> its process."""
        process, log = self._starts(command)
        deadline = time.monotonic() + 3 * SECONDS
        while not prints(_lines(log), command.output, may_go_on=True):
            assert time.monotonic() < deadline, _difference(command, _lines(log))
            assert process.poll() is None, _difference(command, _lines(log))
            time.sleep(0.2)
        return process

    def _starts(self, command: Command) -> tuple[Any, Path]:
        log = self.home.path / f"page-{len(self.home.processes)}.log"
        words = shlex.split(command.text)
        plain = not set(command.text) & set("|><;$*&")
        # These are started as a person starts them: forked, they would have their members say more.
        if words[0] == "rlbuffer" and plain and words[1] not in ("run", "demo"):
            return self.home.start_python("-m", "rlbuffer_cli", *words[1:], log=log.stem), log
        if words[0] == "python" and plain:
            return self.home.start_python(*words[1:], log=log.stem), log
        code = "import os, sys; os.execvp('bash', ['bash', '-c', sys.argv[1]])"
        return self.home.start_python("-c", code, command.text, log=log.stem), log


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").splitlines()


def _difference(command: Command, printed: list[str]) -> str:
    lines = difflib.unified_diff(shape(command.output), shape(printed), "the page", "printed", lineterm="")
    return "\n".join([f"{command.place}: $ {command.text}", *lines, "", "whole:", *printed[-80:]])


@pytest.fixture(scope="module")
def own_run(parent: Parent) -> Iterator[Home]:
    """The folder of somebody who has done what the page about a run of one's own says."""
    with a_home(parent) as home:
        Reader(home).follows(OWN_RUN)
        yield home


@pytest.fixture(scope="module")
def at_work(parent: Parent) -> Iterator[Home]:
    """The same run, at work for as long as somebody looks."""
    with a_home(parent) as home:
        for block in blocks(OWN_RUN):
            if isinstance(block, File):
                (home.path / block.name).write_text(block.text, encoding="utf-8")
        made = home.call("config", "init", "--env", "my_envs:Larger")
        assert made.returncode == 0, made.stderr
        home.environment |= {"RLBUFFER_TRAINER__STEPS": "100000", "RLBUFFER_RUN": "larger"}
        home.start("run", "rlbuffer.toml", "--display", "plain", log="run")
        home.wait_until(lambda: len(home.metrics("larger")) >= SEEN_STEPS, seconds=60, why=f"step {SEEN_STEPS}")
        yield home


def test_a_run_of_ones_own_prints_what_its_page_shows_and_learns(own_run: Home) -> None:
    rewards = [record["reward"] for record in own_run.metrics("larger")]
    assert fmean(rewards[:5]) < FIRST
    assert fmean(rewards[-20:]) > LAST
    for run in ("mine", "both"):  # with a worker, and a worker and a trainer, of one's own
        with own_run.connect(run) as buffer:
            rewards = [record["reward"] for record in buffer.store.history() if record["event"] == "step"]
            assert fmean(rewards[-5:]) < FIRST < fmean(rewards[:5])


@pytest.mark.parametrize("page", AT_WORK)
def test_the_commands_of_a_page_print_what_it_shows_of_a_run_at_work(at_work: Home, page: str) -> None:
    Reader(at_work).follows(DOCS / page)


@pytest.mark.parametrize("page", STOPPED)
def test_the_commands_of_a_page_print_what_it_shows_of_a_run_that_has_ended(own_run: Home, page: str) -> None:
    own_run.environment["RLBUFFER_RUN"] = "larger"  # others were opened later
    Reader(own_run).follows(DOCS / page)


@pytest.mark.parametrize("page", ALONE)
def test_the_commands_of_a_page_print_what_it_shows_in_an_empty_folder(home: Home, page: str) -> None:
    Reader(home).follows(DOCS / page)
