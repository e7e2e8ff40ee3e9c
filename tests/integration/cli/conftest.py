"""A run in memory, and what most tests of this room do with it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_runs import Run

import rlbuffer


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run with nothing in it."""
    made = Run(f"memory://{uuid.uuid4().hex}", tmp_path)
    yield made
    made.close()


@pytest.fixture
def buffer(run: Run, tmp_path: Path) -> Iterator[rlbuffer.Buffer]:
    """The run as its clients see it."""
    with rlbuffer.connect(run.url, run=run.store.run, config={"home": str(tmp_path)}) as opened:
        yield opened


@pytest.fixture
def call(run: Run, typed: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    """Types a command about the run. -> exit code, stdout, stderr."""
    return lambda *arguments: typed(*arguments, "--redis", run.url, "--run", run.store.run)
