"""Fields of hashes that are received into memory which the caller names: what is asked for, and what comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

FieldMemory = tuple[str, int, Sequence[memoryview]]
"""A field, its size in bytes as far as the caller knows, and memory of as many bytes, in as many pieces as it likes."""
FieldRequest = Mapping[str, Sequence[FieldMemory]]
"""Fields by the key of their hash."""
FETCH_BYTES = 64 * 2**20
"""Payload bytes asked for in one call."""
Checksum = Callable[[Sequence[memoryview]], int]
"""Computed of the memory of a field as soon as it is filled: it is still in the processor's cache then."""


class InPlace(NamedTuple):
    """The fields of a hash are all in the memory that was named."""

    checksums: Sequence[int]
    """One of each field."""


Received = InPlace | Sequence[bytes | None]
"""The fields of a hash: in place, or their values, None where missing, and the memory holds anything."""
FieldReply = tuple[dict[str, Received], dict[str, bytes | None]]
"""Key -> its fields; key -> the one further field that is read of each hash, None where it is missing."""
