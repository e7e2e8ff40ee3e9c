"""A worker's figures for whoever asks: sums of what it logs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from rlbuffer.config.settings import RunSettings, WorkerSettings
from rlbuffer.metrics.endpoint import serving
from rlbuffer.metrics.histogram import SECONDS, Histogram
from rlbuffer.metrics.labels import MOST_FAILURES, Labels
from rlbuffer.metrics.registry import Values
from rlbuffer.process.logs import heard

RECENT_GROUPS = 256
"""Groups that the mean reward is taken over."""


class WorkerFigures:
    """Sums up what one worker logs.

    Args:
        settings: the worker's: what counts as solved and as failed.
        errors: op -> calls of this process that the server did not answer.
    """

    def __init__(self, settings: WorkerSettings, errors: Callable[[], Mapping[str, int]]) -> None:
        self._settings, self._errors = settings, errors
        # Until a group says it: those of tickets are called ``<env>.<number>``.
        self._env = str(settings.env_options.get("name") or settings.env)
        self._sums: Counter[str] = Counter(groups=0, rollouts=0, tokens=0, troubles=0)
        self._failed: Counter[str] = Counter()
        self._kinds = Labels(MOST_FAILURES)
        self._prompts: Counter[str] = Counter(solved=0, failed=0, mixed=0)
        self._rewards: deque[float] = deque(maxlen=RECENT_GROUPS)
        self._version = -1
        self._is_waiting = False
        self._group_seconds, self._load_seconds = Histogram(SECONDS), Histogram(SECONDS)

    def values(self) -> Values:
        """The values of :data:`rlbuffer.metrics.registry.WORKER`."""
        rewards = list(self._rewards)
        of_env = {
            "worker_policy_version": self._version,
            "worker_waiting": int(self._is_waiting),
            "worker_reward_mean": fmean(rewards) if rewards else None,
            **{f"worker_{unit}_total": n for unit, n in self._sums.items()},
            "worker_failed_groups_total": dict(self._failed),
            "worker_prompts_total": dict(self._prompts),
            "worker_group_seconds": self._group_seconds,
            "worker_load_seconds": self._load_seconds,
        }
        return {name: {self._env: value} for name, value in of_env.items()} | {"server_errors_total": self._errors()}

    def take(self, line: Mapping[str, Any]) -> None:
        """A line was logged."""
        match line["event"]:
            case "group":
                self._env = line["group_id"].rpartition(".")[0] or self._env
                self._is_waiting = False
                self._sums.update(groups=1, rollouts=line["rollouts"], tokens=line["tokens"])
                self._group_seconds.add(line["seconds"])
                if line["lowest"] is not None and line["highest"] is not None:
                    self._rewards.append(line["reward"])
                    self._prompts[self._difficulty(line["lowest"], line["highest"])] += 1
            case "version":
                self._version = line["version"]
                self._load_seconds.add(line["seconds"])
            case "trouble" if "kind" in line:
                self._failed[self._kinds.of(line["kind"])] += 1
            case "trouble":
                self._sums["troubles"] += 1
            case "waiting":
                self._is_waiting = True

    def _difficulty(self, lowest: float, highest: float) -> str:
        """The word for a group of these rewards."""
        if lowest < highest:
            return "mixed"
        return "solved" if lowest > 0 else "failed"


@contextmanager
def worker_figures(
    settings: RunSettings,
    worker: WorkerSettings,
    name: str,
    errors: Callable[[], Mapping[str, int]],
) -> Iterator[None]:
    """Answers the metrics of a worker while the block runs, where the settings say so."""
    if not settings.metrics.listen:
        yield
        return
    figures = WorkerFigures(worker, errors)
    with heard("rlbuffer.worker", figures.take), serving(settings, "worker", figures.values, worker=name):
        yield
