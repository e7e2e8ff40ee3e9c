"""Values of a trainer's samples as bytes and back, bit for bit, without pickle: what a door cannot put into columns.

    value -> JSON, in which arrays are places -> | length of the JSON | JSON | bytes of the arrays |

Nothing in the bytes names a class or a function, so they can be read from a server that others write to.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.support import SUPPORT

MARK = "$"
"""Key of an object that stands for another value; its kind."""
LONG = 8
"""Numbers from which on a list of floats, or of integers, goes as an array."""
HEAD = 8
"""Bytes of the length in front."""


def as_bytes(value: Any, where: str) -> np.ndarray:
    """The value, as uint8 [N]: None, booleans, numbers, text, numpy arrays, torch tensors; lists, tuples and mappings
    of them.

    Raises:
        InvalidRollout: something in it is of another kind; `where` and its path name it.
    """
    data = bytearray()
    text = json.dumps(_packed(value, where, data)).encode()
    return np.frombuffer(len(text).to_bytes(HEAD, "little") + text + bytes(data), np.uint8)


def of_bytes(data: np.ndarray) -> Any:
    """The inverse of :func:`as_bytes`. Raises PayloadError."""
    whole = data.tobytes()
    try:
        end = HEAD + int.from_bytes(whole[:HEAD], "little")
        return _unpacked(json.loads(whole[HEAD:end]), memoryview(whole)[end:])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PayloadError(f"values of a sample: unexpected content ({type(error).__name__}: {error})") from None


class PushedElsewhere(PayloadError):
    """A rollout of a door's run is none of the door's: its trainer has no sample of it."""

    def __init__(self, door: str, rollout: Rollout) -> None:
        support = ", with the tokens that restricted sampling left," if SUPPORT in rollout.columns else ""
        super().__init__(
            f"rollout {rollout.rollout_id} was pushed{support} by another producer than rlbuffer.doors.{door}, whose "
            "trainer has no use for it: give that producer a run of its own (rlbuffer runs reset empties this one)"
        )


def values_of(rollout: Rollout, door: str) -> list[Any]:
    """What the door, whose attachment has its name, has put into each sequence. Raises PayloadError."""
    if any(door not in sequence.attachments for sequence in rollout.sequences):
        raise PushedElsewhere(door, rollout)
    return [of_bytes(sequence.attachments[door]) for sequence in rollout.sequences]


def _packed(value: Any, where: str, data: bytearray) -> Any:
    match value:
        case None | bool() | str():
            return value
        case np.generic():
            return _array("scalar", np.asarray(value), data)
        case int() | float() if type(value) in (int, float):
            return value
        case np.ndarray() if value.dtype.kind in "biufc":
            return _array("array", value, data)
        case tuple() if type(value) is tuple:
            return {MARK: "tuple", "of": [_packed(item, f"{where}[{i}]", data) for i, item in enumerate(value)]}
        case list() if type(value) is list:
            for kind, dtype in ((float, np.float64), (int, np.int64)):
                if len(value) >= LONG and all(type(item) is kind for item in value) and _fits(value, kind):
                    return _array("list", np.array(value, dtype), data)
            return [_packed(item, f"{where}[{i}]", data) for i, item in enumerate(value)]
        case Mapping():
            pairs = [(key, _packed(item, f"{where}[{key!r}]", data)) for key, item in value.items()]
            if MARK not in value and all(type(key) is str for key in value):
                return dict(pairs)
            return {MARK: "mapping", "of": [[_packed(key, where, data), item] for key, item in pairs]}
    if type(value).__module__ == "torch" and hasattr(value, "untyped_storage"):
        return _tensor(value, data)
    raise InvalidRollout(
        f"{where}: a {type(value).__name__} cannot be kept: numbers, text, lists, mappings, numpy arrays and torch "
        "tensors can"
    )


def _fits(values: list[Any], kind: type) -> bool:
    return kind is float or all(-(2**63) <= value < 2**63 for value in values)


def _array(kind: str, array: np.ndarray, data: bytearray) -> dict[str, Any]:
    at = len(data)
    data += np.ascontiguousarray(array).tobytes()
    return {MARK: kind, "dtype": array.dtype.str, "shape": list(array.shape), "at": at}


def _tensor(tensor: Any, data: bytearray) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    at = len(data)
    data += flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {MARK: "tensor", "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "at": at}


def _unpacked(value: Any, data: memoryview) -> Any:
    if isinstance(value, list):
        return [_unpacked(item, data) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(MARK):
        case None:
            return {key: _unpacked(item, data) for key, item in value.items()}
        case "tuple":
            return tuple(_unpacked(item, data) for item in value["of"])
        case "mapping":
            return {_unpacked(key, data): _unpacked(item, data) for key, item in value["of"]}
        case "tensor":
            return _tensor_of(value, data)
        case "array" | "scalar" | "list" as kind:
            dtype, shape = np.dtype(value["dtype"]), tuple(map(int, value["shape"]))
            if dtype.hasobject:
                raise ValueError(f"an array of {dtype}")
            array = np.frombuffer(data, dtype, int(np.prod(shape)), int(value["at"])).reshape(shape)
            return array.tolist() if kind == "list" else array[()] if kind == "scalar" else array.copy()
        case other:
            raise ValueError(f"a value of the kind {other!r}")


def _tensor_of(value: Mapping[str, Any], data: memoryview) -> Any:
    torch = importlib.import_module("torch")
    dtype, shape = getattr(torch, str(value["dtype"])), tuple(map(int, value["shape"]))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor of {value['dtype']!r}")
    size, at = int(np.prod(shape)) * dtype.itemsize, int(value["at"])
    if not 0 <= at <= at + size <= len(data):
        raise ValueError(f"a tensor of {size} bytes at {at} of {len(data)}")
    flat = torch.empty(size, dtype=torch.uint8)
    flat.numpy()[:] = np.frombuffer(data, np.uint8, size, at)
    return flat.view(dtype).reshape(shape)
