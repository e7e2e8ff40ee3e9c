"""The rollouts of a step's part in columns: a pull works on all of them at once, and people read a record of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, cast, overload

import numpy as np
from numpy.typing import NDArray

from rlbuffer.records.info import RolloutInfo, unfrozen
from rlbuffer.store.records import PartRollout
from rlbuffer.wire.views import ANNOUNCED, Announced

_COLUMNS = (
    "source", "index", "advantage", "rollout_id", "length", "prompt_tokens", "loss_tokens", "reward", "rewards",
    "min_version", "max_version", "turns", "is_truncated", "size", "checksum",
)  # fmt: skip
"""The values of a rollout as they stand in a part."""
_SOURCE = ("payload_key", "group_id", "env", "adapter", "prompt_id", "planned_size", "worker", "pushed_ms")
"""The values of a push."""
_UnfrozenInfo, _UnfrozenRollout = unfrozen(RolloutInfo), unfrozen(PartRollout)


class PartRollouts(Sequence[PartRollout]):
    """The rollouts of a part; the records of all are made when somebody reads one.

    Args:
        items: per rollout the number of its push and its own values, as they stand in a part.
        sources: the values of each push.
        prefix: stands before every payload key.

    Raises:
        ValueError, IndexError, TypeError: these are no values of a part.
    """

    def __init__(self, items: Sequence[Sequence[Any]], sources: Sequence[Sequence[Any]], prefix: str = "") -> None:
        columns = zip(*items, strict=True) if items else ((),) * len(_COLUMNS)
        self._columns: dict[str, tuple[Any, ...]] = dict(zip(_COLUMNS, columns, strict=True))
        named = set(self._columns["source"])
        if not named <= set(range(len(sources))):
            raise ValueError("a rollout names a push that the part does not have")
        pushes = {number: dict(zip(_SOURCE, sources[number], strict=True)) for number in named}
        self._sources, self._prefix = sources, prefix
        self._pushes = {number: push | {"payload_key": prefix + push["payload_key"]} for number, push in pushes.items()}

    @classmethod
    def of(cls, refs: Sequence[PartRollout]) -> PartRollouts:
        """The same rollouts in columns, whatever they come as."""
        if isinstance(refs, PartRollouts):
            return refs
        infos = [ref.info for ref in refs]
        items = [
            [i, ref.index, ref.advantage, *(getattr(info, name) for name in _COLUMNS[3:])]
            for i, (ref, info) in enumerate(zip(refs, infos, strict=True))
        ]
        return cls(items, [[getattr(ref, name) for name in _SOURCE] for ref in refs])

    @classmethod
    def joined(cls, pieces: Iterable[tuple[PartRollouts, Sequence[int]]]) -> PartRollouts:
        """Some rollouts of several parts of one step, by their places there."""
        items: list[list[Any]] = []
        sources: list[Sequence[Any]] = []
        first: dict[int, int] = {}
        prefix = ""
        for part, places in pieces:
            if id(part) not in first:
                first[id(part)], prefix = len(sources), part._prefix
                sources += part._sources
            for place in places:
                source, *values = (column[place] for column in part._columns.values())
                items.append([first[id(part)] + source, *values])
        return cls(items, sources, prefix)

    def column(self, name: str) -> Sequence[Any]:
        """A value of each rollout, by the name of a field of its records."""
        if name in _SOURCE:
            return [self._pushes[number][name] for number in self._columns["source"]]
        return self._columns[name]

    @cached_property
    def numbers(self) -> NDArray[np.void]:
        """[rollouts] of :data:`~rlbuffer.wire.views.ANNOUNCED`.

        Raises:
            TypeError, OverflowError, ValueError: some are no numbers of a rollout.
        """
        out = np.empty(len(self), ANNOUNCED)
        for name in Announced._fields:
            if not {int}.issuperset(map(type, self._columns[name])):
                raise TypeError(f"{name} is not a whole number")
            out[name] = self._columns[name]
        if not out["length"].all():
            raise ValueError("a rollout has no tokens")
        return out

    def __len__(self) -> int:
        return len(self._columns["source"])

    @overload
    def __getitem__(self, index: int) -> PartRollout: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PartRollout, ...]: ...
    def __getitem__(self, index: int | slice) -> PartRollout | tuple[PartRollout, ...]:
        return self._records[index]

    def __iter__(self) -> Iterator[PartRollout]:
        return iter(self._records)

    def __eq__(self, other: object) -> bool:
        return self._records == (other._records if isinstance(other, PartRollouts) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._records)

    @cached_property
    def _records(self) -> tuple[PartRollout, ...]:
        return tuple(map(self._record, zip(*self._columns.values(), strict=True)))

    def _record(self, item: Sequence[Any]) -> PartRollout:
        info, made = _UnfrozenInfo(), _UnfrozenRollout()
        (source, made.index, made.advantage, info.rollout_id, info.length, info.prompt_tokens, info.loss_tokens,
         info.reward, info.rewards, info.min_version, info.max_version, info.turns, info.is_truncated, info.size,
         info.checksum) = item  # fmt: skip
        (made.payload_key, made.group_id, made.env, made.adapter, made.prompt_id, made.planned_size, made.worker,
         made.pushed_ms) = self._pushes[source].values()  # fmt: skip
        info.__class__ = RolloutInfo
        made.info = info
        made.__class__ = PartRollout
        return cast(PartRollout, made)
