"""The rollout, and how one is made from completions, turns or sequences.

A rollout is a small table: one row per token, one column per quantity; an agent's may have several of them. A group
holds the rollouts of one prompt. A :class:`GroupInfo` is a group (or a part of one) without its payload: all that a
decision needs, 53 bytes a sequence and some 60 a group.

Life of a group::

    forming -> ready -> packed -> trained
       |         |
       +---------+----> dropped(reason)

Records are frozen; their invariants are checked once, at construction, and violations raise
:class:`~rlbuffer.errors.InvalidRollout` with the field and the value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.checks import (
    MAX_ROLLOUT_ID,
    NOT_GIVEN,
    as_flag,
    as_items,
    as_mapping,
    as_number,
    as_text,
    read_only,
    same,
    shown,
)
from rlbuffer.records.columns import COLUMN_NAME, MAX_ARRAYS, REQUIRED_COLUMNS, as_column
from rlbuffer.records.failure import Failure, as_failure
from rlbuffer.records.spans import Turn, VersionSpan, as_spans, as_turns

_T = TypeVar("_T")

MAX_LOGPROB = np.float32(1e-3)
"""Logprobs end at 0; samplers that compute in 16 bits round a little above it."""
MIN_LOGPROB = np.float32(-104.0)
"""In float32 e^-104 is 0: no sampler draws such a token. What is below is a stand-in for a logprob that is missing."""
MIN_OTHER_LOGPROB = np.float32(-1000.0)
"""The same for columns of other models, which have not sampled the token: below it is a stand-in, too."""
_TAKEN_BY_TURNS = (*REQUIRED_COLUMNS, "version_spans", "turns", "reward")
MAX_SEQUENCES = 256
"""Sequences of one rollout."""
AT_LIMIT = "length"
"""The `finish_reason` of a rollout whose sampling a length limit ended: it is truncated."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSequence:
    """One row of tokens as a model saw it, a table with one row per token: what is packed as one segment.

    There is no prompt/completion split beyond the mask: an agentic rollout interleaves context and sampled spans.

    Raises:
        InvalidRollout: a column has another length, a wrong dtype or a value that is not finite; a logprob, of any
            column whose name ends in ``logprobs``, is above 0 (1e-3 is rounding) or below -104 (e^-104 is 0 in
            float32, so that nothing draws such a token; -1000 in columns of other models); a float of a column is
            beyond 1e12, either sign, so that it cannot be trained; the first token is trained; spans overlap or do
            not cover the trained tokens; a version is negative.
    """

    tokens: NDArray[np.int32]
    """[T] int32; token ids, context and sampled tokens interleaved."""
    loss_mask: NDArray[np.bool_]
    """[T] bool; True where a token is trained. The first is False: nothing predicts it."""
    logprobs: NDArray[np.float32]
    """[T] float32; inference logprob of each sampled token under the version that sampled it, 0 elsewhere."""
    version_spans: tuple[VersionSpan, ...]
    """Policy version that sampled each range of tokens: ascending, disjoint, covering every trained token. The oldest
    version decides the rollout's age, also where its tokens are masked. A prefix that should not count for the age has
    no span."""
    turns: tuple[Turn, ...] = ()
    """Role that spoke each range of tokens: ascending, disjoint."""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=lambda: NOT_GIVEN)
    """Further quantities per token, each [T] or [T, ...]; ``advantages`` wins over the estimator."""
    attachments: Mapping[str, NDArray[Any]] = field(default_factory=lambda: NOT_GIVEN)
    """Named arrays of any shape that are not per token."""
    name: str = ""
    """For people: ``compacted``, ``sub-task``, ..."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name, dtype in REQUIRED_COLUMNS.items():
            array = as_column(name, getattr(self, name), dtype)
            if array.ndim != 1:
                raise InvalidRollout(f"column {name}: expected shape [T], got {list(array.shape)}")
            put(self, name, array)
        length = len(self.tokens)
        if length == 0:
            raise InvalidRollout("column tokens: empty")
        if self.tokens.item(self.tokens.argmin()) < 0:
            at = int(np.argmax(self.tokens < 0))
            raise InvalidRollout(f"column tokens: negative token id {self.tokens[at]} at position {at}")
        columns = as_arrays("column", self.columns)
        for name, array in (("loss_mask", self.loss_mask), ("logprobs", self.logprobs), *columns.items()):
            if array.ndim == 0 or len(array) != length:
                raise InvalidRollout(f"column {name}: {list(array.shape)} rows do not match {length} tokens")
        for name, array in (("logprobs", self.logprobs), *columns.items()):
            if name.endswith("logprobs"):
                check_logprobs(name, array)
        if self.loss_mask[0]:
            raise InvalidRollout("column loss_mask: the first token cannot be trained")
        put(self, "columns", columns)
        put(self, "attachments", as_arrays("attachment", self.attachments))
        put(self, "version_spans", as_spans(self.version_spans, self.loss_mask))
        put(self, "turns", as_turns(self.turns, length))
        if self.name != "":
            put(self, "name", as_text("name", self.name, limit=64))

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the first trained one (T when none is trained)."""
        first = int(self.loss_mask.argmax())
        return first if self.loss_mask[first] else len(self.tokens)

    @classmethod
    def from_turns(cls, turns: Sequence[Mapping[str, Any]], *, policy_version: int, **fields: Any) -> TokenSequence:
        """Builds a sequence from turns in order; a turn with ``logprobs`` was sampled and is trained.

        Each turn is a mapping with ``role`` and ``tokens`` [n], and optionally ``logprobs`` [n], ``policy_version``
        (else the one given), ``reward`` and ``metadata``.
        """
        return cls(**_of_turns(turns, policy_version), **_further_fields(cls, fields))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        # Read-only mappings do not pickle; samplers do send rollouts between their own processes.
        return rebuilt, (type(self), field_values(self))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout(TokenSequence):
    """One scored, sampled trajectory: its own sequence of tokens, nearly always the only one, and further ones.

    An agent whose context was compacted, that asked sub-agents or tried again from an earlier point has several
    sequences: they are rewarded and compared as one, and packed each by itself (:meth:`from_sequences`).

    Raises:
        InvalidRollout: as :class:`TokenSequence`; a reward is beyond 1e12, either sign; there are more than 256
            sequences; `finish_reason` is ``length`` and `is_truncated` is False.

    Example:
        >>> rollout = Rollout.from_completion(
        ...     prompt_ids=[1, 5], token_ids=[7, 9, 2], logprobs=[-0.1, -0.7, -0.2], reward=1.0, policy_version=3
        ... )
        >>> rollout.length, rollout.prompt_tokens, rollout.loss_tokens
        (5, 2, 3)
        >>> rollout.loss_mask.tolist()
        [False, False, True, True, True]
        >>> rollout.version_spans
        (VersionSpan(policy_version=3, start=2, end=5),)
    """

    rollout_id: str = ""
    """Unique in its group; empty until pushed (then ``<group_id>/<index>``)."""
    reward: float | None = None
    """Scalar of at most 1e12, either sign, or None until scored, and where it failed."""
    rewards: Mapping[str, float] = field(default_factory=lambda: NOT_GIVEN)
    """Named components of the reward."""
    successes: Mapping[str, bool] = field(default_factory=lambda: NOT_GIVEN)
    """Named verdicts."""
    finish_reason: str = ""
    """Reason why sampling ended: ``stop``, ``length``, ..."""
    is_truncated: bool = field(default_factory=lambda: NOT_GIVEN)  # type: ignore[assignment]
    """A length limit ended sampling, or cut what was sampled. Not given: whether `finish_reason` is ``length``."""
    failure: Failure | None = None
    """Why it is a failed attempt: `reward`, `rewards` and `successes` that were given are then not looked at."""
    text: str | None = None
    """Rendered transcript, for people."""
    metadata: Mapping[str, Any] = field(default_factory=lambda: NOT_GIVEN)
    """The user's own; msgpack types only."""
    further: tuple[TokenSequence, ...] = ()
    """Its sequences behind the first, which the fields above are."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "rollout_id", as_text("rollout_id", self.rollout_id, limit=MAX_ROLLOUT_ID))
        if self.failure is not None:
            put(self, "failure", as_failure(self.failure))
            put(self, "reward", None)
            put(self, "rewards", NOT_GIVEN)
            put(self, "successes", NOT_GIVEN)
        if self.reward is not None:
            put(self, "reward", as_number("reward", self.reward))
        put(self, "rewards", _named_values("rewards", self.rewards, as_number))
        put(self, "successes", _named_values("successes", self.successes, as_flag))
        put(self, "finish_reason", as_text("finish_reason", self.finish_reason, limit=64))
        at_limit = self.finish_reason == AT_LIMIT
        given: object = self.is_truncated
        is_truncated = at_limit if given is NOT_GIVEN else as_flag("is_truncated", given)
        if at_limit and not is_truncated:
            raise InvalidRollout(
                f"is_truncated: False, but finish_reason is {AT_LIMIT!r}: leave it out, or name another reason"
            )
        put(self, "is_truncated", is_truncated)
        if self.text is not None:
            put(self, "text", as_text("text", self.text))
        put(self, "metadata", read_only("metadata", self.metadata))
        TokenSequence.__post_init__(self)
        if self.further != ():
            put(self, "further", _as_further(self.further))

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """All of its sequences, itself the first: what is packed, each as one segment."""
        return (self, *self.further)

    @property
    def length(self) -> int:
        """Number of tokens, over all sequences."""
        return len(self.tokens) + sum([len(s.tokens) for s in self.further])

    @property
    def loss_tokens(self) -> int:
        """Number of trained tokens, over all sequences."""
        return sum([int(np.count_nonzero(s.loss_mask)) for s in self.sequences])

    @property
    def min_policy_version(self) -> int:
        """The oldest policy version that sampled a token, over all sequences."""
        return min([min(s.version_spans).policy_version for s in self.sequences])

    @property
    def max_policy_version(self) -> int:
        """The newest policy version that sampled a token, over all sequences."""
        return max([max(s.version_spans).policy_version for s in self.sequences])

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

        `fields` are further ones of the rollout: `rewards`, `finish_reason`, `columns` ...

        Shapes: ``prompt_ids`` [P], P >= 1; ``token_ids`` and ``logprobs`` [C].
        """
        prompt, sampled = (_column("tokens", ids) for ids in (prompt_ids, token_ids))
        inference = _column("logprobs", logprobs)
        if not len(prompt):
            raise InvalidRollout("prompt_ids: empty, but the first token of a rollout cannot be trained")
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
    def from_turns(  # type: ignore[override]  # whether it is scored must be said
        cls, turns: Sequence[Mapping[str, Any]], *, reward: float | None, policy_version: int, **fields: Any
    ) -> Rollout:
        """Builds a rollout of one sequence from turns in order, as :meth:`TokenSequence.from_turns`. `fields` are
        further ones of the rollout: `rewards`, `finish_reason`, `columns` ..."""
        return cls(reward=reward, **_of_turns(turns, policy_version), **_further_fields(cls, fields))

    @classmethod
    def from_sequences(cls, sequences: Sequence[TokenSequence], *, reward: float | None, **fields: Any) -> Rollout:
        """Builds a rollout of several sequences, the main one first.

        :meth:`TokenSequence.from_turns` makes one, with its columns and attachments. `fields` are further ones of the
        rollout: `rewards`, `finish_reason`, `text` ...

        Sequences of one tree begin alike. A token that was sampled once is trained once: where a later sequence begins
        with the same ids and the same inference logprobs as an earlier one, what that one trains is masked, and
        ages it no longer. A later sequence in which nothing is left to train is left out.

        Ids and logprobs are all that this goes by. Two answers to one prompt that were sampled apart and happen to
        begin alike count as one up to where they differ, as if the second had been branched off there. To train each
        whole, push them as two rollouts, or give the second to ``Rollout(..., further=(second,))``, which masks
        nothing.

        Example:
            >>> def sequence(*sampled):
            ...     return TokenSequence.from_turns(
            ...         [
            ...             {"role": "user", "tokens": [1, 5]},
            ...             {"role": "assistant", "tokens": sampled, "logprobs": [-0.5] * len(sampled)},
            ...         ],
            ...         policy_version=3,
            ...     )
            >>> rollout = Rollout.from_sequences([sequence(7, 8), sequence(7, 9, 2)], reward=1.0)
            >>> [s.loss_mask.tolist() for s in rollout.sequences]
            [[False, False, True, True], [False, False, False, True, True]]
            >>> rollout.length, rollout.loss_tokens
            (9, 4)
        """
        main, *later = as_items("sequences", sequences) or [None]
        if not isinstance(main, TokenSequence):
            raise InvalidRollout(f"sequences[0]: expected a TokenSequence, got {shown(main)}")
        seen, further = [main], []
        for sequence in _as_further(later):
            mask = sequence.loss_mask.copy()
            for other in seen:
                shared = _shared(sequence, other)
                mask[:shared] &= ~other.loss_mask[:shared]
            seen.append(sequence)
            if mask.any():
                further.append(_masked(sequence, mask))
        given = {name: getattr(main, name) for name in _SEQUENCE_NAMES}
        free = _further_fields(cls, fields, (*_SEQUENCE_NAMES, "reward", "further"))
        return cls(**given, reward=reward, further=tuple(further), **free)


_NAMES, _SEQUENCE_NAMES = ([f.name for f in fields(record)] for record in (Rollout, TokenSequence))


class TokenArrays(Protocol):
    """The part of a rollout that is trained, of a record or of a payload."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def loss_mask(self) -> NDArray[np.bool_]: ...
    @property
    def logprobs(self) -> NDArray[np.float32]: ...
    @property
    def version_spans(self) -> tuple[VersionSpan, ...]: ...
    @property
    def columns(self) -> Mapping[str, NDArray[Any]]: ...


def check_logprobs(name: str, array: NDArray[Any]) -> None:
    """Raises InvalidRollout unless all logprobs are from :data:`MIN_LOGPROB`, or that of other models' columns, to
    :data:`MAX_LOGPROB`."""
    least = MIN_LOGPROB if name == "logprobs" else MIN_OTHER_LOGPROB
    if not array.size or least <= array.item(array.argmin()) <= array.item(array.argmax()) <= MAX_LOGPROB:
        return
    at = tuple(int(index) for index in np.argwhere(~((array >= least) & (array <= MAX_LOGPROB)))[0])
    if np.isnan(array[at]):
        raise InvalidRollout(f"column {name}: not finite at position {at[0]}: {array[at]}")
    why = (
        "is above 0, so it is no logarithm of a probability; are these logits, or logprobs with the sign turned?"
        if array[at] > 0
        else f"is below {least:g}: no model gives a token that was drawn such a probability. Engines write such "
        "numbers where a logprob is missing; take the token out of loss_mask and put 0 there, or leave the rollout out"
    )
    raise InvalidRollout(f"column {name}: {float(array[at]):.6g} at position {at[0]} {why}")


def _of_turns(turns: Sequence[Mapping[str, Any]], policy_version: int) -> dict[str, Any]:
    """The fields of a sequence of these turns."""
    tokens, mask, logprobs, spans, marks = [], [], [], [], []
    position = 0
    for i, turn in enumerate(as_items("turns", turns)):
        for name in ("role", "tokens"):
            if name not in as_mapping(f"turns[{i}]", turn):
                raise InvalidRollout(f"turns[{i}].{name}: missing")
        ids = _column("tokens", turn["tokens"])
        sampled = turn.get("logprobs") is not None
        values = _column("logprobs", turn["logprobs"]) if sampled else np.zeros(len(ids), np.float32)
        end = position + len(ids)
        if len(values) != len(ids):
            raise InvalidRollout(f"column logprobs: {len(values)} rows do not match {len(ids)} tokens of a turn")
        tokens.append(ids)
        mask.append(np.full(len(ids), sampled))
        logprobs.append(values)
        if sampled and len(ids):
            spans.append(VersionSpan(turn.get("policy_version", policy_version), position, end))
        marks.append(Turn(turn["role"], position, end, turn.get("reward"), turn.get("metadata")))
        position = end
    if not tokens:
        raise InvalidRollout("turns: empty")
    return {
        "tokens": _joined(tokens),
        "loss_mask": _joined(mask),
        "logprobs": _joined(logprobs),
        "version_spans": tuple(spans) or (VersionSpan(policy_version, 0, position),),
        "turns": tuple(marks),
    }


def _further_fields(
    record: type[TokenSequence], given: Mapping[str, Any], taken: Sequence[str] = _TAKEN_BY_TURNS
) -> Mapping[str, Any]:
    """`given`, fields of a record that what it is built from has not `taken`. Raises InvalidRollout."""
    fields = record.__dataclass_fields__
    if unknown := [name for name in given if name in taken or name not in fields]:
        free = ", ".join(name for name in fields if name not in taken)
        raise InvalidRollout(f"{unknown[0]!r} is no further field of a {record.__name__}: {free}")
    return given


def _as_further(given: Any) -> tuple[TokenSequence, ...]:
    further = tuple(as_items("further", given))
    if len(further) >= MAX_SEQUENCES:
        raise InvalidRollout(f"further: {len(further) + 1} sequences are more than {MAX_SEQUENCES}")
    for i, sequence in enumerate(further):
        if not isinstance(sequence, TokenSequence) or isinstance(sequence, Rollout):
            raise InvalidRollout(f"further[{i}]: expected a TokenSequence, got {shown(sequence)}")
    return further


def _shared(a: TokenSequence, b: TokenSequence) -> int:
    """Tokens of the longest common beginning: same ids and same inference logprobs, so one act of sampling."""
    most = min(len(a.tokens), len(b.tokens))
    differs = (a.tokens[:most] != b.tokens[:most]) | (a.logprobs[:most] != b.logprobs[:most])
    return int(differs.argmax()) if differs.any() else most


def _masked(sequence: TokenSequence, mask: NDArray[np.bool_]) -> TokenSequence:
    """The sequence with another mask, which leaves out some of its trained tokens, and all spans of only such."""
    if np.array_equal(mask, sequence.loss_mask):
        return sequence
    loss_mask = sequence.loss_mask
    spans = tuple(
        s for s in sequence.version_spans if mask[s.start : s.end].any() or not loss_mask[s.start : s.end].any()
    )
    return replace(sequence, loss_mask=mask, version_spans=spans)


def without_logprobs(rollout: Rollout) -> tuple[int, ...]:
    """Sequences of a rollout that train tokens, and the logprob of each is exactly 0: nothing was sampled with such a
    certainty, except greedily. Each may come from an engine of its own."""
    if rollout.failure:
        return ()
    return tuple(
        number
        for number, sequence in enumerate(rollout.sequences)
        if not (sequence.loss_mask[-1] and sequence.logprobs[-1])  # nearly always it has one: nothing more is looked at
        and sequence.loss_mask.any()
        and not sequence.logprobs[sequence.loss_mask].any()
    )


def _column(name: str, values: ArrayLike) -> NDArray[Any]:
    array = as_column(name, values, REQUIRED_COLUMNS[name])
    if array.ndim != 1:
        raise InvalidRollout(f"column {name}: expected shape [n], got {list(array.shape)}")
    return array


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    joined = np.concatenate(arrays)
    joined.flags.writeable = False  # ours alone: the record keeps it without another copy
    return joined


def as_arrays(kind: str, values: object) -> Mapping[str, NDArray[Any]]:
    """Checked columns, or attachments, by name. Raises InvalidRollout; `kind` is ``column`` or ``attachment``."""
    if values is NOT_GIVEN:
        return NOT_GIVEN
    out = {}
    for name, array in as_mapping(f"{kind}s", values).items():
        if not isinstance(name, str) or not COLUMN_NAME.match(name) or (kind == "column" and name in REQUIRED_COLUMNS):
            raise InvalidRollout(f"{kind} name {shown(name)} is not allowed")
        out[str.__str__(name)] = as_column(name, array, kind=kind)
    if len(out) > MAX_ARRAYS:
        raise InvalidRollout(f"{kind}s: {len(out)} are more than {MAX_ARRAYS}")
    return MappingProxyType(out)


def _named_values(field_name: str, values: object, check: Callable[[str, Any], _T]) -> Mapping[str, _T]:
    if values is NOT_GIVEN:
        return NOT_GIVEN
    out = {}
    for name, value in as_mapping(field_name, values).items():
        out[as_text(f"{field_name} name", name, limit=64)] = check(f"{field_name}.{name}", value)
    return MappingProxyType(out)


def field_values(record: Any) -> dict[str, Any]:
    """The fields of a record, read-only mappings as dicts: what pickle can take."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {k: dict(v) if isinstance(v, MappingProxyType) else v for k, v in values.items()}


def rebuilt(cls: type[_T], values: Mapping[str, Any]) -> _T:
    """The record that :func:`field_values` was read from."""
    return cls(**values)


def with_column(rollout: Rollout, name: str, values: Sequence[NDArray[Any]]) -> Rollout:
    """The rollout with a further column, of which `values` has an array for each sequence."""
    first, *rest = values
    further = [replace(s, columns={**s.columns, name: v}) for s, v in zip(rollout.further, rest, strict=True)]
    return replace(rollout, columns={**rollout.columns, name: first}, further=tuple(further))


def with_id(rollout: Rollout, rollout_id: str) -> Rollout:
    """The same rollout with an id where it has none; its other fields were checked already."""
    if rollout.rollout_id:
        return rollout
    copy = object.__new__(Rollout)
    for name in _NAMES:
        object.__setattr__(copy, name, getattr(rollout, name))
    object.__setattr__(copy, "rollout_id", rollout_id)
    return copy
