"""A push's metadata: what the batcher reads of a group, as one msgpack map of at most 64 KiB.

Numbers of a rollout take one fixed row of 49 bytes, a named reward 9 more; ids take nothing when they are
``<group_id>/<index>``. The map's last value is a CRC-32 of all bytes before it: it tells an entry that was damaged on
its way from one that was written wrongly, and neither is believed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.records.checks import MAX_COUNT, MAX_NUMBER, as_text
from rlbuffer.records.columns import COLUMN_DTYPES, COLUMN_NAME, MAX_DIMENSIONS, REQUIRED_COLUMNS
from rlbuffer.records.info import (
    HAS_REWARD,
    IS_TRUNCATED,
    MAX_ROLLOUT_ID,
    ROW,
    ColumnKind,
    GroupInfo,
    RolloutInfo,
    group_fields,
    row_of,
    unfrozen,
)
from rlbuffer.wire.bounded_msgpack import dumps, loads, pack
from rlbuffer.wire.checksum import crc32

MAX_PAYLOAD_BYTES = 64 * 2**20
"""Bytes of one rollout's payload."""
MAX_METADATA_BYTES = 64 * 2**10
"""Bytes of one push's metadata: the leader reads it all, and keeps what it reads."""

METADATA_FORMAT = 1
GROUP_KEYS = ("group_id", "env", "prompt_id", "adapter", "planned_size", "needs", "worker", "created")
KEYS = ("format", *GROUP_KEYS, "ids", "rows", "rewards", "columns", "checksum")
_DTYPES = frozenset(dtype.str for dtype in COLUMN_DTYPES)
_UNSET = 0xFFFFFFFF
"""Stands for the checksum while the map is packed: its width is that of every checksum."""


_UnfrozenRollout = unfrozen(RolloutInfo)


def encode_info(info: GroupInfo) -> bytes:
    """The metadata of a push.

    Raises:
        InvalidRollout: it is larger than 64 KiB, or a value is outside its range.
    """
    try:
        info = _checked(info)
    except InvalidRollout as error:
        raise InvalidRollout(f"group {info.group_id}: {error}") from None
    return filled(drafted(info), info.rollouts)


def drafted(info: GroupInfo) -> tuple[bytearray, int]:
    """The metadata of a group that was checked, with zeros for the rows of its rollouts, and where those begin.

    Raises:
        InvalidRollout: it is larger than 64 KiB.
    """
    rollouts = info.rollouts
    ids = [r.rollout_id for r in rollouts]
    before: dict[str, Any] = {"format": METADATA_FORMAT} | {key: getattr(info, key) for key in GROUP_KEYS}
    before["ids"] = None if ids == default_ids(info.group_id, len(ids)) else ids
    after = {
        "rewards": _packed_rewards([r.rewards for r in rollouts]),
        "columns": [[name, dtype, *shape] for name, dtype, shape in info.columns],
        "checksum": _UNSET,
    }
    size = ROW.size * len(rollouts)
    try:
        # One map, packed in three so that the place of the rows is known; each part begins with a byte of its own map.
        front, rows, back = pack(before)[1:], pack({"rows": bytes(size)})[1:], dumps(after)[1:]
    except PayloadError as error:
        raise InvalidRollout(f"group {info.group_id}: metadata {error}") from None
    data = bytearray().join((bytes([0x80 | len(KEYS)]), front, rows, back))
    if len(data) > MAX_METADATA_BYTES:
        names = {name for r in rollouts for name in r.rewards}
        raise InvalidRollout(
            f"group {info.group_id}: metadata of {len(data)} bytes is above the limit of {MAX_METADATA_BYTES} "
            f"(64 KiB): {len(ids)} rollouts with {len(names)} named rewards; push the group in parts"
        )
    return data, 1 + len(front) + len(rows) - size


def filled(draft: tuple[bytearray, int], rollouts: Sequence[RolloutInfo]) -> bytes:
    """A draft with the rows of its rollouts, whose sizes and checksums are known now, and its own checksum."""
    data, at = draft
    data[at : at + ROW.size * len(rollouts)] = b"".join(map(row_of, rollouts))
    data[-4:] = struct.pack(">I", crc32(memoryview(data)[:-4]))
    return bytes(data)


def decode_info(data: bytes) -> GroupInfo:
    """Decodes a push's metadata.

    Raises:
        PayloadError: above 64 KiB, damaged, not the map of this format, or a value outside its range.
    """
    if not isinstance(data, bytes):
        raise PayloadError(f"expected bytes, got {type(data).__name__}")
    values = loads(data, limit=MAX_METADATA_BYTES)
    if not isinstance(values, dict) or tuple(values) != KEYS:
        raise PayloadError("invalid metadata: not the map of this format")
    if type(values["format"]) is not int or values["format"] != METADATA_FORMAT:
        raise PayloadError(f"metadata format {values['format']!r} is not the one this version reads, {METADATA_FORMAT}")
    actual = crc32(data[:-4])
    if data[-5] != 0xCE or values["checksum"] != actual:
        raise PayloadError(f"metadata is damaged: checksum {actual:08x}, expected {values['checksum']!r}")
    try:
        info = _checked(_group(values))
    except PayloadError:
        raise
    except (InvalidRollout, ValueError, TypeError, OverflowError) as error:
        raise PayloadError(f"invalid metadata: {error}") from None
    return info


def _group(values: Mapping[str, Any]) -> GroupInfo:
    rows, ids = values["rows"], values["ids"]
    if not isinstance(rows, bytes) or not rows or len(rows) % ROW.size:
        raise PayloadError("invalid metadata: rows")
    count = len(rows) // ROW.size
    if not isinstance(values["group_id"], str):
        raise PayloadError("invalid metadata: group_id")
    if ids is not None and (not isinstance(ids, list) or len(ids) != count):
        raise PayloadError("invalid metadata: ids")
    if not isinstance(values["needs"], list):
        raise PayloadError("invalid metadata: needs")
    shared = {key: values[key] for key in GROUP_KEYS} | {"needs": tuple(values["needs"])}
    rollouts = unpack_rollouts(values["group_id"], ids, rows, values["rewards"])
    return GroupInfo(**shared, rollouts=rollouts, columns=unpack_columns(values["columns"]))


def unpack_rollouts(group_id: str, ids: Sequence[Any] | None, rows: bytes, rewards: Any) -> tuple[RolloutInfo, ...]:
    """The rollouts of a push.

    Args:
        group_id: of the push.
        ids: one per rollout; None for ``<group_id>/<index>``.
        rows: the map's value, whole rows.
        rewards: the map's value.

    Raises:
        PayloadError: unknown flags, a reward where the flags say that there is none, or `rewards` of another form.
    """
    count = len(rows) // ROW.size
    if ids is None:
        ids = default_ids(group_id, count)
    named = unpacked_rewards(rewards, count)
    rollouts: list[RolloutInfo] = []
    for rollout_id, its_rewards, row in zip(ids, named, ROW.iter_unpack(rows), strict=True):
        length, prompt_tokens, loss_tokens, turns, reward, low, high, flags, size, checksum = row
        if flags & ~(HAS_REWARD | IS_TRUNCATED) or (not flags & HAS_REWARD and reward != 0.0):
            raise PayloadError(f"invalid metadata: flags of rollout {len(rollouts)}")
        made = _UnfrozenRollout()
        made.rollout_id = rollout_id
        made.length = length
        made.prompt_tokens = prompt_tokens
        made.loss_tokens = loss_tokens
        made.reward = reward if flags & HAS_REWARD else None
        made.rewards = its_rewards
        made.min_version = low
        made.max_version = high
        made.turns = turns
        made.is_truncated = bool(flags & IS_TRUNCATED)
        made.size = size
        made.checksum = checksum
        made.__class__ = RolloutInfo
        rollouts.append(made)
    return tuple(rollouts)


def unpack_columns(kinds: Any) -> tuple[ColumnKind, ...]:
    """The kinds of further columns that a push names. Raises PayloadError when one cannot be."""
    if not isinstance(kinds, list):
        raise PayloadError("invalid metadata: columns")
    columns = []
    for kind in kinds:
        if not isinstance(kind, list) or len(kind) < 2 or len(kind) > 1 + MAX_DIMENSIONS:
            raise PayloadError("invalid metadata: columns")
        name, dtype, *shape = kind
        if not isinstance(name, str) or not COLUMN_NAME.match(name) or name in REQUIRED_COLUMNS or dtype not in _DTYPES:
            raise PayloadError("invalid metadata: columns")
        if any(type(size) is not int or not 0 <= size <= MAX_PAYLOAD_BYTES for size in shape):
            raise PayloadError("invalid metadata: columns")
        columns.append((name, dtype, tuple(shape)))
    return tuple(columns)


def _checked(info: GroupInfo) -> GroupInfo:
    info = replace(info, **group_fields(info))
    count = len(info.rollouts)
    if not 1 <= count <= info.planned_size:
        raise InvalidRollout(f"rollouts: {count} do not fit planned_size = {info.planned_size}")
    for rollout in info.rollouts:
        if not as_text("rollout_id", rollout.rollout_id, limit=MAX_ROLLOUT_ID):
            raise InvalidRollout("rollout_id: empty")
    if len({r.rollout_id for r in info.rollouts}) != count:
        raise InvalidRollout(f"rollouts: an id occurs twice in group {info.group_id}")
    for rollout in info.rollouts:
        _check_rollout(rollout)
    return info


def _check_rollout(r: RolloutInfo) -> None:
    trained = r.loss_tokens > 0
    if not (
        1 <= r.prompt_tokens <= r.length <= MAX_PAYLOAD_BYTES
        and 0 <= r.loss_tokens <= r.length - r.prompt_tokens
        and trained == (r.prompt_tokens < r.length)
    ):
        raise InvalidRollout(
            f"rollout {r.rollout_id}: {r.loss_tokens} loss tokens after {r.prompt_tokens} prompt tokens do not fit "
            f"{r.length} tokens"
        )
    if not 0 <= r.min_version <= r.max_version <= MAX_COUNT:
        raise InvalidRollout(f"rollout {r.rollout_id}: policy versions {r.min_version}..{r.max_version}")
    if not 0 <= r.size <= MAX_PAYLOAD_BYTES or not 0 <= r.checksum <= 0xFFFFFFFF or not 0 <= r.turns <= 0xFFFFFFFF:
        raise InvalidRollout(f"rollout {r.rollout_id}: {r.turns} turns, {r.size} bytes, checksum {r.checksum}")
    for name, value in (("reward", r.reward), *r.rewards.items()):
        if value is not None and not math.isfinite(value):
            raise InvalidRollout(f"rollout {r.rollout_id}: {name} is not finite")
        if value is not None and abs(value) > MAX_NUMBER:
            raise InvalidRollout(
                f"rollout {r.rollout_id}: {name} {value!r} is beyond the limit of {MAX_NUMBER:g}, either sign"
            )


def default_ids(group_id: str, count: int) -> list[str]:
    """The ids of a push whose metadata names none."""
    return [group_id + end for end in _ends(count)]


@lru_cache(maxsize=64)
def _ends(count: int) -> tuple[str, ...]:
    return tuple([f"/{i}" for i in range(count)])


def _packed_rewards(rewards: list[Mapping[str, float]]) -> dict[str, list[bytes]]:
    """name -> [which rollouts have it, a byte each; their values, 8 bytes each]."""
    names = dict.fromkeys(name for named in rewards for name in named)
    return {
        name: [
            bytes(name in named for named in rewards),
            struct.pack(f"<{sum(name in named for named in rewards)}d", *(n[name] for n in rewards if name in n)),
        ]
        for name in names
    }


def unpacked_rewards(packed: Any, count: int) -> list[dict[str, float]]:
    """The named rewards of each rollout of a push. Raises PayloadError when `packed`, the map's value, is of another
    form."""
    if not isinstance(packed, dict):
        raise PayloadError("invalid metadata: rewards")
    rewards: list[dict[str, float]] = [{} for _ in range(count)]
    for name, item in packed.items():
        as_text("rewards name", name, limit=64)
        if not isinstance(item, list) or len(item) != 2 or not all(isinstance(x, bytes) for x in item):
            raise PayloadError("invalid metadata: rewards")
        present, values = item
        if len(present) != count or not set(present) <= {0, 1} or len(values) != 8 * sum(present):
            raise PayloadError("invalid metadata: rewards")
        owners = (named for named, has in zip(rewards, present, strict=True) if has)
        for named, (value,) in zip(owners, struct.iter_unpack("<d", values), strict=True):
            named[name] = value
    return rewards
