"""A push that is refused each time that it comes costs itself alone; a refusal that passes is waited out."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
import pytest
from faults import RefusingProxy
from own_server import OwnServer
from rolled_back import roll_back

import rlbuffer
from rlbuffer.errors import PushRefused, RlbufferError
from rlbuffer.store.worker import WorkerStore
from rlbuffer.testing import make_group

pytestmark = pytest.mark.usefixtures("server_binary")
LARGE = 100_000
"""Bytes above which the proxy refuses a command."""
AGAIN = (
    "ERR max request size exceeded. Limit: 1048576 bytes",
    "ERR string exceeds maximum allowed size (proto-max-bulk-len)",
    "NOPERM No permissions to access a key",
    "no code at all",
    "PROXYLIMIT the value is too large",
)
PASSES = ("OOM command not allowed", "LOADING it loads", "READONLY a replica", "MISCONF no disk", "NOREPLICAS none")
PASSES += ("TRYAGAIN moving", "BUSY a script", "CLUSTERDOWN no owner", "MASTERDOWN alone", "ERR max number of clients")


class Rule:
    """Refuses large payloads, or what makes a large group pending, with `line`; at most `times`."""

    def __init__(self, line: str, what: str = "payload", times: int = 10**9) -> None:
        self.line, self.what, self.left = line, what, times
        self.is_on = True

    def __call__(self, words: list[bytes]) -> str:
        size = sum(map(len, words))
        is_payload = words[0] == b"HSET" and size > LARGE
        is_script = words[0] == b"EVALSHA" and b"large" in b" ".join(words)
        if not self.is_on or not self.left or not (is_payload if self.what == "payload" else is_script):
            return ""
        self.left -= 1
        return self.line


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, server_binary: object) -> Iterator[OwnServer]:
    with OwnServer(tmp_path_factory.mktemp("server")) as made:
        yield made


def small(number: int) -> rlbuffer.Group:
    return make_group(env="a", group_id=f"a.{number}", lengths=[8, 8])


def large(number: int = 0) -> rlbuffer.Group:
    column = {"x": np.zeros((8, LARGE // 16), np.float32)}
    return make_group(env="a", group_id=f"a.large{number}", lengths=[8, 8], columns=[column] * 2)


def connect(proxy: RefusingProxy) -> rlbuffer.Buffer:
    return rlbuffer.connect(proxy.url, run=f"refused-{uuid.uuid4().hex[:8]}")


def pending(buffer: rlbuffer.Buffer) -> list[str]:
    return [entry.group_id for entry in buffer.store.read_pool()]


def sequence(buffer: rlbuffer.Buffer, writer: rlbuffer.Writer) -> bytes:
    store = buffer.store.role(WorkerStore)
    return bytes(store.client.hget(store.keys.producer("w", writer.incarnation), "sequence"))


@pytest.mark.parametrize("what", ["payload", "script"])
@pytest.mark.parametrize("line", AGAIN)
def test_a_refused_push_fails_by_name_and_the_next_is_stored(server: OwnServer, line: str, what: str) -> None:
    with RefusingProxy(server.port, Rule(line, what)) as proxy, connect(proxy) as buffer:
        writer = buffer.writer("w", patience_seconds=0.3)
        assert writer.push(small(1)).status == "stored"
        first = writer.incarnation
        for _ in range(2):
            with pytest.raises(PushRefused) as caught:
                writer.push(large())
            assert caught.value.group.group_id == "a.large0"
            assert "group a.large0 (" in str(caught.value)
            assert line.removeprefix("NOPERM ").removeprefix("ERR ")[:20].lower() in str(caught.value).lower()
        assert writer.push(small(2)).status == "stored"
        assert pending(buffer) == ["a.1", "a.2"]
        assert (writer.incarnation, writer.sequence, sequence(buffer, writer)) == (first, 4, b"4")
        assert buffer.ledger().lost == 0
        assert buffer.ledger().total().pushed[0] == 4
        assert buffer.verify().ok


@pytest.mark.parametrize("what", ["payload", "script"])
def test_a_refused_one_of_several_costs_itself_alone(server: OwnServer, what: str) -> None:
    with RefusingProxy(server.port, Rule(AGAIN[0], what)) as proxy, connect(proxy) as buffer:
        writer = buffer.writer("w")
        groups = [small(1), large(2), small(3), large(4), small(5)]
        while True:
            try:
                outcomes = writer.push_many(groups)
                break
            except PushRefused as error:
                groups = [group for group in groups if group is not error.group]
        assert [group.group_id for group in groups] == ["a.1", "a.3", "a.5"]
        assert {str(outcome.status) for outcome in outcomes} <= {"stored", "duplicate"}
        assert pending(buffer) == ["a.1", "a.3", "a.5"]
        writer.done("a")
        assert buffer.ledger().lost == 0
        assert buffer.verify().ok


def test_a_caller_that_goes_on_with_other_groups_has_the_rest_stored_first(server: OwnServer) -> None:
    with RefusingProxy(server.port, Rule(AGAIN[0])) as proxy, connect(proxy) as buffer:
        writer = buffer.writer("w")
        with pytest.raises(PushRefused):
            writer.push_many([small(1), large(2), small(3)])
        assert writer.push(small(4)).status == "stored"
        assert pending(buffer) == ["a.1", "a.3", "a.4"]


def test_what_was_taken_and_is_refused_after_a_loss_is_lost_alone(server: OwnServer) -> None:
    rule = Rule(AGAIN[0])
    rule.is_on = False
    with RefusingProxy(server.port, rule) as proxy, connect(proxy) as buffer:
        writer = buffer.writer("w")
        for group in (small(1), small(2), large(3), small(4)):
            writer.push(group)
        roll_back(buffer.store, writer, to=1)
        rule.is_on = True
        assert writer.push(small(5)).status == "stored"
        assert pending(buffer) == ["a.1", "a.2", "a.4", "a.5"]
        assert buffer.ledger().lost == 1
        roll_back(buffer.store, writer, to=1)  # what was given to nothing is so again
        assert writer.push(small(6)).status == "stored"
        assert pending(buffer) == ["a.1", "a.2", "a.4", "a.5", "a.6"]
        assert buffer.ledger().lost == 1
        assert buffer.verify().ok


def test_a_push_whose_first_try_was_stored_without_an_answer_is_answered(server: OwnServer) -> None:
    with RefusingProxy(server.port, Rule(AGAIN[0], "script")) as proxy, connect(proxy) as buffer:
        with rlbuffer.connect(server.url, run=buffer.run) as direct:
            before = direct.writer("w", incarnation="u")
            before.push(large())
        writer = buffer.writer("w", incarnation="u")
        outcome = writer.push(large())
        assert outcome.status == "duplicate"
        assert writer.push(small(2)).status == "stored"
        assert pending(buffer) == ["a.large0", "a.2"]


@pytest.mark.parametrize("what", ["payload", "script"])
@pytest.mark.parametrize("line", [*PASSES, AGAIN[-1]])
def test_a_refusal_that_passes_is_waited_out(server: OwnServer, line: str, what: str) -> None:
    said: list[RlbufferError] = []
    with RefusingProxy(server.port, Rule(line, what, times=2)) as proxy, connect(proxy) as buffer:
        writer = buffer.writer("w", on_retry=said.append)
        assert writer.push(large()).status == "stored"
        assert said
        assert pending(buffer) == ["a.large0"]
        assert writer.sequence == 1
        assert buffer.ledger().lost == 0
