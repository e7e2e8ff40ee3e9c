"""A home of its own for each fault run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from forked import Parent
    from homes import Home


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
