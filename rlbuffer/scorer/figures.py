"""A scorer's figures for whoever asks: sums of what it logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlbuffer.config.settings import RunSettings
from rlbuffer.metrics.endpoint import serving
from rlbuffer.metrics.histogram import SECONDS, Histogram
from rlbuffer.metrics.labels import MOST_ENVS, Labels
from rlbuffer.metrics.registry import Values
from rlbuffer.process.logs import heard


class ScorerFigures:
    """Sums up what one scorer logs.

    Args:
        errors: op -> calls of this process that the server did not answer.
    """

    def __init__(self, errors: Callable[[], Mapping[str, int]]) -> None:
        self._errors = errors
        self._labels = Labels(MOST_ENVS)
        self._sums: dict[str, Counter[str]] = {}
        """env -> groups, rollouts, tokens."""
        self._seconds: dict[str, Histogram] = {}
        self._late = self._troubles = 0

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

    def take(self, line: Mapping[str, Any]) -> None:
        """A line was logged."""
        match line["event"]:
            case "scored":
                env = self._labels.of(line["env"])
                sums = self._sums.setdefault(env, Counter())
                sums.update(groups=1, rollouts=line["rollouts"], tokens=line["tokens"])
                self._seconds.setdefault(env, Histogram(SECONDS)).add(line["seconds"])
            case "late":
                self._late += 1
            case "trouble":
                self._troubles += 1


@contextmanager
def scorer_figures(settings: RunSettings, name: str, errors: Callable[[], Mapping[str, int]]) -> Iterator[None]:
    """Answers the metrics of a scorer while the block runs, where the settings say so."""
    if not settings.metrics.listen:
        yield
        return
    figures = ScorerFigures(errors)
    with heard("rlbuffer.scorer", figures.take), serving(settings, "score", figures.values, scorer=name):
        yield
