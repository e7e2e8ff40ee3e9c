"""The pace of a stream's trainer: how many groups it trains with a version. Nobody says it, so it is learnt.

A step of a stream is one group, and how many of them make an update is the trainer's own rule: a token budget, a count.
Tickets count updates ahead (:mod:`rlbuffer.batcher.admission`), so the batcher counts the groups of each version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlbuffer.errors import RlbufferError


@dataclass(frozen=True, slots=True)
class Pace:
    """Groups by the version that was announced when they were committed."""

    version: int = -1
    """The newest version under which a group was committed."""
    groups: int = 0
    """Groups committed under it so far."""
    before: float = 0.0
    """Groups of a version, on average over those between the last two that had any."""

    @property
    def groups_per_version(self) -> float:
        """Groups of a version, as far as is known: of the last whole one, or of this one where it has more already."""
        return max(self.before, float(self.groups))

    def after(self, version: int, groups: int) -> Pace:
        """The pace once so many more groups are committed under `version`."""
        if version == self.version:
            return Pace(version, self.groups + groups, self.before)
        made = version - self.version
        # A version that was taken back counts as the next one.
        return Pace(version, groups, self.groups / max(1, made) if self.version >= 0 else self.before)

    def dump(self) -> dict[str, Any]:
        """The pace as msgpack types; nothing before a stream's first group."""
        return {"pace": [self.version, self.groups, self.before]} if self.version >= 0 or self.groups else {}


def load(state: Mapping[str, Any] | None) -> Pace:
    """The inverse of :meth:`Pace.dump`.

    Raises:
        RlbufferError: the state is not one that this version wrote.
    """
    try:
        version, groups, before = (state or {}).get("pace", (-1, 0, 0.0))
        return Pace(int(version), int(groups), float(before))
    except (TypeError, ValueError) as error:
        raise RlbufferError(
            f"the batcher's saved pace of the trainer cannot be read: {type(error).__name__}: {error}"
        ) from None
