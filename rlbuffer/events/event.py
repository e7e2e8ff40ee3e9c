"""The root of all events, and the one function that makes an event a JSON object.

Example:
    >>> as_object(Trouble(error="the server is away"))
    {'event': 'trouble', 'error': 'the server is away'}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final

from rlbuffer.records.waiting import Problem, Waiting

SPREAD: Final[Mapping[str, Any]] = {"spread": True}
"""Mark of a field whose own fields, or items, stand in the object in its place."""
IF_ANY: Final[Mapping[str, Any]] = {"if_any": True}
"""Mark of a field that the object has only where it is not None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened. A class of its own each, so that who tells events can be checked to tell all."""

    event: ClassVar[str]
    """Its name, in JSON and in the run's history; several events may share one."""


def as_object(event: Event) -> dict[str, Any]:
    """The event with its name and its fields, in their order: what ``--display json``, ``metrics.jsonl`` and the run's
    history hold."""
    out: dict[str, Any] = {"event": event.event}
    for part in fields(event):
        value = getattr(event, part.name)
        if part.metadata.get("spread"):
            out |= _spread(value)
        elif value is not None or not part.metadata.get("if_any"):
            out[part.name] = value
    return out


def _spread(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Waiting | Problem):
        return value.record() | {"sentence": str(value)}
    return value if isinstance(value, Mapping) else asdict(value)


# -- of workers and scorers --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble(Event):
    """Something is wrong, and the process goes on."""

    event = "trouble"
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChanged(Event):
    """The run is in another epoch, is another one, or is gone: the process begins again with it."""

    event = "restart"
    error: str


# -- of every process that answers metrics -----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsServed(Event):
    """The process answers ``/metrics`` and ``/status``."""

    event = "metrics"
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsUnavailable(Event):
    """The process cannot listen where its settings say, and works without."""

    event = "metrics"
    sentence: str
