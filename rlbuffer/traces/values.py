"""A value of somebody else's record, with its place: what is wrong with it is said as ``file:line  field: ...``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.checks import as_finite, as_flag, as_integer, escaped, shown


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One value of a record; `place` is its file and line, `path` the way to it."""

    value: Any
    place: str = ""
    path: str = ""

    def __getitem__(self, name: str) -> Value:
        found = self.get(name)
        if found.value is None:
            raise found.wrong("missing")
        return found

    def get(self, name: str) -> Value:
        """The field, whose value is None where the record does not have it, or is not there itself."""
        path = f"{self.path}.{name}" if self.path else name
        return Value(None if self.value is None else self.mapping.get(name), self.place, path)

    def first(self, *names: str) -> Value:
        """The first of these fields that the record has; a value of None where it has none of them."""
        found = [self.get(name) for name in names]
        return next((one for one in found if one.value is not None), found[0])

    def __iter__(self) -> Iterator[Value]:
        if not isinstance(self.value, list | tuple) and not (isinstance(self.value, np.ndarray) and self.value.ndim):
            raise self.wrong(f"expected a list, got {shown(self.value)}")
        for i, item in enumerate(self.value):
            yield Value(item, self.place, f"{self.path}[{i}]")

    def listed(self) -> list[Value]:
        """The items of a list; none where there is no list."""
        return [] if self.value is None else list(self)

    def items(self) -> list[tuple[str, Value]]:
        """Names and fields of an object; none where there is no object."""
        return [] if self.value is None else [(str(name), self.get(name)) for name in self.mapping]

    @property
    def mapping(self) -> Mapping[str, Any]:
        if not isinstance(self.value, Mapping):
            raise self.wrong(f"expected an object, got {shown(self.value)}")
        return self.value

    def ids(self) -> NDArray[np.int32]:
        array = self._array("integers", "iu")
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < 2**31:
            raise self.wrong("a token id is negative or beyond 32 bits")
        return array.astype(np.int32)

    def floats(self) -> NDArray[np.float32]:
        """What is beyond float32 becomes infinite, and is no number of a rollout."""
        with np.errstate(over="ignore"):
            return self._array("numbers", "iuf").astype(np.float32)

    def flags(self) -> NDArray[np.bool_]:
        """Booleans, or zeros and ones."""
        array = self._array("zeros and ones", "biu")
        if not np.isin(array, (0, 1)).all():
            raise self.wrong("expected zeros and ones only")
        return array.astype(np.bool_)

    def number(self) -> float:
        return float(self._checked(as_finite))

    def number_or(self, other: float) -> float:
        """The number, or `other` where the record does not say."""
        return other if self.value is None else self.number()

    def integer(self) -> int:
        return int(self._checked(as_integer))

    def flag(self) -> bool:
        """A boolean; False where the record does not say."""
        return False if self.value is None else bool(self._checked(as_flag))

    def text(self) -> str:
        """A string that UTF-8 can hold, or a whole number as one; "" where the record does not say."""
        if self.value is None:
            return ""
        if isinstance(self.value, int) and not isinstance(self.value, bool):
            return str(self._checked(partial(as_integer, low=-(2**127), high=2**127)))
        if not isinstance(self.value, str):
            raise self.wrong(f"expected a string, got {shown(self.value)}")
        return escaped(self.value)

    def wrong(self, message: str) -> InvalidRollout:
        """What is wrong with the value, as an error with its place and its path."""
        place = f"{self.place}  " if self.place else ""
        return InvalidRollout(escaped(f"{place}{self.path}: {message}" if self.path else f"{place}{message}"))

    def _checked(self, check: Any) -> Any:
        try:
            return check(self.path or "value", self.value)
        except InvalidRollout as error:
            raise InvalidRollout(escaped(f"{self.place}  {error}" if self.place else str(error))) from None

    def _array(self, what: str, kinds: str) -> NDArray[Any]:
        try:
            array = np.asarray(self.value)
        except (ValueError, TypeError, OverflowError):
            array = np.asarray(None)
        if array.size == 0 and isinstance(self.value, list | tuple | np.ndarray):
            return np.zeros(0, np.int8)
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise self.wrong(f"expected a list of {what}, got {shown(self.value)}")
        return array
