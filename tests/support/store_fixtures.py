"""The fixture `run`: the same test on a real server and in memory. A plugin of the test modules of the store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_runs import Run


@pytest.fixture(params=["memory", "server"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    memory = request.param == "memory"
    made = Run(f"memory://{uuid.uuid4().hex}" if memory else request.getfixturevalue("redis_url"), tmp_path)
    yield made
    made.close()
