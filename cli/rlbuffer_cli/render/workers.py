"""Heartbeats of workers, scorers and ranks: a line in the header of `inspect`, and rows of the browser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlbuffer.records.waiting import Problem
from rlbuffer.state.heartbeats import FRESH_SECONDS, problems_of
from rlbuffer.state.text import amount, duration, printable

PROCESS_KINDS = ("worker", "scorer", "rank", "batcher")
"""Kinds of processes that send signs of life."""
BEAT_HEADER = ("who", "heard", "version", "rate", "env", "last failure")
BEAT_NUMBERS = frozenset({"heard", "version", "rate"})


def beat_line(name: str, beat: Mapping[str, Any]) -> str:
    """A worker or scorer in a few words; any process may write a heartbeat, so nothing in it is certain to be there."""
    name = printable(name)
    if beat["seconds_ago"] > FRESH_SECONDS:
        return f"{name} last seen {duration(beat['seconds_ago'])} ago"
    rate, version, gives = beat.get("rollouts_per_second"), beat.get("version"), beat.get("gives")
    parts = [
        f"v{version}" if isinstance(version, int) and version >= 0 else "",
        ", ".join(map(printable, map(str, gives))) if isinstance(gives, list) else "",
        f"{amount(rate)} rollouts/s" if isinstance(rate, float) else "",
    ]
    return " ".join([name, *filter(None, parts)])


def problem_lines(problems: Iterable[Problem]) -> list[str]:
    """A line for each problem."""
    return [f"  ! {printable(str(problem))}" for problem in problems]


def beat_row(who: str, beat: Mapping[str, Any]) -> list[str]:
    """Cells under :data:`BEAT_HEADER` for ``worker NAME``, ``rank N`` ...; a mark for whoever was silent for long."""
    is_silent = beat["seconds_ago"] > FRESH_SECONDS
    rate, version = beat.get("rollouts_per_second"), beat.get("version")
    return [
        who,
        f"{duration(beat['seconds_ago'])} ago{' !' * is_silent}",
        f"v{version}" if isinstance(version, int) and version >= 0 else "",
        f"{amount(rate)} rollouts/s" if isinstance(rate, float) and not is_silent else "",
        str(beat.get("env") or ""),
        " ".join(problem.detail for problem in problems_of(beat)),
    ]
