"""rlbuffer: the experience buffer of asynchronous RL post-training for language models.

Everything importable from here is public, and so are what the packages of the rooms name (``rlbuffer.records``,
``rlbuffer.packing`` ...), ``rlbuffer.errors`` and ``rlbuffer.testing``; everything else is private. Names resolve on
first use, so that ``import rlbuffer`` costs a millisecond and loads neither numpy nor a Redis client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "AdapterConfig": "rlbuffer.config.batcher",
    "AdapterProgress": "rlbuffer.records.step_plan",
    "Batcher": "rlbuffer.batcher.batcher",
    "BatcherConfig": "rlbuffer.config.batcher",
    "Buffer": "rlbuffer.client.buffer",
    "Decision": "rlbuffer.records.step_plan",
    "Drop": "rlbuffer.records.step_plan",
    "EnvConfig": "rlbuffer.config.batcher",
    "Failure": "rlbuffer.records.failure",
    "FakeClock": "rlbuffer.testing",
    "Group": "rlbuffer.records.group",
    "GroupInfo": "rlbuffer.records.info",
    "GroupView": "rlbuffer.client.views",
    "Ledger": "rlbuffer.store.records",
    "MicroBatch": "rlbuffer.records.micro_batch",
    "Normalizers": "rlbuffer.records.step_plan",
    "Plan": "rlbuffer.records.step_plan",
    "Policy": "rlbuffer.client.buffer",
    "PolicyVersion": "rlbuffer.records.policy_version",
    "Pushed": "rlbuffer.records.group",
    "Reader": "rlbuffer.client.reader",
    "Report": "rlbuffer.store.records",
    "RlbufferError": "rlbuffer.errors",
    "Rollout": "rlbuffer.records.rollout",
    "Sample": "rlbuffer.records.micro_batch",
    "Step": "rlbuffer.records.micro_batch",
    "StepPlan": "rlbuffer.records.step_plan",
    "StepView": "rlbuffer.client.views",
    "Ticket": "rlbuffer.records.group",
    "TokenSequence": "rlbuffer.records.rollout",
    "Turn": "rlbuffer.records.spans",
    "VersionSpan": "rlbuffer.records.spans",
    "Writer": "rlbuffer.client.writer",
    "advantage": "rlbuffer.batcher.advantages",
    "connect": "rlbuffer.client.buffer",
    "make_group": "rlbuffer.testing",
    "pack": "rlbuffer.packing.pack",
    "plan": "rlbuffer.packing.planner",
    "redeal": "rlbuffer.packing.planner",
}
_MODULES = {
    name: f"rlbuffer.{name}"
    for name in ("batcher", "client", "config", "errors", "packing", "records", "testing", "traces")
}
_MODULES["advantages"] = "rlbuffer.batcher.advantages"
"""Modules that need no import of their own: ``rlbuffer.packing.pack``."""

if TYPE_CHECKING:
    from rlbuffer import errors as errors
    from rlbuffer import testing as testing
    from rlbuffer import traces as traces
    from rlbuffer.batcher.advantages import advantage as advantage
    from rlbuffer.batcher.batcher import Batcher as Batcher
    from rlbuffer.client.buffer import Buffer as Buffer
    from rlbuffer.client.buffer import Policy as Policy
    from rlbuffer.client.buffer import connect as connect
    from rlbuffer.client.reader import Reader as Reader
    from rlbuffer.client.views import GroupView as GroupView
    from rlbuffer.client.views import StepView as StepView
    from rlbuffer.client.writer import Writer as Writer
    from rlbuffer.config.batcher import AdapterConfig as AdapterConfig
    from rlbuffer.config.batcher import BatcherConfig as BatcherConfig
    from rlbuffer.config.batcher import EnvConfig as EnvConfig
    from rlbuffer.errors import RlbufferError as RlbufferError
    from rlbuffer.packing.pack import pack as pack
    from rlbuffer.packing.planner import plan as plan
    from rlbuffer.packing.planner import redeal as redeal
    from rlbuffer.records.failure import Failure as Failure
    from rlbuffer.records.group import Group as Group
    from rlbuffer.records.group import Pushed as Pushed
    from rlbuffer.records.group import Ticket as Ticket
    from rlbuffer.records.info import GroupInfo as GroupInfo
    from rlbuffer.records.micro_batch import MicroBatch as MicroBatch
    from rlbuffer.records.micro_batch import Sample as Sample
    from rlbuffer.records.micro_batch import Step as Step
    from rlbuffer.records.policy_version import PolicyVersion as PolicyVersion
    from rlbuffer.records.rollout import Rollout as Rollout
    from rlbuffer.records.rollout import TokenSequence as TokenSequence
    from rlbuffer.records.spans import Turn as Turn
    from rlbuffer.records.spans import VersionSpan as VersionSpan
    from rlbuffer.records.step_plan import AdapterProgress as AdapterProgress
    from rlbuffer.records.step_plan import Decision as Decision
    from rlbuffer.records.step_plan import Drop as Drop
    from rlbuffer.records.step_plan import Normalizers as Normalizers
    from rlbuffer.records.step_plan import Plan as Plan
    from rlbuffer.records.step_plan import StepPlan as StepPlan
    from rlbuffer.store.records import Ledger as Ledger
    from rlbuffer.store.records import Report as Report
    from rlbuffer.testing import FakeClock as FakeClock
    from rlbuffer.testing import make_group as make_group

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
