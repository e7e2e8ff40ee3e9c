"""A store of all roles at once: in a benchmark one process plays them all."""

from __future__ import annotations

from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.operator import OperatorStore
from rlbuffer.store.scorer import ScorerStore
from rlbuffer.store.trainer import TrainerStore
from rlbuffer.store.worker import WorkerStore


class EveryRole(WorkerStore, ScorerStore, LeaderStore, TrainerStore, OperatorStore):
    """Nothing of its own."""
