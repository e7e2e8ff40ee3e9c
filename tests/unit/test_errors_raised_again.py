"""Errors that are among their own causes, as a refusal is that is raised again from what was made of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import redis

from rlbuffer.errors import PushRefused, causes
from rlbuffer.process.room import lack_of_room
from rlbuffer.store.server.answers import cause_of, tls_mistake, understand


def raised_again() -> redis.ConnectionError:
    first = redis.ConnectionError("connection reset by peer")
    second = PushRefused("the push was refused")
    try:
        try:
            raise second from first
        except PushRefused as refused:
            raise first from refused
    except redis.ConnectionError as error:
        return error


def below_another() -> redis.ConnectionError:
    error = redis.ConnectionError("closed by the server")
    error.__context__ = raised_again()
    return error


def understood(error: redis.ConnectionError) -> object:
    return understand(error, address="redis://here", source="", is_embedded=False, is_watched=False, is_known=True)


@pytest.mark.parametrize("made", [raised_again, below_another])
@pytest.mark.parametrize("read", [understood, tls_mistake, cause_of, lack_of_room], ids=lambda read: read.__name__)
def test_whoever_reads_an_errors_causes_comes_to_an_end(
    made: Callable[[], redis.ConnectionError], read: Callable[[redis.ConnectionError], object]
) -> None:
    reading = threading.Thread(target=read, args=(made(),), daemon=True)
    reading.start()
    reading.join(20)
    assert not reading.is_alive()


def test_each_cause_comes_once_and_the_newest_first() -> None:
    assert [type(error) for error in causes(below_another())] == [
        redis.ConnectionError,
        redis.ConnectionError,
        PushRefused,
    ]
    assert list(causes(None)) == []
