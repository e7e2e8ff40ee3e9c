"""The output of `score`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

from rlbuffer.events.event import MetricsServed, MetricsUnavailable, RunChanged, Trouble
from rlbuffer.events.scorer import GroupScored, ScoredLate, ScorerEvent, ScorerReady, ScorerStopped
from rlbuffer.state.text import amount, plural


class ScoreNarrator:
    """Tells a scorer's events: troubles at once, scored groups summed up every few seconds."""

    def __init__(self, say: Callable[[str], None], *, every_seconds: float = 10.0) -> None:
        self._say = say
        self._every = every_seconds
        self._since = time.monotonic()
        self._sums = [0, 0, 0]
        self._has_scored = False

    def __call__(self, event: ScorerEvent) -> None:
        match event:
            case ScorerReady():
                self._say(f"gives {', '.join(event.gives)}")
            case GroupScored():
                for place, count in enumerate((1, event.rollouts, event.tokens)):
                    self._sums[place] += count
                if not self._has_scored or time.monotonic() - self._since >= self._every:
                    self._tell()
            case ScoredLate():
                pass  # counted at the end
            case Trouble() | RunChanged():
                self._say(f"! {event.error}")
            case MetricsServed(url=url):
                self._say(f"metrics: {url}")
            case MetricsUnavailable():
                self._say(f"! {event.sentence}")
            case ScorerStopped():
                self._tell()
                failed = f", {event.failed_groups} not scored" if event.failed_groups else ""
                late = f", {event.late} late" if event.late else ""
                self._say(
                    f"stopped after {plural(event.groups, 'group')}, {plural(event.rollouts, 'rollout')}{late}{failed}"
                )
            case _:
                assert_never(event)

    def _tell(self) -> None:
        groups, rollouts, tokens = self._sums
        if groups:
            rate = tokens / max(time.monotonic() - self._since, 1e-3)
            self._say(
                f"scored {plural(groups, 'group')}, {plural(rollouts, 'rollout')}, {amount(tokens)} tokens"
                + (f"  {amount(rate)} tokens/s" if self._has_scored else "")
            )
        self._since, self._sums, self._has_scored = time.monotonic(), [0, 0, 0], True
