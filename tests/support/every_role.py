"""A store of all roles at once, for tests in which one process plays them all."""

from __future__ import annotations

from typing import Any

from rlbuffer.client.buffer import Buffer
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.operator import OperatorStore
from rlbuffer.store.records import Report
from rlbuffer.store.scorer import ScorerStore
from rlbuffer.store.trainer import TrainerStore
from rlbuffer.store.verify.verify import verify


class EveryRole(GatewayStore, ScorerStore, LeaderStore, TrainerStore, OperatorStore):
    """Nothing of its own but what `Buffer.verify` does."""

    def verify(self) -> Report:
        """Recomputes the ledger and every invariant that can be seen from outside."""
        return verify(self)


def stands_in(store: Any, buffer: Buffer) -> Any:
    """Whatever role somebody asks the buffer for, and with whatever patience, `store` is what they get. -> it."""
    store.role = lambda role: store
    store.patient = lambda patience_seconds, on_retry=None: store
    buffer.store = buffer.policy._store = store
    return store
