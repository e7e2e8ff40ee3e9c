"""A version of the policy: what samplers load and rollouts are sampled by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlbuffer.records.checks import (
    as_integer,
    as_mapping,
    as_text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """Weights that can be sampled from.

    Raises:
        InvalidRollout: a number is no integer up to 2**53 - 1, or a text is too long.
    """

    version: int
    """Number of trained steps in the weights; -1 when nothing was announced yet."""
    location: str = ""
    """Place of the weights; empty when the version is announced without weights."""
    size: int = 0
    """Bytes."""
    checksum: str = ""
    """Checksum of the weights, as the publisher computed it."""
    adapter: str = ""
    """"" is all weights."""
    labels: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Name that a stream's trainer gives a version -> that version, of the newest ones."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "version", as_integer("policy version", self.version, low=-1))
        put(self, "location", as_text("policy location", self.location, limit=MAX_LOCATION))
        put(self, "size", as_integer("policy size", self.size))
        put(self, "checksum", as_text("policy checksum", self.checksum, limit=256))
        put(self, "adapter", as_text("policy adapter", self.adapter, limit=128))
        labels = {
            as_text("policy label", label, limit=MAX_LABEL): as_integer("policy version", version)
            for label, version in as_mapping("policy labels", self.labels).items()
        }
        put(self, "labels", labels)


MAX_LABEL = 64
"""Characters of a trainer's name for a version."""
MAX_LOCATION = 2**13
"""Characters of the place of a policy version: every worker reads all of them, all the time."""
