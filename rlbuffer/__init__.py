"""rlbuffer: the experience buffer of asynchronous RL post-training for language models.

Everything importable from here is public, and so are the modules ``rlbuffer.errors`` and ``rlbuffer.testing``;
everything else is private. Names resolve on first use, so that ``import rlbuffer`` costs a millisecond and loads
neither numpy nor a Redis client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "AdapterConfig": "rlbuffer.config",
    "AdapterProgress": "rlbuffer.batches",
    "Batcher": "rlbuffer.batcher",
    "BatcherConfig": "rlbuffer.config",
    "Buffer": "rlbuffer.client",
    "Decision": "rlbuffer.batches",
    "Drop": "rlbuffer.batches",
    "EnvConfig": "rlbuffer.config",
    "FakeClock": "rlbuffer.testing",
    "Group": "rlbuffer.records",
    "GroupInfo": "rlbuffer.records",
    "GroupView": "rlbuffer.views",
    "Ledger": "rlbuffer.store.base",
    "MicroBatch": "rlbuffer.batches",
    "Normalizers": "rlbuffer.batches",
    "Plan": "rlbuffer.batches",
    "Policy": "rlbuffer.client",
    "PolicyVersion": "rlbuffer.records",
    "Pushed": "rlbuffer.records",
    "Reader": "rlbuffer.reader",
    "Report": "rlbuffer.store.base",
    "RlbufferError": "rlbuffer.errors",
    "Rollout": "rlbuffer.records",
    "Sample": "rlbuffer.batches",
    "Step": "rlbuffer.batches",
    "StepPlan": "rlbuffer.batches",
    "StepView": "rlbuffer.views",
    "Ticket": "rlbuffer.records",
    "Turn": "rlbuffer.records",
    "VersionSpan": "rlbuffer.records",
    "Writer": "rlbuffer.writer",
    "advantage": "rlbuffer.advantages",
    "connect": "rlbuffer.client",
    "make_group": "rlbuffer.testing",
    "pack": "rlbuffer.packing",
    "plan": "rlbuffer.packing",
    "redeal": "rlbuffer.packing",
}
_MODULES = ("errors", "testing")
"""Public modules beside the names."""

if TYPE_CHECKING:
    from rlbuffer import errors as errors
    from rlbuffer import testing as testing
    from rlbuffer.advantages import advantage as advantage
    from rlbuffer.batcher import Batcher as Batcher
    from rlbuffer.batches import AdapterProgress as AdapterProgress
    from rlbuffer.batches import Decision as Decision
    from rlbuffer.batches import Drop as Drop
    from rlbuffer.batches import MicroBatch as MicroBatch
    from rlbuffer.batches import Normalizers as Normalizers
    from rlbuffer.batches import Plan as Plan
    from rlbuffer.batches import Sample as Sample
    from rlbuffer.batches import Step as Step
    from rlbuffer.batches import StepPlan as StepPlan
    from rlbuffer.client import Buffer as Buffer
    from rlbuffer.client import Policy as Policy
    from rlbuffer.client import connect as connect
    from rlbuffer.config import AdapterConfig as AdapterConfig
    from rlbuffer.config import BatcherConfig as BatcherConfig
    from rlbuffer.config import EnvConfig as EnvConfig
    from rlbuffer.errors import RlbufferError as RlbufferError
    from rlbuffer.packing import pack as pack
    from rlbuffer.packing import plan as plan
    from rlbuffer.packing import redeal as redeal
    from rlbuffer.reader import Reader as Reader
    from rlbuffer.records import Group as Group
    from rlbuffer.records import GroupInfo as GroupInfo
    from rlbuffer.records import PolicyVersion as PolicyVersion
    from rlbuffer.records import Pushed as Pushed
    from rlbuffer.records import Rollout as Rollout
    from rlbuffer.records import Ticket as Ticket
    from rlbuffer.records import Turn as Turn
    from rlbuffer.records import VersionSpan as VersionSpan
    from rlbuffer.store.base import Ledger as Ledger
    from rlbuffer.store.base import Report as Report
    from rlbuffer.testing import FakeClock as FakeClock
    from rlbuffer.testing import make_group as make_group
    from rlbuffer.views import GroupView as GroupView
    from rlbuffer.views import StepView as StepView
    from rlbuffer.writer import Writer as Writer

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"rlbuffer.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'rlbuffer' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
