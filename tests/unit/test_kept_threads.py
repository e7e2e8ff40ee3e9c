"""Threads that are kept for more work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from rlbuffer.process.threads import MOST_IDLE, KeptThreads

T = TypeVar("T")
SECONDS = 60.0


def played(play: Coroutine[Any, Any, T], threads: KeptThreads) -> T:
    try:
        return asyncio.run(asyncio.wait_for(play, SECONDS))
    finally:
        threads.close()


def test_pieces_of_work_one_after_another_are_done_by_one_thread() -> None:
    threads, idle = KeptThreads("kept"), threading.active_count()

    async def play() -> set[int]:
        found = set()
        for _ in range(20):
            found.add(await threads.do(threading.get_ident))
            while threads.idle != threading.active_count() - idle:  # the answer comes before its thread rests
                await asyncio.sleep(0)
        return found

    assert len(played(play(), threads)) == 1


def test_no_piece_of_work_waits_for_another_one() -> None:
    threads, count = KeptThreads("kept"), 3 * MOST_IDLE
    all_at_work = threading.Barrier(count)

    async def play() -> None:
        for _ in range(2):  # with threads that are kept, too
            await asyncio.gather(*(threads.do(lambda: all_at_work.wait(SECONDS)) for _ in range(count)))
            assert threads.idle <= MOST_IDLE

    played(play(), threads)


def test_what_work_raises_is_raised_and_its_thread_goes_on() -> None:
    threads = KeptThreads("kept")

    async def play() -> int:
        for error in (ValueError, KeyboardInterrupt):
            with pytest.raises(error):
                await threads.do(lambda error=error: (_ for _ in ()).throw(error))
        return await threads.do(lambda: 7)

    assert played(play(), threads) == 7


def test_closed_threads_end_when_their_work_is_done_and_work_is_still_taken() -> None:
    threads, at_work, goes_on = KeptThreads("kept"), threading.Event(), threading.Event()

    def work() -> threading.Thread:
        at_work.set()
        goes_on.wait(SECONDS)
        return threading.current_thread()

    async def play() -> list[threading.Thread]:
        rested = await threads.do(threading.current_thread)
        slow = asyncio.create_task(threads.do(work))
        while not at_work.is_set():
            await asyncio.sleep(0.01)
        threads.close()
        late = await threads.do(threading.current_thread)
        goes_on.set()
        return [rested, late, await slow]

    for thread in played(play(), threads):
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_a_wait_that_is_given_up_names_the_thread_that_is_still_at_work() -> None:
    threads, at_work, goes_on = KeptThreads("kept"), threading.Event(), threading.Event()

    def work() -> None:
        at_work.set()
        goes_on.wait(SECONDS)

    async def play() -> threading.Thread:
        task = asyncio.create_task(threads.do(work))
        while not at_work.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as given_up:
            await task
        thread: threading.Thread = given_up.value.thread  # type: ignore[attr-defined]
        return thread

    thread = played(play(), threads)
    assert thread.is_alive()
    goes_on.set()
    thread.join(SECONDS)
    assert not thread.is_alive()
