"""Failures of an env: the kind of error, its place in the user's files, and what has been running for too long.

An env is the user's code. Most of what fails in it fails in every group, so a worker says the file and line of it, and
what it does when it does not come back.
"""

from __future__ import annotations

import asyncio
import inspect
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlbuffer.errors import ConfigError, clause
from rlbuffer.process.threads import Place, places_of_thread
from rlbuffer.records.checks import escaped
from rlbuffer.state.text import counted, plural

LONG_SECONDS = 5.0
"""Work of an env that runs for longer is named, with the line that it is at."""
MOST_KINDS = 16
"""Kinds of failures that a heartbeat has: the most frequent ones."""
SHOWN_FRAMES = 6
"""Innermost frames of a traceback that are shown."""
MOST_TRACEBACK = 4000
"""Characters of a traceback that a heartbeat carries: the last ones."""

_OURS = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
_PYTHON = sysconfig.get_paths()["stdlib"]


def place_of(error: BaseException, env: object, function: str) -> str:
    """The place in the user's files where `error` was raised, as ``FILE:LINE in NAME``.

    The innermost line outside of rlbuffer and of Python's own library; where there is none, because what the env gave
    is wrong, the beginning of the env's `function`. "" for what the env had no part in.
    """
    places: list[Place] = []
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:  # `raise error from error` makes an error its own cause
        places += [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(cause.__traceback__)]
        thread = getattr(cause, "thread", None)
        places += places_of_thread(thread.ident) if thread is not None and thread.is_alive() else []
        seen.append(cause)
        cause = cause.__cause__
    return _shown(_chosen(places) or (None if isinstance(error, TimeoutError) else _beginning(env, function)))


def traceback_of(error: BaseException) -> str:
    """The traceback's innermost lines, as Python prints them."""
    return escaped("".join(traceback.format_exception(error, limit=-SHOWN_FRAMES)).rstrip())


class Failures:
    """Groups that could not be made, by kind. Written by the worker's loop, read by its heartbeat."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.last = ""
        """The last one in a sentence."""
        self.traceback = ""
        """Its innermost lines, at most :data:`MOST_TRACEBACK` characters."""

    def note(self, kind: str, sentence: str, traceback: str = "") -> None:
        """Counts one."""
        self._counts[kind] += 1
        self.last, self.traceback = sentence, traceback[-MOST_TRACEBACK:]

    def all_of(self, env: str) -> ConfigError:
        """The error with which a worker ends that has made no group."""
        kinds, groups = counted(self.record()), plural(self._counts.total(), "group")
        return ConfigError(
            f"env {env}: none of {groups} could be made ({kinds}), the last: {clause(self.last)}. Mend the env",
            setting="env",
        )

    def record(self) -> dict[str, int]:
        """Kind -> groups, the most frequent first, of so many kinds."""
        return dict(self._counts.copy().most_common(MOST_KINDS))


def exited(error: SystemExit | asyncio.CancelledError) -> RuntimeError:
    """The error for code of the user's that would end its process, or was cancelled by what it waited for."""
    called = f"sys.exit({error.code!r}) was called" if isinstance(error, SystemExit) else ""
    raised = RuntimeError(called or "it was cancelled, and not by rlbuffer")
    raised.__cause__ = error
    return raised


@dataclass(slots=True, eq=False)
class EnvCall:
    """A function of the env that runs."""

    what: str
    thread: int
    task: asyncio.Task[Any] | None
    """The one that it runs in, where the other tasks of its thread go on."""
    since: float | None
    """Monotonic; None while the policy samples for it."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The policy samples for the env meanwhile: that is no work of the env's."""
        self.since = None
        try:
            yield
        finally:
            self.since = time.monotonic()


class RunningCalls:
    """The env's functions that run at this moment. Safe to read from any thread."""

    def __init__(self) -> None:
        self._running: dict[int, EnvCall] = {}

    @contextmanager
    def running(self, what: str, task: asyncio.Task[Any] | None = None) -> Iterator[EnvCall]:
        """The env's function `what` runs meanwhile, in this thread or in `task`. A sys.exit there is an error, and so
        is a cancellation that is not the worker's."""
        call = EnvCall(what=what, thread=threading.get_ident(), task=task, since=time.monotonic())
        self._running[id(call)] = call
        try:
            yield call
        except (SystemExit, asyncio.CancelledError) as error:
            if task is not None and task.cancelling():  # the worker does not wait for it any more
                raise
            raise exited(error) from error
        finally:
            del self._running[id(call)]

    def sentence(self) -> str:
        """A sentence about the function that has run for long, with its place; "" while none has."""
        begun = [(call.since, call) for call in list(self._running.values()) if call.since is not None]
        if not begun:
            return ""
        since, longest = min(begun, key=lambda one: one[0])
        seconds = time.monotonic() - since
        if seconds < LONG_SECONDS:
            return ""
        place = _chosen(_places_of(longest))
        return f"{longest.what}() has run for {seconds:.0f} s" + (f" ({_shown(place)})" if place else "")


def _places_of(call: EnvCall) -> list[Place]:
    if call.task is None:
        return places_of_thread(call.thread)
    places: list[Place] = []
    inner: Any = call.task.get_coro()
    while inner is not None:
        frame = getattr(inner, "cr_frame", None)
        if frame is not None:
            places.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        inner = getattr(inner, "cr_await", None)
    is_running = getattr(call.task.get_coro(), "cr_running", False)
    return places + (places_of_thread(call.thread) if is_running else [])


def _chosen(places: Iterable[Place]) -> Place | None:
    """The innermost one of the user's own, else of a library's."""
    others = [place for place in places if not place[0].startswith((_OURS, "<"))]
    libraries = [place for place in others if place[0].startswith(_LIBRARIES)]
    users_places = [place for place in others if not place[0].startswith((*_LIBRARIES, _PYTHON))]
    return next(reversed(users_places or libraries), None)


def _beginning(env: object, function: str) -> Place | None:
    """The place where the env's `function` is defined."""
    code = getattr(inspect.unwrap(getattr(env, function, env)), "__code__", None)  # type: ignore[arg-type]
    return None if code is None else (code.co_filename, code.co_firstlineno, code.co_name)


def _shown(place: Place | None) -> str:
    return "" if place is None else "{}:{} in {}".format(*place)
