"""The endpoint of a run's metrics: a state of a few seconds ago, read beside whatever the process does.

It is read in a thread, on a connection of its own: who asks never waits for the server, and the process's own
connection, and what it makes of its losses, never depends on who looks at metrics.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from rlbuffer.client.buffer import connect
from rlbuffer.client.run_state import read_run_state
from rlbuffer.config.addresses import parse_listen
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import RlbufferError
from rlbuffer.process.logs import fields
from rlbuffer.state.run_state import RunState

READ_SECONDS, STALE_SECONDS = 2.0, 6.0
"""Seconds between two looks at the run, and after which the last one counts no more."""
PATIENCE_SECONDS = 1.0
LOOPBACK = "127.0.0.1"
_log = logging.getLogger(__name__)


class _Looks:
    """Looks at the run again and again."""

    def __init__(self, settings: RunSettings, origin: str) -> None:
        self._settings, self._origin = settings, origin
        self._last: tuple[float, RunState | None] = 0.0, None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def newest(self) -> RunState | None:
        """None while the server does not answer."""
        at, state = self._last
        return state if time.monotonic() - at < STALE_SECONDS else None

    def close(self) -> None:
        """A look that is under way is not waited for."""
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)

    def _run(self) -> None:
        settings = self._settings
        while not self._stop.is_set():
            try:
                with connect(
                    settings.redis_url, run=settings.run, config=settings, name="metrics", origin=self._origin
                ) as buffer:
                    buffer.store.patience_seconds = PATIENCE_SECONDS
                    while not self._stop.is_set():
                        self._last = time.monotonic(), read_run_state(buffer.store)
                        self._stop.wait(READ_SECONDS)
            except RlbufferError as error:  # the batcher meets the same, and says it
                _log.debug("the metrics are without the run's: %s", error)
            self._stop.wait(READ_SECONDS)


@contextmanager
def serving_metrics(
    settings: RunSettings, errors: Callable[[], Mapping[str, int]], *, origin: str = ""
) -> Iterator[None]:
    """Answers the run's metrics at ``metrics.listen`` while the block runs; nothing where that is empty.

    Where the address cannot be listened on, the log says so, and the process works without.

    Args:
        errors: op -> calls of this process that the server did not answer.
        origin: where the server's address comes from, for messages.
    """
    listen = settings.metrics.listen
    if not listen:
        yield
        return
    from rlbuffer.state.prometheus import RunCollector, answering

    host, port = parse_listen(listen)
    with ExitStack() as stack:
        looks = _Looks(settings, origin)
        stack.callback(looks.close)
        try:
            collector = RunCollector(looks.newest, settings.run, errors)
            port = stack.enter_context(answering((host or LOOPBACK, port), collector))
        except OSError as error:
            _log.warning(
                "nobody can ask this process for the run's metrics: metrics.listen = %r cannot be listened on (%s). It "
                "works on without; choose another address, or stop what has it",
                listen,
                error.strerror or error,
                extra=fields("metrics"),
            )
        else:
            shown = {"": LOOPBACK, "0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
            url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/metrics"
            _log.info("metrics: %s", url, extra=fields("metrics", url=url))
        yield
