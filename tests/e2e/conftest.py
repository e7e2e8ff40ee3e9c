"""Real processes on a real server: every test works in a home of its own and leaves nothing running."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from forked import Parent
from homes import Home, a_home


@pytest.fixture
def home(parent: Parent) -> Iterator[Home]:
    with a_home(parent) as place:
        yield place
