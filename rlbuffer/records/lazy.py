"""Records that are made when somebody reads one: of most steps nobody does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar, overload

T = TypeVar("T")


class LazyRecords(Sequence[T]):
    """A sequence whose :meth:`_each` makes all of its records, once."""

    @abstractmethod
    def _each(self) -> Iterator[T]: ...

    @cached_property
    def _records(self) -> tuple[T, ...]:
        return tuple(self._each())

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return repr(self._records)
