"""The figures that the server has: the ledger, heartbeats, tickets, memory. Asked for on a connection of their own, so
that the leader's own connection, and what it makes of its losses, never depends on who looks at metrics.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from rlbuffer.client.buffer import Buffer, connect
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon.figures import Figures
from rlbuffer.errors import RlbufferError
from rlbuffer.metrics.endpoint import serving
from rlbuffer.metrics.labels import Labels
from rlbuffer.metrics.registry import Values
from rlbuffer.state.heartbeats import FRESH_SECONDS
from rlbuffer.store.records import EnvLedger
from rlbuffer.store.viewer import Viewer

SCRAPE_FRESH_SECONDS = 1.0
"""Time for which an answer of the server counts: however many ask, it is looked at once a second at most."""
SCRAPE_LOOK_SECONDS = 2.0
"""Longest that an asker waits for the server; after it the answer is without its figures."""
SCRAPE_PATIENCE_SECONDS = 1.0
_log = logging.getLogger(__name__)
RANK_DIGITS = 6
"""Heartbeats of ranks are named by numbers; anything else that stands there is nobody's."""


class ServeValues:
    """The answer of `serve`: the leader's figures and the server's. A standby says only that it stands by.

    Args:
        figures: the leader's.
        settings: where the server is.
        errors: op -> calls of this process that the server did not answer.
        origin: where the address comes from, for messages.
    """

    def __init__(
        self, figures: Figures, settings: RunSettings, errors: Callable[[], Mapping[str, int]], *, origin: str = ""
    ) -> None:
        self._figures, self._settings, self._errors, self._origin = figures, settings, errors, origin
        self._buffer: Buffer | None = None
        self._is_closed = False
        self._looking = threading.Lock()
        self._looked = float("-inf")
        self._server: Values = {"server_up": 0}

    def __call__(self) -> Values:
        values = {**self._figures.values(), "server_errors_total": self._errors()}
        server = self._of_server()
        return values | (dict(server) if self._figures.leads else {"server_up": server["server_up"]})

    def close(self) -> None:
        """Closes the connection. A look that is under way is not waited for: it closes what it opens."""
        self._is_closed = True
        if self._looking.acquire(timeout=SCRAPE_LOOK_SECONDS):
            try:
                self._hang_up()
            finally:
                self._looking.release()

    def _of_server(self) -> Values:
        """The server's figures; without a server that answers in time, only that it does not."""
        looks = threading.Thread(target=self._look, name="metrics-look", daemon=True)
        looks.start()
        looks.join(SCRAPE_LOOK_SECONDS)
        return {"server_up": 0} if looks.is_alive() else self._server

    def _look(self) -> None:
        if not self._looking.acquire(timeout=SCRAPE_LOOK_SECONDS):
            return  # another look is under way
        try:
            if not self._is_closed and time.monotonic() - self._looked >= SCRAPE_FRESH_SECONDS:
                self._server = self._asked()
                self._looked = time.monotonic()
            if self._is_closed:
                self._hang_up()
        finally:
            self._looking.release()

    def _asked(self) -> Values:
        try:
            return {"server_up": 1, **server_values(self._store(), self._figures.labels)}
        except RlbufferError as error:  # the leader meets the same, and says it
            _log.debug("the metrics are without the server's: %s", error)
            return {"server_up": 0}

    def _store(self) -> Viewer:
        if self._buffer is None:
            self._buffer = connect(
                self._settings.redis_url,
                run=self._settings.run,
                config=self._settings,
                name="serve-metrics",
                origin=self._origin,
            )
            self._buffer.store.patience_seconds = SCRAPE_PATIENCE_SECONDS
        return self._buffer.store

    def _hang_up(self) -> None:
        if self._buffer is not None:
            self._buffer.close()


@contextmanager
def serve_metrics(
    figures: Figures,
    settings: RunSettings,
    errors: Callable[[], Mapping[str, int]],
    *,
    origin: str = "",
) -> Iterator[None]:
    """Answers the metrics of a batcher while the block runs, where the settings say so."""
    if not settings.metrics.listen:
        yield
        return
    values = ServeValues(figures, settings, errors, origin=origin)
    try:
        with serving(settings, "serve", values):
            yield
    finally:
        values.close()


def server_values(store: Viewer, labels: Labels) -> Values:
    """The figures that a run's server has.

    Raises:
        RlbufferError: it does not answer, or the run is gone.
    """
    facts, ledger, trainer, meta = store.server(), store.ledger(), store.trainer(), store.meta()
    alive: Counter[str] = Counter()
    for beat in store.heartbeats("worker").values():
        alive[labels.of(str(beat.get("env", "")))] += beat["seconds_ago"] <= FRESH_SECONDS
    policy = trainer.policies.get("")
    out = Counter({labels.of(env): 0 for env in ledger.envs})
    for env, tickets in store.tickets_out().items():
        out[labels.of(env)] += tickets
    return {
        "server_memory_bytes": facts["used_memory"],
        "server_memory_limit_bytes": facts["maxmemory"],
        "workers_alive": dict(alive),
        "tickets_out": dict(out),
        "policy_version": None if policy is None else policy.version,
        "step": meta.step,
        "trained_step": trainer.trained,
        "trainer_step": _rank_steps(store.heartbeats("rank")),
        "rollouts_damaged_total": ledger.damaged,
        "pushes_lost_total": ledger.lost,
        **ledger_values(ledger.envs, labels),
    }


def ledger_values(envs: Mapping[str, EnvLedger], labels: Labels) -> dict[str, Any]:
    """The account by label; envs that share one are added up."""
    out: dict[str, dict[str, Any]] = {}

    def add(metric: str, pair: tuple[int, int], env: str, *inner: str) -> None:
        for unit, amount in zip(("rollouts", "tokens"), pair, strict=True):
            where = out.setdefault(f"{unit}_{metric}", {})
            for label in (env, *inner)[:-1]:
                where = where.setdefault(label, {})
            last = (env, *inner)[-1]
            where[last] = where.get(last, 0) + amount

    for name, account in envs.items():
        env = labels.of(name)
        add("received_total", account.pushed, env)
        add("pending", account.pending, env)
        add("packed", account.packed, env)
        add("trained_total", account.trained, env)
        for reason, pair in account.dropped.items():
            add("dropped_total", pair, env, reason)
    out.pop("tokens_packed", None)
    return out


def _rank_steps(beats: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Rank -> its last step."""
    steps: dict[str, int] = {}
    for name, beat in beats.items():
        if name.isdecimal() and len(name) <= RANK_DIGITS:
            with suppress(TypeError, ValueError, KeyError):
                steps[name] = int(beat["step"])
    return dict(sorted(steps.items(), key=lambda item: int(item[0])))
