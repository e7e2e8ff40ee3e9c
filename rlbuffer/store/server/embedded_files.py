"""The files of the embedded server under ``home/server/``: configuration, pid file, socket, log."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import ServerUnreachable
from rlbuffer.process.files import write_whole

_log = logging.getLogger(__name__)

MAX_SOCKET_PATH_BYTES = 100
"""The kernel's limit is 108 on Linux and 104 on macOS, the closing zero included."""

LOG_TAIL_LINES = 8

BACKLOG = 4096
"""Connections that may wait to be accepted: a thousand processes start at once, while the server has little CPU. The
kernel takes less where its own limit (``net.core.somaxconn``) is lower."""


def configuration(directory: Path, socket: Path, settings: ServerSettings) -> str:
    """The text of the configuration file. A file, because arguments would show in the process list."""
    lines = {
        "port": "0",
        "unixsocket": _quoted(socket),
        "unixsocketperm": "700",
        "tcp-backlog": str(BACKLOG),  # of the unix socket, too
        "dir": _quoted(directory),
        "appendonly": "yes",
        "appendfsync": settings.appendfsync,
        # A kill can cut the last command short; the rest of the file is whole.
        "aof-load-truncated": "yes",
        "save": '""',
        "maxmemory": settings.maxmemory,
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "loglevel": "notice",
        "logfile": _quoted(directory / "server.log"),
    }
    return "".join(f"{name} {value}\n" for name, value in lines.items())


def socket_path(directory: Path) -> Path:
    """A path short enough for a unix socket: in the home, else in a private directory named after the home's hash."""
    path = directory / "server.sock"
    if len(os.fsencode(path)) < MAX_SOCKET_PATH_BYTES:
        return path
    name = f"rlbuffer-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]}"
    for parent in (Path(tempfile.gettempdir()), Path("/tmp")):
        path = parent / name / "server.sock"
        if len(os.fsencode(path)) >= MAX_SOCKET_PATH_BYTES:
            continue
        path.parent.mkdir(exist_ok=True, mode=0o700)
        status = path.parent.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
            raise ServerUnreachable(
                f"cannot use {path.parent} for the embedded server's socket: it must be a directory that belongs to "
                "you with mode 0700.\n  Remove it, or choose a shorter home."
            )
        return path
    raise ServerUnreachable(
        f"no path short enough for a unix socket: {directory} and the temporary directory are long."
    )


def write_record(directory: Path, *, pid: int, socket: Path) -> None:
    """Writes where the server is. Its number is for people: in another container it says nothing."""
    write_whole(directory / "server.json", json.dumps({"pid": pid, "socket": str(socket)}) + "\n", is_private=True)


def cut_zeros(directory: Path) -> None:
    """Cuts the zero bytes behind the append-only file's end, which a power cut can leave there: the length of what was
    written last was on the disk, its bytes were not. No server starts with them, and no whole file ends with one."""
    manifest = directory / "appendonlydir" / "appendonly.aof.manifest"
    try:
        names = re.findall(r"^file (\S+) seq \d+ type i$", manifest.read_text(), re.MULTILINE)
        file = (manifest.parent / names[-1]).open("r+b")
    except (OSError, IndexError):
        return  # a new server, or one that says itself what is wrong
    with file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - (1 << 20))
            file.seek(start)
            end = start + len(file.read(end - start).rstrip(b"\0"))
            if end > start:
                break
        if end < size:
            file.truncate(end)
            _log.warning(
                "Warning: %s ended with %d zero bytes, as a power cut leaves them. They were cut; the writes that "
                "stood there are lost, at most those of the last two seconds.",
                file.name,
                size - end,
            )


def read_record(directory: Path) -> dict[str, Any]:
    """The record of the server last started, {} when there is none."""
    try:
        record = json.loads((directory / "server.json").read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def socket_address(socket: Path) -> str:
    """The socket as a URL."""
    return f"unix://{quote(str(socket))}?db=0"


def log_tail(directory: Path) -> str:
    """The end of the server's log, as the indented part of an error message."""
    log = directory / "server.log"
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        lines = []
    return f"  The last lines of {log}:\n" + "\n".join(f"    {line}" for line in lines if line.strip())
