"""A worker's figures for whoever asks: sums of its own events."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean

from rlbuffer.config.settings import RunSettings, WorkerSettings
from rlbuffer.events.event import Trouble
from rlbuffer.events.worker import GroupGivenUp, GroupPushed, VersionLoaded, WorkerEvent, WorkerWaits
from rlbuffer.metrics.endpoint import serving
from rlbuffer.metrics.histogram import SECONDS, Histogram
from rlbuffer.metrics.labels import MOST_FAILURES, Labels
from rlbuffer.metrics.registry import Values

RECENT_GROUPS = 256
"""Groups that the mean reward is taken over."""
Tell = Callable[[WorkerEvent], None]


class WorkerFigures:
    """Takes the events of one worker, sums them up, and hands them on.

    Args:
        settings: the worker's: what counts as solved and as failed.
        errors: op -> calls of this process that the server did not answer.
        tell: takes the events after this.
    """

    def __init__(self, settings: WorkerSettings, errors: Callable[[], Mapping[str, int]], tell: Tell) -> None:
        self._settings, self._errors, self._tell = settings, errors, tell
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

    def __call__(self, event: WorkerEvent) -> None:
        self._heard(event)
        self._tell(event)

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

    def _heard(self, event: WorkerEvent) -> None:
        match event:
            case GroupPushed():
                self._env = event.group_id.rpartition(".")[0] or self._env
                self._is_waiting = False
                self._sums.update(groups=1, rollouts=event.rollouts, tokens=event.tokens)
                self._group_seconds.add(event.seconds)
                if event.lowest is not None and event.highest is not None:
                    self._rewards.append(event.reward)
                    self._prompts[self._difficulty(event.lowest, event.highest)] += 1
            case VersionLoaded(version=version, seconds=seconds):
                self._version = version
                self._load_seconds.add(seconds)
            case GroupGivenUp(kind=kind):
                self._failed[self._kinds.of(kind)] += 1
            case Trouble():
                self._sums["troubles"] += 1
            case WorkerWaits():
                self._is_waiting = True

    def _difficulty(self, lowest: float, highest: float) -> str:
        """The word for a group of these rewards, by the settings that skip prompts."""
        if lowest >= self._settings.skip_solved:
            return "solved"
        return "failed" if highest <= self._settings.skip_failed else "mixed"


@contextmanager
def worker_figures(
    settings: RunSettings,
    worker: WorkerSettings,
    name: str,
    errors: Callable[[], Mapping[str, int]],
    tell: Tell,
) -> Iterator[Tell]:
    """Answers the metrics of a worker while the block runs, where the settings say so. -> what takes its events."""
    if not settings.metrics.listen:
        yield tell
        return
    figures = WorkerFigures(worker, errors, tell)
    with serving(settings, "worker", figures.values, tell, worker=name):
        yield figures
