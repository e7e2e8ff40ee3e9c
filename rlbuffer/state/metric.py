"""A number of the run is a field of a record; what machines call it stands in the field's metadata."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a field."""

    name: str
    """In Prometheus, after ``rlbuffer_``. Units: as the name ends; ``ratio`` is 0-1."""
    kind: Literal["gauge", "counter"]
    """counter: the field has what this record adds."""
    meaning: str
    labels: tuple[str, ...] = ()
    """The value is a mapping, nested in the order of the labels; with `item`, a list that the label counts."""
    item: str = ""
    """Entry of each item of the list."""


def metric(name: str, kind: Literal["gauge", "counter"], meaning: str, default: Any = 0, *, labels: str = "") -> Any:
    """A field that is one metric. `default`: a value, or what makes one; None: not measured. `labels`: with blanks
    between."""
    return metrics(default, Metric(name, kind, meaning, tuple(labels.split())))


def metrics(default: Any, *each: Metric) -> Any:
    """A field that is several metrics."""
    given = {"default_factory": default} if callable(default) else {"default": default}
    return field(**given, metadata={"metrics": each})


def metrics_of(cls: Any) -> Iterator[tuple[str, Metric]]:
    """(field, metric) of a record's class, or of a record."""
    return ((part.name, each) for part in fields(cls) for each in part.metadata.get("metrics", ()))
