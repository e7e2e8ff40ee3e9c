"""Rollouts and groups as the batcher sees them: no payloads, 49 bytes a rollout and some 150 a group."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from rlbuffer.errors import ConfigError, InvalidRollout
from rlbuffer.records.checks import as_integer, as_number, as_text, shown

GROUP_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")
ENV_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
WORKER_NAME = re.compile(r"[A-Za-z0-9_.:@/-]{1,128}\Z")
INCARNATION = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
"""Without a space, a colon or a dot: it stands between those in keys and records on the server."""
ColumnKind = tuple[str, str, tuple[int, ...]]
"""Name, dtype (``<f4``) and trailing shape of a further column."""
MAX_ROLLOUT_ID = 160
"""Characters: a group id, a slash and an index fit."""
ROW = struct.Struct("<IIIIdQQBII")
"""The numbers of a rollout, packed: length, prompt tokens, loss tokens, turns, reward (0.0 for none), min version, max
version, flags, size, checksum."""
ROW_DTYPE = np.dtype(
    [
        ("length", "<u4"),
        ("prompt_tokens", "<u4"),
        ("loss_tokens", "<u4"),
        ("turns", "<u4"),
        ("reward", "<f8"),
        ("min_version", "<u8"),
        ("max_version", "<u8"),
        ("flags", "u1"),
        ("size", "<u4"),
        ("checksum", "<u4"),
    ]
)
"""A :data:`ROW` as a record of an array."""
HAS_REWARD, IS_TRUNCATED = 1, 2
"""Flags of a :data:`ROW`."""
FLAT_WITHIN = 1e-6
"""Share of the largest reward, either sign: what lies closer together counts as equal. Sums of the same parts, and
numbers that a model gave in float32, differ by less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutInfo:
    """One rollout as the batcher sees it."""

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
    rewards: Mapping[str, float] = field(default_factory=dict)
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


class Totals(NamedTuple):
    """Sums over the rollouts of one push: enough to hold a whole group, without looking at any of them."""

    rollouts: int
    tokens: int
    longest: int
    """Tokens of the longest rollout."""
    oldest: int
    """Smallest `min_version`."""
    newest: int
    """Largest `max_version`."""
    is_scored: bool
    """Every rollout has a reward."""
    is_flat: bool
    """True when the rewards are flat, by :func:`are_flat`."""
    is_distinct: bool
    """No id occurs twice."""


class _Unpacked:
    """Three attributes of a :class:`GroupInfo` besides its fields. None takes part in comparisons, copies or pickles.

    A leader that takes over reads a million rollouts and looks at few of them: those of a decoded push stay packed
    until somebody asks for `rollouts`.
    """

    __slots__ = ("_unpack", "rows", "totals")
    _unpack: Callable[[], tuple[RolloutInfo, ...]]
    rows: bytes
    """A :data:`ROW` for each of `rollouts`, in their order."""
    totals: Totals
    """Totals of `rollouts`."""

    if not TYPE_CHECKING:  # a checker would take any misspelt name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Called for a slot that is still empty."""
            if name == "rollouts":
                made = self._unpack()
            elif name == "rows":
                made = b"".join(map(row_of, self.rollouts))
            elif name == "totals":
                made = totals_of(self.rollouts)
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
    """The rollouts of this push, in payload order: rollout i is payload field ``str(i)``."""
    columns: tuple[ColumnKind, ...] = ()
    """Every kind of further column that a rollout of this push has, in order."""
    needs: tuple[str, ...] = ()
    """Names of the columns or rewards that must still be added before the group is ready, e.g. ``ref_logprobs``."""
    worker: str = ""
    """Name of the worker that pushed it."""
    created: float | None = None
    """Unix seconds at the worker; None when unknown. Shown to people, decides nothing."""

    @property
    def tokens(self) -> int:
        """Tokens of all rollouts in this push."""
        return self.totals.tokens


def row_of(rollout: RolloutInfo) -> bytes:
    """The numbers of a rollout as a :data:`ROW`."""
    reward = rollout.reward
    return ROW.pack(
        rollout.length,
        rollout.prompt_tokens,
        rollout.loss_tokens,
        rollout.turns,
        0.0 if reward is None else reward,
        rollout.min_version,
        rollout.max_version,
        (0 if reward is None else HAS_REWARD) | (IS_TRUNCATED if rollout.is_truncated else 0),
        rollout.size,
        rollout.checksum,
    )


def are_flat(rewards: Collection[float | None]) -> bool:
    """True when rewards tell nothing apart: :data:`FLAT_WITHIN` of the largest holds all, or all are missing."""
    scored = [reward for reward in rewards if reward is not None]
    if not scored or len(scored) < len(rewards):
        return not scored
    low, high = min(scored), max(scored)
    return high - low <= FLAT_WITHIN * max(-low, high)


def totals_of(rollouts: Sequence[RolloutInfo]) -> Totals:
    """Adds up the rollouts of one push; all zero when there are none."""
    rewards = {r.reward for r in rollouts}
    return Totals(
        rollouts=len(rollouts),
        tokens=sum(r.length for r in rollouts),
        longest=max((r.length for r in rollouts), default=0),
        oldest=min((r.min_version for r in rollouts), default=0),
        newest=max((r.max_version for r in rollouts), default=0),
        is_scored=None not in rewards,
        is_flat=are_flat(rewards),
        is_distinct=len({r.rollout_id for r in rollouts}) == len(rollouts),
    )


def check_producer(worker: str, incarnation: str) -> None:
    """Checks a producer's name: it becomes part of keys, and of records whose fields a space divides.

    Raises:
        ConfigError: a character that cannot stand there.
    """
    for name, value, pattern in (("worker name", worker, WORKER_NAME), ("incarnation", incarnation, INCARNATION)):
        if not isinstance(value, str) or not pattern.match(value):
            raise ConfigError(f"the {name} must match {pattern.pattern[:-2]}, got {shown(value)}")


def unfrozen(record: type[Any]) -> type[Any]:
    """A class with the slots of a frozen record: an object of it becomes that record when its ``__class__`` is set so.

    The constructor of a frozen record sets every field by a call, which is most of the time of a decoder that has
    checked the values already.
    """
    return type(f"Unfrozen{record.__name__}", record.__bases__, {"__slots__": record.__slots__})


class GroupFields(Protocol):
    """The fields that a group and its info have in common."""

    @property
    def group_id(self) -> str: ...
    @property
    def env(self) -> str: ...
    @property
    def prompt_id(self) -> str: ...
    @property
    def adapter(self) -> str: ...
    @property
    def planned_size(self) -> int: ...
    @property
    def needs(self) -> tuple[str, ...]: ...
    @property
    def worker(self) -> str: ...
    @property
    def created(self) -> float | None: ...


def group_fields(record: GroupFields) -> dict[str, Any]:
    """Checks the fields that a group and its info have in common: everything except the rollouts.

    Raises:
        InvalidRollout: a field is of the wrong type or outside its range.
    """
    for name, pattern in (("group_id", GROUP_ID), ("env", ENV_NAME)):
        value = getattr(record, name)
        if not isinstance(value, str) or not pattern.match(value):
            raise InvalidRollout(f"{name}: expected {pattern.pattern[:-2]}, got {shown(value)}")
    needs: object = record.needs
    if not isinstance(needs, list | tuple):
        raise InvalidRollout(f"needs: expected a list of names, got {shown(needs)}")
    return {
        "prompt_id": as_text("prompt_id", record.prompt_id, limit=256),
        "adapter": as_text("adapter", record.adapter, limit=128),
        "worker": as_text("worker", record.worker, limit=128),
        "planned_size": as_integer("planned_size", record.planned_size, low=1, high=2**31 - 1),
        "needs": tuple(as_text(f"needs[{i}]", n, limit=64) for i, n in enumerate(needs)),
        "created": None if record.created is None else as_number("created", record.created),
    }
