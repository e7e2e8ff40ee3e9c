"""Who a process is, for others to tell: host and number, and whether such a one may be there still."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from socket import gethostname
from typing import Any

from rlbuffer.state.heartbeats import FRESH_SECONDS


@cache
def visible_from() -> str:
    """The processes whose numbers mean something here: those of this machine since its start, in this PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return gethostname()


def identity() -> dict[str, Any]:
    """The fields of a heartbeat that say whose it is."""
    return {"pid": os.getpid(), "host": gethostname(), "space": visible_from()}


def named(beat: Mapping[str, Any]) -> str:
    """``pid 7 on a.example``."""
    return f"pid {beat.get('pid')} on {beat.get('host')}"


def may_live(beat: Mapping[str, Any]) -> bool:
    """Another process than this one, whose heartbeat this is, may be there still. Of one whose number says nothing here
    only silence tells."""
    pid = beat.get("pid")
    if beat.get("left") or not isinstance(pid, int) or pid <= 0:
        return False
    if beat.get("space") != visible_from():
        return float(beat["seconds_ago"]) <= FRESH_SECONDS
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # anybody may have written it
        return False
    except PermissionError:
        return True
    return True
