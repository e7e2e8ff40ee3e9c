"""Curves over the steps of a run: where their points come from, and how a terminal or a file shows them."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlbuffer.errors import NotFound, RlbufferError, installed_by
from rlbuffer.process.files import whole_file
from rlbuffer.records.step_header import StepHeader
from rlbuffer.state.step_record import scalars
from rlbuffer.state.text import did_you_mean, printable
from rlbuffer.store.history import Committed, Dropped
from rlbuffer_cli.text import cut

FROM_HISTORY = ("fill", "drops")
"""Fields that only the server's history has: a share of the step's capacity, and rollouts by reason since the step
before."""
HISTORY_RECORDS = 100_000
"""More than the server keeps."""
METRICS_FILE = "metrics.jsonl"
LEAST_CHART = 38
"""Columns of a terminal that a small chart has at least."""
RECENT_BYTES = 4 * 2**20
"""The newest part of the metrics that is read for a screen."""
TRENDS = ("reward", "entropy")
NO_CURVES = ("step", "time", "at", "epoch")
MARKS = "•o+*#%@="
"""One for each of several curves, so that they differ without colours."""
IN_ASCII = str.maketrans("•┤│─┬┐┌└┘", ".||-+++++")
COLOURS_OF_CURVES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart by those who see colours differently, too (Okabe and Ito 2008)."""
FILES = (".png", ".svg")


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot."""

    name: str
    points: tuple[tuple[int, float], ...]
    """(step, value), steps ascending; at least one."""

    @property
    def legend(self) -> str:
        """As :meth:`told` in four digits."""
        return self.told(".4g")

    def told(self, form: str, width: int | None = None) -> str:
        """Where it is now, and between which values it was; `form`: of the values. What has no room in `width` is left
        out whole: half of a number would be another one."""
        values = [value for _, value in self.points]
        step, value = self.points[-1]
        now = f"{printable(self.name)}  {value:{form}}"
        between = f"{min(values):{form}} to {max(values):{form}}"
        ways = [f"{now} at step {step}, {between}", f"{now}, {between}", f"{now} at step {step}", now]
        return next((way for way in ways if width is None or cut(way, width) == way), ways[-1])


# -- where points come from --------------------------------------------------------------------------------------------
def step_of(line: bytes) -> dict[str, Any] | None:
    """What a line of the metrics says of a trained step; None where it is none."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None  # a line that a killed trainer left half-written, or a damaged one
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None


def metrics_of(file: Path, most: int | None = None) -> list[dict[str, Any]]:
    """The steps of a ``metrics.jsonl`` in their order, of its last `most` bytes. A step that was trained again counts
    as it was last.

    Raises:
        NotFound: the file cannot be read.
    """
    try:
        with file.open("rb") as stream:
            if most is not None and stream.seek(0, 2) > most:
                stream.seek(-most, 2)
                stream.readline()
            else:
                stream.seek(0)
            found = {record["step"]: record for record in map(step_of, stream) if record is not None}
    except OSError as error:
        raise NotFound(f"cannot read the metrics {file}: {error.strerror}") from None
    return [found[step] for step in sorted(found)]


def history_of(newest_first: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The committed steps of a run's history in their order, each with the ``drops`` since the one before.

    Drops since the last one are those of the next step, which is open.
    """
    records: dict[int, dict[str, Any]] = {}
    none = dict.fromkeys(sorted({r["reason"] for r in newest_first if r.get("event") == Dropped.event}), 0)
    drops = dict(none)
    for record in reversed(newest_first):
        if record.get("event") == Dropped.event:
            drops[record["reason"]] += record["rollouts"]
        elif record.get("event") == Committed.event:
            records[record["step"]] = {**record, "drops": drops}
            drops = dict(none)
    if any(drops.values()):
        step = max(records, default=0) + 1
        records[step] = {"step": step, "drops": drops}
    return [records[step] for step in sorted(records)]


def archive_of(folder: Path) -> list[dict[str, Any]]:
    """The steps of an archive that count, as :func:`history_of`, with the trainer's records.

    Raises:
        ArchiveError: there is no archive. ConfigError: pyarrow is missing.
    """
    from rlbuffer.archive import Archive

    archive = Archive(folder)
    trained = {record["step"]: record for record in archive.trained}
    columns = ("step", "rollouts", "tokens", "reward", "age", "max_age", "fill")
    happened: list[tuple[int, dict[str, Any]]] = [
        (group.at_ms, {"event": Dropped.event, "reason": group.reason, "rollouts": group.rollouts})
        for group in archive.dropped()
    ]
    for step in archive.steps:
        figures = {name: getattr(step, name) for name in columns}
        record = {**figures, **trained.get(step.step, {}), "step": step.step, "event": Committed.event}
        happened.append((step.committed_ms, record))
    happened.sort(key=lambda each: (each[0], each[1]["event"] == Committed.event), reverse=True)
    return history_of([record for _, record in happened])


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
        names = sorted(path.replace("/", ".") for path in paths.difference(NO_CURVES))
        hint = did_you_mean(field, names)
        fields = ", ".join(name for name in names if "." not in name)
        where = f" of run {run}" if run else ""
        raise NotFound(f"no step{where} has a number called {field!r}.{hint} There are: {fields or 'no steps yet'}.")
    return [Curve(f"{run} {name}".strip(), tuple(line)) for name, line in points.items()]


def trends(records: Sequence[Mapping[str, Any]], headers: Sequence[StepHeader]) -> list[Curve]:
    """Reward and entropy over the steps, by the trainer's records; without any, the reward by `headers`. A single point
    is no curve."""
    records = records or [{"step": header.step, "reward": header.reward} for header in headers]
    numbers = [{"step": r["step"], **{name: r.get(name) for name in TRENDS}} for r in records]
    named = {name for record in numbers for name in scalars(record)}
    curves = [curve for name in TRENDS if name in named for curve in curves_of(numbers, name)]
    return [curve for curve in curves if len(curve.points) > 1]


# -- how they are shown ------------------------------------------------------------------------------------------------
def chart(
    curves: Sequence[Curve],
    *,
    width: int,
    height: int = 16,
    is_ascii: bool = False,
    steps: tuple[int, int] | None = None,
    form: str = ".4g",
) -> list[str]:
    """Curves over one another with their axes, in `height` lines; then a line for each with its mark, its last value
    and its range. `steps`: first and last of the axis, where several charts shall have the same; `form`: of the values
    at the axis."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    plotext.xaxes(True, False)
    plotext.yaxes(True, False)
    first, last, low, high = _bounds(curves)
    first, last = steps or (first, last)
    plotext.xlim(first, max(last, first + 1))
    plotext.ylim(low, high)
    plotext.xticks([first, last], [f"step {first}", str(last)])
    plotext.yticks([low, high], [f"{low:{form}}", f"{high:{form}}"])
    marks = [MARKS[n % len(MARKS)] for n in range(len(curves))]
    for curve, mark in zip(curves, marks, strict=True):
        xs, ys = zip(*curve.points, strict=True)
        plotext.plot(xs, ys, marker="braille" if len(curves) == 1 and not is_ascii else mark)
    drawn = [line.rstrip() for line in plotext.uncolorize(plotext.build()).rstrip().split("\n")]
    if len(curves) > 1 or is_ascii:
        drawn += [
            cut(f"{mark} {curve.told(form, width - 2)}", width) for curve, mark in zip(curves, marks, strict=True)
        ]
    else:
        drawn += [cut(curves[0].told(form, width), width)]
    return [line.translate(IN_ASCII) for line in drawn] if is_ascii else drawn


def small_charts(curves: Sequence[Curve], *, width: int, height: int = 6) -> list[str]:
    """A chart of its own for each curve, all with one axis of steps: a scale does not fit another's values. Two stand
    side by side where there is room."""
    steps = [step for curve in curves for step, _ in curve.points]
    if not steps:
        return []
    axis, across = (min(steps), max(steps)), 1 + (width >= 2 * LEAST_CHART)
    each = width // across - 2
    columns = []
    for curve in curves:
        *drawn, caption = chart([curve], width=each, height=height, steps=axis, form=".3f")
        columns.append([caption, *drawn])
    lines: list[str] = []
    for at in range(0, len(columns), across):
        lines += [
            "".join(line.ljust(each + 2) for line in row).rstrip()
            for row in zip(*columns[at : at + across], strict=True)
        ]
    return lines


def _bounds(curves: Iterable[Curve]) -> tuple[int, int, float, float]:
    """First and last step, least and largest value; apart from each other."""
    steps = [step for curve in curves for step, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    return min(steps), max(steps), low, high


def check_drawing(file: Path) -> None:
    """Before much is computed for a picture: that it can be drawn, and that its folder is there.

    Raises:
        RlbufferError: matplotlib is not installed, or there is no such folder.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise RlbufferError(f"{file} needs the module matplotlib: {installed_by('plot')}") from None
    if not file.parent.is_dir():
        raise RlbufferError(f"cannot write {file}: there is no folder {file.parent}")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise RlbufferError(f"cannot write {file}: the folder {file.parent} may not be written to")


def bars(names: Sequence[str], panels: Mapping[str, Sequence[tuple[float, float, float]]], file: Path) -> None:
    """Writes ``.png`` or ``.svg``: a panel per figure, in it a bar per name, of (value, least, most).

    Raises:
        RlbufferError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise RlbufferError(f"{file} needs the module matplotlib: {installed_by('plot')}") from None
    with rc_context({"text.parse_math": False, "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(3.2 * len(panels), 1.2 + 0.4 * len(names)), layout="constrained")
        every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        places = range(len(names))
        for axes, (title, values) in zip(every, panels.items(), strict=True):
            sizes = [value for value, _, _ in values]
            ranges = [[v - low for v, low, _ in values], [high - v for v, _, high in values]]
            colours = ["#999999", *[COLOURS_OF_CURVES[0]] * (len(names) - 1)]
            axes.barh(places, sizes, xerr=ranges, color=colours, capsize=3)
            axes.set_title(title, fontsize="medium")
            axes.set_yticks(places, [printable(name) for name in names])
            axes.spines[["top", "right"]].set_visible(False)
        every[0].invert_yaxis()
        try:
            with whole_file(file) as out:
                figure.savefig(out, format=file.suffix[1:])
        except OSError as error:
            raise RlbufferError(f"cannot write {file}: {error.strerror or error}") from None


def write_chart(curves: Sequence[Curve], title: str, file: Path) -> None:
    """Writes ``.png`` or ``.svg``; a file that is there is replaced.

    Raises:
        RlbufferError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise RlbufferError(f"{file} needs the module matplotlib: {installed_by('plot')}") from None
    # Names are anybody's: none is a formula. A letter that no font has is a box.
    with rc_context({"text.parse_math": False, "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.add_subplot(xlabel="step", title=printable(title))
        lines = [
            axes.plot(*zip(*curve.points, strict=True), color=COLOURS_OF_CURVES[n % len(COLOURS_OF_CURVES)])[0]
            for n, curve in enumerate(curves)
        ]
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(color="#dddddd")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(lines, [curve.legend for curve in curves], frameon=False)
        try:
            with whole_file(file) as out:
                figure.savefig(out, format=file.suffix[1:])
        except OSError as error:
            raise RlbufferError(f"cannot write {file}: {error.strerror or error}") from None
