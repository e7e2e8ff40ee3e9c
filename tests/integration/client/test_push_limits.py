"""Pushes that a server can never take, and lines that are too slow for them: the worker says so and goes on."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faults import SlowProxy
from own_server import OwnServer
from rolled_back import roll_back

import rlbuffer
from rlbuffer.errors import InvalidRollout, PushBroken
from rlbuffer.store import limits
from rlbuffer.store.server import connection
from rlbuffer.testing import make_group
from rlbuffer.wire import payload

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("server_binary")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OwnServer]:
    """It takes no transaction above one MiB."""
    with OwnServer(tmp_path / "server", options={"client-query-buffer-limit": "1mb"}) as made:
        yield made


def group(seed: int, *, size: int = 0, rollouts: int = 2) -> rlbuffer.Group:
    """A group whose rollouts have `size` bytes of attachments each."""
    small = make_group(seed=seed, size=rollouts, lengths=[8] * rollouts)
    if not size:
        return small
    made = (
        rlbuffer.Rollout(
            **{name: getattr(r, name) for name in ("tokens", "loss_mask", "logprobs", "reward", "version_spans")},
            attachments={"picture": np.zeros(size, np.uint8)},
        )
        for r in small.rollouts
    )
    return rlbuffer.Group(small.group_id, small.env, small.prompt_id, tuple(made), small.planned_size)


def buffer_of(server: OwnServer, *, user: str = "") -> rlbuffer.Buffer:
    url = server.url.replace("redis://", f"redis://{user}:x@") if user else server.url
    return rlbuffer.connect(url, run=f"limits-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def blind(server: OwnServer) -> Iterator[rlbuffer.Buffer]:
    """A user that may not read the server's settings, as those of deploy/users.acl."""
    with buffer_of(server) as admin:
        client = admin.store.connection.client  # type: ignore[attr-defined]
        client.execute_command("ACL", "SETUSER", "worker", "on", ">x", "~*", "+@all", "-@dangerous", "+info")
    with buffer_of(server, user="worker") as made:
        yield made


def pending(buffer: rlbuffer.Buffer) -> list[str]:
    return [entry.group_id for entry in buffer.store.read_pool()]


def test_a_push_above_the_servers_query_buffer_is_refused_before_anything_is_sent(server: OwnServer) -> None:
    with buffer_of(server) as buffer:
        writer = buffer.writer("w")
        with pytest.raises(InvalidRollout) as caught:
            writer.push(group(1, size=MIB))
        size = sum(len(payload) for payload in payload.encode_push(group(1, size=MIB)).payloads)
        assert f"takes {size} bytes, above the server's client-query-buffer-limit of {MIB}." in str(caught.value)
        assert "cmdstat_pexpire" not in buffer.store.client.info("commandstats")  # type: ignore[attr-defined]
        assert writer.push(group(2)).status == "stored"
        assert pending(buffer) == ["a.2"]
        assert buffer.ledger().lost == 0
        assert buffer.verify().ok


def test_the_largest_push_that_is_not_refused_is_taken(server: OwnServer) -> None:
    with buffer_of(server) as buffer:
        details = len(payload.encode_push(group(1, size=4096)).payloads[0]) - 4096
        each = (MIB - limits.OVERHEAD_BYTES) // 2 - details
        writer = buffer.writer("w")
        assert writer.push(group(1, size=each - 16)).status == "stored"
        with pytest.raises(InvalidRollout, match="client-query-buffer-limit"):
            writer.push(group(2, size=each + 16))


def test_a_rollout_above_the_largest_value_and_a_push_above_the_memory_are_refused(tmp_path: Path) -> None:
    options = {"proto-max-bulk-len": "1mb", "maxmemory": "8mb", "maxmemory-policy": "noeviction"}
    with OwnServer(tmp_path / "server", options=options) as server, buffer_of(server) as buffer:
        writer = buffer.writer("w")
        with pytest.raises(InvalidRollout, match=r"rollout a\.1/0 takes \d+ bytes, above the server's proto-max-bulk"):
            writer.push(group(1, size=MIB))
        with pytest.raises(InvalidRollout, match=rf"it takes \d+ bytes, above the server's maxmemory of {8 * MIB}"):
            writer.push(group(1, size=MIB // 2, rollouts=20))


def test_a_push_that_breaks_its_connection_each_time_raises_and_the_writer_goes_on_with_another(
    blind: rlbuffer.Buffer,
) -> None:
    heard: list[Exception] = []
    writer = blind.writer("w", patience_seconds=0.5, on_retry=heard.append)
    assert writer.push(group(1)).status == "stored"
    large, others = group(2, size=MIB), [group(3), group(4)]
    for ask in (lambda: writer.push(large), lambda: writer.push(large), lambda: writer.push_many([large, *others])):
        with pytest.raises(PushBroken) as caught:
            ask()
        assert caught.value.group is large
    assert {type(error) for error in heard} == {PushBroken}
    size = sum(len(payload) for payload in payload.encode_push(large).payloads)
    assert f"group a.2 ({size} bytes)" in str(caught.value)
    assert pending(blind) == ["a.1"]
    assert [pushed.status for pushed in writer.push_many([*others, group(5)])] == ["stored"] * 3
    assert pending(blind) == ["a.1", "a.3", "a.4", "a.5"]
    assert blind.ledger().lost == 1
    assert blind.verify().ok


def test_a_broken_push_that_is_stored_after_all_is_not_lost(blind: rlbuffer.Buffer) -> None:
    client = blind.store.client  # type: ignore[attr-defined]
    writer = blind.writer("w", patience_seconds=0.0)
    with pytest.raises(PushBroken):
        writer.push(group(1, size=MIB))
    # Its last try came through, and only its answer did not.
    client.hset(blind.store.keys.producer("w", writer.incarnation), mapping={"sequence": 1, "id": "1-1"})  # type: ignore[attr-defined]
    assert writer.push(group(2)).status == "stored"
    assert blind.ledger().lost == 0


def test_a_push_of_the_spool_that_is_too_large_by_now_does_not_block_what_follows(server: OwnServer) -> None:
    with buffer_of(server) as buffer:
        client = buffer.store.connection.client  # type: ignore[attr-defined]
        client.config_set("client-query-buffer-limit", 16 * MIB)
        writer = buffer.writer("w")
        for seed in range(1, 5):
            writer.push(group(seed, size=MIB if seed == 3 else 0))
        roll_back(buffer.store, writer, to=1)
        client.config_set("client-query-buffer-limit", MIB)
        client.connection_pool.disconnect()
        assert writer.push(group(5)).status == "stored"
        assert pending(buffer) == ["a.1", "a.2", "a.4", "a.5"]
        assert buffer.ledger().lost == 1
        roll_back(buffer.store, writer, to=2)
        assert writer.push(group(6)).status == "stored"
        assert pending(buffer) == ["a.1", "a.2", "a.4", "a.5", "a.6"]
        assert buffer.ledger().lost == 1


def test_a_slow_line_has_more_time_for_a_large_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "COMMAND_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(limits, "QUICK_BYTES", MIB)
    with (
        OwnServer(tmp_path / "server") as server,
        SlowProxy(server.port, bytes_per_second=4 * MIB) as slow,
        rlbuffer.connect(slow.url, run="slow") as buffer,
    ):
        writer = buffer.writer("w")
        assert writer.push(group(1, size=4 * MIB)).status == "stored"
        assert buffer.store.connection.losses == 0  # type: ignore[attr-defined]
        assert buffer.verify().ok


def test_time_grows_with_what_is_sent() -> None:
    assert [limits.timeout_seconds(n * MIB, 20.0) for n in (0, 16, 17, 64, 512)] == [20, 20, 40, 160, 640]
