"""Curves over the steps of a run, from the trainer's metrics and from the history that the server keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlbuffer.errors import NotFound
from rlbuffer.records.step_header import StepHeader
from rlbuffer.state.step_record import scalars
from rlbuffer.state.text import did_you_mean
from rlbuffer.store.history import Committed, Dropped
from rlbuffer_cli.render.metrics_tail import step_of
from rlbuffer_cli.render.text import sparkline, thinned

FROM_HISTORY = ("fill", "drops")
"""Fields that only the server's history has: a share of the step's capacity, and rollouts by reason since the step
before."""
HISTORY_RECORDS = 100_000
"""More than the server keeps."""
METRICS_FILE = "metrics.jsonl"
RECENT_BYTES = 4 * 2**20
"""The newest part of the metrics that is read for a screen."""
TRENDS = ("reward", "entropy")
TREND_COLUMNS = 40
NO_CURVES = ("step", "time", "at", "epoch")
LEAST_FALL = 0.2
"""A fall by a smaller share of a curve's whole range is none."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot."""

    name: str
    points: tuple[tuple[int, float], ...]
    """(step, value), steps ascending; at least one."""


def metrics_of(file: Path) -> list[dict[str, Any]]:
    """The steps of a ``metrics.jsonl`` in their order. A step that was trained again counts as it was last.

    Raises:
        NotFound: the file cannot be read.
    """
    records: dict[int, dict[str, Any]] = {}
    try:
        with file.open("rb") as stream:
            for line in stream:
                record = step_of(line)
                if record is not None:
                    records[record["step"]] = record
    except OSError as error:
        raise NotFound(f"cannot read the metrics {file}: {error.strerror}") from None
    return [records[step] for step in sorted(records)]


def recent_metrics(folder: Path) -> list[dict[str, Any]]:
    """The newest steps of the trainer's metrics in `folder`; nothing where they are on another host."""
    try:
        with (folder / METRICS_FILE).open("rb") as stream:
            start = max(0, stream.seek(0, 2) - RECENT_BYTES)
            stream.seek(start)
            lines = stream.read().split(b"\n")[bool(start) :]
    except OSError:
        return []
    records = {record["step"]: record for record in map(step_of, lines) if record is not None}
    return [records[step] for step in sorted(records)]


def trend_lines(folder: Path, headers: Sequence[StepHeader]) -> list[str]:
    """Reward and entropy over the steps in a line each, with when they fell: which of them fell first?

    `folder` has the trainer's metrics; where they are on another host, the rewards are those of `headers`.
    """
    known = recent_metrics(folder)
    records = known or [{"step": header.step, "reward": header.reward} for header in headers]
    lines = []
    for field in TRENDS:
        points = [(r["step"], float(v)) for r in records if isinstance(v := r.get(field), int | float)]
        if len(points) < 2:
            continue
        values = [value for _, value in points]
        strip = sparkline(values, width=TREND_COLUMNS, low=min(values), high=max(values))
        lines.append(f"{field:<7}  {strip}  steps {points[0][0]} to {points[-1][0]}: {course_of(points)}")
    if lines and not known:
        lines.append("entropy  is in metrics.jsonl of the trainer's output folder, which is not on this machine")
    return lines


def course_of(points: Sequence[tuple[int, float]]) -> str:
    """Both ends of a curve, its fall behind its highest place, and by which step half of that; of a long curve the
    means of neighbours count.

    Example:
        >>> course_of([(1, 0.5), (2, 1.0), (3, 0.9), (4, 0.2)])
        '0.500 to 0.200; fell from 1.000 at step 2 to 0.200 at step 4, half of that by step 4'
    """
    each = math.ceil(len(points) / TREND_COLUMNS)
    means = f" (means of {each} steps)" if each > 1 else ""
    steps = [round(step) for step in thinned([float(step) for step, _ in points], TREND_COLUMNS)]
    values = thinned([value for _, value in points], TREND_COLUMNS)
    top = max(range(len(values)), key=lambda i: (values[i], -i))
    low = min(range(top, len(values)), key=lambda i: (values[i], i))
    fall = values[top] - values[low]
    if fall < LEAST_FALL * (max(values) - min(values)) or not fall:
        return f"{values[0]:.3f} to {values[-1]:.3f}, no fall{means}"
    half = next(i for i in range(top, len(values)) if values[i] <= values[top] - fall / 2)
    fell = f"fell from {values[top]:.3f} at step {steps[top]} to {values[low]:.3f} at step {steps[low]}"
    return f"{values[0]:.3f} to {values[-1]:.3f}; {fell}, half of that by step {steps[half]}{means}"


def history_of(newest_first: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The committed steps of a run's history in their order, each with the ``drops`` since the one before.

    Drops since the last one are those of the next step, which is open.
    """
    records: dict[int, dict[str, Any]] = {}
    drops: dict[str, int] = {}
    reasons = {r["reason"] for r in newest_first if r.get("event") == Dropped.event}
    for record in reversed(newest_first):
        if record.get("event") == Dropped.event:
            drops[record["reason"]] = drops.get(record["reason"], 0) + record["rollouts"]
        elif record.get("event") == Committed.event:
            records[record["step"]] = {**record, "drops": dict.fromkeys(sorted(reasons), 0) | drops}
            drops = {}
    if drops:
        step = max(records, default=0) + 1
        records[step] = {"step": step, "drops": dict.fromkeys(sorted(reasons), 0) | drops}
    return [records[step] for step in sorted(records)]


def archive_of(folder: Path) -> list[dict[str, Any]]:
    """The steps of an archive that count, in their order: the trainer's record, with ``drops`` since the step before.

    Drops since the last one are those of the next step.

    Raises:
        ArchiveError: there is no archive. ConfigError: pyarrow is missing.
    """
    from rlbuffer.archive import Archive

    archive = Archive(folder)
    trained = {record["step"]: record for record in archive.trained}
    dropped = sorted(archive.dropped(), key=lambda group: group.at_ms, reverse=True)
    reasons = sorted({group.reason for group in dropped})
    records = []
    for step in archive.steps:
        drops = dict.fromkeys(reasons, 0)
        while dropped and dropped[-1].at_ms <= step.committed_ms:
            group = dropped.pop()
            drops[group.reason] += group.rollouts
        own = {name: getattr(step, name) for name in ("rollouts", "tokens", "reward", "age", "max_age", "fill")}
        records.append({**own, **trained.get(step.step, {}), "step": step.step, "drops": drops})
    if dropped:
        since = dict.fromkeys(reasons, 0)
        for group in dropped:
            since[group.reason] += group.rollouts
        records.append({"step": max((record["step"] for record in records), default=0) + 1, "drops": since})
    return records


def curves_of(records: Sequence[Mapping[str, Any]], field: str, run: str = "") -> list[Curve]:
    """The field of every step: one curve, or one for each entry where it is a table (``rewards``: one per env).

    Args:
        records: steps in their order.
        field: name, with dots into tables: ``rewards.math``.
        run: put before the curves' names, where several runs are laid over each other.

    Raises:
        NotFound: no step has a number of that name.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    path = field.replace(".", "/")
    for record in records:
        for name, value in scalars(record).items():
            if f"{name}/".startswith(f"{path}/") and math.isfinite(value):
                entry = name[len(path) + 1 :] or field
                points.setdefault(entry, []).append((record["step"], value))
    if not points:
        paths = {each for r in records[-2:] for name in scalars(r) for each in (name, name.partition("/")[0])}
        known = sorted(path.replace("/", ".") for path in paths.difference(NO_CURVES))
        hint = did_you_mean(field, known)
        fields = ", ".join(name for name in known if "." not in name)
        where = f" of run {run}" if run else ""
        raise NotFound(f"no step{where} has a number called {field!r}.{hint} There are: {fields or 'no steps yet'}.")
    return [Curve(f"{run} {name}".strip(), tuple(line)) for name, line in points.items()]


def bounds(curves: Iterable[Curve]) -> tuple[int, int, float, float]:
    """First and last step, least and largest value; apart from each other."""
    steps = [step for curve in curves for step, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    return min(steps), max(max(steps), min(steps) + 1), low, high
