"""The job of one worker: all that it is started with."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlbuffer.config.settings import EvaluationSettings, WorkerSettings
from rlbuffer.worker.envs import Env
from rlbuffer.worker.samplers import Sampler

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """A worker's run, settings, env and sampler."""

    buffer: Buffer
    name: str
    """The producer's; the same after a restart."""
    settings: WorkerSettings
    env: Env
    sampler: Sampler
    stop: threading.Event
    """Set: what is in flight lands, then the worker ends."""
    evaluations: Mapping[str, EvaluationSettings] = field(default_factory=dict)
    """Evaluations of versions that it makes beside its work, by name."""
    section: str = ""
    """The ``[worker.NAME]`` that it was started for; "" for none."""
