"""A worker whose server refuses the push of one group gives that one up; one that may push nothing ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from faults import RefusingProxy
from own_server import OwnServer
from worker_stage import PATIENCE_SECONDS, Stage

from rlbuffer.errors import ServerUnsuitable

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("server_binary")]


def test_a_worker_gives_up_the_group_that_is_refused(tmp_path: Path) -> None:
    def rule(words: list[bytes]) -> str:
        is_its = words[0] == b"EVALSHA" and b"counting.1" in words
        return "ERR max request size exceeded" if is_its else ""

    with OwnServer(tmp_path) as server, RefusingProxy(server.port, rule) as proxy:
        stage = Stage(proxy.url)
        try:
            stage.announce(0)
            stage.allow(4)
            stage.start()
            deadline = time.monotonic() + PATIENCE_SECONDS
            names = {"counting.0", "counting.2", "counting.3"}
            while {entry.group_id for entry in stage.store.read_pool()} < names:
                assert time.monotonic() < deadline
                assert stage.raised is None
                time.sleep(0.02)
            assert "counting.1" not in {entry.group_id for entry in stage.store.read_pool()}
        finally:
            stage.finish()
            stage.logged.close()
            stage.buffer.close()
        assert stage.raised is None


def test_a_worker_that_may_push_nothing_ends_with_the_servers_words(tmp_path: Path) -> None:
    def rule(words: list[bytes]) -> str:
        is_payload = words[0] == b"HSET" and b":g:{" in words[1]
        return "NOPERM No permissions to access a key" if is_payload else ""

    with OwnServer(tmp_path) as server, RefusingProxy(server.port, rule) as proxy:
        stage = Stage(proxy.url)
        try:
            stage.announce(0)
            stage.allow(4)
            stage.start()
            assert stage.thread is not None
            stage.thread.join(PATIENCE_SECONDS)
            assert not stage.thread.is_alive()
        finally:
            stage.finish()
            stage.logged.close()
            stage.buffer.close()
    assert isinstance(stage.raised, ServerUnsuitable)
    assert "No permissions to access a key" in str(stage.raised)
