"""Runs one program, and ends with it all that it has started. Imports nothing of rlbuffer: it starts in some 30 ms.

    keeper.py CONTROL REPORT PROGRAM ARGUMENT...

It stands between a worker and a program, since a worker that is killed can clean nothing up. CONTROL is a pipe to read
from: its end says that the worker is gone, or wants the program killed. REPORT is a pipe to write to, which hears how
the program ended: ``exit CODE``, ``signal NUMBER``, or ``error WHY`` where it did not start.

The program has a session of its own. On Linux this process adopts whatever that leaves behind, also what has left its
session (PR_SET_CHILD_SUBREAPER); and the program is killed if this process is (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

KILL_SECONDS = 10.0
"""Longest that killing may take; a process that hangs in the kernel is left to it."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TASKS = Path("/proc/self/task")


def main(control: int, report: int, command: list[str]) -> None:
    """Runs the program."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        program = subprocess.Popen(
            command,
            start_new_session=True,
            preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # no thread runs yet
        )
    except (OSError, ValueError) as error:
        _tell(report, f"error {error}")
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # its end is told by CONTROL alone

    def watch() -> None:
        os.read(control, 1)
        _kill_group(program.pid)
        _kill_children()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if hasattr(os, "waitid"):  # no macOS before Python 3.13
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != program.pid:
            os.waitpid(ended.si_pid, 0)  # adopted
    else:
        program.wait()
    _kill_group(program.pid)  # its number is not given again while the group has members
    code = program.wait()
    _kill_children()
    _tell(report, f"exit {code}" if code >= 0 else f"signal {-code}")


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _kill_children() -> None:
    """Kills every child of this process until it has none: what a child leaves becomes one."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        for child in _children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            gone, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not gone:
            time.sleep(0.005)


def _children() -> list[int]:
    found = list[int]()
    with suppress(OSError):
        for task in TASKS.iterdir():
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def _prctl(option: int, value: int) -> None:
    """Nothing where it is no Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _tell(report: int, what: str) -> None:
    with suppress(BrokenPipeError):
        os.write(report, what.encode(errors="replace")[:4000])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
