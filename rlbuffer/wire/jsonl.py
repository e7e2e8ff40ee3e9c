"""Groups from JSON: what ``rlbuffer push FILE.jsonl`` reads, one group per line.

The field names are those of :class:`~rlbuffer.records.group.Group`, :class:`~rlbuffer.records.rollout.Rollout` and, in
`further`, :class:`~rlbuffer.records.rollout.TokenSequence`; arrays are lists. JSON has no dtypes: of further columns
and attachments, booleans become bool, integers int32 (int64 where they need it) and everything with a fraction float32;
``{"dtype": "<f8", "shape": [5, 2], "values": [...]}`` says it exactly, and ``{"base64": "AP8="}`` in metadata or an
answer stands for bytes. So :func:`line_of` writes a group, and its payload is the same when it is read again. A file is
written by people, too, so every error is one line that names the field: ``rollouts[2].logprobs: [3] rows do not match 4
tokens``. File and line are the caller's to add.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout
from rlbuffer.records.checks import shown
from rlbuffer.records.columns import REQUIRED_COLUMNS
from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.records.spans import Turn, VersionSpan
from rlbuffer.state.text import nearest
from rlbuffer.wire.json_bytes import with_bytes

_NEEDED = {
    "Group": ("group_id", "env", "prompt_id", "planned_size", "rollouts"),
    "Rollout": (*REQUIRED_COLUMNS, "version_spans"),
    "TokenSequence": (*REQUIRED_COLUMNS, "version_spans"),
}
_WHY = {
    "planned_size": "how many rollouts the whole group has",
    "version_spans": "which policy version sampled which tokens, as [[version, start, end], ...]",
}
_INT32 = np.iinfo(np.int32)
_Sequence = TypeVar("_Sequence", bound=TokenSequence)

FIELD_NAMES = {cls.__name__: frozenset(f.name for f in fields(cls)) for cls in (Rollout, TokenSequence, Group)}
"""Names that a line of ``rlbuffer push`` may use."""


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
        return json.loads(text.strip(), object_pairs_hook=_without_duplicates)
    except InvalidRollout:
        raise  # a ValueError too, but not one of the parser's
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" + (f" of line {error.lineno}" if error.lineno > 1 else "")
        raise InvalidRollout(f"not JSON: {error.msg.removesuffix(' at')} at {where}") from None
    except UnicodeDecodeError as error:
        raise InvalidRollout(f"not JSON: not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise InvalidRollout("not JSON: nested too deeply") from None
    except ValueError:
        raise InvalidRollout("not JSON: an integer of too many digits") from None


def group_from_dict(d: Mapping[str, Any]) -> Group:
    """A group from the fields of Group and Rollout, with lists for arrays.

    Version spans are ``[version, start, end]``, turns ``[role, start, end, reward?, metadata?]``; both may be objects
    with the same names instead.

    Raises:
        InvalidRollout: an unknown or missing field, a wrong type, or a value that its record refuses; the message is
            one line that names the field.
    """
    try:
        values = _fields("Group", d, "")
        rollouts = values["rollouts"]
        if not isinstance(rollouts, list | tuple):
            raise InvalidRollout(f"rollouts: expected a list, got {_kind(rollouts)}")
        records = tuple(_rollout(r, f"rollouts[{i}]") for i, r in enumerate(rollouts))
        values |= {name: with_bytes(values[name]) for name in ("answer", "metadata") if name in values}
        return Group(**(values | {"rollouts": records}))
    except InvalidRollout as error:
        raise InvalidRollout(" ".join(str(error).split())) from None


def _rollout(d: Any, path: str) -> Rollout:
    return _record_of(Rollout, d, path)


def _record_of(cls: type[_Sequence], d: Any, path: str) -> _Sequence:
    values = _fields(cls.__name__, d, path)
    for name, dtype in REQUIRED_COLUMNS.items():
        values[name] = _array(f"{path}.{name}", values[name], dtype)
    for table in ("columns", "attachments"):
        if table in values:
            arrays = values[table]
            if not isinstance(arrays, Mapping):
                raise InvalidRollout(f"{path}.{table}: expected an object, got {_kind(arrays)}")
            values[table] = {k: _further(f"{path}.{table}.{k}", a) for k, a in arrays.items()}
    if "metadata" in values:
        values["metadata"] = with_bytes(values["metadata"])
    if "further" in values:
        further = values["further"]
        if not isinstance(further, list | tuple):
            raise InvalidRollout(f"{path}.further: expected a list, got {_kind(further)}")
        values["further"] = [_record_of(TokenSequence, its, f"{path}.further[{i}]") for i, its in enumerate(further)]
    for name, record in (("version_spans", VersionSpan), ("turns", Turn)):
        if name in values:
            items = values[name]
            if not isinstance(items, list | tuple):
                raise InvalidRollout(f"{path}.{name}: expected a list, got {_kind(items)}")
            values[name] = [_record(record, f"{path}.{name}[{i}]", with_bytes(item)) for i, item in enumerate(items)]
    if "failure" in values:
        values["failure"] = _record(Failure, f"{path}.failure", values["failure"])
    try:
        return cls(**values)
    except InvalidRollout as error:
        raise InvalidRollout(_located(path, str(error))) from None


def _fields(record: str, d: Any, path: str) -> dict[str, Any]:
    if not isinstance(d, Mapping):
        raise InvalidRollout(f"{path or record.lower()}: expected an object, got {_kind(d)}")
    dot = f"{path}." if path else ""
    for name in d:
        if name not in FIELD_NAMES[record]:
            raise InvalidRollout(f"{dot}{name}: unknown field{_suggestion(name, FIELD_NAMES[record])}")
    for name in _NEEDED[record]:
        if name not in d:
            raise InvalidRollout(f"{dot}{name}: missing" + (f": {_WHY[name]}" if name in _WHY else ""))
    return dict(d)


def _array(path: str, values: Any, dtype: np.dtype[Any] | None) -> NDArray[Any]:
    """`values` as an array whose kind is that of its elements, not yet of its final dtype."""
    required = dtype is not None
    if required and not isinstance(values, list | tuple | np.ndarray):
        raise InvalidRollout(f"{path}: expected a list, got {_kind(values)}")
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        raise InvalidRollout(f"{path}: nested lists of unequal length") from None
    if array.dtype.kind not in "biuf":
        place, bad = _odd_one(path, values) or (path, _kind(values))
        raise InvalidRollout(f"{place}: expected a number, got {bad}")
    if array.size == 0 and dtype is not None:
        array = array.astype(dtype)
    return array


def _odd_one(path: str, values: Any) -> tuple[str, str] | None:
    """Place and kind of the first element that is no number of 64 bits; None where all are."""
    if isinstance(values, list | tuple):
        odd_ones = (_odd_one(f"{path}[{i}]", value) for i, value in enumerate(values))
        return next((odd for odd in odd_ones if odd is not None), None)
    is_number = isinstance(values, bool | float) or (isinstance(values, int) and -(2**63) <= values < 2**63)
    return None if is_number else (path, _kind(values))


def _further(path: str, values: Any) -> NDArray[Any]:
    """A column or an attachment: lists, or an object that says dtype and shape."""
    if not isinstance(values, Mapping):
        return _inferred(_array(path, values, None))
    if values.keys() != {"dtype", "shape", "values"}:
        raise InvalidRollout(f"{path}: expected lists, or an object with dtype, shape and values")
    array = _array(f"{path}.values", values["values"], None)
    try:
        dtype = np.dtype(values["dtype"])
        with np.errstate(over="ignore"):
            return array.astype(dtype).reshape(values["shape"])
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRollout(f"{path}: dtype, shape and values do not go together: {error}") from None


def _inferred(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return array.astype(np.float32)
    if array.dtype.kind == "i":
        fits = array.size == 0 or (int(array.min()) >= _INT32.min and int(array.max()) <= _INT32.max)
        return array.astype(np.int32 if fits else np.int64)
    return array


def _record(record: type[VersionSpan] | type[Turn] | type[Failure], path: str, item: Any) -> Any:
    if not isinstance(item, Mapping):
        return item
    for name in item:
        if name not in record._fields:
            raise InvalidRollout(f"{path}.{name}: unknown field{_suggestion(name, record._fields)}")
    for name in record._fields:
        if name not in item and name not in record._field_defaults:
            raise InvalidRollout(f"{path}.{name}: missing")
    return record(**item)


def _located(path: str, message: str) -> str:
    """A record's message with the path of its field: ``column x: ...`` -> ``rollouts[2].columns.x: ...``."""
    match = re.match(r"(column|attachment) (\w+): (.*)", message, re.DOTALL)
    if match is None:
        return f"{path}.{message}" if re.match(r"[a-z_]+[\w.\[\]]*: ", message) else f"{path}: {message}"
    kind, name, rest = match.groups()
    table = "" if kind == "column" and name in REQUIRED_COLUMNS else f"{kind}s."
    return f"{path}.{table}{name}: {rest}"


def _suggestion(name: str, known: Iterable[str]) -> str:
    near = nearest(str(name), known)
    return f"; did you mean {near}?" if near else f"; known are {', '.join(sorted(known))}"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string {shown(value)}"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    return shown(value)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRollout(f"key {shown(twice)} occurs twice in one object")
    return out
