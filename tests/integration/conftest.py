"""A real server for the integration tests: an embedded one, or the one that RLBUFFER_TEST_REDIS_URL names.

Without any the tests are skipped on a developer's machine; in CI (``CI=true``) that is a failure.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import ServerUnreachable
from rlbuffer.store.server import embedded
from rlbuffer.store.server.binary import ServerBinary, find_binary


@pytest.fixture(scope="session")
def server_binary() -> ServerBinary:
    """The program of the embedded server."""
    try:
        return find_binary()
    except ServerUnreachable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def server_home(server_binary: ServerBinary) -> Iterator[Path]:
    """Home of an embedded server that runs for the whole session. Do not kill this one: use `home` for that."""
    path = Path(tempfile.mkdtemp(prefix="rlb-session-"))
    running = embedded.ensure(path, ServerSettings(maxmemory="1gb", appendfsync="no"))
    yield path
    running.release()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def redis_url(request: pytest.FixtureRequest) -> str:
    """Address of a server for tests that leave it alone, except the keys of their own `run_name`."""
    named = os.environ.get("RLBUFFER_TEST_REDIS_URL", "")
    if named:
        return named
    address = embedded.find(request.getfixturevalue("server_home"))
    if address is None:
        pytest.fail("the session's embedded server is not running: a test has stopped it")
    return address


@pytest.fixture
def run_name() -> str:
    """A run that no other test uses."""
    return f"t-{uuid.uuid4().hex[:12]}"
