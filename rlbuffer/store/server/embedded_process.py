"""The embedded server as a process: whether it lives, and what it leaves behind when it died."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

children: dict[int, subprocess.Popen[bytes]] = {}
"""Servers that this process started: their parent must reap them, or they look alive after they died."""


def left_behind(directory: Path, group: int) -> list[int]:
    """Processes of the dead server's group that have its lock from it. The group's number alone says nothing: once the
    last of them is gone, it is given out again, to a program of anybody's."""
    pids = []
    with contextlib.suppress(OSError):
        lock = (directory / "alive.lock").stat()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[2]) == group and _has_open(process, lock):
                    pids.append(int(process.name))
    return pids


def _has_open(process: Path, file: os.stat_result) -> bool:
    """True when the process has it open. What the process closes while its files are looked at is passed over."""
    for opened in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(opened.stat(), file):
                return True
    return False


def is_dead(recorded: Mapping[str, Any]) -> bool:
    """The recorded process is gone, a zombie, or another program by now. False when none is recorded."""
    pid = recorded.get("pid")
    if not isinstance(pid, int):
        return False
    if _reap(pid):
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return True
    status, program = state_and_program(pid)
    return status == "Z" or recorded.get("program") not in (None, program)


def state_and_program(pid: int) -> tuple[str, str | None]:
    """(state letter, program name) from /proc; ("", None) where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "", None
    return text[text.rindex(")") + 2], text[text.index("(") + 1 : text.rindex(")")]


def _reap(pid: int) -> bool:
    """True when it was a child of this process and has ended."""
    child = children.get(pid)
    if child is None or child.poll() is None:
        return False
    children.pop(pid, None)
    return True
