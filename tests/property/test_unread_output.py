"""A reader that is there and does not read: nobody waits for it, and what it gets is whole lines, in order, none
unaccounted for."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbuffer.process import output
from rlbuffer.process.output import _Outliving

COUNT = re.compile(rb"\.\.\. (\d+) lines? left out: nobody read them\n")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "UNREAD_SECONDS", 0.05)
    monkeypatch.setattr(output, "READER_LOOK_SECONDS", 0.0)


@contextmanager
def piped(size: int = 4096) -> Iterator[tuple[_Outliving, int]]:
    """A pipe of that size: the stream that writes into it, and where it is read."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, size)
    os.set_blocking(reader, False)
    try:
        with _Outliving(writer, "w") as stream:
            yield stream, reader
    finally:
        os.close(reader)


def taken(reader: int, most: int = 1 << 20) -> bytes:
    try:
        return os.read(reader, most)
    except BlockingIOError:
        return b""


def line(number: int, width: int, is_json: bool) -> bytes:
    if is_json:
        return json.dumps({"event": "step", "step": number, "more": "x" * width}).encode() + b"\n"
    return b"%d %s\n" % (number, b"x" * width)


def missing(text: bytes, is_json: bool) -> int:
    """Lines that this one stands for; 0 for an ordinary one."""
    if is_json:
        record = json.loads(text)
        return int(record["lines"]) if record["event"] == "left_out" else 0
    count = COUNT.fullmatch(text)
    return int(count[1]) if count else 0


@pytest.mark.parametrize("is_json", [False, True])
@given(data=st.data())
def test_the_reader_gets_whole_lines_and_a_word_for_each_that_it_lacks(is_json: bool, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch, piped() as (stream, reader):
        patch.setattr(output, "UNREAD_SECONDS", 0.0)
        patch.setattr(output, "MOST_KEPT_BYTES", kept := data.draw(st.integers(0, 30_000)))
        widths = data.draw(st.lists(st.integers(0, 9000), min_size=1, max_size=30))
        written = b"".join(line(number, width, is_json) for number, width in enumerate(widths))
        cuts = sorted(data.draw(st.sets(st.integers(1, len(written) - 1), max_size=30)))
        got = b""
        for start, end in pairwise([0, *cuts, len(written)]):
            assert stream.write(written[start:end]) == end - start
            got += taken(reader, data.draw(st.sampled_from([0, 1, 1000, 5000, 1 << 20])) or 1)
        for _ in range(1 + len(written) // 1000):  # it reads again, and there is something to say
            got += taken(reader)
            stream.write(b"")
        got += taken(reader)
    lines = got.splitlines(keepends=True)
    newest = written[max(0, len(written) - kept) :].partition(b"\n")[2]
    assert got.endswith(newest)
    expected = 0
    for text in lines:
        if left_out := missing(text, is_json):
            expected += left_out
        else:
            assert text == line(expected, widths[expected], is_json)
            expected += 1
    assert expected == len(widths)


def test_a_write_waits_for_a_reader_once_and_then_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    poll, waits = select.poll, list[int]()
    monkeypatch.setattr(select, "poll", lambda: (waits.append(1), poll())[1])
    with piped() as (stream, reader):
        stream.write(b"a" * 9_999 + b"\n")
        assert waits
        waits.clear()
        for number in range(20_000):
            stream.write(b"%d\n" % number)
        assert waits == []
        got = b""
        while not got.endswith(b"again\n"):
            got += taken(reader)
            stream.write(b"again\n")
        assert got.startswith(b"a" * 9_999 + b"\n...")
        assert b"\n19999\nagain\n" in got


def test_the_last_lines_come_at_the_end_of_the_process_if_somebody_reads_them_then() -> None:
    script = """if True:
        import sys
        from rlbuffer.process import output
        output.UNREAD_SECONDS = 0.1
        output.outlive_readers()
        print("a" * 4095, "first", sep="\\n", flush=True)
        output.UNREAD_SECONDS = 60.0
        print("last")
        print("ends", file=sys.stderr, flush=True)
    """
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with subprocess.Popen([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(writer)
        assert process.stderr is not None
        assert process.stderr.readline() == b"ends\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)  # it waits for its reader
        with os.fdopen(reader, "rb") as stream:
            assert stream.read() == b"a" * 4095 + b"\nfirst\nlast\n"
    assert process.returncode == 0


def test_a_slow_reader_that_reads_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "UNREAD_SECONDS", 30.0)
    text, got = b"b" * 49_999 + b"\n", bytearray()
    with piped() as (stream, reader):

        def read() -> None:
            while len(got) < len(text):
                got.extend(taken(reader, 1000))
                time.sleep(0.0002)

        thread = threading.Thread(target=read)
        thread.start()
        stream.write(text)
        thread.join()
    assert got == text


def test_the_streams_own_flags_stay_as_they_are() -> None:
    with piped() as (stream, _):
        stream.write(b"c\n")
        assert os.get_blocking(stream.fileno())


def test_a_socket_that_nobody_reads_holds_nobody_up() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, _Outliving(ours.fileno(), "w", closefd=False) as stream:
        for _ in range(100):
            stream.write(b"d" * 99_999 + b"\n")
        theirs.setblocking(False)
        got = b""
        while b"left out" not in got:
            try:
                got += theirs.recv(1 << 20)
            except BlockingIOError:
                stream.write(b"again\n")
    assert COUNT.search(got)


def test_a_terminal_that_is_halted_holds_nobody_up() -> None:
    master, terminal = os.openpty()
    try:
        os.set_blocking(master, False)
        with _Outliving(terminal, "w") as stream:
            stream.write(b"before\n")
            termios.tcflow(terminal, termios.TCOOFF)  # ctrl-S
            for number in range(100):
                stream.write(b"%d\n" % number)
            assert taken(master) == b"before\r\n"
            termios.tcflow(terminal, termios.TCOON)  # ctrl-Q
            stream.write(b"after\n")
            got = taken(master)
        assert got.split() == [*(b"%d" % number for number in range(100)), b"after"]
    finally:
        os.close(master)


def test_another_descriptor_in_its_place_is_written_to() -> None:
    """As a supervised process, whose output is led into its log."""
    with piped() as (stream, reader):
        stream.write(b"here\n")
        other, end = os.pipe()
        os.dup2(end, stream.fileno())
        os.close(end)
        stream.write(b"there\n")
        assert (taken(reader), os.read(other, 100)) == (b"here\n", b"there\n")
        os.close(other)
