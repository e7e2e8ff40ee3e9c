"""Real processes on a real server: every test works in a home of its own and leaves nothing running.

Servers of a test's own are those of the integration tests.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
for folder in ("e2e", "integration"):
    if str(TESTS / folder) not in sys.path:
        sys.path.append(str(TESTS / folder))

from forked import Parent  # noqa: E402
from homes import Home  # noqa: E402


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
