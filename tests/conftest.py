"""Fixtures of every level."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rlbuffer.config.settings import ServerSettings
from rlbuffer.store.server import embedded

if TYPE_CHECKING:
    from forked import Parent

pytest_plugins = ("leftovers",)

SLOWEST_FIRST = ("faults", "e2e", "simulation", "property")
"""Folders whose files take longest: begun last, one of them would keep the others waiting for the end."""


def pytest_configure(config: pytest.Config) -> None:
    """The plugin pytest-xdist hands out files in the order below, not those with many tests first: these are the quick
    ones."""
    # A shell has its background jobs ignore ctrl-C, and what a test starts would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {folder: place for place, folder in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.parent.name, len(places)))


@pytest.fixture(scope="session")
def parent() -> Iterator[Parent]:
    """Has imported torch once for all processes that are forked from it."""
    from forked import Parent

    made = Parent()
    yield made
    made.close()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """A tiny model on several threads spends its time, and that of the tests beside it, waiting for them."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stop_server(home: Path) -> None:
    """Stops the embedded server that a test left running under `home`, if any."""
    deadline = time.monotonic() + 10
    while embedded.find(home) is not None and time.monotonic() < deadline:
        if not embedded.ensure(home, ServerSettings()).release():
            time.sleep(0.05)


@pytest.fixture
def home() -> Iterator[Path]:
    """An empty home with a path short enough for a unix socket; its server is stopped afterwards."""
    path = Path(tempfile.mkdtemp(prefix="rlb-"))
    yield path
    stop_server(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Types a command in an empty folder, with settings from nowhere else. -> exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLBUFFER_HOME", str(tmp_path / "home"))
    for name in ("RLBUFFER_REDIS_URL", "RLBUFFER_RUN", "RLBUFFER_CONFIG", "RLBUFFER_DEBUG"):
        monkeypatch.delenv(name, raising=False)

    from rlbuffer_cli.main import main

    def command(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([*arguments])
        return code, *capsys.readouterr()

    return command
