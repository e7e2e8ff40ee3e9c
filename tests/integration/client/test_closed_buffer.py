"""A buffer that was closed says so at every call, whatever patience the call has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rlbuffer
from rlbuffer.errors import BufferClosed

pytestmark = pytest.mark.server

CALLS: dict[str, Callable[[Any], Any]] = {
    "take": lambda closed: closed.writer.take("math", 1, timeout_seconds=60.0),
    "push": lambda closed: closed.writer.push(rlbuffer.testing.make_group(seed=1)),
    "push_many": lambda closed: closed.writer.push_many([rlbuffer.testing.make_group(seed=n) for n in range(2)]),
    "done": lambda closed: closed.writer.done("math"),
    "next step": lambda closed: next(closed.reader.steps()),
    "trained": lambda closed: closed.reader.trained(1),
    "a new writer": lambda closed: closed.buffer.writer("another"),
    "a new reader": lambda closed: next(closed.buffer.reader(0, 1, timeout_seconds=60.0).steps()),
    "policy": lambda closed: closed.buffer.policy.wait(1, timeout_seconds=60.0),
    "announce": lambda closed: closed.buffer.policy.announce(1, location="", size=0, checksum=""),
    "ledger": lambda closed: closed.buffer.ledger(),
    "groups": lambda closed: closed.buffer.groups(),
    "step": lambda closed: closed.buffer.step(1),
    "verify": lambda closed: closed.buffer.verify(),
}


class Closed:
    """A buffer that is closed, and what it had handed out."""

    def __init__(self, url: str) -> None:
        self.buffer = rlbuffer.connect(url, run="closed")
        self.writer = self.buffer.writer("worker-0", patience_seconds=60.0)
        self.writer.push(rlbuffer.testing.make_group())
        self.reader = self.buffer.reader(0, 1, timeout_seconds=60.0)
        self.reader.start()
        self.buffer.close()


@pytest.fixture
def closed(redis_url: str) -> Closed:
    return Closed(redis_url)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.timeout(45)  # each call would be patient for a minute
def test_a_closed_buffer_says_so_at_once(closed: Closed, call: Callable[[Closed], Any]) -> None:
    with pytest.raises(BufferClosed):
        call(closed)
