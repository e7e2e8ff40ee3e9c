"""The fixtures `run`, a run on a real server, and `served`, daemons over it. A plugin of the modules that use them.

That `memory://` answers the same is held by tests/property/test_store_equivalence.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_runs import Served
from store_runs import Run


@pytest.fixture
def run(redis_url: str, tmp_path: Path) -> Iterator[Run]:
    made = Run(redis_url, tmp_path)
    yield made
    made.close()


@pytest.fixture
def served(run: Run) -> Iterator[Served]:
    made = Served(run)
    yield made
    made.close()
