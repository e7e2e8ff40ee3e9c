"""What moves through the buffer: rollouts, groups, and what the batcher sees of them.

A rollout is a small table: one row per token, one column per quantity. A group holds the rollouts of one prompt.
A :class:`GroupInfo` is a group (or a part of one) without its payload: all that a decision needs, about 100 bytes a
rollout.

Life of a group::

    forming -> ready -> packed -> trained
       |         |
       +---------+----> dropped(reason)

Records are frozen; their invariants are checked once, at construction, and violations raise
:class:`~rlbuffer.errors.InvalidRollout` with the field and the value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlbuffer.columns import COLUMN_NAME, REQUIRED_COLUMNS, as_column, as_finite, same
from rlbuffer.errors import InvalidRollout

GROUP_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")
ENV_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
REASONS = ("stale", "future", "small", "flat", "oversized", "invalid", "late", "duplicate", "void")
"""Why rollouts are dropped; the order is the order of tables and metrics."""


class VersionSpan(NamedTuple):
    """Tokens ``start`` to ``end`` (exclusive) were sampled by ``policy_version``."""

    policy_version: int
    start: int
    end: int


class Turn(NamedTuple):
    """Tokens ``start`` to ``end`` (exclusive) belong to ``role``; reward and metadata of the turn are optional."""

    role: str
    start: int
    end: int
    reward: float | None = None
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One scored, sampled trajectory: a table with one row per token.

    There is no prompt/completion split beyond the mask: an agentic rollout interleaves context and sampled spans.

    Raises:
        InvalidRollout: a column has another length, a wrong dtype or a value that is not finite; the first token is
            trained; spans overlap or do not cover the trained tokens; a version is negative.
    """

    rollout_id: str = ""
    """Unique in the run; empty until pushed (then ``<group_id>/<index>``)."""
    tokens: NDArray[np.int32]
    """[T] int32; token ids, context and sampled tokens interleaved."""
    loss_mask: NDArray[np.bool_]
    """[T] bool; True where a token is trained. The first is False: nothing predicts it."""
    logprobs: NDArray[np.float32]
    """[T] float32; inference logprob of each sampled token under the version that sampled it, 0 elsewhere."""
    reward: float | None = None
    """Finite scalar, or None until scored."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named components of the reward."""
    successes: Mapping[str, bool] = field(default_factory=dict)
    """Named verdicts."""
    version_spans: tuple[VersionSpan, ...]
    """Which policy version sampled which tokens: ascending, disjoint, covering every trained token."""
    turns: tuple[Turn, ...] = ()
    """Which role spoke which tokens: ascending, disjoint."""
    finish_reason: str = ""
    """Why sampling ended: ``stop``, ``length``, ..."""
    is_truncated: bool = False
    """Sampling ended because a length limit was reached."""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Further quantities per token, each [T] or [T, ...]; ``advantages`` wins over the estimator."""
    attachments: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Named arrays of any shape that are not per token."""
    text: str | None = None
    """Rendered transcript, for people."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's own; msgpack types only."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        if not isinstance(self.rollout_id, str) or len(self.rollout_id) > 160:
            raise InvalidRollout(f"rollout_id: expected a string of at most 160 characters, got {self.rollout_id!r}")
        for name, dtype in REQUIRED_COLUMNS.items():
            array = as_column(name, getattr(self, name), dtype)
            if array.ndim != 1:
                raise InvalidRollout(f"column {name}: expected shape [T], got {list(array.shape)}")
            put(self, name, array)
        length = len(self.tokens)
        if length == 0:
            raise InvalidRollout("column tokens: empty")
        if int(self.tokens.min()) < 0:
            raise InvalidRollout(f"column tokens: negative token id at position {int(np.argmin(self.tokens))}")
        columns = {}
        for name, values in self.columns.items():
            if not isinstance(name, str) or not COLUMN_NAME.match(name) or name in REQUIRED_COLUMNS:
                raise InvalidRollout(f"column name {name!r} is not allowed")
            columns[name] = as_column(name, values)
        for name, array in (("loss_mask", self.loss_mask), ("logprobs", self.logprobs), *columns.items()):
            if array.ndim == 0 or len(array) != length:
                shape = list(array.shape)
                raise InvalidRollout(f"column {name}: {shape} rows do not match {length} tokens")
        if self.loss_mask[0]:
            raise InvalidRollout("column loss_mask: the first token cannot be trained")
        put(self, "columns", MappingProxyType(columns))
        attachments = {}
        for name, values in self.attachments.items():
            if not isinstance(name, str) or not COLUMN_NAME.match(name):
                raise InvalidRollout(f"attachment name {name!r} is not allowed")
            attachments[name] = as_column(f"attachment {name}", values)
        put(self, "attachments", MappingProxyType(attachments))
        if self.reward is not None:
            put(self, "reward", as_finite("reward", self.reward))
        put(self, "rewards", MappingProxyType({str(k): as_finite(f"rewards.{k}", v) for k, v in self.rewards.items()}))
        put(self, "successes", MappingProxyType({str(k): bool(v) for k, v in self.successes.items()}))
        put(self, "version_spans", _spans(self.version_spans, length, self.loss_mask))
        put(self, "turns", _turns(self.turns, length))
        put(self, "is_truncated", bool(self.is_truncated))
        put(self, "metadata", MappingProxyType(dict(self.metadata)))

    @property
    def length(self) -> int:
        """Number of tokens T."""
        return len(self.tokens)

    @property
    def loss_tokens(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the first trained one (T when none is trained)."""
        return int(np.argmax(self.loss_mask)) if self.loss_mask.any() else self.length

    @property
    def min_policy_version(self) -> int:
        """The oldest policy version that sampled a token."""
        return min(span.policy_version for span in self.version_spans)

    @property
    def max_policy_version(self) -> int:
        """The newest policy version that sampled a token."""
        return max(span.policy_version for span in self.version_spans)

    @classmethod
    def from_completion(
        cls,
        *,
        prompt_ids: ArrayLike,
        token_ids: ArrayLike,
        logprobs: ArrayLike,
        reward: float | None,
        policy_version: int,
        **fields: Any,
    ) -> Rollout:
        """Builds a single-turn rollout: a prompt, then sampled tokens, all of them trained.

        Shapes: ``prompt_ids`` [P], P >= 1; ``token_ids`` and ``logprobs`` [C].
        """
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        sampled = np.asarray(token_ids, dtype=np.int32)
        inference = np.asarray(logprobs, dtype=np.float32)
        if sampled.shape != inference.shape:
            raise InvalidRollout(
                f"column logprobs: {list(inference.shape)} rows do not match {list(sampled.shape)} token ids"
            )
        turns = [
            {"role": "user", "tokens": prompt},
            {"role": "assistant", "tokens": sampled, "logprobs": inference},
        ]
        return cls.from_turns(turns, reward=reward, policy_version=policy_version, **fields)

    @classmethod
    def from_turns(
        cls, turns: Sequence[Mapping[str, Any]], *, reward: float | None, policy_version: int, **fields: Any
    ) -> Rollout:
        """Builds a rollout from turns in order; a turn with ``logprobs`` was sampled and is trained.

        Each turn is a mapping with ``role`` and ``tokens`` [n], and optionally ``logprobs`` [n], ``policy_version``
        (else the rollout's), ``reward`` and ``metadata``.
        """
        tokens, mask, logprobs, spans, marks = [], [], [], [], []
        position = 0
        for turn in turns:
            ids = np.asarray(turn["tokens"], dtype=np.int32)
            inference = turn.get("logprobs")
            end = position + len(ids)
            tokens.append(ids)
            mask.append(np.full(len(ids), inference is not None))
            values = np.zeros(len(ids), np.float32) if inference is None else np.asarray(inference, np.float32)
            if len(values) != len(ids):
                raise InvalidRollout(f"column logprobs: {len(values)} rows do not match {len(ids)} tokens of a turn")
            logprobs.append(values)
            if inference is not None and len(ids):
                spans.append(VersionSpan(int(turn.get("policy_version", policy_version)), position, end))
            marks.append(Turn(turn["role"], position, end, turn.get("reward"), turn.get("metadata")))
            position = end
        if not tokens:
            raise InvalidRollout("turns: empty")
        return cls(
            tokens=np.concatenate(tokens),
            loss_mask=np.concatenate(mask),
            logprobs=np.concatenate(logprobs),
            reward=reward,
            version_spans=tuple(spans) or (VersionSpan(policy_version, 0, position),),
            turns=tuple(marks),
            **fields,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rollout):
            return NotImplemented
        return all(same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]


def _spans(spans: Sequence[Any], length: int, mask: NDArray[np.bool_]) -> tuple[VersionSpan, ...]:
    out, position = [], 0
    covered = np.zeros(length, np.bool_)
    for item in spans:
        try:
            version, start, end = (int(x) for x in item)
        except (TypeError, ValueError):
            raise InvalidRollout(f"version_spans: expected (policy_version, start, end), got {item!r}") from None
        if version < 0:
            raise InvalidRollout(f"version_spans: negative policy version {version}")
        if not position <= start < end <= length:
            raise InvalidRollout(f"version_spans: [{start}, {end}) is out of order or outside {length} tokens")
        covered[start:end] = True
        position = end
        out.append(VersionSpan(version, start, end))
    if not out:
        raise InvalidRollout("version_spans: at least one is required")
    bare = mask & ~covered
    if bare.any():
        raise InvalidRollout(f"version_spans: the trained token at position {int(np.argmax(bare))} is in no span")
    return tuple(out)


def _turns(turns: Sequence[Any], length: int) -> tuple[Turn, ...]:
    out, position = [], 0
    for item in turns:
        try:
            turn = Turn(*item)
            start, end = int(turn.start), int(turn.end)
        except (TypeError, ValueError):
            raise InvalidRollout(f"turns: expected (role, start, end, reward?, metadata?), got {item!r}") from None
        if not position <= start <= end <= length:
            raise InvalidRollout(f"turns: [{start}, {end}) is out of order or outside {length} tokens")
        position = end
        reward = None if turn.reward is None else as_finite("turns.reward", turn.reward)
        out.append(Turn(str(turn.role), start, end, reward, dict(turn.metadata) if turn.metadata else None))
    return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutInfo:
    """What the batcher sees of one rollout."""

    rollout_id: str
    """Unique in the run."""
    length: int
    """Tokens."""
    prompt_tokens: int
    """Tokens before the first trained one."""
    loss_tokens: int
    """Trained tokens."""
    reward: float | None
    """Finite scalar, or None until scored."""
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
    """CRC-32 of the encoded payload; 0 before encoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """What the batcher sees of one push: a group, or a part of one, without its payload."""

    group_id: str
    """`[A-Za-z0-9_.:-]{1,128}`, unique in the run."""
    env: str
    """Named source of tasks."""
    prompt_id: str
    """What the rollouts share."""
    adapter: str = ""
    """LoRA adapter that sampled them; "" is all weights."""
    planned_size: int
    """Rollouts planned for the whole group."""
    rollouts: tuple[RolloutInfo, ...]
    """The rollouts of this push, in payload order: rollout i is payload field ``str(i)``."""
    needs: tuple[str, ...] = ()
    """What must still be added before the group is ready, e.g. ``ref_logprobs``."""
    worker: str = ""
    """Who pushed it."""
    created: float | None = None
    """Unix seconds at the worker; None when unknown. Shown to people, decides nothing."""

    @property
    def tokens(self) -> int:
        """Tokens of all rollouts in this push."""
        return sum(r.length for r in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one prompt, or a part of them (parts share ``group_id`` and ``planned_size``)."""

    group_id: str
    """`[A-Za-z0-9_.:-]{1,128}`, unique in the run."""
    env: str
    """`[A-Za-z0-9_.-]{1,64}`; named source of tasks."""
    prompt_id: str
    """What the rollouts share."""
    rollouts: tuple[Rollout, ...]
    """At least one; ids are filled in as ``<group_id>/<index>`` where empty."""
    planned_size: int
    """Rollouts planned for the whole group."""
    adapter: str = ""
    """LoRA adapter that sampled them; "" is all weights."""
    answer: Any = None
    """Reference answer; msgpack types only; part of the payload."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's own; msgpack types only; part of the payload."""
    needs: tuple[str, ...] = ()
    """What must still be added before the group is ready."""
    worker: str = ""
    """Who pushed it."""
    created: float | None = None
    """Unix seconds at the worker."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        if not isinstance(self.group_id, str) or not GROUP_ID.match(self.group_id):
            raise InvalidRollout(f"group_id: expected {GROUP_ID.pattern[:-2]}, got {self.group_id!r}")
        if not isinstance(self.env, str) or not ENV_NAME.match(self.env):
            raise InvalidRollout(f"env: expected {ENV_NAME.pattern[:-2]}, got {self.env!r}")
        if not isinstance(self.prompt_id, str) or len(self.prompt_id) > 256:
            raise InvalidRollout(f"prompt_id: expected a string of at most 256 characters, got {self.prompt_id!r}")
        rollouts = tuple(self.rollouts)
        if not rollouts:
            raise InvalidRollout("rollouts: empty")
        if isinstance(self.planned_size, bool) or not isinstance(self.planned_size, int) or self.planned_size < 1:
            raise InvalidRollout(f"planned_size: expected a positive integer, got {self.planned_size!r}")
        if len(rollouts) > self.planned_size:
            raise InvalidRollout(f"rollouts: {len(rollouts)} are more than planned_size = {self.planned_size}")
        if any(not r.rollout_id for r in rollouts):
            rollouts = tuple(_named(r, f"{self.group_id}/{i}") for i, r in enumerate(rollouts))
        ids = [r.rollout_id for r in rollouts]
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise InvalidRollout(f"rollouts: id {twice!r} occurs twice in group {self.group_id}")
        put(self, "rollouts", rollouts)
        put(self, "metadata", MappingProxyType(dict(self.metadata)))
        put(self, "needs", tuple(str(n) for n in self.needs))

    def info(self) -> GroupInfo:
        """What the batcher sees of this group: no payloads."""
        return GroupInfo(
            group_id=self.group_id,
            env=self.env,
            prompt_id=self.prompt_id,
            adapter=self.adapter,
            planned_size=self.planned_size,
            needs=self.needs,
            worker=self.worker,
            created=self.created,
            rollouts=tuple(
                RolloutInfo(
                    rollout_id=r.rollout_id,
                    length=r.length,
                    prompt_tokens=r.prompt_tokens,
                    loss_tokens=r.loss_tokens,
                    reward=r.reward,
                    rewards=r.rewards,
                    min_version=r.min_policy_version,
                    max_version=r.max_policy_version,
                    turns=len(r.turns),
                    is_truncated=r.is_truncated,
                )
                for r in self.rollouts
            ),
        )


def _named(rollout: Rollout, rollout_id: str) -> Rollout:
    if rollout.rollout_id:
        return rollout
    values = {f.name: getattr(rollout, f.name) for f in fields(rollout)}
    return Rollout(**(values | {"rollout_id": rollout_id}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Leave to sample one group now: number ``n`` of an env is its n-th prompt."""

    env: str
    number: int
    """From 0; the group samples prompt ``number`` of the env's order."""
    group_id: str
    """``<env>.<number>``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What became of a push."""

    entry_id: str
    """Id of its entry in the pool."""
    status: str
    """``stored`` | ``duplicate``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """Weights that can be sampled from."""

    version: int
    """Number of trained steps in the weights; -1 when nothing was announced yet."""
    location: str = ""
    """Where the weights are; empty when the version is announced without weights."""
    size: int = 0
    """Bytes."""
    checksum: str = ""
    """Of the weights, as the publisher computed it."""
    adapter: str = ""
    """"" is all weights."""


FIELD_NAMES = {cls.__name__: frozenset(f.name for f in fields(cls)) for cls in (Rollout, Group)}
"""Names that a line of ``rlbuffer push`` may use."""

__all__ = [
    "ENV_NAME",
    "FIELD_NAMES",
    "GROUP_ID",
    "REASONS",
    "Group",
    "GroupInfo",
    "PolicyVersion",
    "Pushed",
    "Rollout",
    "RolloutInfo",
    "Ticket",
    "Turn",
    "VersionSpan",
]
