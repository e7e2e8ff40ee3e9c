"""The rollouts of a step's part in columns: a pull works on all of them at once, and people read a record of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, overload

from rlbuffer.records.info import ROW_DTYPE, RolloutInfo
from rlbuffer.store.records import PartRollout
from rlbuffer.wire.payload import Announced

_COLUMNS = ("source", "index", "advantage", *Announced._fields)
"""The values of a rollout as they stand in a part."""
_SOURCE = ("payload_key", "group_id", "env", "adapter", "prompt_id", "planned_size", "worker", "pushed_ms")
"""The values of a push."""
_LIMITS = {
    name: 2 ** (8 * ROW_DTYPE[name].itemsize)
    for name in ("length", "prompt_tokens", "loss_tokens", "min_version", "max_version", "size", "checksum")
}
"""Name of a whole number of a rollout -> what it is below."""


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
    def announced(self) -> list[Announced]:
        """Each rollout as its payload must be.

        Raises:
            TypeError, OverflowError, ValueError: some numbers are none of a rollout.
        """
        for name, limit in _LIMITS.items():
            values = self._columns[name]
            if not {int}.issuperset(map(type, values)):
                raise TypeError(f"{name} is not a whole number")
            if values and not 0 <= min(values) <= max(values) < limit:
                raise OverflowError(f"{name} is outside of what a rollout can have")
        if not all(self._columns["length"]):
            raise ValueError("a rollout has no tokens")
        return [*map(Announced._make, zip(*[self._columns[name] for name in Announced._fields], strict=True))]

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
        source, index, advantage, *announced = item
        info = RolloutInfo(**dict(zip(Announced._fields, announced, strict=True)))
        return PartRollout(index=index, info=info, advantage=advantage, **self._pushes[source])
