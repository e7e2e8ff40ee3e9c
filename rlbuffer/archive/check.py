"""`verify --archive`: proves of an archive that every step is there once, whole, and what its digest says.

A1  every step from the first to the newest is there; none is a hole
A2  no step is in two files
A3  every digest is that of the header and the parts, chained on the one before
A4  every rollout that a part names is there once, with the payload that it announced
A5  every payload of a dropped group has the checksum that it carries
A6  the settings of every step are there, and no record of the history is lost
A7  from the first step that the trainer recorded to the last, every step has its record
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rlbuffer.archive.library import Archive, ArchivedStep
from rlbuffer.archive.rows import MISSING, payload_of
from rlbuffer.archive.schema import history_names, settings_file, steps_names
from rlbuffer.errors import ArchiveError, PayloadError
from rlbuffer.store.records import Finding, PartRollout, Report
from rlbuffer.store.step_format import decode_part, step_digest
from rlbuffer.wire.payload import payload_checksum

NAMED_HOLES = 20
"""Holes that are named one by one."""


def check_archive(archive: Archive) -> Report:
    """Reads every byte of an archive, one row group at a time."""
    findings: list[Finding] = []
    counts: Counter[str] = Counter()
    steps = {step.digest: step for step in archive.steps}
    _check_chain(archive, findings)
    for name in steps_names(archive.folder):
        try:
            expected: dict[tuple[int, int, int], PartRollout] = {}
            for row in archive.step_rows(name):
                findings += _check_digest(row)
                for part in (decode_part(data) for data in row["parts"]):
                    expected |= {(part.step, part.rank, i): ref for i, ref in enumerate(part.rollouts)}
                counts["steps" if row["digest"] in steps else "steps_taken_back"] += 1
            findings += _check_rollouts(archive.rows(name.file("rollouts")), expected, counts)
        except (ArchiveError, PayloadError) as error:
            findings.append(Finding(invariant="A4", message=f"{name.file()}: {error}"))
    _check_dropped(archive, findings, counts)
    revisions = {step.revision for step in steps.values()}
    for revision in sorted(revisions):
        if not (archive.folder / settings_file(revision)).exists():
            findings.append(Finding(invariant="A6", message=f"the settings of revision {revision} are missing"))
    _check_trained(archive, findings, counts)
    return Report(findings=tuple(findings), checked=dict(counts))


def _check_trained(archive: Archive, findings: list[Finding], counts: Counter[str]) -> None:
    try:
        numbers = [int(record["step"]) for record in archive.trained]
    except (ArchiveError, KeyError, TypeError, ValueError) as error:
        findings.append(Finding(invariant="A7", message=f"records of the trainer cannot be read: {error}"))
        return
    counts["trained"] = len(numbers)
    there = {step.step for step in archive.steps if numbers and numbers[0] <= step.step <= numbers[-1]}
    for first, last in list(_ranges(sorted(there - set(numbers))))[:NAMED_HOLES]:
        which = f"step {first} has" if first == last else f"steps {first} to {last} have"
        findings.append(Finding(invariant="A7", message=f"{which} no record of the trainer"))


def _check_chain(archive: Archive, findings: list[Finding]) -> None:
    numbers = [step.step for step in archive.steps]
    last = numbers[-1] if numbers else 0
    missing = sorted(set(range(1, last + 1)) - set(numbers))
    for first, final in list(_ranges(missing))[:NAMED_HOLES]:
        which = f"step {first} is" if first == final else f"steps {first} to {final} are"
        findings.append(Finding(invariant="A1", message=f"{which} missing"))
    previous: ArchivedStep | None = None
    for step in archive.steps:
        if previous is not None and previous.step == step.step - 1 and previous.digest != step.previous_digest:
            message = f"step {step.step} follows {step.previous_digest[:12]}, step {previous.step} is another one"
            findings.append(Finding(invariant="A3", message=message))
        previous = step
    files = Counter(step.digest for step in archive.all_steps)
    for digest in (digest for digest, count in files.items() if count > 1):
        twice = [step for step in archive.all_steps if step.digest == digest]
        message = f"step {twice[0].step} is there {len(twice)} times: {', '.join(step.file for step in twice)}"
        findings.append(Finding(invariant="A2", message=message))


def _ranges(numbers: Iterable[int]) -> Iterable[tuple[int, int]]:
    """(first, last) of each run of consecutive numbers."""
    first = last = 0
    for number in numbers:
        if first and number == last + 1:
            last = number
            continue
        if first:
            yield first, last
        first = last = number
    if first:
        yield first, last


def _check_digest(row: Mapping[str, Any]) -> list[Finding]:
    digest = step_digest(row["previous_digest"], row["header"], row["parts"])
    if digest == row["digest"]:
        return []
    message = f"step {row['step']}: header and parts have the digest {digest[:12]}, not {row['digest'][:12]}"
    return [Finding(invariant="A3", message=message)]


def _check_rollouts(
    rows: Iterable[Mapping[str, Any]], expected: dict[tuple[int, int, int], PartRollout], counts: Counter[str]
) -> list[Finding]:
    findings = []
    for row in rows:
        if row.get("left_out") is not None:
            counts["left_out"] += 1
            if row["details"] is not None and (wrong := _wrong(row, row["size"], row["checksum"])):
                message = f"step {row['step']}: rollout {row['rollout_id']} of {row['group_id']}, left out: {wrong}"
                findings.append(Finding(invariant="A4", message=message))
            continue
        place = (row["step"], row["rank"], row["place"])
        ref = expected.pop(place, None)
        if ref is None:
            message = f"step {row['step']}: no part names rollout {row['rollout_id']}, or it is there twice"
            findings.append(Finding(invariant="A4", message=message))
            continue
        counts["rollouts"] += 1
        counts["tokens"] += ref.info.length
        wrong = _wrong(row, ref.info.size, ref.info.checksum)
        if wrong:
            message = f"step {row['step']}: rollout {ref.info.rollout_id} of {ref.group_id}: {wrong}"
            findings.append(Finding(invariant="A4", message=message))
    findings += [
        Finding(invariant="A4", message=f"step {step}: rollout {ref.info.rollout_id} of {ref.group_id} is missing")
        for (step, _, _), ref in expected.items()
    ]
    return findings


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


def _check_dropped(archive: Archive, findings: list[Finding], counts: Counter[str]) -> None:
    for _, _, name in history_names(archive.folder):
        try:
            _check_history_file(archive, name, findings, counts)
        except (ArchiveError, PayloadError) as error:
            findings.append(Finding(invariant="A5", message=f"{name}: {error}"))


def _check_history_file(archive: Archive, name: str, findings: list[Finding], counts: Counter[str]) -> None:
    for row in archive.history_rows(name):
        counts["dropped"] += row["kind"] == "drop"
        if row["is_cut"]:
            message = f"records of drops before {row['history_id']} are lost: the server keeps the newest only"
            findings.append(Finding(invariant="A6", message=message))
    dropped = name.replace("history-", "dropped-", 1)
    if not (archive.folder / dropped).exists():
        return
    for row in archive.rows(dropped):
        counts["dropped_rollouts"] += 1
        wrong = "" if row["details"] is None else _wrong(row, row["size"], row["checksum"])
        if wrong:
            message = f"dropped group {row['group_id']}: rollout {row['rollout_id']}: {wrong}"
            findings.append(Finding(invariant="A5", message=message))
