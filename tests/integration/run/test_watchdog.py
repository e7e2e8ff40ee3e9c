"""The watchdog and the signals of a process, on real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

BEGIN = """
import re, signal, threading, time
from rlbuffer.process import watchdog
from rlbuffer.process.signals import stop_on_signals

watchdog.HELD_SECONDS, watchdog.GRACE_SECONDS, watchdog.WIND_SECONDS = 1.0, 0.5, 0.1

def hold():
    re.fullmatch("(a+)+b", "a" * 64)

def block():
    time.sleep(3600)

stop = threading.Event()
with stop_on_signals(stop), watchdog.ended_when_stuck(stop):
    print("begun", flush=True)
"""


def start(inside: str, *, after: str = "") -> subprocess.Popen[str]:
    program = BEGIN + textwrap.indent(inside, "    ") + "\n" + after
    process = subprocess.Popen(
        [sys.executable, "-c", f"exec(compile({program!r}, 'own.py', 'exec'))"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize(
    ("stuck", "place"),
    [
        pytest.param("threading.Thread(target=hold).start(); block()", '"own.py", line 9 in hold', id="a thread holds"),
        pytest.param("hold()", '"own.py", line 9 in hold', id="the main thread holds"),
        pytest.param("block()", '"own.py", line 12 in block', id="the main thread blocks"),
        pytest.param(
            "thread = threading.Thread(target=block); thread.start(); thread.join()",
            '"own.py", line 12 in block',
            id="a thread is waited for",
        ),
    ],
)
def test_a_process_that_cannot_end_itself_is_ended_and_says_where_it_was(stuck: str, place: str) -> None:
    process = start(stuck)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert place in said


def test_a_process_that_works_for_long_and_ends_when_it_is_asked_to_is_left_alone() -> None:
    process = start("import hashlib\nwhile not stop.is_set(): hashlib.sha256(bytes(10**6))\nprint('ended')")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2.5)
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out, said) == (0, "ended\n", "")


def test_the_second_signal_ends_a_process_that_blocks_at_once() -> None:
    process = start("watchdog.GRACE_SECONDS = 600.0\nblock()")
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130


def test_nothing_is_left_of_it_afterwards_though_the_process_was_asked_to_stop() -> None:
    process = start(
        "before = threading.active_count()\nsignal.raise_signal(signal.SIGTERM)",
        after="print(stop.is_set(), before - threading.active_count(), flush=True)\n"
        "time.sleep(2 * watchdog.GRACE_SECONDS)\nsignal.raise_signal(signal.SIGTERM)",
    )
    assert process.stdout is not None
    out = process.stdout.read()  # communicate() would miss what came together with the first line
    _, said = process.communicate(timeout=60)
    assert (out, said, process.returncode) == ("True 1\n", "", -signal.SIGTERM)
