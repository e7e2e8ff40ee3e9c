"""The gateway's heartbeat: what it serves, how much, and what hinders it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlbuffer.errors import clause
from rlbuffer.gateway.answering import Answering, GatewayCounts
from rlbuffer.gateway.engines.fleet import Fleet
from rlbuffer.gateway.loading import Loader
from rlbuffer.gateway.sweeping import Sweeper
from rlbuffer.process.heartbeat import RATE_BEATS, Heartbeats
from rlbuffer.records.group import Group
from rlbuffer.records.waiting import Trouble, Wait, Waiting
from rlbuffer.state.text import plural
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.store.open_rollouts import read_counts

TROUBLE_SECONDS = 10.0
"""An engine in trouble for so long is worth a word: one that is full for a moment is none."""
TICKET_SECONDS = 5.0
"""For so long an opener that found no ticket counts as waiting: it asks again within two seconds."""


class GatewayHeartbeat(Heartbeats):
    """Beats in a thread of its own: no call holds it up."""

    def __init__(self, store: GatewayStore, name: str) -> None:
        super().__init__("rlbuffer-heartbeat", Trouble.GATEWAY_STUCK)
        self.listens = ""
        self.answering: Answering | None = None
        self.sweeper: Sweeper | None = None
        self.fleet: Fleet | None = None
        self.loader: Loader | None = None
        self.other_ends = 0
        """Ends that were refused, since the rollout had another one."""
        self.ticket_waits = 0
        """Openings that wait for a ticket now."""
        self._lacking: dict[str, float] = {}
        """Env -> when (monotonic) an opening of it found no ticket."""
        self._past: deque[tuple[float, int, float, float]] = deque([(time.monotonic(), 0, 0.0, 0.0)], maxlen=RATE_BEATS)
        """Of the last beats: when (monotonic), calls until then, engine's and own seconds of them."""
        self._store, self._name = store, name

    def pushed(self, group: Group) -> None:
        """A group was stored."""
        self.groups += 1
        self.rollouts += len(group.rollouts)
        self.tokens += sum(rollout.loss_tokens for rollout in group.rollouts)

    @contextmanager
    def waiting_for_ticket(self) -> Iterator[None]:
        """While an opening waits for a ticket."""
        self.ticket_waits += 1
        try:
            yield
        finally:
            self.ticket_waits -= 1

    def lacks_ticket(self, env: str) -> None:
        """An opening has found no ticket."""
        self._lacking[env] = time.monotonic()

    def record(self) -> dict[str, Any]:
        """The content of a heartbeat; msgpack types."""
        found: dict[str, Any] = {
            "listens": self.listens,
            "other_ends": self.other_ends,
            "ticket_waits": self.ticket_waits,
        }
        if self.answering is not None:
            tally = self.answering.tally
            found |= {
                "calls": tally.calls,
                "open_calls": self.answering.open_calls,
                "sampled_tokens": tally.tokens,
                "told_again": tally.again,
                "new_sequences": tally.new_sequences,
                "engine_seconds": tally.engine_seconds,
                "own_seconds": tally.own_seconds,
                "refused": sum(tally.refused.values()),
                **self._lately(tally),
            }
        if self.sweeper is not None:
            found |= {"abandoned": self.sweeper.abandoned, "stuck_groups": self.sweeper.stuck}
        if self.fleet is not None:
            found |= {"models": self.fleet.models, "engine_troubles": len(self.fleet.troubles)}
        return found | super().record()

    def _lately(self, tally: GatewayCounts) -> dict[str, float]:
        """Calls a second, and the seconds of a call, since the oldest of the last beats."""
        at, calls, engine_seconds, own_seconds = self._past[0]
        new = tally.calls - calls
        lately = {"calls_per_second": new / max(time.monotonic() - at, 1e-9)}
        if new:
            lately["call_engine_seconds"] = (tally.engine_seconds - engine_seconds) / new
            lately["call_own_seconds"] = (tally.own_seconds - own_seconds) / new
        return lately

    def _note(self) -> None:
        super()._note()
        if self.answering is not None:
            tally = self.answering.tally
            self._past.append((time.monotonic(), tally.calls, tally.engine_seconds, tally.own_seconds))

    def _renew(self) -> None:
        """Tickets of open rollouts are kept by their calls. What hinders the gateway is found out for the next beat."""
        self.error, self.waiting = "; ".join(self._troubles()), self._waits()

    def _troubles(self) -> Iterator[str]:
        """What somebody must cure, as clauses."""
        if self.fleet is not None and (lasting := self.fleet.lasting(TROUBLE_SECONDS)):
            yield f"{len(lasting)} of {plural(len(self.fleet), 'engine')} cannot be used ({clause(lasting[0])})"
        if self.loader is not None and self.loader.trouble:
            yield f"the newest weights are not in its engines ({clause(self.loader.trouble)})"
        if self.sweeper is not None and self.sweeper.trouble:
            yield f"open rollouts are not looked after ({clause(self.sweeper.trouble)})"
        if self.sweeper is not None and self.sweeper.stuck:
            groups = plural(self.sweeper.stuck, "group")
            yield f"{groups} cannot be pushed yet, and wait for it ({clause(self.sweeper.stuck_because)})"

    def _waits(self) -> Waiting | None:
        if not self._store.may_sample():
            full = "The server's memory is nearly full, so nothing is sampled for agents until steps retire."
            return Waiting(kind=Wait.SERVER, detail=full)
        if self.fleet is not None and self.answering is not None and self.answering.open_calls:
            lasting = self.fleet.lasting(TROUBLE_SECONDS)
            if len(lasting) == len(self.fleet):
                return Waiting(kind=Wait.ENGINE, detail=clause(lasting[0]))
        now = time.monotonic()
        lacking = [env for env, at in list(self._lacking.items()) if now - at < TICKET_SECONDS]
        return Waiting(kind=Wait.TICKET, env=", ".join(sorted(lacking))) if lacking else None

    def _tell(self, record: dict[str, Any]) -> Mapping[str, Any] | None:
        counts = read_counts(self._store)
        record["open_rollouts"] = {env: of_env.open for env, of_env in counts.items() if of_env.open}
        return self._store.heartbeat("gateway", self._name, record)
