"""A push's metadata: what the batcher reads of a group, one msgpack list of at most 64 KiB and a CRC-32 of it.

Numbers of a sequence take one fixed row; those that are its rollout's own stand in the row of the first. A named
reward takes 9 bytes more; ids take nothing when they are ``<group_id>/<index>``. The checksum tells an entry that was
damaged on its way from one that was written wrongly, and neither is believed.

A leader that takes over reads a million rollouts: the numbers of all pushes of a page are checked together, as columns
of one array, and stay packed until somebody asks for a :class:`~rlbuffer.records.info.RolloutInfo`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.records.checks import MAX_NUMBER, MAX_ROLLOUT_ID
from rlbuffer.records.columns import COLUMN_DTYPES, COLUMN_NAME, MAX_DIMENSIONS, REQUIRED_COLUMNS
from rlbuffer.records.failure import FAILURE_KIND
from rlbuffer.records.info import (
    ENV_NAME,
    FURTHER,
    GROUP_ID,
    HAS_REWARD,
    IS_TRUNCATED,
    MAX_PAYLOAD_BYTES,
    NUMBERS,
    ROW,
    ROW_DTYPE,
    ColumnKind,
    GroupInfo,
    RolloutInfo,
    Totals,
    records_of,
    totals_of,
    totals_of_pushes,
)
from rlbuffer.wire.checksum import sealed, unsealed

if TYPE_CHECKING:
    from rlbuffer.records.group import Group
    from rlbuffer.records.rollout import Rollout

MAX_METADATA_BYTES = 64 * 2**10
"""Bytes of one push's metadata: the leader reads it all, and keeps what it reads."""

_Name = Annotated[str, Meta(max_length=128)]
_Short = Annotated[str, Meta(max_length=64)]
_Finite = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
_Shape = Annotated[list[Annotated[int, Meta(ge=0, le=MAX_PAYLOAD_BYTES)]], Meta(max_length=MAX_DIMENSIONS - 1)]


class _Push(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, tag="P3", gc=False):
    group_id: Annotated[str, Meta(pattern=f"^{GROUP_ID.pattern}")]
    env: Annotated[str, Meta(pattern=f"^{ENV_NAME.pattern}")]
    prompt_id: Annotated[str, Meta(max_length=256)]
    adapter: _Name
    planned_size: Annotated[int, Meta(ge=1, lt=2**31)]
    needs: list[_Short]
    worker: _Name
    created: _Finite | None
    seconds: _Finite | None
    ids: list[Annotated[str, Meta(min_length=1, max_length=MAX_ROLLOUT_ID)]] | None
    """None: each is ``<group_id>/<index>``."""
    rows: Annotated[bytes, Meta(min_length=ROW.size)]
    """A :data:`~rlbuffer.records.info.ROW` for each sequence."""
    rewards: dict[_Short, list[_Finite | None]]
    """Named rewards, one for each rollout that has it."""
    columns: list[tuple[Annotated[str, Meta(pattern=f"^{COLUMN_NAME.pattern}")], str, _Shape]]


class _PushWithFailures(_Push, array_like=True, frozen=True, forbid_unknown_fields=True, tag="P3F", gc=False):
    failures: dict[Annotated[str, Meta(pattern=f"^{FAILURE_KIND.pattern}")], list[Annotated[int, Meta(ge=0)]]]
    """Places of the rollouts that failed, by kind."""


_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE: Callable[[bytes], _Push] = msgspec.msgpack.Decoder(_Push | _PushWithFailures).decode
_DTYPES = frozenset(dtype.str for dtype in COLUMN_DTYPES)
_NONE: Mapping[str, float] = {}
_FLAGS = 0, HAS_REWARD, IS_TRUNCATED, HAS_REWARD | IS_TRUNCATED, FURTHER, FURTHER | IS_TRUNCATED
_NUMBER_NAMES = [number.name for number in NUMBERS]
_BOUNDED = {n.name for n in NUMBERS if n.code in "dQ" or (n.code == "I" and n.most < 2**32 - 1)}
"""Those that could be larger than what is believed."""


def encode_info(info: GroupInfo) -> bytes:
    """The metadata of a push, as :func:`encode_metadata`."""
    rollouts = info.rollouts
    try:
        rows = info.rows
    except struct.error as error:
        raise InvalidRollout(f"group {info.group_id}: metadata {error}") from None
    failures = [rollout.failure for rollout in rollouts]
    return encode_metadata(info, info.columns, rows, rollouts, failures)


def encode_metadata(
    group: Group | GroupInfo,
    columns: Sequence[ColumnKind],
    rows: bytes,
    rollouts: Sequence[Rollout | RolloutInfo],
    failures: Sequence[str],
) -> bytes:
    """The metadata of a push.

    Args:
        rows: a :data:`~rlbuffer.records.info.ROW` for each sequence.
        failures: the kind of each rollout's failure, "" of those that have not failed.

    Raises:
        InvalidRollout: it is larger than 64 KiB, or could not be read again.
    """
    ids = [rollout.rollout_id for rollout in rollouts]
    names = dict.fromkeys([name for rollout in rollouts for name in rollout.rewards])
    failed: dict[str, list[int]] = {}
    for place, failure in enumerate(failures):
        if failure:
            failed.setdefault(failure, []).append(place)
    values: list[Any] = [
        group.group_id,
        group.env,
        group.prompt_id,
        group.adapter,
        group.planned_size,
        [*group.needs],
        group.worker,
        group.created,
        group.seconds,
        None if ids == default_ids(group.group_id, len(ids)) else ids,
        rows,
        {name: [rollout.rewards.get(name) for rollout in rollouts] for name in names},
        [*columns],
    ]
    kind: type[_Push] = _Push
    if failed:
        kind, values = _PushWithFailures, [*values, failed]
    try:
        data = sealed(_ENCODE(kind(*values)))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRollout(f"group {group.group_id}: metadata {error}") from None
    if len(data) > MAX_METADATA_BYTES:
        raise InvalidRollout(
            f"group {group.group_id}: metadata of {len(data)} bytes is above the limit of {MAX_METADATA_BYTES} "
            f"(64 KiB): {len(ids)} rollouts with {len(names)} named rewards; push the group in parts"
        )
    return data


def decode_info(data: bytes) -> GroupInfo:
    """Decodes a push's metadata.

    Raises:
        PayloadError: above 64 KiB, damaged, not of this format, or a value outside its range.
    """
    (info,) = decode_infos([data])
    if isinstance(info, PayloadError):
        raise info
    return info


def decode_infos(pushes: Sequence[bytes]) -> list[GroupInfo | PayloadError]:
    """Decodes many pushes at once: for each its info, or what is wrong with it."""
    envs: dict[str, str] = {}
    found = [_read(data) for data in pushes]
    right = [push for push in found if isinstance(push, _Push)]
    totals = iter(_totals([push.rows for push in right]) if right else ())
    return [push if isinstance(push, PayloadError) else _info(push, next(totals), envs) for push in found]


def _read(data: Any) -> _Push | PayloadError:
    """A push of which all but the numbers of its rollouts is right."""
    if not isinstance(data, bytes):
        return PayloadError(f"expected bytes, got {type(data).__name__}")
    if len(data) > MAX_METADATA_BYTES:
        return PayloadError(f"metadata of {len(data)} bytes is above the limit of {MAX_METADATA_BYTES}")
    try:
        push = _DECODE(unsealed(data, "metadata"))
    except PayloadError as error:
        return error
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        return PayloadError(f"invalid metadata: {error}")
    if len(push.rows) % ROW.size:
        return PayloadError(f"invalid metadata: {len(push.rows)} bytes of rows, each has {ROW.size}")
    if push.columns and any(name in REQUIRED_COLUMNS or dtype not in _DTYPES for name, dtype, _ in push.columns):
        return PayloadError("invalid metadata: columns")
    return push


def _info(push: _Push, totals: Totals | None, envs: dict[str, str]) -> GroupInfo | PayloadError:
    """`envs`: the groups of a page share one string for each."""
    if totals is None:
        return PayloadError(f"invalid metadata: {_wrong(push)}")
    count = totals.rollouts
    if count > push.planned_size:
        return PayloadError(f"invalid metadata: {count} rollouts, planned_size = {push.planned_size}")
    if push.ids is not None and (len(push.ids) != count or len(set(push.ids)) != count):
        return PayloadError(f"invalid metadata: ids: not one of its own for each of {count} rollouts")
    if push.rewards and any(len(values) != count for values in push.rewards.values()):
        return PayloadError(f"invalid metadata: rewards: not one for each of {count} rollouts")
    info = GroupInfo.unpacked_by(
        partial(_rollouts, push, totals.rollouts),
        group_id=push.group_id,
        env=envs.setdefault(push.env, push.env),
        prompt_id=push.group_id if push.prompt_id == push.group_id else push.prompt_id,
        adapter=push.adapter,
        planned_size=push.planned_size,
        columns=tuple([(name, dtype, tuple(shape)) for name, dtype, shape in push.columns]),
        needs=tuple(push.needs),
        worker=push.worker,
        created=push.created,
        seconds=push.seconds,
        rows=push.rows,
        totals=totals,
    )
    if isinstance(push, _PushWithFailures):
        if any(rollout.failure and (rollout.reward is not None or rollout.rewards) for rollout in info.rollouts):
            return PayloadError("invalid metadata: failures: a rollout that failed has a reward")
        object.__setattr__(info, "totals", totals_of(info))
    return info


def _rollouts(push: _Push, count: int) -> tuple[RolloutInfo, ...]:
    ids = default_ids(push.group_id, count) if push.ids is None else push.ids
    failures = [""] * count
    if isinstance(push, _PushWithFailures):
        for kind, places in push.failures.items():
            for place in places:
                if place < count:
                    failures[place] = kind
    return records_of(push.rows, ids, _named(push, count), failures)


def _named(push: _Push, count: int) -> Sequence[Mapping[str, float]]:
    """The named rewards of each rollout of a push."""
    if not push.rewards:
        return [_NONE] * count
    components = push.rewards.items()
    return [{name: value for name, values in components if (value := values[i]) is not None} for i in range(count)]


def names_of(info: GroupInfo) -> tuple[Sequence[str], Sequence[Mapping[str, float]]]:
    """Ids and named rewards of a push's rollouts, in order; its rollouts stay packed."""
    unpack = getattr(info, "_unpack", None)
    if unpack is None:
        return [rollout.rollout_id for rollout in info.rollouts], [rollout.rewards for rollout in info.rollouts]
    push, count = unpack.args
    return push.ids or default_ids(push.group_id, count), _named(push, count)


def has_no_names(info: GroupInfo) -> bool:
    """True when a push names no id and no reward of its rollouts; they stay packed."""
    unpack = getattr(info, "_unpack", None)
    return unpack is not None and unpack.args[0].ids is None and not unpack.args[0].rewards


def default_ids(group_id: str, count: int) -> list[str]:
    """The ids of a push whose metadata names none."""
    return [group_id + end for end in _ends(count)]


@lru_cache(maxsize=64)
def _ends(count: int) -> tuple[str, ...]:
    return tuple([f"/{i}" for i in range(count)])


def _rules(rows: NDArray[np.void]) -> dict[str, NDArray[np.bool_]]:
    """Rule -> [sequences] True where the numbers keep it."""
    length, prompt, loss = (rows[name].astype(np.int64) for name in ("length", "prompt_tokens", "loss_tokens"))
    flags, reward = rows["flags"], rows["reward"]
    with np.errstate(invalid="ignore"):  # a reward may be any bytes
        rules = {number.name: np.abs(rows[number.name]) <= number.most for number in NUMBERS if number.name in _BOUNDED}
        return rules | {
            "tokens": (prompt >= 1)
            & (prompt <= length)
            & (loss <= length - prompt)
            & ((loss > 0) == (prompt < length)),
            "policy versions": rows["min_version"] <= rows["max_version"],
            "flags": np.isin(flags, _FLAGS) & ((flags & HAS_REWARD != 0) | (reward == 0.0)),
        }


def _wrong(push: _Push) -> str:
    """What is wrong with the numbers of a push."""
    rows = np.frombuffer(push.rows, ROW_DTYPE)
    what, is_kept = next(
        ((what, is_kept) for what, is_kept in _rules(rows).items() if not is_kept.all()), ("flags", np.zeros(1))
    )
    i = int(is_kept.argmin())
    if what in _BOUNDED:
        most = next(number.most for number in NUMBERS if number.name == what)
        return f"sequence {i}: {what} {rows[what][i]} is beyond the limit of {most:g}, either sign"
    return f"sequence {i} has {what} that no rollout has: {dict(zip(_NUMBER_NAMES, rows[i].tolist(), strict=True))}"


def _totals(packed: Sequence[bytes]) -> list[Totals | None]:
    """Adds up the rows of each push; None when a value is outside its range.

    Args:
        packed: the rows of each push, whole ones and at least one.
    """
    rows = np.frombuffer(b"".join(packed), ROW_DTYPE)
    counts = np.array([len(rows) for rows in packed]) // ROW.size
    starts = np.cumsum(counts) - counts
    is_right = np.logical_and.reduce([*_rules(rows).values()])
    is_right[starts] &= rows["flags"][starts] & FURTHER == 0
    are_right = np.logical_and.reduceat(is_right, starts).tolist()
    pairs = zip(totals_of_pushes(rows, counts), are_right, strict=True)
    return [totals if right else None for totals, right in pairs]
