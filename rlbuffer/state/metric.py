"""A number of the run is a field of a record; what machines call it stands in the field's metadata."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, Literal

from rlbuffer.records.readable import readable

SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
AGES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
LENGTHS = (16.0, 64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0)
REWARDS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a field."""

    name: str
    """In Prometheus, after ``rlbuffer_``. Units: as the name ends; ``ratio`` is 0-1."""
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    """The value is a mapping, nested in the order of the labels; with `item`, a list that the label counts."""
    item: str = ""
    """Entry of each item of the list, or part of the value."""
    bounds: tuple[float, ...] = ()
    """Of a histogram, whose value is ``{"buckets": {bound: values up to it}, "sum": ..., "count": ...}``."""


def metric(
    name: str,
    kind: Kind,
    meaning: str,
    default: Any = 0,
    *,
    labels: str = "",
    bounds: Sequence[float] = (),
    is_said: bool = False,
) -> Any:
    """A field that is one metric.

    Args:
        default: a value, or what makes one; None: not measured.
        labels: with blanks between.
        is_said: the value comes from a heartbeat, as :func:`said_in` reads it.
    """
    return metrics(default, Metric(name, kind, meaning, tuple(labels.split()), bounds=tuple(bounds)), is_said=is_said)


def metrics(default: Any, *each: Metric, is_said: bool = False) -> Any:
    """A field that is several metrics."""
    given = {"default_factory": default} if callable(default) else {"default": default}
    return field(**given, metadata={"metrics": each, "is_said": is_said})


def metrics_of(cls: Any) -> Iterator[tuple[str, Metric]]:
    """(field, metric) of a record's class, or of a record."""
    return ((part.name, each) for part in fields(cls) for each in part.metadata.get("metrics", ()))


def said_in(cls: Any, record: Any) -> dict[str, Any]:
    """The fields of a record that a heartbeat says. Anybody may have written it: another type is left out."""
    by_field = {part.name: part.metadata["metrics"][0] for part in fields(cls) if part.metadata.get("is_said")}
    found = {name: value for name, value in readable(cls, record).items() if name in by_field and value is not None}
    return {name: value for name, value in found.items() if not _is_other(by_field[name], value)}


def _is_other(each: Metric, histogram: Any) -> bool:
    """It is a histogram of other buckets than the metric's."""
    return bool(each.bounds) and list(histogram["buckets"]) != [*map(str, each.bounds), "+Inf"]


def is_number(value: Any) -> bool:
    """A number that is finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
