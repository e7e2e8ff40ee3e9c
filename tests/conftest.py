"""Fixtures of every level."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbuffer.settings import ServerSettings
from rlbuffer.store import server

pytest_plugins = ("leftovers",)


def stop_server(home: Path) -> None:
    """Stops the embedded server that a test left running under `home`, if any."""
    deadline = time.monotonic() + 10
    while server.find(home) is not None and time.monotonic() < deadline:
        if not server.ensure(home, ServerSettings()).release():
            time.sleep(0.05)


@pytest.fixture
def home() -> Iterator[Path]:
    """An empty home with a path short enough for a unix socket; its server is stopped afterwards."""
    path = Path(tempfile.mkdtemp(prefix="rlb-"))
    yield path
    stop_server(path)
    shutil.rmtree(path, ignore_errors=True)
