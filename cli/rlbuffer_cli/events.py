"""Events that `demo` and `run` print with ``--display json`` beside those of their processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlbuffer.events.event import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary(Event):
    """A whole run: where reward began and ended, what was trained, whether it adds up."""

    event = "summary"
    run: str
    steps: int
    seconds: float
    first_step_seconds: float | None
    reward_from: float | None
    """Mean over the first `edge_steps`."""
    reward_to: float | None
    """Mean over the last ones."""
    edge_steps: int
    tokens: int
    """Trained."""
    shares: Mapping[str, float]
    """env -> its fraction of the tokens."""
    ledger: Mapping[str, Any]
    """Rollouts: ``pushed``, ``pending``, ``packed``, ``trained``, ``dropped`` (by reason), and if it `balances`."""
    stored: str
    """Folder."""
    parameters_sha256: str | None
    exit_code: int
    restarts: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSaid(Event):
    """A line of a supervised process."""

    event = "log"
    process: str
    line: str
