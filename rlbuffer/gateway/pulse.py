"""The gateway's heartbeat: what it serves, how much, and what hinders it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbuffer.gateway.answering import Answering
from rlbuffer.gateway.engines.fleet import Fleet
from rlbuffer.gateway.sweeping import Sweeper
from rlbuffer.process.heartbeat import Heartbeats
from rlbuffer.records.group import Group
from rlbuffer.store.gateway import GatewayStore


class Pulse(Heartbeats):
    """Beats in a thread of its own: no call holds it up."""

    def __init__(self, store: GatewayStore, name: str) -> None:
        super().__init__("rlbuffer-pulse")
        self.listens = ""
        self.answering: Answering | None = None
        self.sweeper: Sweeper | None = None
        self.fleet: Fleet | None = None
        self.other_ends = 0
        """Ends that were refused, since the rollout had another one."""
        self._store, self._name = store, name

    def pushed(self, group: Group) -> None:
        """A group was stored."""
        self.groups += 1
        self.rollouts += len(group.rollouts)
        self.tokens += sum(rollout.loss_tokens for rollout in group.rollouts)

    def record(self) -> dict[str, Any]:
        """The content of a heartbeat; msgpack types."""
        found: dict[str, Any] = {"listens": self.listens, "other_ends": self.other_ends}
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
            }
        if self.sweeper is not None:
            found |= {"abandoned": self.sweeper.abandoned, "stuck_groups": self.sweeper.stuck}
        if self.fleet is not None:
            found |= {"models": self.fleet.models, "engine_troubles": len(self.fleet.troubles)}
        return found | super().record()

    def _renew(self) -> None:
        """Tickets of open rollouts are kept by their calls."""

    def _tell(self, record: dict[str, Any]) -> Mapping[str, Any] | None:
        return self._store.heartbeat("gateway", self._name, record)
