"""A worker in a thread, against the real scripts (memory://)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worker_stage import Stage, hurry


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    hurry(monkeypatch)
    stage = Stage()
    yield stage
    stage.finish()
    stage.buffer.close()
