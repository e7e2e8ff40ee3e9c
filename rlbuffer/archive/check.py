"""`verify --archive`: proves of an archive that every step is there once, whole, and what its digest says.

A1  every step from the first to the newest is there; none is a hole
A3  every digest is that of the header and the parts, chained on the one before
A4  every rollout that a part names is there once, with the payload that it announced
A5  every payload of a dropped group has the checksum that it carries
A6  the settings of every step are there, and no record of the history is lost
A7  from the first step that the trainer recorded to the last, every step has its record
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby, pairwise
from typing import Any

from rlbuffer.archive.library import Archive
from rlbuffer.archive.rows import MISSING, payload_of
from rlbuffer.archive.schema import history_names, steps_names
from rlbuffer.errors import ArchiveError, NotFound, PayloadError
from rlbuffer.store.records import PartRollout, Report
from rlbuffer.store.step_format import decode_part, step_digest
from rlbuffer.store.verify.snapshot import Findings
from rlbuffer.wire.payload import payload_checksum

NAMED_HOLES = 20
"""Holes that are named one by one."""


def check_archive(archive: Archive, progress: Callable[[str, float], None] = lambda what, share: None) -> Report:
    """Reads every byte of an archive, one row group at a time. `progress` gets what is read now, and the share of the
    files that were read before."""
    findings = Findings()
    counts: Counter[str] = Counter()
    steps = {step.digest: step for step in archive.steps}
    _check_chain(archive, findings)
    names, histories = steps_names(archive.folder), history_names(archive.folder)
    for number, name in enumerate(names):
        progress(f"checking steps {name.first} to {name.last}", number / (len(names) + len(histories)))
        try:
            expected: dict[tuple[int, int, int], PartRollout] = {}
            for row in archive.table(name.file()):
                digest = step_digest(row["previous_digest"], row["header"], row["parts"])
                findings.unless(
                    digest == row["digest"],
                    "A3",
                    f"step {row['step']}: header and parts have the digest {digest[:12]}, not {row['digest'][:12]}",
                )
                for part in (decode_part(data) for data in row["parts"]):
                    expected |= {(part.step, part.rank, i): ref for i, ref in enumerate(part.rollouts)}
                counts["steps" if row["digest"] in steps else "steps_taken_back"] += 1
            _check_rollouts(archive.rows(name.file("rollouts")), expected, findings, counts)
        except ArchiveError as error:
            findings.add("A4", str(error))
        except PayloadError as error:
            findings.add("A4", f"{name.file()}: {error}")
    for number, (_, _, history) in enumerate(histories, len(names)):
        progress("checking what was dropped", number / (len(names) + len(histories)))
        try:
            _check_history_file(archive, history, findings, counts)
        except ArchiveError as error:
            findings.add("A5", str(error))
        except PayloadError as error:
            findings.add("A5", f"{history}: {error}")
    for revision in sorted({step.revision for step in steps.values()}):
        try:
            archive.settings(revision)
        except NotFound:
            findings.add("A6", f"the settings of revision {revision} are missing")
        except ArchiveError as error:
            findings.add("A6", str(error))
    _check_trained(archive, findings, counts)
    return Report(findings=tuple(findings.found), checked=dict(counts))


def _check_trained(archive: Archive, findings: Findings, counts: Counter[str]) -> None:
    try:
        numbers = [int(record["step"]) for record in archive.trained]
    except (ArchiveError, KeyError, TypeError, ValueError) as error:
        findings.add("A7", f"records of the trainer cannot be read: {error}")
        return
    counts["trained"] = len(numbers)
    there = {step.step for step in archive.steps if numbers and numbers[0] <= step.step <= numbers[-1]}
    for steps in _ranges(there - set(numbers)):
        findings.add("A7", f"{steps}: no record of the trainer")


def _check_chain(archive: Archive, findings: Findings) -> None:
    numbers = [step.step for step in archive.steps]
    for steps in _ranges(set(range(1, max(numbers, default=0) + 1)) - set(numbers)):
        findings.add("A1", f"{steps}: missing")
    for before, step in pairwise(archive.steps):
        findings.unless(
            before.step != step.step - 1 or before.digest == step.previous_digest,
            "A3",
            f"step {step.step} follows {step.previous_digest[:12]}, step {before.step} is another one",
        )


def _ranges(numbers: Iterable[int]) -> list[str]:
    """Consecutive numbers as ``step 3`` or ``steps 3 to 5``; the first few."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    return [f"step {run[0]}" if len(run) == 1 else f"steps {run[0]} to {run[-1]}" for run in runs[:NAMED_HOLES]]


def _check_rollouts(
    rows: Iterable[Mapping[str, Any]],
    expected: dict[tuple[int, int, int], PartRollout],
    findings: Findings,
    counts: Counter[str],
) -> None:
    for row in rows:
        whose = f"step {row['step']}: rollout {row['rollout_id']} of {row['group_id']}"
        if row.get("left_out") is not None:
            counts["left_out"] += 1
            wrong = "" if row["details"] is None else _wrong(row, row["size"], row["checksum"])
            findings.unless(not wrong, "A4", f"{whose}, left out: {wrong}")
            continue
        ref = expected.pop((row["step"], row["rank"], row["place"]), None)
        if ref is None:
            findings.add("A4", f"{whose}: no part names it, or it is there twice")
            continue
        counts["rollouts"] += 1
        counts["tokens"] += ref.info.length
        wrong = _wrong(row, ref.info.size, ref.info.checksum)
        findings.unless(not wrong, "A4", f"{whose}: {wrong}")
    for (step, _, _), ref in expected.items():
        findings.add("A4", f"step {step}: rollout {ref.info.rollout_id} of {ref.group_id} is missing")


def _wrong(row: Mapping[str, Any], size: int, checksum: int) -> str:
    """The fault of a row's payload; "" for none."""
    try:
        data = payload_of(row)
    except (PayloadError, TypeError, ValueError) as error:
        return str(error)
    if data is None:
        return str(row["problem"] or MISSING)
    if row["problem"]:
        return f"it was damaged when it was archived: {row['problem']}"
    actual = payload_checksum(data)
    if (len(data), actual) != (size, checksum):
        return f"{len(data)} bytes with checksum {actual:08x}, announced were {size} with {checksum:08x}"
    return ""


def _check_history_file(archive: Archive, name: str, findings: Findings, counts: Counter[str]) -> None:
    for row in archive.table(name):
        counts["dropped"] += row["kind"] == "drop"
        lost = f"records of drops before {row['history_id']} are lost: the server keeps the newest only"
        findings.unless(not row["is_cut"], "A6", lost)
    dropped = name.replace("history-", "dropped-", 1)
    for row in archive.rows(dropped) if (archive.folder / dropped).exists() else ():
        counts["dropped_rollouts"] += 1
        wrong = "" if row["details"] is None else _wrong(row, row["size"], row["checksum"])
        findings.unless(not wrong, "A5", f"dropped group {row['group_id']}: rollout {row['rollout_id']}: {wrong}")
