"""Being asked to stop: at once while a rank waits for a step, after the step otherwise."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from rlbuffer.trainer.stopping import StopRequest, StopRequested


@pytest.fixture
def asked() -> Iterator[StopRequest]:
    """A request that SIGUSR1 asks."""
    before = signal.getsignal(signal.SIGUSR1)
    stop = StopRequest()
    stop.on_signals(signal.SIGUSR1)
    yield stop
    signal.signal(signal.SIGUSR1, before)


def ask() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_signal_interrupts_the_waiting(asked: StopRequest) -> None:
    with pytest.raises(StopRequested), asked.waiting():
        ask()
    assert asked.is_set


def test_a_signal_outside_the_waiting_only_leaves_a_note(asked: StopRequest) -> None:
    with asked.waiting():
        pass
    ask()
    assert asked.is_set


def test_who_was_asked_before_does_not_begin_to_wait() -> None:
    stop = StopRequest()
    stop.set()
    with pytest.raises(StopRequested), stop.waiting():
        pytest.fail("the waiting began")


def test_a_second_signal_does_not_interrupt_what_ends_the_waiting(asked: StopRequest) -> None:
    ended = []

    def wait() -> None:
        try:
            ask()
        finally:
            ask()
            ended.append(True)

    with pytest.raises(StopRequested), asked.waiting():
        wait()
    assert ended == [True]
