"""Groups to push: few tokens, made, encoded and decoded once, because that is what costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache, lru_cache
from typing import Any, TypeVar

from rlbuffer.errors import PayloadError
from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Group
from rlbuffer.records.info import GroupInfo, RolloutInfo
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.testing import make_group
from rlbuffer.wire import payload

SHAPES = 12
SMALLEST_TOKENS = 16
"""Of a group: two rollouts of 8."""
KEPT_ROLLOUTS = 10_000
"""Groups, or bytes of them, that are kept from seed to seed: a few kB each."""
_K = TypeVar("_K")
_V = TypeVar("_V")
_T = TypeVar("_T", Group, Rollout)
_NAMES = {kind: tuple(f.name for f in fields(kind)) for kind in (Group, Rollout)}


@cache
def _shape(number: int, version: int) -> Group:
    size = 2 + number % 2
    rewards = [float(i and number % 4 > 0) for i in range(size)]
    made = make_group(seed=number, size=size, rewards=rewards, version=version)
    first, *others = made.rollouts
    if number % 6 == 5:
        others[-1] = replace(others[-1], failure=Failure("tool", "away"))
    further = tuple(_branch(n, version) for n in range(number % 4))
    return _with(made, rollouts=(_with(first, further=further), *others))


def _branch(tokens: int, version: int) -> TokenSequence:
    """A further sequence of a rollout."""
    sampled = {"role": "assistant", "tokens": [7] * (tokens + 1), "logprobs": [-0.5] * (tokens + 1)}
    return TokenSequence.from_turns([{"role": "user", "tokens": [5, 6]}, sampled], policy_version=version)


def made_group(dice: random.Random, group_id: str, env: str, version: int, adapter: str = "") -> Group:
    """A group of two or three rollouts of 8 to 31 tokens, the first of up to four sequences, the last at times a failed
    attempt, sampled by `version` of an adapter, "" being all weights."""
    return _named(dice.randrange(SHAPES), version, group_id, env, adapter)


@lru_cache(KEPT_ROLLOUTS)
def _named(number: int, version: int, group_id: str, env: str, adapter: str) -> Group:
    shape = _shape(number, version)
    rollouts = tuple(_with(r, rollout_id=f"{group_id}/{i}") for i, r in enumerate(shape.rollouts))
    return _with(shape, group_id=group_id, env=env, prompt_id=group_id, adapter=adapter, rollouts=rollouts)


def _with(record: _T, **values: object) -> _T:
    """The record with other values in some fields; its checks have passed for the shape, and names change nothing."""
    made = object.__new__(type(record))
    for name in _NAMES[type(record)]:
        object.__setattr__(made, name, values[name] if name in values else getattr(record, name))
    return made


class Codec:
    """The wire's own encoder and decoders, asked once for the same group or the same bytes.

    They are pure, and their records frozen. A group is encoded for every push of it and decoded by the batcher, again
    after every takeover, by every rank of every attempt, and by the invariants; names repeat from seed to seed. A
    refused or damaged group is never kept.
    """

    def __init__(self) -> None:
        self._encode, self._info, self._rollout = payload.encode_push, payload.decode_info, payload.decode_rollout
        self._page = payload.decode_infos
        self._pushes: dict[tuple[int, ...], tuple[Group, payload.EncodedPush]] = {}
        self._infos: dict[bytes, GroupInfo] = {}
        self._rollouts: dict[bytes, tuple[RolloutInfo | None, Rollout]] = {}

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """The replaced functions: function, its name, the stand-in."""
        return [
            (self._encode, "encode_push", self.encode_push),
            (self._info, "decode_info", self.decode_info),
            (self._page, "decode_infos", self.decode_infos),
            (self._rollout, "decode_rollout", self.decode_rollout),
        ]

    def encode_push(self, group: Group) -> payload.EncodedPush:
        """The stand-in for :func:`rlbuffer.wire.payload.encode_push`."""
        # A part is a group of its own every time, of the same rollouts; holding the group keeps their ids in use.
        place = tuple(id(rollout) for rollout in group.rollouts)
        cached = self._pushes.get(place)
        if cached is None or cached[0] != group:
            cached = _room(self._pushes)[place] = group, self._encode(group)
        return cached[1]

    def decode_info(self, data: bytes) -> GroupInfo:
        """The stand-in for :func:`rlbuffer.wire.payload.decode_info`."""
        info = self._infos.get(data)
        if info is None:
            info = _room(self._infos)[data] = self._info(data)
        return info

    def decode_infos(self, pushes: Sequence[bytes]) -> list[GroupInfo | PayloadError]:
        """The stand-in for :func:`rlbuffer.wire.payload.decode_infos`."""
        known = {data: self._infos[data] for data in pushes if data in self._infos}
        unknown = [data for data in pushes if data not in known]
        made = dict(zip(unknown, self._page(unknown), strict=True))
        for data, info in made.items():
            if isinstance(info, GroupInfo):
                _room(self._infos)[data] = info
        return [known[data] if data in known else made[data] for data in pushes]

    def decode_rollout(self, data: bytes, *, expected: RolloutInfo | None = None) -> Rollout:
        """The stand-in for :func:`rlbuffer.wire.payload.decode_rollout`."""
        known, rollout = self._rollouts.get(data, (None, None))
        if rollout is None or known != expected:
            rollout = self._rollout(data, expected=expected)
            _room(self._rollouts)[data] = expected, rollout
        return rollout


def _room(kept: dict[_K, _V]) -> dict[_K, _V]:
    if len(kept) >= KEPT_ROLLOUTS:
        kept.clear()
    return kept
