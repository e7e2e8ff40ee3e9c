"""Heartbeats of workers, scorers and ranks: a line in the header of `inspect`, and rows of the browser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlbuffer.state.heartbeats import FRESH_SECONDS, failures_of, silent_envs, troubles
from rlbuffer.state.text import amount, counted, duration, printable

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
        f"! {printable(str(beat['error']))}" if beat.get("error") and not failures_of(beat).kinds else "",
    ]
    return " ".join([name, *filter(None, parts)])


def silent_lines(workers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each env whose workers are all silent: nothing of it comes."""
    return [f"  ! {sentence}" for sentence in silent_envs(workers).values()]


def failure_lines(name: str, beat: Mapping[str, Any]) -> list[str]:
    """The failures of a worker's env."""
    return [f"  ! {sentence}" for sentence in troubles(name, beat)]


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
        " ".join(_troubles(beat)),
    ]


def _troubles(beat: Mapping[str, Any]) -> Iterator[str]:
    """The newest of each kind of trouble that a heartbeat tells of."""
    kinds, last = failures_of(beat)
    if kinds:
        yield f"{counted(kinds)}: {last}"
    elif beat.get("error"):
        yield str(beat["error"])
    for name in ("ended", "busy"):
        if beat.get(name):
            yield str(beat[name])
