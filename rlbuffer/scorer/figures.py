"""A scorer's figures for whoever asks: sums of its own events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rlbuffer.config.settings import RunSettings
from rlbuffer.events.event import Trouble
from rlbuffer.events.scorer import GroupScored, ScoredLate, ScorerEvent
from rlbuffer.metrics.endpoint import serving
from rlbuffer.metrics.histogram import SECONDS, Histogram
from rlbuffer.metrics.labels import MOST_ENVS, Labels
from rlbuffer.metrics.registry import Values

Tell = Callable[[ScorerEvent], None]


class ScorerFigures:
    """Takes the events of one scorer, sums them up, and hands them on.

    Args:
        errors: op -> calls of this process that the server did not answer.
        tell: takes the events after this.
    """

    def __init__(self, errors: Callable[[], Mapping[str, int]], tell: Tell) -> None:
        self._errors, self._tell = errors, tell
        self._labels = Labels(MOST_ENVS)
        self._sums: dict[str, Counter[str]] = {}
        """env -> groups, rollouts, tokens."""
        self._seconds: dict[str, Histogram] = {}
        self._late = self._troubles = 0

    def __call__(self, event: ScorerEvent) -> None:
        self._heard(event)
        self._tell(event)

    def values(self) -> Values:
        """The values of :data:`rlbuffer.metrics.registry.SCORE`."""
        envs = dict(self._sums)
        return {
            **{
                f"score_{u}_total": {env: its[u] for env, its in envs.items()} for u in ("groups", "rollouts", "tokens")
            },
            "score_late_groups_total": self._late,
            "score_troubles_total": self._troubles,
            "score_group_seconds": dict(self._seconds),
            "server_errors_total": self._errors(),
        }

    def _heard(self, event: ScorerEvent) -> None:
        match event:
            case GroupScored():
                env = self._labels.of(event.env)
                sums = self._sums.setdefault(env, Counter())
                sums.update(groups=1, rollouts=event.rollouts, tokens=event.tokens)
                self._seconds.setdefault(env, Histogram(SECONDS)).add(event.seconds)
            case ScoredLate():
                self._late += 1
            case Trouble():
                self._troubles += 1


@contextmanager
def scorer_figures(
    settings: RunSettings, name: str, errors: Callable[[], Mapping[str, int]], tell: Tell
) -> Iterator[Tell]:
    """Answers the metrics of a scorer while the block runs, where the settings say so. -> what takes its events."""
    if not settings.metrics.listen:
        yield tell
        return
    figures = ScorerFigures(errors, tell)
    with serving(settings, "score", figures.values, tell, scorer=name):
        yield figures
