"""The fixture `run`, a run on a real server. A plugin of the test modules of the store.

That `memory://` answers the same is held by tests/property/test_store_equivalence.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_runs import Run


@pytest.fixture
def run(redis_url: str, tmp_path: Path) -> Iterator[Run]:
    made = Run(redis_url, tmp_path)
    yield made
    made.close()
