"""Leftovers of a test: threads, processes (servers too) and environment variables. Found, stopped, named.

A thread or a process belongs to the test during which it was started, whoever started it: a thread's threads are the
test's, and so are a process's processes, orphans too. Processes that a fixture of a wider scope starts stay as long as
the fixture. Processes are known by a variable in their environment, so a number that was given out again misleads
nobody. Nor may a test signal one that is not its own.

A plugin, since hooks of a conftest hear nothing of fixtures of the whole session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import psutil
import pytest

PATIENCE_SECONDS = float(os.environ.get("PYTEST_LEFTOVERS_SECONDS", "20"))
"""Seconds that anything on its way out gets to end; a test that leaves nothing does not wait at all."""
MARK = "PYTEST_PROCESS_TREE"
"""Environment variable that every process of a test inherits."""
LIBRARIES = ("tqdm._monitor", "hypothesis", "execnet", "xdist", "pytest_timeout")
"""Modules whose threads live as long as the process."""
LIBRARY_VARIABLES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "KMP_")
"""Set by libraries for themselves when they are first used, or again for each test."""
LASTING = "a fixture of a wider scope"


class _Stopped(BaseException):
    """Raised in a thread that a test has left behind."""


class Leftovers:
    """The books of this process: whose thread and whose process each one is. Made once, before any test."""

    def __init__(self) -> None:
        self._value = uuid.uuid4().hex
        os.environ[MARK] = self._value
        os.environ["SPT_NOENV"] = "1"  # setproctitle would write over the environment that is looked at
        # A server writes over its own: where it works tells whose it is.
        # pytest's own folders stay where they are.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        self._folder = tempfile.mkdtemp(prefix="t")
        os.environ["TMPDIR"] = tempfile.tempdir = self._folder
        # After multiprocessing's own folder, which lies in this one; never by a forked process.
        Finalize(None, shutil.rmtree, args=(self._folder,), kwargs={"ignore_errors": True}, exitpriority=-200)
        self._pid = os.getpid()
        self._owner = LASTING
        self._seen: dict[int, float] = {}
        """Processes that were looked at: those of before, and those of other people."""
        self._start_thread = threading.Thread.start
        self._signals: dict[str, Callable[[int, int], None]] = {"kill": os.kill, "killpg": os.killpg}
        self._watch_threads()
        self._guard_signals()
        self.forget_processes()

    # -- whose -----------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def lasting(self) -> Iterator[None]:
        """Processes and threads that are started here outlive the test: a fixture of a wider scope is set up."""
        before, self._owner = self._owner, LASTING
        self.forget_processes(only_new=True)
        try:
            yield
        finally:
            self._owner = before
            self.forget_processes()

    @contextlib.contextmanager
    def test(self, name: str) -> Iterator[list[str]]:
        """Yields a list that names, at the end, what the test has left behind; it is stopped by then."""
        self._owner = name
        variables = dict(os.environ)
        found: list[str] = []
        yield found
        self._wait(lambda: not self._threads(name) and not self._processes())
        found += [self._stopped_thread(thread) for thread in self._threads(name)]
        found += [self._stopped_process(process) for process in self._processes()]
        found += _restored(variables)
        self._owner = LASTING

    def _watch_threads(self) -> None:
        books = self

        def start(thread: Any) -> None:
            starter = threading.current_thread()
            is_main = starter is threading.main_thread()
            thread._left_by = books._owner if is_main else getattr(starter, "_left_by", LASTING)
            work = thread.run

            def run() -> None:
                with contextlib.suppress(_Stopped):
                    work()

            thread.run = run
            books._start_thread(thread)

        threading.Thread.start = start  # type: ignore[method-assign]

    def _guard_signals(self) -> None:
        def guarded(name: str) -> Callable[[int, int], None]:
            real = self._signals[name]

            def send(pid: int, number: int) -> None:
                if number and os.getpid() == self._pid and not self._may_signal(pid):
                    raise AssertionError(f"os.{name}({pid}, {number}): no test has started that process")
                real(pid, number)

            return send

        for name in self._signals:
            setattr(os, name, guarded(name))

    def _may_signal(self, pid: int) -> bool:
        if pid == self._pid:
            return True
        try:
            process = psutil.Process(pid)
            return process.status() == psutil.STATUS_ZOMBIE or self._is_ours(process)
        except psutil.NoSuchProcess:
            return True  # nobody gets it

    # -- what is left ----------------------------------------------------------------------------------------------
    def _threads(self, name: str) -> list[threading.Thread]:
        return [
            thread
            for thread in threading.enumerate()
            if getattr(thread, "_left_by", LASTING) == name and not type(thread).__module__.startswith(LIBRARIES)
        ]

    def forget_processes(self, *, only_new: bool = False) -> None:
        """Those of now are nobody's; `only_new`: not those that a test has started, which would be forgiven."""
        ours = {process.pid for process in self._processes()} if only_new else set()
        self._seen = {pid: 0.0 for pid in _pids() if pid not in ours}

    def lifelong(self) -> set[int | None]:
        """This process, and the two that Python starts once for as long as it lives."""
        return {self._pid, getattr(_FORKSERVER, "_forkserver_pid", None), getattr(_TRACKER, "_pid", None)}

    def _processes(self) -> list[psutil.Process]:
        """Processes of this process that were not seen before."""
        pids = _pids()
        self._seen = {pid: begin for pid, begin in self._seen.items() if pid in pids}
        found = []
        for pid in pids - self._seen.keys() - self.lifelong():
            try:
                process = psutil.Process(pid)
                if not self._is_ours(process):
                    self._seen[pid] = 0.0
                elif not _is_over(process):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.ppid() == self._pid:
                return True
            return process.environ().get(MARK) == self._value or process.cwd().startswith(self._folder)
        except (psutil.AccessDenied, psutil.ZombieProcess):
            return False

    # -- stopping --------------------------------------------------------------------------------------------------
    def _wait(self, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_over() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _stopped_thread(self, thread: threading.Thread) -> str:
        work = getattr(thread, "_target", None)
        doing = f" ({work.__qualname__})" if hasattr(work, "__qualname__") else ""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while thread.is_alive() and time.monotonic() < deadline:
            # Ends it at its next line of Python; one that catches everything is ended again.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stopped))
            thread.join(0.05)
        return f"thread {thread.name}{doing}" + (", which cannot be stopped" if thread.is_alive() else "")

    def _stopped_process(self, process: psutil.Process) -> str:
        try:
            told = f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
            process.kill()
        except psutil.NoSuchProcess:
            return f"process {process.pid}"
        self._wait(lambda: _is_over(process))
        return told


def _is_over(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # its parent has not looked yet
    except psutil.NoSuchProcess:
        return True


def _pids() -> set[int]:
    places = Path("/proc")
    if places.is_dir():
        return {int(place.name) for place in places.iterdir() if place.name.isdecimal()}
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _restored(variables: Mapping[str, str]) -> list[str]:
    """Puts the environment back. -> what was changed."""
    changed = []
    for name in sorted({*os.environ, *variables}):
        before, now = variables.get(name), os.environ.get(name)
        if before == now or name.startswith(LIBRARY_VARIABLES):
            continue
        changed.append(f"environment variable {name}: {before!r} before, {now!r} after")
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return changed


_FORKSERVER: Any = getattr(forkserver, "_forkserver")  # noqa: B009 - private
_TRACKER: Any = getattr(resource_tracker, "_resource_tracker")  # noqa: B009 - private

LEFTOVERS = Leftovers()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    if fixturedef.scope == "function":
        return (yield)
    with LEFTOVERS.lasting():
        return (yield)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves a thread, a process, a server or an environment variable fails, and the next one is safe."""
    with LEFTOVERS.test(request.node.nodeid) as found:
        yield
    if found:
        pytest.fail("the test left behind:\n" + "\n".join(found))
