"""The processes of a run that a fault may strike, found again each time, and the signals sent to them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
from homes import Home

KINDS = ("worker", "serve", "rank", "server")
"""Kinds to kill: each at least as often as the others, except for the remainder."""


class Processes:
    """Processes that `rlbuffer run` supervises in a home, by kind."""

    def __init__(self, home: Home, supervisor_pid: int, *, run: str = "tiny", server_pid: int = 0) -> None:
        self._home = home
        self._output = home.path / "runs" / run
        self._supervisor = psutil.Process(supervisor_pid)
        self._server_pid = server_pid
        """Of a server that the run does not start itself."""
        self._struck: set[int] = set()

    def find(self, kind: str) -> dict[str, int]:
        """name -> pid of the living processes of a kind, without those that were killed already."""
        if kind == "server":
            pid = self._server_pid or int(_read(self._home.path / "server" / "server.json").get("pid", 0))
            found = {"server": pid}
            ours = {pid}  # whoever needed it started it, and may be gone
        else:
            listed = _read(self._output / ("ranks.json" if kind == "rank" else "pids.json"))
            found = {name: pid for name, pid in listed.items() if name.split(" ")[0].split("-")[0] == kind}
            # Numbers may have been given to others meanwhile: only what descends from the supervisor is ours.
            ours = {process.pid for process in self._supervisor.children(recursive=True)}
        return {name: pid for name, pid in found.items() if pid in ours - self._struck and _is_alive(pid)}

    def kill(self, name: str, pid: int) -> None:
        """Sends SIGKILL."""
        self._struck.add(pid)
        _signal(pid, signal.SIGKILL)

    def pause(self, pid: int, seconds: float) -> threading.Thread:
        """SIGSTOP, and SIGCONT after `seconds`."""
        _signal(pid, signal.SIGSTOP)

        def go_on() -> None:
            time.sleep(seconds)
            _signal(pid, signal.SIGCONT)

        thread = threading.Thread(target=go_on)
        thread.start()
        return thread


def _read(path: Path) -> dict[str, int]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}  # not written yet, or the run is over


def _is_alive(pid: int) -> bool:
    try:
        return pid > 0 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended by itself in between
