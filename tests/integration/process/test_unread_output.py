"""A process of a run whose reader leaves, or is there and does not read: it does what it would have done, and the
reader gets whole lines, in order, none unaccounted for."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import termios
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BEGIN = """
import logging, os, sys
from rlbuffer.process import logs
"""


@contextmanager
def process(script: str, stdout: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the script; its stderr is read, and a line on its stdin lets it go on."""
    command = [sys.executable, "-c", BEGIN + textwrap.dedent(script), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE) as started:
        os.close(stdout)
        yield started
        if started.poll() is None:
            started.kill()


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """A small one."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(reader, "rb", closefd=False):
        yield reader, writer
    os.close(reader)


def go_on(started: subprocess.Popen[bytes]) -> None:
    assert started.stdin is not None
    started.stdin.write(b"\n")
    started.stdin.flush()


def said(started: subprocess.Popen[bytes]) -> bytes:
    assert started.stderr is not None
    return started.stderr.readline()


def everything(reader: int) -> bytes:
    with os.fdopen(reader, "rb", closefd=False) as stream:
        return stream.read()


@pytest.mark.parametrize("display", ["plain", "json"])
def test_who_prints_waits_for_nobody_and_what_the_reader_missed_is_counted(display: str) -> None:
    script = """
        logs.KEPT_BYTES = 5_000
        logs.start(sys.argv[1], clock=False)
        log = logging.getLogger("rlbuffer.somewhere")
        for number in range(3000):
            log.info("%d", number, extra=logs.fields("number"))
        print("done", file=sys.stderr, flush=True)
        sys.stdin.readline()
        logs.UNREAD_SECONDS = 60.0
        logs.stop()
        print("at last")
    """
    with pipe() as (reader, writer), process(script, writer, display) as started:
        assert said(started) == b"done\n"
        go_on(started)
        lines = everything(reader).decode().splitlines()
        assert started.wait() == 0
    *texts, last = lines
    *numbers, count = [json.loads(text)["text"] for text in texts] if display == "json" else texts
    assert numbers == [str(number) for number in range(len(numbers))]
    assert int(re.sub(r"\D", "", count)) + len(numbers) == 3000
    assert last == "at last"


@pytest.mark.parametrize("reader_is", ["gone", "late"])
def test_a_process_without_a_reader_ends_with_its_own_code(reader_is: str) -> None:
    script = """
        logs.UNREAD_SECONDS = 0.1
        logs.outlive_readers()
        for number in range(10_000):
            print(number)
        print("done", file=sys.stderr, flush=True)
        sys.exit(7)
    """
    with pipe() as (reader, writer):
        if reader_is == "gone":
            os.dup2(os.open(os.devnull, os.O_RDONLY), reader)
        with process(script, writer) as started:
            assert said(started) == b"done\n"
            assert started.wait() == 7
            assert said(started) == b""


def test_the_last_lines_come_at_the_end_of_the_process_if_somebody_reads_them_then() -> None:
    script = """
        logs.UNREAD_SECONDS = 60.0
        logs.outlive_readers()
        print("a" * 9999)
        print("last")
        print("ends", file=sys.stderr, flush=True)
    """
    with pipe() as (reader, writer), process(script, writer) as started:
        assert said(started) == b"ends\n"
        with pytest.raises(subprocess.TimeoutExpired):
            started.wait(0.5)  # it waits for its reader
        assert everything(reader) == b"a" * 9999 + b"\nlast\n"
        assert started.wait() == 0


def test_a_terminal_that_is_halted_holds_nobody_up() -> None:
    script = """
        logs.UNREAD_SECONDS = 60.0
        logs.outlive_readers()
        print("before")
        sys.stdin.readline()
        for number in range(100):
            print(number)
        print("done", file=sys.stderr, flush=True)
    """
    master, terminal = os.openpty()
    halting = os.dup(terminal)
    with process(script, terminal) as started:
        assert os.read(master, 100) == b"before\r\n"
        termios.tcflow(halting, termios.TCOOFF)  # ctrl-S
        go_on(started)
        assert said(started) == b"done\n"
        termios.tcflow(halting, termios.TCOON)  # ctrl-Q
        got = b""
        while not got.endswith(b"99\r\n"):
            got += os.read(master, 1000)
        assert started.wait() == 0
    assert got.split() == [b"%d" % number for number in range(100)]
    os.close(halting)
    os.close(master)


def test_a_process_that_is_forked_from_one_prints_by_itself() -> None:
    script = """
        logs.start(clock=False)
        if not (child := os.fork()):
            logging.getLogger("rlbuffer.child").info("a line")
            print("and another", flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print("the last")
    """
    with pipe() as (reader, writer), process(script, writer) as started:
        assert everything(reader) == b"a line\nand another\nthe last\n"
        assert started.wait() == 0
