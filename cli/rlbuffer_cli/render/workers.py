"""Heartbeats of workers, scorers and ranks: a line in the header of `inspect`, and rows of the browser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlbuffer.narration.numbers import amount, duration, failures_of, printable
from rlbuffer.narration.waiting import counted

SHOWN_FRESH_SECONDS = 6.0
"""A heartbeat comes at least every two seconds; whoever is silent for longer may be gone."""
SHOWN_SILENT_SECONDS = 12.0
"""An env whose workers are silent for so long has none: their tickets lapse."""
PROCESS_KINDS = ("worker", "scorer", "rank", "batcher")
"""Kinds of processes that send signs of life."""
BEAT_HEADER = ("who", "heard", "version", "rate", "env", "last failure")
BEAT_NUMBERS = frozenset({"heard", "version", "rate"})


def beat_line(name: str, beat: Mapping[str, Any]) -> str:
    """A worker or scorer in a few words; any process may write a heartbeat, so nothing in it is certain to be there."""
    name = printable(name)
    if beat["seconds_ago"] > SHOWN_FRESH_SECONDS:
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
    envs: dict[str, dict[str, float]] = {}
    for name, beat in workers.items():
        envs.setdefault(str(beat.get("env") or ""), {})[name] = beat["seconds_ago"]
    lines = []
    for env, ages in sorted(envs.items()):
        if env and min(ages.values()) > SHOWN_SILENT_SECONDS:
            heard = ", ".join(f"{printable(name)} was heard {duration(ago)} ago" for name, ago in ages.items())
            lines.append(f"  ! env {printable(env)} has no worker at work: {heard}")
    return lines


def failure_lines(name: str, beat: Mapping[str, Any]) -> list[str]:
    """The failures of a worker's env."""
    kinds, last = failures_of(beat)
    env, lines = printable(str(beat.get("env", ""))), []
    if kinds:
        groups = f"{sum(kinds.values())} group{'s' * (sum(kinds.values()) != 1)}"
        lines.append(
            f"  ! env {env}, worker {printable(name)}: {groups} given up ({printable(counted(kinds))}), "
            f"the last: {printable(last)}"
        )
    if beat.get("ended"):
        lines.append(f"  ! env {env}, worker {printable(name)} has ended: {printable(str(beat['ended']))}")
    if beat.get("doing") and beat["seconds_ago"] > SHOWN_FRESH_SECONDS:
        lines.append(
            f"  ! env {env}, worker {printable(name)} ended without a word: it was last heard of while "
            f"{printable(str(beat['doing']))} ran"
        )
    elif beat.get("busy"):
        lines.append(f"  ! env {env}, worker {printable(name)}: {printable(str(beat['busy']))}")
    return lines


def beat_row(who: str, beat: Mapping[str, Any]) -> list[str]:
    """Cells under :data:`BEAT_HEADER` for ``worker NAME``, ``rank N`` ...; a mark for whoever was silent for long."""
    is_silent = beat["seconds_ago"] > SHOWN_FRESH_SECONDS
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
