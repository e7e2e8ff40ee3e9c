"""Rows of payloads, and payloads of rows: every byte comes back, so that its checksum can be computed again.

Tokens, marks and logprobs are copied once, from views of the received bytes into one array per column; nothing becomes
a Python object per token.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlbuffer.archive.schema import ADDED_COLUMNS, FORMAT_KEY, READ_FORMATS, ROLLOUTS
from rlbuffer.errors import ArchiveError, PayloadError
from rlbuffer.records.columns import REQUIRED_COLUMNS, trained_advantage
from rlbuffer.records.info import RolloutInfo
from rlbuffer.store.records import PartRollout
from rlbuffer.wire.encoding import joined
from rlbuffer.wire.payload import Payload, decode

MISSING = "its payload is missing"
PENDING = "it was pending: its payload is not copied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A sequence of a rollout of a step, or of a dropped group, as it is archived."""

    ref: PartRollout
    """The rollout as a step's part, or the record of a drop, names it; with checksum 0 where nothing announced one."""
    data: bytes | None
    """Its payload; None when it is gone."""
    group: bytes | None = None
    """Answer and metadata of its push, as encoded; beside the first rollout of each push only."""
    step: int | None = None
    rank: int | None = None
    place: int | None = None
    """Index in the part of its rank."""
    left_out: str | None = None
    """Reason for which its group was trained without it; None for all others."""
    history_id: str | None = None
    """The drop's record in the history."""
    needs: Sequence[str] = ()
    """Names that scorers must still add, of a group that was exported before."""
    created: float | None = None
    """Unix seconds at the worker, where they are known."""
    gone: str = MISSING
    """Reason why there is no `data`."""


ROW_GROUP_BYTES = 64 * 2**20
"""Payload bytes of a row group."""
ROW_GROUP_ROWS = 65_536
"""Rows of a row group at most: those without a payload have no bytes."""
ROWS_AT_ONCE = 16
"""Rows that a reader holds decoded."""
BUFFER_BYTES = 2**20
"""Bytes of a column that a reader has in memory before they are decoded."""


def rollout_table(sources: Sequence[Source]) -> Any:
    """[N] rows of :data:`~rlbuffer.archive.schema.ROLLOUTS`, a pyarrow table; payloads are copied."""
    return next(rollout_tables([sources]), ROLLOUTS.empty_table())


def rollout_tables(groups: Iterable[Sequence[Source]]) -> Iterator[Any]:
    """Tables of whole groups, of about :data:`ROW_GROUP_BYTES` each; none is empty.

    The payloads of a group are copied before the next one is asked for.
    """
    rows: list[dict[str, Any]] = []
    tokens: dict[str, list[NDArray[Any]]] = {name: [] for name in REQUIRED_COLUMNS}
    size = 0
    for sources in groups:
        pieces = [_opened(source) for source in sources]
        rows += [_scalars(source, *piece) for source, piece in zip(sources, pieces, strict=True)]
        for name, arrays in tokens.items():
            arrays += _copied([getattr(payload, name) for payload, _, _ in pieces if payload is not None])
        size += sum([len(source.data) for source in sources if source.data is not None])
        if size >= ROW_GROUP_BYTES or len(rows) >= ROW_GROUP_ROWS:
            yield _table(rows, tokens)
            rows, tokens, size = [], {name: [] for name in REQUIRED_COLUMNS}, 0
    if rows:
        yield _table(rows, tokens)


def _copied(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    return [np.concatenate(arrays)] if arrays else []


def _table(rows: Sequence[Mapping[str, Any]], tokens: Mapping[str, Sequence[NDArray[Any]]]) -> Any:
    """The rows, and their tokens, marks and logprobs one after the other."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([row["tokens"] for row in rows], out=offsets[1:])
    ends = pa.array(offsets)
    arrays = [
        pa.ListArray.from_arrays(ends, _values(field, tokens[field.name]), type=field.type)
        if field.name in tokens
        else pa.array([row[field.name] for row in rows], field.type)
        for field in ROLLOUTS
    ]
    return pa.Table.from_arrays(arrays, schema=ROLLOUTS)


def _values(field: Any, arrays: Sequence[NDArray[Any]]) -> Any:
    whole = np.concatenate(arrays) if arrays else np.empty(0, REQUIRED_COLUMNS[field.name])
    return pa.array(whole, field.type.value_type)


def _opened(source: Source) -> tuple[Payload | None, RolloutInfo, str]:
    """A payload that is what was announced, what it is, and what is wrong with it.

    What nobody has announced is described by its own details.
    """
    info = source.ref.info
    if source.data is None:
        return None, info, source.gone
    try:
        payload = decode(source.data, info if info.checksum else None)
        if payload.loss_mask.view(np.uint8).max() > 1:  # a column of booleans cannot keep it
            raise PayloadError("invalid rollout payload: a mark of the loss mask is neither 0 nor 1")
    except PayloadError as error:
        return None, info, str(error)
    return payload, info if info.checksum else payload.info, ""


def _scalars(source: Source, parts: Payload | None, info: RolloutInfo, problem: str) -> dict[str, Any]:
    """Everything of a row but its columns of tokens."""
    ref = source.ref
    return {
        "step": source.step,
        "rank": source.rank,
        "place": source.place,
        "history_id": source.history_id,
        "group_id": ref.group_id,
        "env": ref.env,
        "adapter": ref.adapter,
        "prompt_id": ref.prompt_id,
        "planned_size": ref.planned_size,
        "worker": ref.worker,
        "payload_key": ref.payload_key,
        "index": ref.index,
        "sequence": ref.sequence if parts is None else parts.details.number,
        "pushed_ms": ref.pushed_ms,
        "entry_id": ref.entry_id,
        "seconds": ref.seconds,
        "advantage": None if source.rank is None else _advantage(ref, parts),
        "rollout_id": info.rollout_id,
        "length": info.length,
        "prompt_tokens": info.prompt_tokens,
        "loss_tokens": info.loss_tokens,
        "reward": info.reward,
        "rewards": list(info.rewards.items()),
        "min_version": info.min_version,
        "max_version": info.max_version,
        "finish_reason": "" if parts is None else parts.details.finish_reason,
        "is_truncated": info.is_truncated,
        "size": len(source.data) if source.data is not None else info.size,
        "checksum": info.checksum,
        "problem": problem,
        "left_out": source.left_out,
        "text": None if parts is None else parts.text,
        "tokens": 0 if parts is None else len(parts.tokens),  # of each of the three columns
        "columns": [] if parts is None else _packed(parts.columns),
        "attachments": [] if parts is None else _packed(parts.attachments),
        "details": None if parts is None else parts.packed,
        "group_payload": source.group,
        "needs": list(source.needs),
        "created": source.created,
        "raw": None if parts is not None or source.data is None else bytes(source.data),
    }


def _advantage(ref: PartRollout, parts: Payload | None) -> float:
    """The one that trained; of a payload that cannot be read the one that was planned."""
    return ref.advantage if parts is None else trained_advantage(ref.advantage, parts.columns, parts.loss_mask)


def _packed(arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    return [
        {"name": name, "dtype": array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}
        for name, array in arrays.items()
    ]


# -- and back ----------------------------------------------------------------------------------------------------------
def payload_of(row: Mapping[str, Any]) -> bytes | None:
    """The payload that a row was made of; None where it was missing.

    `row`: as pyarrow's ``RecordBatch.to_pylist`` gives it, its columns of tokens as arrays (:func:`rows_of`).
    """
    if row["details"] is None:
        raw: bytes | None = row["raw"]
        return raw
    text = row["text"]
    return joined(
        row["details"],
        [
            *(np.ascontiguousarray(row[name], dtype) for name, dtype in REQUIRED_COLUMNS.items()),
            *(_unpacked(array) for array in (*row["columns"], *row["attachments"])),
        ],
        None if text is None else text.encode(),
        tokens=len(row["tokens"]),
    )


def _unpacked(array: Mapping[str, Any]) -> NDArray[Any]:
    dtype, shape = np.dtype(array["dtype"]), array["shape"]
    return np.frombuffer(array["data"], dtype).reshape(shape) if array["data"] else np.zeros(shape, dtype)


UNREADABLE = (OSError, UnicodeDecodeError, pa.ArrowException)
"""Errors of reading a damaged file, at its opening or at any page of it."""


def parquet_of(path: Path | IO[bytes]) -> Any:
    """A Parquet file to be read, a context manager."""
    return pq.ParquetFile(path, buffer_size=BUFFER_BYTES, page_checksum_verification=True)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file of an archive, to be read within the block.

    Raises:
        ArchiveError: it is missing, cannot be read, now or in the block, or is of another format; names the file.
    """
    try:
        with parquet_of(path) as parquet:
            stored = (parquet.schema_arrow.metadata or {}).get(FORMAT_KEY, b"0").decode()
            if stored not in map(str, READ_FORMATS):
                formats = " and ".join(map(str, READ_FORMATS))
                raise ArchiveError(f"{path} is of format {stored}, and this version reads formats {formats}")
            yield parquet
    except FileNotFoundError:
        raise ArchiveError(f"{path} is missing: bring it back from a copy of the archive") from None
    except UNREADABLE as error:  # pyarrow's words for what the system refused name the file once more
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ArchiveError(f"{path} cannot be read: {why}") from None


def rows_in(parquet: Any) -> Iterator[dict[str, Any]]:
    """The rows of an open file of rollouts. A few are in memory at once, however many a row group has: whoever wrote
    the file chose its row groups, and how well they are compressed."""
    for batch in parquet.iter_batches(batch_size=ROWS_AT_ONCE):
        yield from rows_of(batch)


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """The rows of a record batch as mappings; columns of tokens as arrays, without an object per token."""
    per_token = [name for name in REQUIRED_COLUMNS if name in batch.schema.names]
    others = [name for name in batch.schema.names if name not in per_token]
    rows: list[dict[str, Any]] = batch.select(others).to_pylist()
    for name in per_token:
        column = batch.column(name)
        offsets = column.offsets.to_numpy()
        values = column.values.to_numpy(zero_copy_only=False)
        for row, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True):
            row[name] = values[start:end]
    older = dict.fromkeys(name for name in ADDED_COLUMNS if name not in batch.schema.names)
    for row in rows:
        if "rewards" in row:
            row["rewards"] = dict(row["rewards"] or ())
        row |= older
    return rows
