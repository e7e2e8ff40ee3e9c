"""Any answer of a server or a proxy comes out of a call as an error of rlbuffer, which says what to do next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from faults import TalkingServer, info_reply

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import (
    RlbufferError,
    ServerFull,
    ServerRefused,
    ServerUnreachable,
    ServerUnsuitable,
    WrongAnswer,
    WrongType,
)
from rlbuffer.store.server.connection import Connection

ROWS = [
    # Answers of another server than the one that was meant: a loss, and tried again on a new connection.
    ("-UNBLOCKED force unblock from blocking operation, instance state changed", ServerRefused, "loss"),
    ("-MOVED 3999 127.0.0.1:6381", ServerRefused, "loss"),
    ("-READONLY You can't write against a read only replica.", ServerRefused, "loss"),
    ("-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", ServerRefused, "loss"),
    ("-LOADING Redis is loading the dataset in memory", ServerRefused, "loss"),
    ("-CLUSTERDOWN The cluster is down", ServerRefused, "loss"),
    ("-NOAUTH Authentication required.", ServerRefused, "loss"),
    ("-WRONGPASS invalid username-password pair or user is disabled.", ServerRefused, "loss"),
    ("-ERR max number of clients reached", ServerUnreachable, "loss"),
    ("-ERR max number of clients + cluster connections reached", ServerUnreachable, "loss"),
    ("HTTP/1.1 400 Bad Request", ServerUnreachable, "loss"),
    # The right server, which refuses for now.
    ("-OOM command not allowed when used memory > 'maxmemory'.", ServerFull, "told"),
    ("-EXECABORT Transaction discarded because of: OOM command not allowed when used memory.", ServerFull, "told"),
    ("-EXECABORT Transaction discarded because of: READONLY You can't write against it.", ServerRefused, "loss"),
    ("-EXECABORT Transaction discarded because of: MISCONF Errors writing to disk.", ServerRefused, "told"),
    ("-MISCONF Errors writing to the AOF file: No space left on device", ServerRefused, "told"),
    ("-NOREPLICAS Not enough good replicas to write.", ServerRefused, "told"),
    ("-ASK 3999 127.0.0.1:6381", ServerRefused, "again"),
    ("-TRYAGAIN Multiple keys request during rehashing of slot", ServerRefused, "again"),
    ("-BUSY Redis is busy running a script.", ServerRefused, "again"),
    ("-NOSCRIPT No matching script. Please use EVAL.", ServerRefused, "again"),
    ("-EXECABORT Transaction discarded because of previous errors.", ServerRefused, "again"),
    ("-UPSTREAM a proxy's own words", ServerRefused, "again"),
    # A wrong answer stays wrong.
    ("-NOPERM this user has no permissions to run the 'get' command", ServerUnsuitable, "told"),
    ("-ERR unknown command `HELLO`, with args beginning with: `3`, ", ServerUnsuitable, "told"),
    ("-WRONGTYPE Operation against a key holding the wrong kind of value", WrongType, "told"),
    ("-ERR unknown command 'GET'", WrongAnswer, "told"),
    ("-ERR user_script:12: attempt to index a nil value script: 1234", WrongAnswer, "told"),
    ("-no code at all", WrongAnswer, "told"),
]
"""Answer, the error that it becomes, and whether it is raised at once, tried again, or a loss (and tried again)."""


@pytest.fixture
def talking() -> Iterator[TalkingServer]:
    with TalkingServer(info_reply(redis_version="7.2.4")) as server:
        yield server


@pytest.fixture
def connection(talking: TalkingServer, tmp_path: Path) -> Iterator[Connection]:
    with Connection(talking.url, home=tmp_path, server=ServerSettings(), name="test", patience_seconds=5) as made:
        yield made


def counted(connection: Connection, patience_seconds: float) -> tuple[int, RlbufferError, redis.RedisError]:
    """Returns how often GET was sent, the outcome, and the error that it was made of."""
    sent = 0

    def get() -> object:
        nonlocal sent
        sent += 1
        return connection.client.get("k")

    with pytest.raises(RlbufferError) as caught:
        connection.call(get, patience_seconds=patience_seconds)
    cause = caught.value.__cause__
    assert isinstance(cause, redis.RedisError)
    return sent, caught.value, cause


@pytest.mark.parametrize(("answer", "kind", "then"), ROWS, ids=[row[0].split(" ")[0] + row[0][-9:] for row in ROWS])
def test_every_answer_becomes_an_error_of_ours(
    talking: TalkingServer, connection: Connection, answer: str, kind: type[RlbufferError], then: str
) -> None:
    talking.reply = answer.encode() + b"\r\n"
    before = connection.losses
    sent, error, _ = counted(connection, patience_seconds=0.2)
    assert type(error) is kind
    assert (sent > 1) == (then != "told")
    assert (connection.losses > before) == (then == "loss")
    if kind in (ServerRefused, WrongAnswer) and then != "loss":
        words = answer.removeprefix("-").removeprefix("EXECABORT Transaction discarded because of: ")
        assert words.partition(" ")[2] in str(error), "the server's own words"


def test_an_answer_that_passes_is_waited_out(talking: TalkingServer, connection: Connection) -> None:
    talking.reply = b"-UNBLOCKED force unblock\r\n"

    def get() -> object:
        try:
            return connection.client.get("k")
        finally:
            talking.reply = b"$5\r\nvalue\r\n"

    assert connection.call(get, patience_seconds=30) == b"value"


def test_a_server_that_asks_for_a_password_is_told_without_the_words_of_its_protocol(tmp_path: Path) -> None:
    answer = b"-NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH\r\n"
    with TalkingServer(answer) as talking, pytest.raises(ServerUnsuitable, match="password") as refused:
        Connection(talking.url, home=tmp_path, server=ServerSettings(), name="test", patience_seconds=30)
    assert "HELLO" not in str(refused.value)


def test_a_value_that_cannot_be_sent_is_no_trouble_of_the_server(connection: Connection) -> None:
    send: Callable[[], object] = lambda: connection.client.set("k", object())  # type: ignore[arg-type]  # noqa: E731
    with pytest.raises(WrongAnswer, match=r"the client cannot send this to the server at .*: Invalid input of type"):
        connection.call(send)
