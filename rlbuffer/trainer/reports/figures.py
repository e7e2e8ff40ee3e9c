"""The trainer's figures for whoever asks: the record of the last step, and sums over all that it trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlbuffer.config.settings import RunSettings
from rlbuffer.events.event import as_object
from rlbuffer.events.trainer import CheckpointWritten, StepTrained, TrainerEvent, TrainerWarning
from rlbuffer.metrics.endpoint import serving
from rlbuffer.metrics.labels import MOST_ENVS, MOST_REWARDS, Labels
from rlbuffer.metrics.registry import TRAIN, Values
from rlbuffer.trainer.reports.reports import OnEvent

LABELS_OF: Mapping[str, int] = {"env": MOST_ENVS, "name": MOST_REWARDS}
"""Label that foreign workers name -> how many have one of their own."""


class TrainerFigures:
    """Takes the events of rank 0, keeps what they say, and hands them on."""

    def __init__(self, tell: OnEvent) -> None:
        self._tell = tell
        self._labels = {label: Labels(most) for label, most in LABELS_OF.items()}
        self._record: Mapping[str, Any] = {}
        """Last step, as `metrics.jsonl` has it."""
        self._sums: Counter[str] = Counter(steps=0, damaged_tokens=0, warnings=0)
        self._tokens: Counter[str] = Counter()
        self._waits: dict[str, float] = {}
        self._checkpoint: int | None = None

    def __call__(self, event: TrainerEvent) -> None:
        self._heard(event)
        self._tell(event)

    def values(self) -> Values:
        """The values of :data:`rlbuffer.metrics.registry.TRAIN`."""
        record = self._record
        ranks = record.get("ranks") or ()
        recorded = {
            metric.name: self._labelled(metric.labels, record.get(metric.record)) for metric in TRAIN if metric.record
        }
        return recorded | {
            **{f"train_{name}_total": n for name, n in self._sums.items()},
            "train_tokens_total": dict(self._tokens),
            "train_wait_seconds_total": dict(self._waits),
            "train_rank_tokens": {str(rank): its["tokens"] for rank, its in enumerate(ranks)},
            "train_checkpoint_step": self._checkpoint,
        }

    def _heard(self, event: TrainerEvent) -> None:
        match event:
            case StepTrained():
                self._sums.update(steps=1, damaged_tokens=event.damaged_tokens)
                for env, tokens in event.tokens_by_env.items():
                    self._tokens[self._labels["env"].of(env)] += tokens
                for rank, its in enumerate(event.ranks):
                    self._waits[str(rank)] = self._waits.get(str(rank), 0.0) + its["wait"]
                self._record = as_object(event)
            case CheckpointWritten(step=step):
                self._checkpoint = step
            case TrainerWarning():
                self._sums["warnings"] += 1

    def _labelled(self, labels: tuple[str, ...], value: Any) -> Any:
        """The record's value with bounded labels."""
        if not labels or not isinstance(value, Mapping):
            return value
        bounded = self._labels.get(labels[0])
        return {
            name if bounded is None else bounded.of(name): self._labelled(labels[1:], inner)
            for name, inner in value.items()
        }


@contextmanager
def trainer_figures(settings: RunSettings, tell: OnEvent, *, rank: int) -> Iterator[OnEvent]:
    """Answers the trainer's metrics from rank 0 while the block runs, where the settings say so. -> what takes its
    events."""
    if rank or not settings.metrics.listen:
        yield tell
        return
    figures = TrainerFigures(tell)
    with serving(settings, "train", figures.values, tell):
        yield figures
