"""Daemons over the run of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemon_runs import Served
from store_runs import Run


@pytest.fixture
def served(run: Run) -> Iterator[Served]:
    made = Served(run)
    yield made
    made.close()
