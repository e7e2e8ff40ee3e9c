"""Why an attempt at a prompt has no reward: it failed."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.checks import escaped, shown

FAILURE_KIND = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
MAX_MESSAGE = 2000
"""Characters of a failure's message."""


class Failure(NamedTuple):
    """An attempt failed: its reward is not 0 but none, so nothing of it is trained and nothing is compared with it."""

    kind: str
    """`[A-Za-z0-9_.-]{1,64}`: what failures are counted by, such as the type of an error."""
    message: str = ""
    """What it said, for people; what is beyond 2,000 characters is cut."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


def as_failure(given: Any) -> Failure:
    """A checked failure, of one or of ``(kind, message)``. Raises InvalidRollout."""
    try:
        kind, message = given
    except (TypeError, ValueError):
        raise InvalidRollout(f"failure: expected (kind, message), got {shown(given)}") from None
    if not isinstance(message, str):
        raise InvalidRollout(f"failure: expected a string for a message, got {shown(message)}")
    if not isinstance(kind, str) or not FAILURE_KIND.match(kind):
        raise InvalidRollout(f"failure: expected a kind {FAILURE_KIND.pattern[:-2]}, got {shown(kind)}")
    kind, message = str.__str__(kind), str.__str__(message)
    return Failure(kind, escaped(message[:MAX_MESSAGE])[:MAX_MESSAGE])


def kind_of(name: str) -> str:
    """`name` as a kind of failure, with what is not allowed in one replaced."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:64] or "failed"
