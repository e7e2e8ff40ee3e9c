from __future__ import annotations

from collections.abc import Iterator

import pytest
from gateway_stage import Stage


@pytest.fixture
def stage(redis_url: str, run_name: str) -> Iterator[Stage]:
    """Agents, a gateway, an engine and a batcher, on a real server."""
    made = Stage(redis_url, run_name)
    yield made
    made.close()
