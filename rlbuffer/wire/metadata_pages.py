"""The metadata of many pushes at once: what a leader reads when it takes over, and whenever something was pushed.

The numbers of all rollouts of a page are checked together, as columns of one array, and stay packed: a rollout becomes
a :class:`~rlbuffer.records.info.RolloutInfo` when somebody asks for it. A push that is not plainly right in every point
goes through :func:`~rlbuffer.wire.metadata.decode_info`, which says what is wrong with it, or that it is right after
all. So the two never disagree, and what is checked here needs to hold only in one direction.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import PayloadError
from rlbuffer.records.checks import MAX_COUNT, MAX_NUMBER
from rlbuffer.records.info import (
    ENV_NAME,
    FLAT_WITHIN,
    GROUP_ID,
    HAS_REWARD,
    IS_TRUNCATED,
    ROW,
    ROW_DTYPE,
    ColumnKind,
    GroupInfo,
    Totals,
    unfrozen,
)
from rlbuffer.wire.bounded_msgpack import without_duplicates
from rlbuffer.wire.checksum import crc32
from rlbuffer.wire.metadata import (
    KEYS,
    MAX_METADATA_BYTES,
    MAX_PAYLOAD_BYTES,
    METADATA_FORMAT,
    decode_info,
    default_ids,
    unpack_columns,
    unpack_rollouts,
    unpacked_rewards,
)

_MAP = 0x80 | len(KEYS)
"""First byte of a map with as many pairs as there are keys: then none of them can occur twice."""
_UINT32 = 0xCE
_NONE: Mapping[str, float] = {}
_NO_REWARDS = msgpack.packb("rewards") + msgpack.packb({})
_UnfrozenGroup = unfrozen(GroupInfo)


def decode_infos(pushes: Sequence[bytes]) -> list[GroupInfo | PayloadError]:
    """Decodes many pushes at once: for each its info, or the error of :func:`~rlbuffer.wire.metadata.decode_info`."""
    envs: dict[Any, str] = {}
    infos: list[Any] = [_plain(data, envs) for data in pushes]
    right = [info for info in infos if info is not None]
    if right:
        for info, totals in zip(right, _totals([info.rows for info in right]), strict=True):
            info.totals = totals
    return [
        _one_by_one(data) if info is None or info.totals is None else _frozen(info)
        for data, info in zip(pushes, infos, strict=True)
    ]


class RolloutNumbers(NamedTuple):
    """The numbers of one rollout as its push's metadata packs them; names as in :class:`RolloutInfo`."""

    length: int
    prompt_tokens: int
    loss_tokens: int
    turns: int
    packed_reward: float
    """0.0 of a rollout that is not scored."""
    min_version: int
    max_version: int
    flags: int
    size: int
    checksum: int

    @property
    def reward(self) -> float | None:
        """None until it is scored."""
        return self.packed_reward if self.flags & HAS_REWARD else None

    @property
    def is_truncated(self) -> bool:
        """Sampling ended at a limit."""
        return bool(self.flags & IS_TRUNCATED)


def numbers_of(info: GroupInfo) -> Iterable[RolloutNumbers]:
    """The numbers of a push's rollouts, in order; its rollouts stay packed."""
    return map(RolloutNumbers._make, ROW.iter_unpack(info.rows))


def scored_rewards(info: GroupInfo) -> tuple[float, ...]:
    """The rewards of a push's scored rollouts, in order; its rollouts stay packed."""
    return tuple([row[4] for row in ROW.iter_unpack(info.rows) if row[7] & HAS_REWARD])  # half a generator's time


def names_of(info: GroupInfo) -> tuple[Sequence[str], Sequence[Mapping[str, float]]]:
    """Ids and named rewards of a push's rollouts, in order; its rollouts stay packed."""
    unpack = getattr(info, "_unpack", None)
    if unpack is None:
        return [rollout.rollout_id for rollout in info.rollouts], [rollout.rewards for rollout in info.rollouts]
    group_id, _, rows, rewards = unpack.args
    count = len(rows) // ROW.size
    return default_ids(group_id, count), unpacked_rewards(rewards, count) if rewards else [_NONE] * count


def _frozen(info: Any) -> GroupInfo:
    info.__class__ = GroupInfo
    made: GroupInfo = info
    return made


def _one_by_one(data: bytes) -> GroupInfo | PayloadError:
    try:
        return decode_info(data)
    except PayloadError as error:
        return error


def _plain(data: bytes, envs: dict[Any, str]) -> Any:
    """A push of which all but the numbers of its rollouts is right, not frozen yet; None when it may not be.

    Args:
        data: the metadata.
        envs: names that are right already; the groups of a page share one string for each.
    """
    if type(data) is not bytes or not 5 < len(data) <= MAX_METADATA_BYTES or data[0] != _MAP or data[-5] != _UINT32:
        return None
    has_rewards = _NO_REWARDS not in data
    try:
        values = msgpack.unpackb(data, object_pairs_hook=without_duplicates if has_rewards else None)
    except Exception:  # whatever it is, it is said one by one
        return None
    if type(values) is not dict or tuple(values) != KEYS:
        return None
    version, group_id, env, prompt_id, adapter, planned, needs, worker, created, *rest = values.values()
    ids, rows, rewards, columns, checksum = rest
    if type(env) is not str or env not in envs:
        if type(env) is not str or not ENV_NAME.match(env):
            return None
        envs[env] = env
    if not (
        type(version) is int
        and version == METADATA_FORMAT
        and checksum == crc32(memoryview(data)[:-4])
        and type(group_id) is str
        and GROUP_ID.match(group_id)
        and type(prompt_id) is str
        and len(prompt_id) <= 256
        and type(adapter) is str
        and len(adapter) <= 128
        and type(worker) is str
        and len(worker) <= 128
        and type(planned) is int
        and type(rows) is bytes
        and 0 < len(rows) <= planned * ROW.size
        and len(rows) % ROW.size == 0
        and planned < 2**31
        and (created is None or (type(created) is float and abs(created) <= MAX_NUMBER))
        and ids is None
        and type(needs) is list
        and all(type(name) is str and len(name) <= 64 for name in needs)
        and type(rewards) is dict
        and (not rewards or (has_rewards and _are_named(rewards, len(rows) // ROW.size)))
    ):
        return None
    kinds: tuple[ColumnKind, ...] = ()
    if columns != []:
        try:
            kinds = unpack_columns(columns)
        except PayloadError:
            return None
    made = _UnfrozenGroup()
    made.group_id = group_id
    made.env = envs[env]
    made.prompt_id = group_id if prompt_id == group_id else prompt_id
    made.adapter = adapter
    made.planned_size = planned
    made.columns = kinds
    made.needs = tuple(needs)
    made.worker = worker
    made.created = created
    made.rows = rows
    made._unpack = partial(unpack_rollouts, group_id, None, rows, rewards)
    return made


def _are_named(rewards: dict[Any, Any], count: int) -> bool:
    """True when these are named rewards of `count` rollouts."""
    for name, item in rewards.items():
        if type(name) is not str or len(name) > 64 or type(item) is not list or len(item) != 2:
            return False
        present, values = item
        if type(present) is not bytes or type(values) is not bytes:
            return False
        owners = present.count(1)
        if len(present) != count or owners + present.count(0) != count or len(values) != 8 * owners:
            return False
        numbers = struct.unpack(f"<{owners}d", values)
        # A NaN makes the sum one, whatever the comparisons say of it.
        if numbers and not (math.isfinite(sum(numbers)) and max(numbers) <= MAX_NUMBER and min(numbers) >= -MAX_NUMBER):
            return False
    return True


def _totals(packed: Sequence[bytes]) -> list[Totals | None]:
    """Adds up the rows of each push; None when a value is outside its range.

    Args:
        packed: the rows of each push, whole ones and at least one.
    """
    counts = np.array([len(rows) for rows in packed]) // ROW.size
    starts = np.cumsum(counts) - counts
    rows = np.frombuffer(b"".join(packed), ROW_DTYPE)
    length, prompt, loss = (rows[name].astype(np.int64) for name in ("length", "prompt_tokens", "loss_tokens"))
    reward, low, high = (np.ascontiguousarray(rows[name]) for name in ("reward", "min_version", "max_version"))
    flags = rows["flags"]
    scored = (flags & HAS_REWARD) != 0
    with np.errstate(invalid="ignore", over="ignore"):  # a reward may be any bytes
        is_right: NDArray[np.bool_] = (
            (flags <= HAS_REWARD | IS_TRUNCATED)
            & (scored | (reward == 0.0))
            & (np.abs(reward) <= MAX_NUMBER)
            & (prompt >= 1)
            & (prompt <= length)
            & (length <= MAX_PAYLOAD_BYTES)
            & (loss <= length - prompt)
            & ((loss > 0) == (prompt < length))
            & (low <= high)
            & (high <= MAX_COUNT)
            & (rows["size"] <= MAX_PAYLOAD_BYTES)
        )
        all_scored = np.logical_and.reduceat(scored, starts)
        highest, lowest = np.maximum.reduceat(reward, starts), np.minimum.reduceat(reward, starts)
        is_flat = highest - lowest <= FLAT_WITHIN * np.maximum(-lowest, highest)
    sums = zip(
        counts.tolist(),
        np.add.reduceat(length, starts).tolist(),
        np.maximum.reduceat(length, starts).tolist(),
        np.minimum.reduceat(low, starts).tolist(),
        np.maximum.reduceat(high, starts).tolist(),
        all_scored.tolist(),
        (is_flat & (all_scored == np.logical_or.reduceat(scored, starts))).tolist(),
        (True for _ in packed),  # ids that follow from the group's
        strict=True,
    )
    are_right = np.logical_and.reduceat(is_right, starts).tolist()
    return [Totals._make(values) if right else None for values, right in zip(sums, are_right, strict=True)]
