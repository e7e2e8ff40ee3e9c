"""The fault runs use the homes of the end-to-end tests and the servers of the integration tests."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from forked import Parent
    from homes import Home

TESTS = Path(__file__).parents[1]
for folder in ("e2e", "integration"):
    if str(TESTS / folder) not in sys.path:
        sys.path.append(str(TESTS / folder))


@pytest.fixture
def home(parent: Parent) -> Iterator[Home]:
    from homes import Home

    # A short path: the server's unix socket must fit 108 bytes.
    path = Path(tempfile.mkdtemp(prefix="rlb-"))
    place = Home(path, parent)
    try:
        yield place
    finally:
        place.stop()
        shutil.rmtree(path, ignore_errors=True)
