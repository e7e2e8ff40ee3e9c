"""Stand-ins for time, threads, chance and identity, put into every loaded module of rlbuffer while a seed runs.

The real code says ``time.monotonic()`` or ``threading.Event()`` of a module that it imported; here those names lead to
the virtual clock and to greenlets. Nothing outside of rlbuffer's modules is touched.
"""

from __future__ import annotations

import concurrent.futures
import random
import sys
import threading
import time
import uuid
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rlbuffer.process.threads import begun
from simulation.rollouts import Codec
from simulation.scheduler import Process, Scheduler, Task

CODEC = Codec()
Waited = namedtuple("Waited", ("done", "not_done"))


class Time:
    """The module `time`, by the virtual clock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        return self._scheduler.now

    perf_counter = process_time = monotonic

    def time(self) -> float:
        task = self._scheduler.current
        return self._scheduler.now + (task.process.clock_ahead if task is not None else 0.0)

    def sleep(self, seconds: float) -> None:
        self._scheduler.wait(seconds)


class Event:
    """Stand-in for threading.Event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._scheduler.wake(task)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set and self._scheduler.current is not None:
            self._waiting.append(self._scheduler.current)
            self._scheduler.wait(timeout)
        return self._is_set


class Lock:
    """Stand-in for threading.Lock and RLock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Task | None = None
        self._depth = 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self) -> bool:
        while self._depth and self._owner is not self._scheduler.current:
            self._scheduler.wait(0.001)
        self._owner = self._scheduler.current
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1


class Thread:
    """Stand-in for threading.Thread: a task of the process that starts it."""

    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., Any],
        args: Iterable[Any] = (),
        name: str = "",
        daemon: Any = None,
    ) -> None:
        self._scheduler, self._body, self.name = scheduler, lambda: target(*args), name
        self._task: Task | None = None

    def start(self) -> None:
        process = _here(self._scheduler)

        def body() -> None:
            try:
                self._body()
            except Exception as error:
                self._scheduler.failures.append(f"thread {self.name} of {process.name} died of {error!r}")

        self._task = self._scheduler.spawn(process, body)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None:
            self._scheduler.join(self._task, timeout)


class Threading:
    """The module `threading`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.current_thread = threading.current_thread
        self.main_thread = threading.main_thread
        self.get_ident = threading.get_ident

    def Event(self) -> Event:  # noqa: N802 - the name of the class it stands for
        return Event(self._scheduler)

    def Lock(self) -> Lock:  # noqa: N802
        return Lock(self._scheduler)

    RLock = Lock

    def Thread(self, *args: Any, **kwargs: Any) -> Thread:  # noqa: N802
        return Thread(self._scheduler, *args, **kwargs)


class Future:
    """Stand-in for concurrent.futures.Future."""

    def __init__(self, scheduler: Scheduler, task: Task) -> None:
        self._scheduler, self._task = scheduler, task

    def done(self) -> bool:
        return self._task.is_done

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        if self._task.is_done:
            callback(self)
        else:
            self._task.callbacks.append(lambda: callback(self))

    def cancel(self) -> bool:
        return False  # as of a future that runs already

    def has_failed(self) -> bool:
        """It is done, and its result is an error."""
        return self._task.is_done and self._task.error is not None

    def result(self, timeout: float | None = None) -> Any:
        if not self._scheduler.join(self._task, timeout):
            raise TimeoutError
        if self._task.error is not None:
            raise self._task.error
        return self._task.result


def _here(scheduler: Scheduler) -> Process:
    if scheduler.current is None:
        raise RuntimeError("a thread can only be started by a task")
    return scheduler.current.process


@contextmanager
def installed(scheduler: Scheduler, dice: random.Random, constants: dict[tuple[str, str], Any]) -> Iterator[None]:
    """Puts the stand-ins, and other values for some constants, into the modules of rlbuffer for a while."""

    def wait_for(futures: Iterable[Future], timeout: float | None = None) -> Waited:
        futures = list(futures)
        for future in futures:
            scheduler.join(future._task, timeout)
        return Waited({f for f in futures if f.done()}, {f for f in futures if not f.done()})

    def begin(work: Callable[[], Any], name: str) -> Future:
        return Future(scheduler, scheduler.spawn(_here(scheduler), work))

    class Uuid:
        @staticmethod
        def uuid4() -> uuid.UUID:
            return uuid.UUID(int=dice.getrandbits(128), version=4)

    replaced: list[tuple[Any, str, Any]] = [
        *CODEC.replacements(),
        (time, "time", Time(scheduler)),
        (threading, "threading", Threading(scheduler)),
        (random, "random", dice),
        (uuid, "uuid", Uuid),
        (begun, "begun", begin),
        (concurrent.futures.wait, "wait", wait_for),
    ]
    before: list[tuple[Any, str, Any]] = []
    try:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] != "rlbuffer" or module is None:
                continue
            for attribute, value in list(vars(module).items()):
                if isinstance(value, random.Random):  # a generator of the module's own
                    before.append((module, attribute, value))
                    setattr(module, attribute, dice)
            for real, attribute, stand_in in replaced:
                if vars(module).get(attribute) is real:
                    before.append((module, attribute, real))
                    setattr(module, attribute, stand_in)
        for (name, attribute), value in constants.items():
            module = sys.modules[name]
            before.append((module, attribute, getattr(module, attribute)))
            setattr(module, attribute, value)
        yield
    finally:
        for module, attribute, value in reversed(before):
            setattr(module, attribute, value)
