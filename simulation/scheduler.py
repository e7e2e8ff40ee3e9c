"""Virtual time: tasks that run one at a time, in an order that the seed decides.

A task is a greenlet of a process; the real code in it runs straight on and is switched away only where it waits:
at a round trip, in a sleep, at an event. So the same seed gives the same run, and nothing needs a lock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import greenlet

BEGINNING = 1_000_000.0
"""Unix seconds at which every simulation starts."""

BUSY_TURNS = 1_000_000
"""Turns of a seed above which a task lets no time pass: some hundred times what seeds need."""


class Killed(BaseException):
    """Unwinds a task of a killed process; no real code catches it, and its process can do nothing while it unwinds."""


class Process:
    """A simulated operating-system process: its tasks die, stop and go on together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.stopped_until = 0.0
        self.clock_ahead = 0.0
        """Seconds by which its clock is ahead of the others'."""
        self.tasks: list[Task] = []
        self.outcome: BaseException | None = None
        """What ended its main task; None when that returned."""


class Task:
    """One thread of a process."""

    def __init__(self, scheduler: Scheduler, process: Process, body: Callable[[], Any]) -> None:
        self.process = process
        self.body = body
        self.is_done = False
        self.error: BaseException | None = None
        self.result: Any = None
        self.wakeup = 0
        """Which of its waits a wake-up belongs to: one that comes too late is ignored."""
        self.joiners: list[Task] = []
        self.callbacks: list[Callable[[], Any]] = []
        """Called when it has ended."""
        self._scheduler = scheduler
        self.greenlet = greenlet.greenlet(self._run, scheduler.hub)

    def _run(self) -> None:
        try:
            if not self.process.is_dead:
                self.result = self.body()
        except BaseException as error:
            self.error = error
        self.is_done = True
        self.process.tasks.remove(self)
        del self._scheduler.tasks[self]
        for callback in self.callbacks:
            callback()
        for task in self.joiners:
            self._scheduler.wake(task)


class Scheduler:
    """The clock and the queue of what happens next."""

    def __init__(self) -> None:
        self.now = BEGINNING
        self.hub = greenlet.getcurrent()
        self.current: Task | None = None
        self.tasks: dict[Task, None] = {}
        """All that have not ended."""
        self.failures: list[str] = []
        """Threads that ended by an error which nobody was told of."""
        self._queue: list[tuple[float, int, Callable[[], None] | None, Task | None, int]] = []
        """When, the how-manyth; what to do, or whom to wake from which of its waits."""
        self._order = 0
        self._turns = 0

    # -- for the hub -----------------------------------------------------------------------------------------------
    def at(self, when: float, action: Callable[[], None]) -> None:
        """Does `action` at a time, in the hub: it must not wait."""
        self._order += 1
        heapq.heappush(self._queue, (max(when, self.now), self._order, action, None, 0))

    def _wake_at(self, when: float, task: Task, wakeup: int) -> None:
        self._order += 1
        heapq.heappush(self._queue, (when, self._order, None, task, wakeup))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Does `action` some time from now."""
        self.at(self.now + seconds, action)

    def run(self, until: Callable[[], bool], deadline: float) -> bool:
        """Lets time pass until `until()` holds (checked after every event) or the deadline. -> whether it holds."""
        while not until():
            if not self._queue or self._queue[0][0] > deadline:
                self.now = max(self.now, deadline)
                return until()
            self.now, _, action, task, wakeup = heapq.heappop(self._queue)
            self._turns += 1
            if self._turns > BUSY_TURNS:
                raise RuntimeError(f"more than {BUSY_TURNS} turns: {task.process.name if task else action} never waits")
            if task is not None:
                self._resume(task, wakeup)
            elif action is not None:
                action()
        return True

    def spawn(self, process: Process, body: Callable[[], Any]) -> Task:
        """Starts a task of `process`."""
        task = Task(self, process, body)
        process.tasks.append(task)
        self.tasks[task] = None
        self._wake_at(self.now, task, 0)
        return task

    def kill(self, process: Process) -> None:
        """Ends a process where it stands: whatever it waits for, it gets no further."""
        process.is_dead = True
        process.stopped_until = 0.0
        for task in list(process.tasks):
            if task is not self.current:
                self.wake(task)

    def wake(self, task: Task) -> None:
        """Ends the wait of a task, now."""
        self._wake_at(self.now, task, task.wakeup)

    def _resume(self, task: Task, wakeup: int) -> None:
        if task.is_done or task.wakeup != wakeup:
            return
        if task.process.stopped_until > self.now:
            self._wake_at(task.process.stopped_until, task, wakeup)
            return
        task.wakeup += 1
        self.current = task
        try:
            task.greenlet.switch()
        finally:
            self.current = None

    # -- for tasks -------------------------------------------------------------------------------------------------
    def wait(self, seconds: float | None = None) -> None:
        """Waits for :meth:`wake`, at most `seconds`; without a task (between runs) it does nothing."""
        task = self.current
        if task is None:
            return
        if task.process.is_dead:
            raise Killed
        if seconds is not None:
            self._wake_at(self.now + seconds if seconds > 0.0 else self.now, task, task.wakeup)
        self.hub.switch()
        if task.process.is_dead:
            raise Killed

    def join(self, task: Task, seconds: float | None = None) -> bool:
        """Waits for the end of a task. -> whether it ended."""
        if not task.is_done and self.current is not None:
            task.joiners.append(self.current)
            self.wait(seconds)
        return task.is_done
