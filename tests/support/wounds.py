"""Wounds of stored bytes, and lies of who writes them."""

from __future__ import annotations

import random
import struct
import zlib
from typing import Any

import msgpack

HEADER = struct.Struct("<4sHHIIII")
"""Of a payload."""


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """`data` with one to three wounds of the kinds that storage, networks and programs inflict."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(out) + 1)
        size = rng.randint(1, 16)
        kind = rng.randrange(9)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            out += rng.randbytes(size)
        elif kind == 4:
            out[at : at + size] = other[at : at + size]
        elif kind == 5:
            out[at:at] = out[rng.randrange(len(out) + 1) :][:size]
        elif kind == 6:
            out[at : at + size] = bytes(len(out[at : at + size]))
        elif kind == 7:
            del out[at : at + size]
        elif len(out) >= HEADER.size:
            fields = list(HEADER.unpack_from(out))
            i = rng.randrange(1, len(fields))
            largest = 0xFFFF if i < 3 else 0xFFFFFFFF
            fields[i] = rng.choice(
                [0, 1, largest, rng.randint(0, largest), (fields[i] + rng.choice([-8, -1, 1, 8])) & largest]
            )
            HEADER.pack_into(out, 0, *fields)
    return bytes(out)


def resealed(data: bytes, *, length: bool = True) -> bytes:
    """`data` with its checksum, and with `length` its length, made right again: what lies behind them is tried."""
    if len(data) < HEADER.size:
        return data
    out = bytearray(data)
    if length:
        struct.pack_into("<I", out, 16, len(out))
    struct.pack_into("<I", out, 20, zlib.crc32(bytes(out[24:]), zlib.crc32(bytes(out[:20]))))
    return bytes(out)


HOSTILE = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**32, 2**53, 2**63, 2**64 - 1, -(2**63)),
    *(0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "a", "f4", "<f8", "O", "tokens", "../x", "\x00", "π" * 400, b"", b"\x00" * 49),
    *([], {}, [[]], [None], [0, 0, 0], [-1, 0, 3], [1, 0, 99], ["x"] * 12),
    *(["x", "f4"], ["x", "f4", -1], ["x", "f4", 2**40], ["x", "u1", 0, 2**26]),
    *({"a": {}}, {"reward": float("nan")}, {"x": [b"\x02\x00\x00", b"\x00" * 16]}, [b"\x01", b""]),
    *(["user", 0, 99, None, None], ["user", 2, 1, None, None], [["user", 0, 1, "x", None]]),
)


def tampered(rng: random.Random, value: Any) -> Any:
    """A decoded structure with one of its values, at any depth, swapped, dropped, doubled or replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {k: tampered(rng, v) if k == key else v for k, v in value.items()}
    if isinstance(value, list) and value and rng.random() < 0.85:
        i, kind = rng.randrange(len(value)), rng.random()
        if kind < 0.1:
            return value[:i] + value[i + 1 :]
        if kind < 0.2:
            return [*value, value[i]]
        if kind < 0.3:
            return rng.sample(value, len(value))
        return [*value[:i], tampered(rng, value[i]), *value[i + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 8])
    if isinstance(value, bytes) and value and rng.random() < 0.7:
        return mutated(rng, value, value[::-1])
    return rng.choice(HOSTILE)


def packed(value: Any) -> bytes:
    try:
        return bytes(msgpack.packb(value))
    except OverflowError:
        return b"\xc0"


def with_details(data: bytes, details: bytes) -> bytes:
    """A payload with other details; everything behind them stays aligned as it was."""
    magic, version, count, size, tokens, _, _ = HEADER.unpack_from(data)
    start = -(-(HEADER.size + size) // 8) * 8
    body = details + bytes(-(HEADER.size + len(details)) % 8) + data[start:]
    return resealed(HEADER.pack(magic, version, count, len(details), tokens, 0, 0) + body)


def false_payload(rng: random.Random, data: bytes, other: bytes, kind: int) -> bytes:
    """`data` as a writer that lies makes it, with a checksum that is right: wounds where `kind` is odd, in every other
    of these with the length that the bytes had, else details that say something else."""
    return resealed(mutated(rng, data, other), length=kind % 4 == 1) if kind % 2 else with_false_details(rng, data)


def with_false_details(rng: random.Random, data: bytes) -> bytes:
    """A payload whose details say something else, with a checksum that is right."""
    size = HEADER.unpack_from(data)[3]
    details = msgpack.unpackb(data[HEADER.size : HEADER.size + size], strict_map_key=False)
    return with_details(data, packed(tampered(rng, details)))
