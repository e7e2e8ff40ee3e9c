"""Groups as lines of JSON: what ``rlbuffer export`` writes and ``rlbuffer push FILE.jsonl`` reads, one group per line.

The field names are those of :class:`~rlbuffer.records.group.Group`, :class:`~rlbuffer.records.rollout.Rollout` and, in
`further`, :class:`~rlbuffer.records.rollout.TokenSequence`; arrays are lists. JSON has no dtypes: of further columns
and attachments, booleans become bool, integers int32 (int64 where they need it) and everything with a fraction float32;
``{"dtype": "<f8", "shape": [5, 2], "values": [...]}`` says it exactly, and ``{"base64": "AP8="}`` in metadata or an
answer stands for bytes. So :func:`line_of` writes a group, and its payload is the same when it is read again. A file is
written by people, too, so every error is one line that names the field: ``rollouts[2].logprobs: [3] rows do not match 4
tokens``. File and line are the caller's to add.
"""

from __future__ import annotations

import base64
import json
import os
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from inspect import signature
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.checks import escaped, shown
from rlbuffer.records.columns import REQUIRED_COLUMNS
from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.state.text import nearest
from rlbuffer.wire.bounded_msgpack import without_duplicates

_INT32 = np.iinfo(np.int32)
_LIKE_BYTES = re.compile(r"\$*base64\Z")
"""Key of bytes, ``base64``; of a mapping of the user's own that looks like them it gets a ``$`` in front."""
_GROUP_VALUES = ("group_id", "env", "prompt_id", "planned_size", "adapter", "worker", "created")
_ROLLOUT_VALUES = ("rollout_id", "reward", "finish_reason", "is_truncated", "failure", "text")
_Sequence = TypeVar("_Sequence", bound=TokenSequence)
MAX_DOCUMENT_BYTES = 2**31
"""Longest JSON document, over one line or many, that is parsed."""


# -- to JSON -----------------------------------------------------------------------------------------------------------
def line_of(group: Group) -> str:
    """The group on one line, without what it does not have.

    Example:
        >>> from rlbuffer.testing import make_group
        >>> group = make_group(lengths=[8, 9])
        >>> group_from_line(line_of(group)).rollouts == group.rollouts
        True
    """
    record: dict[str, Any] = {name: getattr(group, name) for name in _GROUP_VALUES}
    record |= {"needs": list(group.needs), "answer": _without_bytes(group.answer)}
    record |= {"metadata": _without_bytes(group.metadata), "rollouts": [_of_rollout(r) for r in group.rollouts]}
    return json.dumps(_kept(record), ensure_ascii=False, allow_nan=False)


def _of_rollout(rollout: Rollout) -> dict[str, Any]:
    record: dict[str, Any] = {name: getattr(rollout, name) for name in _ROLLOUT_VALUES} | _of_sequence(rollout)
    record |= {"rewards": dict(rollout.rewards), "successes": dict(rollout.successes)}
    record |= {"further": [_kept(_of_sequence(sequence)) for sequence in rollout.further]}
    return _kept(record | {"metadata": _without_bytes(rollout.metadata)})


def _of_sequence(sequence: TokenSequence) -> dict[str, Any]:
    record: dict[str, Any] = {name: getattr(sequence, name).tolist() for name in REQUIRED_COLUMNS}
    record |= {"version_spans": [list(span) for span in sequence.version_spans], "name": sequence.name}
    record |= {"turns": [[*turn[:4], _without_bytes(turn.metadata)] for turn in sequence.turns]}
    for table in ("columns", "attachments"):
        record[table] = {
            name: {"dtype": array.dtype.str, "shape": list(array.shape), "values": array.ravel().tolist()}
            for name, array in getattr(sequence, table).items()
        }
    return record


def _kept(record: dict[str, Any]) -> dict[str, Any]:
    """Without what is as it would be anyway; an empty text or answer is another one than none."""
    always, unless_none = ("prompt_id", *REQUIRED_COLUMNS), ("text", "answer")
    return {
        name: value
        for name, value in record.items()
        if name in always
        or (value is not None and (name in unless_none or (value is not False and value not in ("", [], {}))))
    }


def _without_bytes(value: Any) -> Any:
    """A value in types of msgpack as types of JSON; :func:`_with_bytes` is the inverse."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        return [_without_bytes(item) for item in value]
    if isinstance(value, Mapping):
        mark = "$" if _is_like_bytes(value) else ""
        return {mark + key: _without_bytes(item) for key, item in value.items()}
    return value


# -- and back ----------------------------------------------------------------------------------------------------------
def group_from_line(line: str | bytes) -> Group:
    """The group on one line of a JSONL file.

    Raises:
        InvalidRollout: the line is not JSON, a key occurs twice, or what :func:`group_from_dict` refuses.

    Example:
        >>> group_from_line('{"group_id": "math.0"}')
        Traceback (most recent call last):
            ...
        rlbuffer.errors.InvalidRollout: env: missing
    """
    return group_from_dict(values_of_line(line))


def values_of_line(line: str | bytes) -> Any:
    """What a line of JSON says.

    Raises:
        InvalidRollout: it is not JSON, or a key occurs twice.
    """
    try:
        text = line.decode() if isinstance(line, bytes) else line
        return json.loads(text.strip(), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise InvalidRollout(f"not JSON: {error}") from None


class Record(NamedTuple):
    """One value of a file of JSON, or why there is none."""

    place: str
    """``file:line``, or ``file[index]`` of a document's list."""
    value: Any
    wrong: InvalidRollout | None = None
    """Why it cannot be read, with its place; `value` is None then."""


def records_in(stream: IO[bytes], name: str, *, most: int = MAX_DOCUMENT_BYTES) -> Iterator[Record]:
    """The records of a file: its lines, or the items of the list that it is as a whole, or the one object.

    A line that is no JSON is a record that is wrong, and the lines behind it are read.

    Args:
        stream: from its beginning, or can be sought.
        most: bytes of the longest line that is parsed.
    """
    first = _first_line(stream, most)
    is_cut = len(first) >= most  # a line that is too long, and no object over several lines
    if first.startswith(b"[") or (first.startswith(b"{") and not is_cut and _parsed(first, name).wrong):
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        whole = _parsed(stream.read(), name) if size <= MAX_DOCUMENT_BYTES else None
        if whole is not None and whole.wrong is None:
            if isinstance(whole.value, list):
                yield from (Record(f"{name}[{number}]", item) for number, item in enumerate(whole.value))
            else:
                yield whole
            return
    stream.seek(0)
    number = 0
    while line := stream.readline(most + 1):
        number += 1
        place = f"{name}:{number}"
        if len(line) > most:
            why = f"the line is longer than {most // 2**20} MiB, the most that is read; push larger groups from Python"
            yield Record(place, None, InvalidRollout(f"{place}  {why}"))
            while line and not line.endswith(b"\n"):
                line = stream.readline(most)
        elif line.removeprefix(BOM_UTF8).strip():
            yield _parsed(line, place)


def _first_line(stream: IO[bytes], most: int) -> bytes:
    """The first that is not blank, or its beginning where it is longer than `most`."""
    stream.seek(0)
    while line := stream.readline(most):
        if line := line.removeprefix(BOM_UTF8).strip():
            return line
    return b""


def _parsed(line: bytes, place: str) -> Record:
    try:
        return Record(place, values_of_line(line.removeprefix(BOM_UTF8)))
    except InvalidRollout as error:
        return Record(place, None, InvalidRollout(f"{place}  {error}"))


def group_from_dict(d: Mapping[str, Any]) -> Group:
    """A group from the fields of Group and Rollout, with lists for arrays.

    Version spans are ``[version, start, end]``, turns ``[role, start, end, reward?, metadata?]``; both may be objects
    with the same names instead.

    Raises:
        InvalidRollout: an unknown or missing field, a wrong type, or a value that its record refuses; the message is
            one line that names the field.
    """
    try:
        values = _fields(Group, d, "")
        values["rollouts"] = [_sequence(Rollout, r, path) for path, r in _items("rollouts", values["rollouts"])]
        values |= {name: _with_bytes(values[name]) for name in ("answer", "metadata") if name in values}
        return Group(**values)
    except InvalidRollout as error:
        raise InvalidRollout(escaped(" ".join(str(error).split()))) from None
    except RecursionError:
        raise InvalidRollout("it is nested too deeply") from None


def _sequence(cls: type[_Sequence], d: Any, path: str) -> _Sequence:
    values = _fields(cls, d, path)
    for name, dtype in REQUIRED_COLUMNS.items():
        array = _array(f"{path}.{name}", values[name])
        values[name] = array if array.size else array.astype(dtype)
    for table in values.keys() & {"columns", "attachments"}:
        arrays = _object(f"{path}.{table}", values[table])
        values[table] = {name: _further(f"{path}.{table}.{name}", array) for name, array in arrays.items()}
    if "metadata" in values:
        values["metadata"] = _with_bytes(values["metadata"])
    if "further" in values:
        further = _items(f"{path}.further", values["further"])
        values["further"] = [_sequence(TokenSequence, sequence, place) for place, sequence in further]
    for name, record in (("version_spans", VersionSpan), ("turns", Turn)):
        if name in values:
            items = _items(f"{path}.{name}", values[name])
            values[name] = [_record(record, _with_bytes(item), place) for place, item in items]
    if "failure" in values:
        values["failure"] = _record(Failure, values["failure"], f"{path}.failure")
    try:
        return cls(**values)
    except InvalidRollout as error:
        raise InvalidRollout(f"{path}: {error}") from None


def _record(record: type[VersionSpan] | type[Turn] | type[Failure], item: Any, path: str) -> Any:
    """An object as its record; a list is left to the rollout."""
    return record(**_fields(record, item, path)) if isinstance(item, Mapping) else item


@cache
def _names(record: Any) -> Mapping[str, bool]:
    """Field -> it must be there."""
    return {name: field.default is field.empty for name, field in signature(record).parameters.items()}


def _fields(record: Any, d: Any, path: str) -> dict[str, Any]:
    names, dot = _names(record), f"{path}." if path else ""
    for name in _object(path or "group", d):
        if name not in names:
            near = nearest(str(name), names)
            hint = f"did you mean {near}?" if near else f"known are {', '.join(sorted(names))}"
            raise InvalidRollout(f"{dot}{name}: unknown field; {hint}")
    for name, is_needed in names.items():
        if is_needed and name not in d:
            raise InvalidRollout(f"{dot}{name}: missing")
    return dict(d)


def _object(path: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRollout(f"{path}: expected an object, got {_shown(value)}")
    return value


def _items(path: str, value: Any) -> list[tuple[str, Any]]:
    """Each item of a list, behind its place."""
    if not isinstance(value, list | tuple):
        raise InvalidRollout(f"{path}: expected a list, got {_shown(value)}")
    return [(f"{path}[{i}]", item) for i, item in enumerate(value)]


def _array(path: str, values: Any) -> NDArray[Any]:
    """`values` as an array whose kind is that of its elements, not yet of its final dtype."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        raise InvalidRollout(f"{path}: nested lists of unequal length") from None
    if array.dtype.kind not in "biuf":
        place, odd = _odd_one(path, values) or (path, values)
        raise InvalidRollout(f"{place}: expected a number, got {_shown(odd)}")
    return array


def _odd_one(path: str, values: Any) -> tuple[str, Any] | None:
    """Place and value of the first element that is no number of 64 bits; None where all are."""
    if isinstance(values, list | tuple):
        return next(filter(None, (_odd_one(place, value) for place, value in _items(path, values))), None)
    is_number = isinstance(values, bool | float) or (isinstance(values, int) and -(2**63) <= values < 2**63)
    return None if is_number else (path, values)


def _further(path: str, values: Any) -> NDArray[Any]:
    """A column or an attachment: lists, or an object that says dtype and shape."""
    if not isinstance(values, Mapping):
        return _inferred(_array(path, values))
    if values.keys() != {"dtype", "shape", "values"}:
        raise InvalidRollout(f"{path}: expected lists, or an object with dtype, shape and values")
    array = _array(f"{path}.values", values["values"])
    try:
        dtype = np.dtype(values["dtype"])
        with np.errstate(over="ignore", invalid="raise"):  # invalid: NaN and infinity are no integers
            return array.astype(dtype).reshape(values["shape"])
    except (TypeError, ValueError, OverflowError, FloatingPointError) as error:
        raise InvalidRollout(f"{path}: dtype, shape and values do not go together: {error}") from None


def _inferred(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return array.astype(np.float32)
    if array.dtype.kind == "i":
        fits = array.size == 0 or (int(array.min()) >= _INT32.min and int(array.max()) <= _INT32.max)
        return array.astype(np.int32 if fits else np.int64)
    return array


def _with_bytes(value: Any) -> Any:
    """The value that :func:`_without_bytes` was given; a ``base64`` that is none stays as it is."""
    if isinstance(value, list | tuple):
        return [_with_bytes(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"base64"} and isinstance(value["base64"], str):
        with suppress(ValueError):
            return base64.b64decode(value["base64"], validate=True)
    is_marked = _is_like_bytes(value)
    return {key.removeprefix("$") if is_marked else key: _with_bytes(item) for key, item in value.items()}


def _is_like_bytes(value: Mapping[Any, Any]) -> bool:
    return len(value) == 1 and all(isinstance(key, str) and _LIKE_BYTES.match(key) for key in value)


def _shown(value: Any) -> str:
    """A value as it stands in JSON, or its beginning."""
    try:
        text = json.dumps(value, default=repr)
    except (ValueError, TypeError, RecursionError):  # an int of 5,000 digits, a key that JSON does not have
        return shown(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
