"""The knowledge of a live view of a whole run: the trained steps, the pool, ages and ranks. Reads only."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rlbuffer.client.buffer import Buffer
from rlbuffer.client.run_state import read_run_state
from rlbuffer.errors import RlbufferError
from rlbuffer.state.run_state import RunState
from rlbuffer.state.step_record import StepRecord
from rlbuffer_cli.render.metrics_tail import MetricsTail

WATCH_LOOK_SECONDS = 1.0
"""Seconds between two looks at the server."""
KEPT_LINES = 6


@dataclass(slots=True)
class Glance:
    """The last look at the server."""

    state: RunState | None = None
    ages: Counter[int] = field(default_factory=Counter)
    """Age in policy versions -> rollouts of the newest step."""
    rank_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens of each rank in the newest step."""
    trouble: str = ""
    """The reason why the last look failed."""

    @property
    def waiting(self) -> str:
        """What the view says of the batcher."""
        waiting = None if self.state is None else self.state.waiting
        return self.trouble or str(waiting or "")


class Watch:
    """Collects step records as they appear and looks at the server once a second."""

    def __init__(self, buffer: Buffer, metrics: Path, *, on_step: Callable[[StepRecord], None]) -> None:
        self.started = time.monotonic()
        self.records: list[StepRecord] = []
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.glance = Glance()
        self.first_step_seconds: float | None = None
        self.tokens: Counter[str] = Counter()
        self._buffer = buffer
        self._tail = MetricsTail(metrics)
        self._on_step = on_step
        self._next_look = 0.0

    @property
    def seconds(self) -> float:
        """Since the processes were started."""
        return time.monotonic() - self.started

    def log(self, name: str, line: str) -> None:
        """A line of the supervisor's log, for the foot of the view; steps are in the view already."""
        if name in ("serve", "train") and line.startswith("step "):
            return
        self.lines.append(f"{name}  {line}")

    def update(self, *, look: bool, now: bool = False) -> None:
        """Takes in new steps; with `look`, the server too when it is time, or `now`."""
        for record in self._tail.new():
            if self.first_step_seconds is None:
                self.first_step_seconds = self.seconds
            self.records.append(record)
            self.tokens.update({env: n for env, n in record.tokens_by_env.items() if n})
            self._on_step(record)
        if look and (now or time.monotonic() >= self._next_look):
            self._next_look = time.monotonic() + WATCH_LOOK_SECONDS
            try:
                self.glance = self._look()
            except RlbufferError as error:
                self.glance.trouble = str(error).splitlines()[0]

    def _look(self) -> Glance:
        glance = Glance(state=read_run_state(self._buffer.store))
        if self.records:
            view = self._buffer.step(self.records[-1].step)
            for rank, rollout in view.rollouts:
                glance.ages[view.header.step - 1 - rollout.info.min_version] += 1
                glance.rank_tokens[rank] = glance.rank_tokens.get(rank, 0) + rollout.info.length
        return glance

    # -- numbers -------------------------------------------------------------------------------------------------------
    def rewards(self) -> list[float]:
        """Mean reward of each step."""
        return [r.reward for r in self.records if r.reward is not None]

    def mean_reward(self, records: list[StepRecord]) -> float | None:
        """Mean over the steps given; None without any."""
        rewards = [r.reward for r in records if r.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    def shares(self) -> dict[str, float]:
        """env -> fraction of all trained tokens."""
        total = sum(self.tokens.values()) or 1
        return {env: n / total for env, n in sorted(self.tokens.items())}
