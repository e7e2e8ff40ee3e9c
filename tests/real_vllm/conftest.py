"""Real vLLM: an engine in this process, and its OpenAI-compatible server.

Needs an environment with vllm in it (``make vllm-test`` makes one); without, everything here is skipped, unless
``RLBUFFER_VLLM=1`` says that it must run.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from leftovers import LEFTOVERS, PATIENCE_SECONDS

if TYPE_CHECKING:
    from homes import Home

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is not None:
        return
    for item in items:
        if HERE not in item.path.parents:
            continue
        if os.environ.get("RLBUFFER_VLLM") == "1":
            raise pytest.UsageError("vllm is not installed")  # it must run here
        item.add_marker(pytest.mark.skip(reason="needs vllm: make vllm-test"))


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> None:
    """Instead of the check after each test: a module's engine, server and event loop start what they need when they
    are first used, and keep it as long as the module."""


@pytest.fixture(autouse=True, scope="module")
def module_leaves_nothing_behind() -> Iterator[None]:
    """Set up before a module's other fixtures, so it looks when they are gone."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    known = before | LEFTOVERS.lifelong()
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in known]
    _, left = psutil.wait_procs(left, timeout=PATIENCE_SECONDS)
    commands = [" ".join(process.cmdline())[:200] for process in left]
    for process in left:
        process.kill()
    if left:
        pytest.fail("the module left behind:\n" + "\n".join(commands))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for a module: an engine lives in the loop that started it."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder for a module's weights."""
    path = Path(tempfile.mkdtemp(prefix="rlb-vllm-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def home() -> Iterator[Home]:
    """A home folder with its own embedded server, as the end-to-end tests have it."""
    from homes import a_home

    with a_home() as place:
        yield place
