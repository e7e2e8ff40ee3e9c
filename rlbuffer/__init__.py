"""rlbuffer: the experience buffer of asynchronous RL post-training for language models.

The names here are those that a worker and a trainer are written with. What the packages of the rooms name
(``rlbuffer.records``, ``rlbuffer.packing`` ...), ``rlbuffer.errors`` and ``rlbuffer.testing`` are public, too;
everything else is private. Names resolve on first use, so that ``import rlbuffer`` costs a millisecond and loads
neither numpy nor a Redis client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "BatcherConfig": "rlbuffer.config.batcher",
    "Buffer": "rlbuffer.client.buffer",
    "Failure": "rlbuffer.records.failure",
    "Group": "rlbuffer.records.group",
    "MicroBatch": "rlbuffer.records.micro_batch",
    "Policy": "rlbuffer.client.buffer",
    "PolicyVersion": "rlbuffer.records.policy_version",
    "Reader": "rlbuffer.client.reader",
    "RlbufferError": "rlbuffer.errors",
    "Rollout": "rlbuffer.records.rollout",
    "Step": "rlbuffer.records.micro_batch",
    "Stream": "rlbuffer.client.stream",
    "Ticket": "rlbuffer.records.group",
    "TokenSequence": "rlbuffer.records.rollout",
    "Turn": "rlbuffer.records.spans",
    "VersionSpan": "rlbuffer.records.spans",
    "Writer": "rlbuffer.client.writer",
    "connect": "rlbuffer.client.buffer",
}
_MODULES = {
    name: f"rlbuffer.{name}"
    for name in ("batcher", "client", "config", "doors", "errors", "packing", "records", "testing", "traces")
}
_MODULES["advantages"] = "rlbuffer.batcher.advantages"
"""Modules that need no import of their own: ``rlbuffer.packing.pack``."""

if TYPE_CHECKING:
    from rlbuffer import batcher as batcher
    from rlbuffer import client as client
    from rlbuffer import config as config
    from rlbuffer import doors as doors
    from rlbuffer import errors as errors
    from rlbuffer import packing as packing
    from rlbuffer import records as records
    from rlbuffer import testing as testing
    from rlbuffer import traces as traces
    from rlbuffer.batcher import advantages as advantages
    from rlbuffer.client.buffer import Buffer as Buffer
    from rlbuffer.client.buffer import Policy as Policy
    from rlbuffer.client.buffer import connect as connect
    from rlbuffer.client.reader import Reader as Reader
    from rlbuffer.client.stream import Stream as Stream
    from rlbuffer.client.writer import Writer as Writer
    from rlbuffer.config.batcher import BatcherConfig as BatcherConfig
    from rlbuffer.errors import RlbufferError as RlbufferError
    from rlbuffer.records.failure import Failure as Failure
    from rlbuffer.records.group import Group as Group
    from rlbuffer.records.group import Ticket as Ticket
    from rlbuffer.records.micro_batch import MicroBatch as MicroBatch
    from rlbuffer.records.micro_batch import Step as Step
    from rlbuffer.records.policy_version import PolicyVersion as PolicyVersion
    from rlbuffer.records.rollout import Rollout as Rollout
    from rlbuffer.records.rollout import TokenSequence as TokenSequence
    from rlbuffer.records.spans import Turn as Turn
    from rlbuffer.records.spans import VersionSpan as VersionSpan

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'rlbuffer' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
