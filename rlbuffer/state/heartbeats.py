"""Sentences about workers by their heartbeats; any process may write one, so nothing in it is certain to be there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rlbuffer.state.text import counted, duration, plural, printable

FRESH_SECONDS = 8.0
"""A heartbeat comes every two seconds, that of a worker without tickets at least every seven; whoever is silent for
longer may be gone."""
SHOWN_SILENT_SECONDS = 12.0
"""An env whose workers are silent for so long has none: their tickets lapse."""


class Failed(NamedTuple):
    """The groups that could not be made, as a worker's heartbeat says."""

    kinds: Mapping[str, int]
    """Kind of the error -> groups."""
    last: str
    """The last one, with file and line."""


def failures_of(beat: Mapping[str, Any]) -> Failed:
    """Any process may write a heartbeat, so nothing in it is certain to be there."""
    kinds, last = beat.get("failures"), beat.get("failure")
    sound = {str(k): n for k, n in kinds.items() if isinstance(n, int)} if isinstance(kinds, dict) else {}
    return Failed(sound, str(last or ""))


def silent_envs(workers: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Env whose workers are all silent, so that nothing of it comes -> the sentence that says so."""
    envs: dict[str, dict[str, float]] = {}
    for name, beat in workers.items():
        envs.setdefault(str(beat.get("env") or ""), {})[name] = beat["seconds_ago"]
    sentences = {}
    for env, ages in sorted(envs.items()):
        if env and min(ages.values()) > SHOWN_SILENT_SECONDS:
            heard = ", ".join(f"{printable(name)} was heard {duration(ago)} ago" for name, ago in ages.items())
            sentences[env] = f"env {printable(env)} has no worker at work: {heard}"
    return sentences


def troubles(name: str, beat: Mapping[str, Any]) -> Iterator[str]:
    """The failures of a worker's env: groups that it gave up, and how it ended or what it does not come back from."""
    kinds, last = failures_of(beat)
    who = f"env {printable(str(beat.get('env', '')))}, worker {printable(name)}"
    if kinds:
        groups = plural(sum(kinds.values()), "group")
        yield f"{who}: {groups} given up ({printable(counted(kinds))}), the last: {printable(last)}"
    if beat.get("ended"):
        yield f"{who} has ended: {printable(str(beat['ended']))}"
    if beat.get("doing") and beat["seconds_ago"] > FRESH_SECONDS:
        doing = printable(str(beat["doing"]))
        yield f"{who} ended without a word: it was last heard of while {doing} ran"
    elif beat.get("busy"):
        yield f"{who}: {printable(str(beat['busy']))}"
