"""Rollouts and groups as the batcher sees them: no payloads, 53 bytes a sequence and some 70 a group."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import ConfigError
from rlbuffer.records.checks import MAX_COUNT, MAX_NUMBER, shown

if TYPE_CHECKING:
    from rlbuffer.records.rollout import Rollout, TokenSequence

GROUP_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")
ENV_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
WORKER_NAME = re.compile(r"[A-Za-z0-9_.:@/-]{1,128}\Z")
INCARNATION = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
"""Without a space, a colon or a dot: it stands between those in keys and records on the server."""
ColumnKind = tuple[str, str, tuple[int, ...]]
"""Name, dtype (``<f4``) and trailing shape of a further column."""
MAX_PAYLOAD_BYTES = 64 * 2**20
"""Bytes of the payload of one sequence; a token takes at least one."""
HAS_REWARD, IS_TRUNCATED, FURTHER = 1, 2, 4
"""Flags of a row. FURTHER: a sequence of the rollout of the row before, which has the reward."""
Sealed = tuple[int, int]
"""Bytes of an encoded payload, and the CRC-32 that it carries in its header; zeros before it is encoded."""


class Number(NamedTuple):
    """A number that a push says of each of its sequences."""

    name: str
    """Of the field of :class:`RolloutNumbers`."""
    code: str
    """``I`` | ``Q`` | ``B`` unsigned, ``d`` float."""
    most: float
    """The largest value, either sign, that is believed."""
    fold: str
    """Value of a rollout of several sequences: ``sum`` | ``min`` | ``max`` of theirs, or that of the ``first``."""


NUMBERS = (
    Number("length", "I", MAX_PAYLOAD_BYTES, "sum"),
    Number("prompt_tokens", "I", MAX_PAYLOAD_BYTES, "first"),
    Number("loss_tokens", "I", MAX_PAYLOAD_BYTES, "sum"),
    Number("turns", "I", 2**32 - 1, "sum"),
    Number("largest_token", "I", 2**31 - 1, "max"),
    Number("reward", "d", MAX_NUMBER, "first"),
    Number("min_version", "Q", MAX_COUNT, "min"),
    Number("max_version", "Q", MAX_COUNT, "max"),
    Number("flags", "B", HAS_REWARD | IS_TRUNCATED | FURTHER, "first"),
    Number("size", "I", MAX_PAYLOAD_BYTES, "sum"),
    Number("checksum", "I", 2**32 - 1, "first"),
)
"""The numbers of a sequence, from the push to the pull: a further one is a line here and in :func:`_values`, a field of
:class:`RolloutNumbers`, the next `SCHEMA` of rlbuffer/store/keys.py, and the place that uses it."""
ROW = struct.Struct("<" + "".join(number.code for number in NUMBERS))
"""The numbers of a sequence, packed; the reward is 0.0 for none."""
ROW_DTYPE = np.dtype([(n.name, {"I": "<u4", "Q": "<u8", "B": "u1", "d": "<f8"}[n.code]) for n in NUMBERS])
"""A :data:`ROW` as a record of an array."""
_NAMES = tuple(number.name for number in NUMBERS)
_PYTHON_FOLDS: Mapping[str, Callable[[Sequence[int]], int]] = {"sum": sum, "min": min, "max": max}
_FOLDS: Mapping[str, np.ufunc] = {"sum": np.add, "min": np.minimum, "max": np.maximum}


def _values(rollout: Rollout, sequence: TokenSequence, payload: Sealed) -> dict[str, Any]:
    """Name -> number of a sequence of a rollout."""
    tokens, spans = sequence.tokens, sequence.version_spans
    reward = rollout.reward if sequence is rollout else None
    flags = FURTHER if sequence is not rollout else 0 if reward is None else HAS_REWARD
    size, checksum = payload
    return {
        "length": len(tokens),
        "prompt_tokens": sequence.prompt_tokens,
        "loss_tokens": np.count_nonzero(sequence.loss_mask),
        "turns": len(sequence.turns),
        "largest_token": tokens.item(tokens.argmax()),
        "reward": 0.0 if reward is None else reward,
        "min_version": min(spans)[0],
        "max_version": max(spans)[0],
        "flags": flags | (IS_TRUNCATED if rollout.is_truncated else 0),
        "size": size,
        "checksum": checksum,
    }


def row_of(rollout: Rollout, sequence: TokenSequence, payload: Sealed = (0, 0)) -> bytes:
    """The numbers of a sequence of a rollout as a :data:`ROW`."""
    values = _values(rollout, sequence, payload)
    return ROW.pack(*[values[name] for name in _NAMES])


def own_numbers(rollout: Rollout, sequence: TokenSequence) -> dict[str, Any]:
    """The numbers of a sequence that are not its rollout's, by name; of its payload nothing is known."""
    values = _values(rollout, sequence, (0, 0))
    return {name: values[name] for name in _NAMES if name not in ("reward", "flags")}


def numbers_of(info: RolloutInfo) -> dict[str, Any]:
    """The fields of :class:`RolloutNumbers`, by name."""
    return {name: getattr(info, name) for name in RolloutNumbers.__struct_fields__}


def sequences_of(rows: NDArray[np.void]) -> NDArray[np.int64]:
    """[rollouts] the number of sequences of each, of [sequences] of :data:`ROW_DTYPE`."""
    heads = np.flatnonzero(rows["flags"] & FURTHER == 0)
    return np.diff(heads, append=len(rows))


def rollouts_of(rows: NDArray[np.void]) -> NDArray[np.void]:
    """[sequences] of :data:`ROW_DTYPE` -> [rollouts] of it, folded; of single sequences the rows themselves."""
    if rows["flags"].max(initial=0) < FURTHER:
        return rows
    out = rows[heads := np.flatnonzero(rows["flags"] & FURTHER == 0)]
    for number in NUMBERS:
        if number.fold in _FOLDS:
            out[number.name] = _FOLDS[number.fold].reduceat(rows[number.name].astype(np.int64), heads)
    return out


FLAT_WITHIN = 1e-6
"""Share of the largest reward, either sign: what lies closer together counts as equal. Sums of the same parts, and
numbers that a model gave in float32, differ by less."""


class RolloutNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """What a push says of a rollout in numbers. A pull makes and compares two for each payload."""

    rollout_id: str
    """Unique in its group."""
    length: int
    """Tokens."""
    prompt_tokens: int
    """Tokens before the first trained one."""
    loss_tokens: int
    """Trained tokens."""
    reward: float | None
    """Scalar of at most 1e12, either sign, or None until scored."""
    rewards: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Named components of the reward."""
    min_version: int
    """Oldest policy version that sampled a token."""
    max_version: int
    """Newest policy version that sampled a token."""
    turns: int = 0
    """Number of turns."""
    is_truncated: bool = False
    """Sampling ended at a length limit."""
    size: int = 0
    """Bytes of the encoded payload; 0 before encoding."""
    checksum: int = 0
    """CRC-32 that the encoded payload carries in its header; 0 before encoding."""
    largest_token: int = 0
    """Largest token id."""

    def changed(self, **values: Any) -> Self:
        """The same with other values."""
        return msgspec.structs.replace(self, **values)


class RolloutInfo(RolloutNumbers, frozen=True, kw_only=True, gc=False):
    """One rollout, or one sequence of it, in numbers: as its push says them, as the batcher sees them, as a step's part
    has them and as its payload has to have them."""

    failure: str = ""
    """Kind of the failure of an attempt that failed."""
    parts: tuple[RolloutInfo, ...] = ()
    """A record of each of its sequences, where it has several: what stands above is folded over them."""

    @property
    def sequences(self) -> tuple[RolloutInfo, ...]:
        """A record of each of its sequences, which have a payload each."""
        return self.parts or (self,)


class Totals(NamedTuple):
    """Sums over the rollouts of one push: enough to hold a whole group, without looking at any of them."""

    rollouts: int
    sequences: int
    tokens: int
    longest: int
    """Tokens of the longest sequence."""
    oldest: int
    """Smallest `min_version`."""
    newest: int
    """Largest `max_version`."""
    is_scored: bool
    """Every rollout that has not failed has a reward."""
    is_flat: bool
    """True when the rewards of these are flat, by :func:`are_flat`."""
    is_distinct: bool
    """No id occurs twice."""
    failed: int
    """Rollouts that failed."""
    are_trained: bool
    """Every sequence has a trained token."""


NO_TOTALS = Totals(
    rollouts=0,
    sequences=0,
    tokens=0,
    longest=0,
    oldest=0,
    newest=0,
    is_scored=True,
    is_flat=True,
    is_distinct=True,
    failed=0,
    are_trained=True,
)
"""Of a push without rollouts."""


class _Unpacked:
    """Four attributes of a :class:`GroupInfo` besides its fields. None takes part in comparisons, copies or pickles.

    A leader that takes over reads a million rollouts and looks at few of them: those of a decoded push stay packed
    until somebody asks for `rollouts`.
    """

    __slots__ = ("_unpack", "rows", "sequences", "totals")
    _unpack: Callable[[], tuple[RolloutInfo, ...]]
    rows: bytes
    """A :data:`ROW` for each of `sequences`, in their order."""
    sequences: tuple[RolloutInfo, ...]
    """The sequences of all rollouts, in payload order: number i is payload field ``str(i)``."""
    totals: Totals
    """Totals of `rollouts`."""

    if not TYPE_CHECKING:  # a checker would take any misspelt name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Called for a slot that is still empty."""
            if name == "rollouts":
                made = self._unpack()
            elif name == "rows":
                made = b"".join([row for rollout in self.rollouts for row in rows_of(rollout)])
            elif name == "sequences":
                made = tuple([part for rollout in self.rollouts for part in rollout.sequences])
            elif name == "totals":
                made = totals_of(self)
            else:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            object.__setattr__(self, name, made)
            return made


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo(_Unpacked):
    """One push as the batcher sees it: a group, or a part of one, without its payload.

    Example:
        >>> from rlbuffer.testing import make_group
        >>> info = make_group(env="math", rewards=[0.0, 1.0], lengths=[8, 12], seed=3).info()
        >>> info.group_id, info.tokens, info.totals.is_flat
        ('math.3', 20, False)
        >>> info.rollouts[1].loss_tokens
        9
    """

    group_id: str
    """`[A-Za-z0-9_.:-]{1,128}`, unique in the run."""
    env: str
    """Named source of tasks."""
    prompt_id: str
    """Name of the prompt that the rollouts share."""
    adapter: str = ""
    """LoRA adapter that sampled them; "" is all weights."""
    planned_size: int
    """Rollouts planned for the whole group."""
    rollouts: tuple[RolloutInfo, ...]
    """The rollouts of this push, in order."""
    columns: tuple[ColumnKind, ...] = ()
    """Every kind of further column that a rollout of this push has, in order."""
    needs: tuple[str, ...] = ()
    """Names of the columns or rewards that must still be added before the group is ready, e.g. ``ref_logprobs``."""
    worker: str = ""
    """Name of the worker that pushed it."""
    created: float | None = None
    """Unix seconds at the worker; None when unknown. Shown to people, decides nothing."""
    seconds: float | None = None
    """Seconds from its ticket to this push, by the worker's monotonic clock; None without a ticket. Decides nothing."""

    @classmethod
    def unpacked_by(cls, unpack: Callable[[], tuple[RolloutInfo, ...]], **fields: Any) -> GroupInfo:
        """One whose `rollouts` are made by `unpack` when they are asked for; every other field is given."""
        made = object.__new__(cls)
        put = object.__setattr__
        put(made, "_unpack", unpack)
        for name, value in fields.items():
            put(made, name, value)
        return made

    @property
    def tokens(self) -> int:
        """Tokens of all rollouts in this push."""
        return self.totals.tokens

    def rows_of(self, places: Sequence[int]) -> bytes:
        """The numbers of the sequences in these payload fields: a :data:`ROW` for each."""
        if places == range(self.totals.sequences):
            return self.rows
        return b"".join([self.rows[ROW.size * place : ROW.size * (place + 1)] for place in places])

    def places_of(self, rollouts: Sequence[int]) -> Sequence[int]:
        """The payload fields of the sequences of some rollouts, both by their place in the push."""
        if self.totals.sequences == self.totals.rollouts:
            return rollouts
        ends = list(accumulate(len(rollout.sequences) for rollout in self.rollouts))
        return [place for i in rollouts for place in range(ends[i] - len(self.rollouts[i].sequences), ends[i])]


def records_of(
    rows: bytes, ids: Sequence[str], rewards: Sequence[Mapping[str, float]], failures: Sequence[str]
) -> tuple[RolloutInfo, ...]:
    """The rollouts of packed rows, with the id, named rewards and kind of failure of each."""
    numbers = [dict(zip(_NAMES, row, strict=True)) for row in ROW.iter_unpack(rows)]
    heads = [i for i, row in enumerate(numbers) if not row["flags"] & FURTHER]
    made = []
    for rollout_id, named, failure, start, end in zip(
        ids, rewards, failures, heads, [*heads, len(numbers)][1:], strict=True
    ):
        first = _record(rollout_id, named, failure, numbers[start])
        made.append(folded([first, *(_record(rollout_id, {}, "", row) for row in numbers[start + 1 : end])]))
    return tuple(made)


def _record(rollout_id: str, rewards: Mapping[str, float], failure: str, numbers: dict[str, Any]) -> RolloutInfo:
    flags = numbers.pop("flags")
    if not flags & HAS_REWARD:
        numbers["reward"] = None
    is_truncated = bool(flags & IS_TRUNCATED)
    return RolloutInfo(rollout_id=rollout_id, rewards=rewards, is_truncated=is_truncated, failure=failure, **numbers)


def rows_of(rollout: RolloutInfo) -> list[bytes]:
    """The numbers of a rollout as :data:`ROW` s, one for each of its sequences."""
    return [row_of_info(part, is_further=i > 0) for i, part in enumerate(rollout.sequences)]


def row_of_info(rollout: RolloutInfo, *, is_further: bool = False) -> bytes:
    """The numbers of a rollout of one sequence, or of one sequence of several, as a :data:`ROW`."""
    flags = FURTHER if is_further else 0
    if rollout.reward is not None:
        flags |= HAS_REWARD
    if rollout.is_truncated:
        flags |= IS_TRUNCATED
    packed = {"flags": flags, "reward": 0.0 if rollout.reward is None else rollout.reward}
    return ROW.pack(*[packed[n.name] if n.name in packed else getattr(rollout, n.name) for n in NUMBERS])


def folded(parts: Sequence[RolloutInfo]) -> RolloutInfo:
    """The record of a rollout of these sequences, of which the first has what is the rollout's own."""
    if len(parts) == 1:
        return parts[0]
    values: dict[str, Any] = {
        n.name: _PYTHON_FOLDS[n.fold]([getattr(p, n.name) for p in parts]) for n in NUMBERS if n.fold != "first"
    }
    return parts[0].changed(**values, parts=tuple(parts))


def are_flat(rewards: Collection[float | None]) -> bool:
    """True when rewards tell nothing apart: :data:`FLAT_WITHIN` of the largest holds all, or all are missing."""
    scored = [reward for reward in rewards if reward is not None]
    if not scored or len(scored) < len(rewards):
        return not scored
    low, high = min(scored), max(scored)
    return high - low <= FLAT_WITHIN * max(-low, high)


def totals_of_pushes(rows: NDArray[np.void], counts: NDArray[np.int64], failed: int = 0) -> list[Totals]:
    """Adds up the rows of many pushes at once: a leader that takes over reads a million rollouts.

    Args:
        rows: [sequences] of :data:`ROW_DTYPE`, push by push; no id occurs twice in one.
        counts: [pushes] sequences of each, at least one.
        failed: rollouts that failed, of each push.
    """
    starts = np.cumsum(counts) - counts
    length, reward = rows["length"].astype(np.int64), np.ascontiguousarray(rows["reward"])
    is_scored = rows["flags"] & HAS_REWARD != 0  # of the first sequence of each rollout alone
    rollouts = np.add.reduceat((rows["flags"] & FURTHER == 0).astype(np.int64), starts)
    scored = np.add.reduceat(is_scored.astype(np.int64), starts)
    are_scored = scored + failed == rollouts
    with np.errstate(invalid="ignore", over="ignore"):  # a reward may be any bytes
        highest = np.maximum.reduceat(np.where(is_scored, reward, -np.inf), starts)
        lowest = np.minimum.reduceat(np.where(is_scored, reward, np.inf), starts)
        are_close = highest - lowest <= FLAT_WITHIN * np.maximum(-lowest, highest)
    sums = zip(
        rollouts.tolist(),
        counts.tolist(),
        np.add.reduceat(length, starts).tolist(),
        np.maximum.reduceat(length, starts).tolist(),
        np.minimum.reduceat(rows["min_version"], starts).tolist(),
        np.maximum.reduceat(rows["max_version"], starts).tolist(),
        are_scored.tolist(),
        ((scored == 0) | (are_scored & are_close)).tolist(),
        repeat(True, len(counts)),  # no id occurs twice
        repeat(failed, len(counts)),
        (np.minimum.reduceat(rows["loss_tokens"], starts) > 0).tolist(),
        strict=True,
    )
    return [*map(Totals._make, sums)]


def totals_of(info: GroupInfo) -> Totals:
    """Adds up the rollouts of one push, whatever its ids, and however many failed."""
    rollouts = info.rollouts
    if not rollouts:
        return NO_TOTALS
    rows = np.frombuffer(info.rows, ROW_DTYPE)
    (totals,) = totals_of_pushes(
        rows, np.array([len(rows)]), failed=sum([bool(rollout.failure) for rollout in rollouts])
    )
    return totals._replace(is_distinct=len({rollout.rollout_id for rollout in rollouts}) == len(rollouts))


def check_producer(worker: str, incarnation: str) -> None:
    """Checks a producer's name: it becomes part of keys, and of records whose fields a space divides.

    Raises:
        ConfigError: a character that cannot stand there.
    """
    for name, value, pattern in (("worker name", worker, WORKER_NAME), ("incarnation", incarnation, INCARNATION)):
        if not isinstance(value, str) or not pattern.match(value):
            raise ConfigError(f"the {name} must match {pattern.pattern[:-2]}, got {shown(value)}")
