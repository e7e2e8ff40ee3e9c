"""Being asked to stop: the handler leaves a note, wherever the process is."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from rlbuffer.process.signals import StopRequest, stop_on_signals


@pytest.fixture
def asked() -> Iterator[StopRequest]:
    """A request that SIGUSR1 asks."""
    before = signal.getsignal(signal.SIGUSR1)
    stop = StopRequest()
    stop.on_signals(signal.SIGUSR1)
    yield stop
    signal.signal(signal.SIGUSR1, before)


class AsksAtItsEnd:
    """Is asked inside a destructor, where an exception would be printed and forgotten."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)


def test_a_signal_leaves_a_note(asked: StopRequest) -> None:
    assert not asked.is_set
    os.kill(os.getpid(), signal.SIGUSR1)
    assert asked.is_set


def test_a_signal_inside_a_destructor_is_not_forgotten(asked: StopRequest) -> None:
    AsksAtItsEnd()
    assert asked.is_set


def test_another_thread_asks_itself_and_leaves_the_handlers_alone() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    stop = StopRequest()
    thread = threading.Thread(target=stop.on_signals, args=(signal.SIGUSR1,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR1) is before
    stop.set()
    assert stop.is_set


def test_a_terminal_that_closes_asks_to_stop_unless_that_is_ignored() -> None:
    before = signal.getsignal(signal.SIGHUP)
    stop = threading.Event()
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with stop_on_signals(stop):
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_set()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with stop_on_signals(stop):
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
