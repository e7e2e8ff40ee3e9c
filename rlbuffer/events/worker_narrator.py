"""The output of `worker`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import assert_never

from rlbuffer.events.event import MetricsServed, MetricsUnavailable, RunChanged, Trouble
from rlbuffer.events.worker import (
    EnvFinished,
    GroupGivenUp,
    GroupPushed,
    SamplerChecked,
    VersionEvaluated,
    VersionLoaded,
    WorkerEvent,
    WorkerStopped,
    WorkerWaits,
)
from rlbuffer.process.lasting import AGAIN_SECONDS, Lasting
from rlbuffer.state.text import amount, counted, plural


class WorkerNarrator:
    """Tells a worker's events: versions and groups summed up every few seconds, a trouble or what is waited for at once
    and, while it lasts, every minute."""

    def __init__(self, tell: Callable[[str], None], *, every_seconds: float = 10.0) -> None:
        self._tell = tell
        self._every = every_seconds
        self._since = time.monotonic()
        self._sums = {"groups": 0, "rollouts": 0, "tokens": 0}
        self._rewards = 0.0
        self._version = -1
        self._has_pushed = False
        self._lasting = Lasting()
        self._failed: Counter[str] = Counter()
        self._last_failure = ""
        self._told_failures = float("-inf")

    def __call__(self, event: WorkerEvent) -> None:
        match event:
            case VersionLoaded():
                if self._version < 0:
                    self._tell(f"sampling with policy version {event.version}")
                self._version = event.version
            case SamplerChecked():
                self._tell(f"the sampler's logprobs are those of the published weights (to {event.difference:.1g})")
            case VersionEvaluated(env=env, version=version, result=result):
                self._tell(
                    f"eval/{env}/reward/mean {result['reward/mean']:.3f} +- {result['reward/error']:.3f}"
                    f"  version {version}  {plural(int(result['rollouts']), 'rollout')} in {result['seconds']:.1f} s"
                )
            case GroupPushed():
                self._count(event)
            case EnvFinished():
                self._tell(event.sentence)
            case GroupGivenUp():
                self._fail(event)
            case Trouble():
                if self._lasting.is_due(event.error, time.monotonic()):
                    self._tell(f"! {event.error}")
            case MetricsServed(url=url):
                self._tell(f"metrics: {url}")
            case MetricsUnavailable():
                self._tell(f"! {event.sentence}")
            case RunChanged():
                self._tell(f"! {event.error}")
            case WorkerWaits():
                if self._lasting.is_due(event.waiting.key, time.monotonic()):
                    self._tell(f"waiting for {event.waiting.seconds:.0f} s: {event.waiting}")
            case WorkerStopped():
                self._tell_groups()
                self._tell_failures()
                failed = f", {event.failed_groups} given up" if event.failed_groups else ""
                self._tell(
                    f"stopped after {plural(event.groups, 'group')}, {plural(event.rollouts, 'rollout')}{failed}"
                )
            case _:
                assert_never(event)

    def _count(self, event: GroupPushed) -> None:
        self._lasting.is_over()
        self._sums["groups"] += 1
        self._sums["rollouts"] += event.rollouts
        self._sums["tokens"] += event.tokens
        self._rewards += event.reward * event.rollouts
        if not self._has_pushed or time.monotonic() - self._since >= self._every:
            self._tell_groups()

    def _fail(self, event: GroupGivenUp) -> None:
        """A group was given up: says the first of a kind with its traceback, and counts the others."""
        if event.traceback:
            self._tell(f"! {event.error}\n{event.traceback}")
            self._told_failures = max(self._told_failures, time.monotonic())
            return
        self._failed[event.kind] += 1
        self._last_failure = event.error
        if time.monotonic() - self._told_failures >= AGAIN_SECONDS:
            self._tell_failures()

    def _tell_failures(self) -> None:
        if self._failed:
            self._tell(
                f"! {plural(sum(self._failed.values()), 'more group')} given up ({counted(self._failed)}), the last: "
                f"{self._last_failure}"
            )
        self._failed.clear()
        self._told_failures = time.monotonic()

    def _tell_groups(self) -> None:
        rollouts = self._sums["rollouts"]
        if rollouts:
            rate = rollouts / max(time.monotonic() - self._since, 1e-3)
            self._tell(
                f"pushed {plural(self._sums['groups'], 'group')}, {plural(rollouts, 'rollout')}, "
                f"{amount(self._sums['tokens'])} tokens  reward {self._rewards / rollouts:.2f}  version {self._version}"
                + (f"  {rate:.0f} rollouts/s" if self._has_pushed else "")
            )
        self._since, self._rewards, self._has_pushed = time.monotonic(), 0.0, True
        self._sums = dict.fromkeys(self._sums, 0)
