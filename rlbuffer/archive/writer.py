"""Adding to an archive: every file is written under a temporary name, flushed, and renamed when it is whole.

What the directory holds is what is archived, so a writer that dies at any byte leaves nothing half done: the next one
reads the names and goes on. Rollouts come before the steps that need them, so a step that is there has all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlbuffer.archive.rows import Source, opened, rollout_tables
from rlbuffer.archive.schema import (
    HISTORY,
    PENDING_FILE,
    ROLLOUTS,
    RUN_KEY,
    SETTINGS,
    STEPS,
    TICKETS,
    TICKETS_FILE,
    TRAINED,
    StepsName,
    described,
    history_file,
    history_names,
    settings_file,
    steps_names,
)
from rlbuffer.errors import ArchiveError
from rlbuffer.process.files import whole_file
from rlbuffer.records.step_header import StepHeader
from rlbuffer.store.history import VOID_FIELDS
from rlbuffer.store.part_rollouts import StepBytes
from rlbuffer.store.records import Meta

_NO_DICTIONARY = frozenset({"tokens", "loss_mask", "logprobs", "columns", "attachments", "details", "raw"})
_OPTIONS: Mapping[str, Any] = {"compression": "zstd", "compression_level": 1, "write_page_checksum": True}


class ArchiveWriter:
    """Writes one run's archive.

    Args:
        folder: is made where it is not there.
        run: name of the run.
        check: is called before anything appears; it raises where this process may not write any more.

    Raises:
        ArchiveError: the folder holds the archive of another run, or one of another format.
        OSError: the filesystem refused.
    """

    def __init__(self, folder: Path, run: str, check: Callable[[], None] = lambda: None) -> None:
        self.folder = folder
        self._run = run
        self._check = check
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob(".*.parquet.*.part"):
            with suppress(FileNotFoundError):
                part.unlink()
        self.digests: set[str] = set()
        """Digests of the steps that are archived."""
        for name in steps_names(folder):
            with opened(folder / name.file()) as file:
                table = file.read(columns=["digest"])
            there = table.schema.metadata.get(RUN_KEY, b"").decode()
            if there != run:
                raise ArchiveError(
                    f"{folder} holds the archive of run {there!r}, not of {run!r}. Give each run its own archive.dir"
                )
            self.digests |= set(table.column("digest").to_pylist())
        history = history_names(folder)
        self.history_place = "{}-{}".format(*history[-1][1]) if history else "0-0"
        """Id of the last record of the history that is archived."""
        trained = history_names(folder, "trained")
        self.trained_place = "{}-{}".format(*trained[-1][1]) if trained else "0-0"
        """Id of the last record of the trainer that is archived."""

    def add_steps(self, steps: Sequence[tuple[StepHeader, StepBytes]], rollouts: Iterable[Sequence[Source]]) -> None:
        """Adds consecutive steps of one epoch.

        Args:
            steps: at least one.
            rollouts: theirs; each sequence is done with before the next one is asked for.

        Raises:
            OSError: the filesystem refused; nothing was added.
        """
        name = StepsName(steps[0][0].epoch, steps[0][0].step, steps[-1][0].step, steps[-1][0].digest[:12])
        self._write(name.file("rollouts"), ROLLOUTS, rollout_tables(rollouts))
        rows = [_step_row(header, stored) for header, stored in steps]
        self._write(name.file(), STEPS, [pa.Table.from_pylist(rows, schema=STEPS)])
        self.digests |= {header.digest for header, _ in steps}

    def add_history(
        self, records: Sequence[tuple[str, Mapping[str, Any]]], rollouts: Iterable[Sequence[Source]], *, is_cut: bool
    ) -> None:
        """Adds records of the history, at least one, and the rollouts of the groups that were dropped.

        `is_cut`: records before them are gone. Raises OSError; then nothing was added.
        """
        first, last = records[0][0], records[-1][0]
        tables = rollout_tables(rollouts)
        if (table := next(tables, None)) is not None:
            self._write(history_file("dropped", first, last), ROLLOUTS, chain([table], tables))
        rows = [row for entry_id, record in records for row in history_rows(entry_id, record)]
        rows[0]["is_cut"] = is_cut
        self._write(history_file("history", first, last), HISTORY, [pa.Table.from_pylist(rows, schema=HISTORY)])
        self.history_place = last

    def add_trained(self, records: Sequence[tuple[str, Mapping[str, Any]]], *, is_cut: bool) -> None:
        """Adds records of the trainer, at least one. `is_cut`: records before them are gone. Raises OSError."""
        first, last = records[0][0], records[-1][0]
        rows = [
            {
                **_fields(record, TRAINED_FIELDS),
                "record_id": entry_id,
                "at_ms": int(entry_id.partition("-")[0]),
                "record": json.dumps(record, default=str),
                "is_cut": is_cut and entry_id == first,
            }
            for entry_id, record in records
        ]
        self._write(history_file("trained", first, last), TRAINED, [pa.Table.from_pylist(rows, schema=TRAINED)])
        self.trained_place = last

    def add_pending(self, rollouts: Iterable[Sequence[Source]]) -> None:
        """Replaces what was pending by what is. Raises OSError."""
        tables = rollout_tables(rollouts)
        self._write(PENDING_FILE, ROLLOUTS, chain([next(tables, ROLLOUTS.empty_table())], tables))

    def add_tickets(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the tickets that were out by those that are: rows of :data:`~rlbuffer.archive.schema.TICKETS`.
        Raises OSError."""
        self._write(TICKETS_FILE, TICKETS, [pa.Table.from_pylist(list(rows), schema=TICKETS)])

    def add_settings(self, meta: Meta) -> None:
        """Adds the batcher's settings of a revision, once. Raises OSError."""
        name = settings_file(meta.revision)
        if not (self.folder / name).exists():
            config = json.dumps(meta.config, sort_keys=True)
            row = {"revision": meta.revision, "epoch": meta.epoch, "digest": meta.config_digest, "config": config}
            self._write(name, SETTINGS, [pa.Table.from_pylist([row], schema=SETTINGS)])

    def _write(self, name: str, schema: Any, tables: Iterable[Any]) -> None:
        write_file(self.folder / name, schema, tables, run=self._run, check=self._check)


def write_file(
    path: Path, schema: Any, tables: Iterable[Any], *, run: str, check: Callable[[], None] = lambda: None
) -> None:
    """Writes a Parquet file that is there whole, and on the disk, or not at all; a row group per table.

    Raises:
        OSError: the filesystem refused. Whatever `check` raises, before each row group and before the file appears.
    """
    dictionary = [column for column in schema.names if column not in _NO_DICTIONARY]
    with whole_file(path, is_flushed=True) as file:
        with pq.ParquetWriter(
            file,
            described(schema, run),
            use_dictionary=dictionary,
            column_encoding=_encodings(schema),
            write_statistics=["step", "group_id", "history_id"],
            **_OPTIONS,
        ) as writer:
            for table in tables:
                check()
                writer.write_table(table)
        file.flush()
        os.fsync(file.fileno())  # it may take long: what `check` says must be true when the file appears
        check()


def _encodings(schema: Any) -> dict[str, str] | None:
    """Bytes of floats apart compress better: logprobs have nearly equal exponents."""
    return {"logprobs.list.element": "BYTE_STREAM_SPLIT"} if "logprobs" in schema.names else None


def _step_row(header: StepHeader, stored: StepBytes) -> dict[str, Any]:
    same = (
        *("step", "epoch", "digest", "previous_digest", "committed_ms", "revision", "world_size", "rollouts"),
        *("tokens", "reward", "age", "max_age", "fill"),
    )
    return {
        **{name: getattr(header, name) for name in same},
        "closed_by": str(header.closed_by),
        "group_ids": list(header.group_ids),
        "header": stored.header,
        "parts": list(stored.parts),
    }


TRAINED_FIELDS: Mapping[str, Callable[[Any], Any]] = {"step": int, "epoch": int, "digest": str}
DROP_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "group_id": str,
    "env": str,
    "reason": str,
    "detail": str,
    "rollouts": int,
    "tokens": int,
    "reward": float,
    "min_version": int,
}


def history_rows(entry_id: str, record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The row of a record of the history, and behind a record of taken back steps a row per group of it."""
    groups = record.get("groups")
    voids = groups if isinstance(groups, list) else []
    whole = {name: value for name, value in record.items() if name != "groups" or not voids}
    base = {"history_id": entry_id, "at_ms": int(entry_id.partition("-")[0])}
    yield {
        **base,
        "kind": str(record.get("event", "")),
        **_fields(record, DROP_FIELDS),
        "record": json.dumps(whole, default=str),
        "is_cut": False,
    }
    for group in voids:
        row = {**dict(zip(VOID_FIELDS, group, strict=False)), "reason": "void"}
        yield {**base, "kind": "drop", **_fields(row, DROP_FIELDS), "record": "", "is_cut": False}


def _fields(record: Mapping[str, Any], fields: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Anybody may have written it: a field of another type is left out."""
    out: dict[str, Any] = {}
    for name, kind in fields.items():
        value = record.get(name)
        with suppress(TypeError, ValueError):
            out[name] = None if value is None or value == "" else kind(value)
    return out
