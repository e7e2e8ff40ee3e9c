"""The trainer's figures for whoever asks: what the record of the last step has, and sums of what each added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlbuffer.config.settings import RunSettings
from rlbuffer.metrics.endpoint import serving
from rlbuffer.metrics.labels import MOST_ENVS, MOST_REWARDS, OTHER_NAMES, Labels
from rlbuffer.metrics.registry import Values
from rlbuffer.process.logs import heard
from rlbuffer.state.metric import Metric, metrics_of
from rlbuffer.state.step_record import StepRecord

LABELS_OF: Mapping[str, int] = {"env": MOST_ENVS, "name": MOST_REWARDS}
"""Label that foreign workers name -> how many have one of their own."""


class TrainerFigures:
    """Keeps the numbers of the steps that rank 0 logs."""

    def __init__(self) -> None:
        self._labels = {label: Labels(most) for label, most in LABELS_OF.items()}
        self._values: dict[str, Any] = {}

    def take(self, line: Mapping[str, Any]) -> None:
        """A line was logged."""
        if line["event"] == "step":
            self.add(StepRecord.read(line))

    def add(self, record: StepRecord) -> None:
        """A step was trained."""
        before, self._values = self._values, {}
        for field, metric in metrics_of(record):
            value = self._value(metric, getattr(record, field))
            is_sum = metric.kind == "counter"
            self._values[metric.name] = _sum(before.get(metric.name, 0), value) if is_sum else value

    def values(self) -> Values:
        """The values of :data:`rlbuffer.metrics.registry.TRAIN`."""
        return self._values

    def _value(self, metric: Metric, value: Any) -> Any:
        """A field's value as the metric has it."""
        if metric.item:
            return {str(number): its[metric.item] for number, its in enumerate(value)}
        return self._labelled(metric.labels, value)

    def _labelled(self, labels: tuple[str, ...], value: Any) -> Any:
        """The value with bounded labels; what comes beyond the first names is left out."""
        if not labels:
            return value
        bounded = self._labels.get(labels[0])
        inner = {name if bounded is None else bounded.of(name): each for name, each in value.items()}
        return {name: self._labelled(labels[1:], each) for name, each in inner.items() if name != OTHER_NAMES}


def _sum(before: Any, more: Any) -> Any:
    """Both together, label by label."""
    if not isinstance(more, Mapping):
        return before + more
    old = before or {}
    return {name: _sum(old.get(name, 0), more.get(name, 0)) for name in {**old, **more}}


@contextmanager
def trainer_figures(settings: RunSettings, *, rank: int) -> Iterator[None]:
    """Answers the trainer's metrics from rank 0 while the block runs, where the settings say so."""
    if rank or not settings.metrics.listen:
        yield
        return
    figures = TrainerFigures()
    with heard("rlbuffer.trainer", figures.take), serving(settings, "train", figures.values):
        yield
