"""A process of its own for one side of a comparison: what the other side keeps or has freed there does not reach it."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")


class Apart:
    """An object in a process of its own, whose calls are timed there.

    Args:
        make: makes the object, of `args`; both are pickled.
    """

    def __init__(self, make: Callable[..., object], *args: Any) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self._process.start()
        theirs.close()

    def __call__(self, method: str, *args: Any) -> tuple[float, float]:
        """Seconds by the clock, and of the process's CPU, of one call. Raises RuntimeError when the process ended."""
        wall, cpu = self._ask((method, args))
        return wall, cpu

    def cpu(self) -> float:
        """CPU seconds of all threads of the process so far. Raises RuntimeError when it ended."""
        seconds: float = self._ask(None)
        return seconds

    def _ask(self, request: tuple[str, tuple[Any, ...]] | None) -> Any:
        try:
            self._pipe.send(request)
            return self._pipe.recv()
        except (EOFError, OSError):
            what = "say its CPU time" if request is None else f"do {request[0]}"
            raise RuntimeError(f"the process that should {what} has ended; what it met stands above") from None

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, make: Callable[..., object], args: tuple[Any, ...]) -> None:
    here = make(*args)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        if request is None:
            pipe.send(time.process_time())
            continue
        method, its = request
        wall, cpu = time.perf_counter(), time.process_time()
        result = getattr(here, method)(*its)
        pipe.send((time.perf_counter() - wall, time.process_time() - cpu))
        del result  # freed before the next call, and not within this one
