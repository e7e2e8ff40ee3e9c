"""Reading an archive: steps, rollouts, dropped groups, and what an id names.

Steps that were taken back (``rlbuffer runs rewind``, a server that lost its newest writes) stay in the files. Those
that count are on the chain of digests that ends in the newest step: each names the digest of the one before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from pyarrow.compute import field, scalar, starts_with
from pyarrow.dataset import ParquetFileFormat, ParquetFragmentScanOptions, dataset

from rlbuffer.archive.rows import opened, payload_of, rows_in, rows_of
from rlbuffer.archive.schema import (
    ARCHIVE_FORMAT,
    FORMAT_KEY,
    LACKS_OF_FORMAT_4,
    PENDING_FILE,
    RUN_KEY,
    TICKETS_FILE,
    history_names,
    settings_file,
    steps_names,
)
from rlbuffer.errors import AmbiguousId, ArchiveError, NotFound, PayloadError
from rlbuffer.records.info import RolloutInfo, RolloutNumbers
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.states import Reason
from rlbuffer.records.step_header import StepHeader
from rlbuffer.state.text import several_ids
from rlbuffer.store.history import Committed, Dropped, Recovered, RunRewound, StepsVoided, TrainerStarted
from rlbuffer.store.keys import Keys
from rlbuffer.store.part_rollouts import StepPart
from rlbuffer.store.records import PartRollout, TakenTicket
from rlbuffer.store.step_format import decode_header, decode_part
from rlbuffer.wire.payload import decode_group_payload, decode_whole

_LIGHT = (
    *("step", "epoch", "digest", "previous_digest", "committed_ms", "revision", "rollouts", "tokens", "reward"),
    *("age", "max_age", "fill"),
)
ROWS_SCANNED = 1024
"""Rows that are read before a filter chooses among them; a row group bounds their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedStep:
    """A committed step, as its file has it; `Archive.rollouts` has what it holds."""

    step: int
    epoch: int
    digest: str
    """SHA-256 of the step, chained on `previous_digest`."""
    previous_digest: str
    committed_ms: int
    """Server time of the commit, in milliseconds."""
    revision: int
    """Revision of the settings that made it."""
    rollouts: int
    tokens: int
    reward: float | None
    """Mean over rollouts."""
    age: float
    """Mean over rollouts, in policy versions."""
    max_age: int
    fill: float
    """Tokens over the step's capacity."""
    file: str
    """The file that holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group, or a part of one, that was not trained."""

    history_id: str
    """Id of its record in the run's history."""
    at_ms: int
    """Server time of the drop, in milliseconds."""
    group_id: str
    env: str
    reason: str
    """Reason of the drop, a :class:`~rlbuffer.records.states.Reason` by name."""
    detail: str
    """The rule that dropped it, with value and limit."""
    rollouts: int
    tokens: int
    reward: float | None
    """Mean over the scored rollouts."""
    min_version: int
    committed: int | None
    """The last step that was committed then; None where the archive does not say."""
    file: str
    """The file of the history that holds its record."""
    record: Mapping[str, Any]
    """Its whole record in the history; empty for a group of a step that was taken back, which has none of its own."""

    @property
    def whole_record(self) -> Mapping[str, Any]:
        """The record as the server's history has it, with what a group of a step that was taken back has in place of
        one."""
        same = ("group_id", "env", "reason", "detail", "rollouts", "tokens", "reward", "min_version")
        return {**self.record, **{name: getattr(self, name) for name in same}, "at": self.at_ms / 1000}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedRollout:
    """One rollout as it was archived, a row for each of its sequences; a row has every column of the file."""

    rows: tuple[Mapping[str, Any], ...]
    """Column -> value; columns of tokens are arrays."""

    @property
    def row(self) -> Mapping[str, Any]:
        """The row of its first sequence, which has what is the rollout's own."""
        return self.rows[0]

    @property
    def rollout_id(self) -> str:
        """Unique in its group."""
        return str(self.row["rollout_id"])

    @property
    def refs(self) -> list[PartRollout]:
        """Its sequences as a step's part names them."""
        return [_ref_of(row, len(self.rows)) for row in self.rows]

    @property
    def payloads(self) -> list[bytes | None]:
        """The payload of each sequence as its worker sent it; None when it was gone when it was archived."""
        return [payload_of(row) for row in self.rows]

    @property
    def rollout(self) -> Rollout:
        """The rollout itself.

        Raises:
            PayloadError: its payload was missing or damaged when it was archived.
        """
        payloads = self.payloads
        if None in payloads:
            raise PayloadError(f"rollout {self.rollout_id}: {self.rows[payloads.index(None)]['problem']}")
        return decode_whole(payloads)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedGroup:
    """A group of the archive, with the rollouts that are there."""

    group_id: str
    env: str
    step: int | None
    """The step that trained it; None: it was dropped."""
    dropped: DroppedGroup | None
    """None: it was trained, or was pending where it has no step either."""
    members: tuple[ArchivedRollout, ...]
    answer: Any
    """Reference answer; None where there is none, or its payload is gone."""
    metadata: Mapping[str, Any]


class Archive:
    """An archive's directory.

    Args:
        folder: the directory that ``rlbuffer serve --archive`` was given.

    Raises:
        ArchiveError: there is no archive, it is of another format, or of several runs.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._names = steps_names(self.folder)
        if not self._names and not history_names(self.folder):
            raise ArchiveError(f"{self.folder} holds no archive: it has no file steps-*.parquet")

    @cached_property
    def all_steps(self) -> tuple[ArchivedStep, ...]:
        """Every step of every file, also those that were taken back; by file."""
        return tuple(
            ArchivedStep(file=name.file(), **row) for name in self._names for row in self.table(name.file(), _LIGHT)
        )

    @cached_property
    def steps(self) -> tuple[ArchivedStep, ...]:
        """The steps that count, the oldest first: the chain that ends in the newest one. A hole leaves numbers out."""
        by_step: dict[int, dict[str, ArchivedStep]] = {}
        for step in sorted(self.all_steps, key=lambda s: (s.step, s.epoch)):
            by_step.setdefault(step.step, {}).setdefault(step.digest, step)
        chain: list[ArchivedStep] = []
        newest = max(self.all_steps, key=lambda s: (s.epoch, s.step), default=None)
        digest = "" if newest is None else newest.digest
        for number in sorted((n for n in by_step if newest is not None and n <= newest.step), reverse=True):
            if not chain or chain[-1].step == number + 1:
                counts = by_step[number].get(digest)
            else:  # behind a hole: nothing names its digest, so the newest epoch counts
                epoch = chain[-1].epoch
                counts = next((s for s in reversed(by_step[number].values()) if s.epoch <= epoch), None)
            if counts is not None:
                chain.append(counts)
                digest = counts.previous_digest
        return tuple(reversed(chain))

    @cached_property
    def run(self) -> str:
        """Name of the run."""
        files = [name.file() for name in self._names] or [name for _, _, name in history_names(self.folder)]
        with opened(self.folder / files[0]) as parquet:
            return str(parquet.schema_arrow.metadata.get(RUN_KEY, b"").decode())

    def headers(self, steps: Sequence[ArchivedStep]) -> list[StepHeader]:
        """The headers of archived steps, in their order."""
        headers: dict[str, StepHeader | None] = dict.fromkeys(step.digest for step in steps)
        for file in dict.fromkeys(step.file for step in steps):
            for row in self.table(file, ("digest", "committed_ms", "header")):
                if row["digest"] in headers:
                    headers[row["digest"]] = _header(row)
        return [header for header in headers.values() if header is not None]

    def step(self, number: int) -> tuple[StepHeader, tuple[StepPart, ...]]:
        """The header and the parts of a step that counts. Raises NotFound."""
        archived = self._archived(number)
        rows = self.table(archived.file, ("digest", "committed_ms", "header", "parts"))
        row = next(row for row in rows if row["digest"] == archived.digest)
        prefix = Keys(self.run).payload_prefix
        return _header(row), tuple(decode_part(part, prefix) for part in row["parts"])

    def rollouts(self, step: int, *, left_out: bool = False) -> Iterator[ArchivedRollout]:
        """The rollouts of a step, by group, or those that its groups hold besides, with why they were left out.

        What a stream's trainer was given and has not trained is among those that were left out, ``unused``.
        Raises NotFound when the archive does not have it.
        """
        rows = self._rows_of(self._archived(step))
        return _members(row for row in rows if (row.get("left_out") is not None) == left_out)

    def groups(self, step: int) -> Iterator[ArchivedGroup]:
        """The groups of a step, each with its rollouts that were left out. Raises NotFound."""
        archived = self._archived(step)
        return _groups_in(self._rows_of(archived), archived)

    def all_groups(self, steps: Sequence[ArchivedStep] | None = None) -> Iterator[ArchivedGroup]:
        """Every group of the steps that count, or of these, by step, then every drop. Each file is read once."""
        for file, of_file in groupby(self.steps if steps is None else steps, key=lambda step: step.file):
            by_number = {step.step: step for step in of_file}
            for number, rows in groupby(self.rows(_beside(file)), key=lambda row: int(row["step"])):
                if (step := by_number.get(number)) is not None:
                    yield from _groups_in(self._marked(rows, step), step)
        counts = {step.digest for step in self.steps}
        for file, drops in groupby(self.dropped(), key=lambda drop: drop.file):
            yield from self._dropped_in(file, [drop for drop in drops if drop.record.get("digest") not in counts])

    def dropped_groups(self, takes: Callable[[DroppedGroup], bool] = lambda drop: True) -> Iterator[ArchivedGroup]:
        """Every drop that is taken, the newest first, with the rollouts that were kept. Each file is read once."""
        files = [(file, [*filter(takes, drops)]) for file, drops in groupby(self.dropped(), key=lambda drop: drop.file)]
        for file, drops in reversed(files):
            yield from sorted(self._dropped_in(file, drops), key=_dropped_ms, reverse=True)

    def _dropped_in(self, file: str, drops: Iterable[DroppedGroup]) -> Iterator[ArchivedGroup]:
        """Drops of a file of the history as groups, those of which a rollout was kept first."""
        by_key = {(drop.history_id, drop.group_id): drop for drop in drops}
        rows = self.rows(_beside(file)) if by_key and (self.folder / _beside(file)).exists() else iter(())
        for key, of_group in groupby(rows, key=lambda row: (row["history_id"], row["group_id"])):
            if (drop := by_key.pop(key, None)) is not None:
                yield group_of([*of_group], drop.group_id, drop)
        for drop in by_key.values():
            yield group_of([], drop.group_id, drop)

    def _rows_of(self, place: ArchivedStep | DroppedGroup, group_id: str = "") -> Iterator[dict[str, Any]]:
        """The rows of a step's rollouts, those that its groups hold besides last, or of a drop's; of one group, or
        all."""
        file = _beside(place.file)
        chosen = field("group_id") == group_id if group_id else scalar(True)
        if isinstance(place, ArchivedStep):
            return self._marked(self.rows(file, chosen & (field("step") == place.step)), place)
        if not (self.folder / file).exists():
            return iter(())
        return self.rows(file, chosen & (field("history_id") == place.history_id))

    def _marked(self, rows: Iterable[dict[str, Any]], step: ArchivedStep) -> Iterator[dict[str, Any]]:
        """The rows of a step; what was not trained of it says so."""
        unused = self._unused.get(step.digest, frozenset())
        return (row | {"left_out": Reason.UNUSED} if row["rollout_id"] in unused else row for row in rows)

    @cached_property
    def _unused(self) -> dict[str, frozenset[str]]:
        """Digest of a step -> rollouts that a stream's trainer was given in it and has not trained. The step's own file
        may be older than what the trainer said."""
        found: dict[str, frozenset[str]] = {}
        for _, _, name in history_names(self.folder):
            for record in map(_record_of, self.table(name, chosen=field("reason") == str(Reason.UNUSED))):
                digest, rollout_ids = record.get("digest"), record.get("rollout_ids")
                if isinstance(digest, str) and isinstance(rollout_ids, list):
                    found[digest] = found.get(digest, frozenset()) | frozenset(map(str, rollout_ids))
        return found

    @cached_property
    def _by_number(self) -> dict[int, ArchivedStep]:
        return {step.step: step for step in self.steps}

    def _archived(self, number: int) -> ArchivedStep:
        """The step of this number that counts. Raises NotFound."""
        if number not in self._by_number:
            raise NotFound(f"the archive {self.folder} has no step {number}")
        return self._by_number[number]

    def dropped(self, prefix: str = "") -> Iterator[DroppedGroup]:
        """Every drop of groups whose id begins so, the oldest first."""
        counts = (field("kind") != Dropped.event) | field("is_cut")  # for what was committed then
        chosen = counts | starts_with(field("group_id"), prefix) if prefix else None
        committed: int | None = None
        for _, _, name in history_names(self.folder):
            for row in self.table(name, chosen=chosen):
                if row["is_cut"] or row["kind"] in (StepsVoided.event, RunRewound.event):
                    committed = None
                if row["kind"] == Committed.event:
                    step = _record_of(row).get("step")
                    committed = step if isinstance(step, int) else None
                elif row["kind"] == Dropped.event and (row["group_id"] or "").startswith(prefix):
                    yield _drop_of(row, name, committed)

    @cached_property
    def trained(self) -> tuple[Mapping[str, Any], ...]:
        """The trainer's records of the steps that count, the oldest first: each a line of ``metrics.jsonl``.

        Of a step that was trained again after a kill the last record counts. A step without one is left out.
        """
        records: dict[str, Mapping[str, Any]] = {}
        for _, _, name in history_names(self.folder, "trained"):
            for row in self.table(name):
                records[row["digest"] or ""] = json.loads(row["record"])
        return tuple(records[step.digest] for step in self.steps if step.digest in records)

    def trained_at(self) -> list[tuple[float, Mapping[str, Any]]]:
        """When each step was said to be trained, Unix seconds of the server, and its record; the oldest first. Also
        steps that were taken back."""
        return [
            (row["at_ms"] / 1000, json.loads(row["record"]))
            for _, _, name in history_names(self.folder, "trained")
            for row in self.table(name)
        ]

    @cached_property
    def attempts(self) -> tuple[Mapping[str, Any], ...]:
        """The starts of the trainer, the oldest first: each record with ``at_ms``, ``step`` (the last one that its
        state contained), ``world_size`` and ``settings``. Format 4 has none, nor has a trainer that said none."""
        return tuple(
            {**_record_of(row), "at_ms": row["at_ms"]}
            for _, _, name in history_names(self.folder)
            for row in self.table(name, chosen=field("kind") == TrainerStarted.event)
        )

    @cached_property
    def has_lost_steps(self) -> bool:
        """The server lost steps that were trained, and the run went on behind them."""
        names = [name for _, _, name in history_names(self.folder)]
        return any(self.table(name, chosen=field("kind") == Recovered.event) for name in names)

    def commits(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Server time in milliseconds, and record, of every commit in the history, the oldest first: also of steps that
        were taken back. ``read``, ``decided``, ``since`` and ``published`` say what the leader knew
        (:class:`~rlbuffer.store.records.Decided`); those of format 4 lack them."""
        for _, _, name in history_names(self.folder):
            for row in self.table(name, chosen=field("kind") == Committed.event):
                yield row["at_ms"], _record_of(row)

    def pending(self) -> Iterator[ArchivedGroup]:
        """The pushes that were pending when the last leader left, without payloads, in the order of their arrival.

        A leader that was killed leaves what was pending before it: what is trained or dropped since is among it.
        """
        if (self.folder / PENDING_FILE).exists():
            for _, of_push in groupby(self.rows(PENDING_FILE), key=lambda row: row["entry_id"]):
                rows = [*of_push]
                yield group_of(rows, rows[0]["group_id"], None)

    def tickets_out(self) -> list[TakenTicket]:
        """The tickets that were out when the last leader left, by env and number: groups that nobody has pushed yet,
        and how long they had taken. As of :meth:`pending`."""
        rows = self.table(TICKETS_FILE) if (self.folder / TICKETS_FILE).exists() else []
        return [TakenTicket(**row) for row in rows]

    @cached_property
    def lacks(self) -> tuple[str, ...]:
        """What files of an older format do not say, for people; empty when all are of the newest one."""
        names = [*(name.file() for name in self._names), *(name for _, _, name in history_names(self.folder))]
        for name in names:
            with opened(self.folder / name) as parquet:
                if parquet.schema_arrow.metadata[FORMAT_KEY] != str(ARCHIVE_FORMAT).encode():
                    return LACKS_OF_FORMAT_4
        return ()

    def settings(self, revision: int) -> Mapping[str, Any]:
        """The batcher's settings of a revision, with ``config`` as JSON. Raises NotFound."""
        name = settings_file(revision)
        if not (self.folder / name).exists():
            raise NotFound(f"the archive {self.folder} has no settings of revision {revision}")
        return self.table(name)[0]

    def find(self, identifier: str) -> ArchivedGroup:
        """Finds a group by its id, a rollout's id (``<group>/<index>``), or a unique prefix of the group's id.

        Where it was trained several times, or dropped in part, the last step that trained it counts.

        Raises:
            NotFound: it is not there. AmbiguousId: the prefix fits several.
        """
        prefix = identifier.rsplit("/", 1)[0]
        places = self._places(prefix)
        group_ids = {prefix} if prefix in places else set(places)
        if not group_ids:
            raise NotFound(f"the archive {self.folder} has no group {identifier!r}")
        if len(group_ids) > 1:
            raise AmbiguousId(several_ids(prefix, group_ids, "the archive"))
        group_id = group_ids.pop()
        place = places[group_id]
        rows = [*self._rows_of(place, group_id)]
        if isinstance(place, ArchivedStep) and not rows:
            raise ArchiveError(f"{self.folder / _beside(place.file)} lacks the rollouts of group {group_id!r}")
        return group_of(rows, group_id, place)

    def _places(self, prefix: str) -> dict[str, ArchivedStep | DroppedGroup]:
        """Group id that begins so -> the last step that trained it, else its drop."""
        places: dict[str, ArchivedStep | DroppedGroup] = {drop.group_id: drop for drop in self.dropped(prefix)}
        counting = {step.digest: step for step in self.steps}
        for name in self._names:
            for row in self.table(name.file(), ("digest", "group_ids")):
                if (step := counting.get(row["digest"])) is not None:
                    places |= {group_id: step for group_id in row["group_ids"] if group_id.startswith(prefix)}
        return places

    def rows(self, file: str, chosen: Any = None) -> Iterator[dict[str, Any]]:
        """The rows of a file of rollouts, a few at a time; of those that `chosen` leaves out, an expression of pyarrow,
        no row group is read without need."""
        path = self.folder / file
        with opened(path) as parquet:
            if chosen is None:
                yield from rows_in(parquet)
            else:
                for batch in _scanned(path, chosen).to_batches():
                    yield from rows_of(batch)

    def table(self, file: str, columns: Sequence[str] | None = None, chosen: Any = None) -> list[dict[str, Any]]:
        """The rows of any other file at once; as :meth:`rows`."""
        path = self.folder / file
        with opened(path) as parquet:
            read = _scanned(path, chosen).to_table() if chosen is not None else parquet.read(columns=columns)
            rows: list[dict[str, Any]] = read.to_pylist()
            return rows


def _scanned(path: Path, chosen: Any) -> Any:
    checked = ParquetFragmentScanOptions(page_checksum_verification=True, use_buffered_stream=True)
    files = dataset(path, format=ParquetFileFormat(default_fragment_scan_options=checked))
    # Of files and batches one more than the one at hand is read: none would wait for ever.
    return files.scanner(filter=chosen, batch_size=ROWS_SCANNED, batch_readahead=1, fragment_readahead=1)


def _beside(file: str) -> str:
    """The file with the rollouts of a file of steps, or of the history."""
    kind, _, rest = file.partition("-")
    return f"{'rollouts' if kind == 'steps' else 'dropped'}-{rest}"


def _dropped_ms(group: ArchivedGroup) -> int:
    """Server time of a dropped group's drop."""
    return 0 if group.dropped is None else group.dropped.at_ms


def _groups_in(rows: Iterable[Mapping[str, Any]], step: ArchivedStep) -> Iterator[ArchivedGroup]:
    """The groups of a step's rows, of which those that were left out come last."""
    by_group: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_group.setdefault(row["group_id"], []).append(row)
    for group_id, of_group in by_group.items():
        yield group_of(of_group, group_id, step)


def _ref_of(row: Mapping[str, Any], sequences: int) -> PartRollout:
    """A row's sequence, of a rollout of so many."""
    numbers = {name: row[name] for name in RolloutNumbers.__struct_fields__ if name in row}
    return PartRollout(
        payload_key=row["payload_key"],
        index=row["index"],
        info=RolloutInfo(**numbers),
        group_id=row["group_id"],
        env=row["env"] or "",
        adapter=row["adapter"] or "",
        advantage=row["advantage"] or 0.0,
        sequence=row["sequence"] or 0,
        sequences=sequences,
        prompt_id=row["prompt_id"] or "",
        planned_size=row["planned_size"] or 0,
        worker=row["worker"] or "",
        pushed_ms=row["pushed_ms"] or 0,
    )


def _header(row: Mapping[str, Any]) -> StepHeader:
    header, _ = decode_header(row["header"], digest=row["digest"], committed_ms=row["committed_ms"])
    return header


def _members(rows: Iterable[Mapping[str, Any]]) -> Iterator[ArchivedRollout]:
    """The rollouts of these rows, in which the sequences of each stand together."""
    for _, sequences in groupby(rows, key=lambda row: (row["payload_key"], row["rollout_id"])):
        yield ArchivedRollout(rows=tuple(sequences))


def group_of(
    rows: Sequence[Mapping[str, Any]], group_id: str, place: ArchivedStep | DroppedGroup | None
) -> ArchivedGroup:
    """A group out of its rows, those of each push together: at least one, but for a drop. `place`: None of one that was
    pending."""
    group_payload = next((row["group_payload"] for row in rows if row["group_payload"] is not None), None)
    answer, metadata = (None, {}) if group_payload is None else decode_group_payload(group_payload)
    dropped = place if isinstance(place, DroppedGroup) else None
    return ArchivedGroup(
        group_id=group_id,
        env=str(rows[0]["env"]) if dropped is None else dropped.env,
        step=place.step if isinstance(place, ArchivedStep) else None,
        dropped=dropped,
        members=tuple(_members(rows)),
        answer=answer,
        metadata=metadata,
    )


def _record_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The whole record of a row of the history; empty where it has none."""
    record = json.loads(row["record"] or "{}")
    return record if isinstance(record, dict) else {}


def _drop_of(row: Mapping[str, Any], file: str, committed: int | None) -> DroppedGroup:
    """The drop of a row of the history; `committed`: the last step then."""
    return DroppedGroup(
        history_id=row["history_id"],
        at_ms=row["at_ms"],
        group_id=row["group_id"] or "",
        env=row["env"] or "",
        reason=row["reason"] or "",
        detail=row["detail"] or "",
        rollouts=row["rollouts"] or 0,
        tokens=row["tokens"] or 0,
        reward=row["reward"],
        min_version=row["min_version"] or 0,
        committed=committed,
        file=file,
        record=_record_of(row),
    )
