"""Real processes on a real server: every test works in a home of its own and leaves nothing running."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Parent
from homes import Home


@pytest.fixture
def home(parent: Parent) -> Iterator[Home]:
    # A short path: the server's unix socket must fit 108 bytes.
    path = Path(tempfile.mkdtemp(prefix="rlb-"))
    place = Home(path, parent)
    try:
        yield place
    finally:
        place.stop()
        shutil.rmtree(path, ignore_errors=True)
