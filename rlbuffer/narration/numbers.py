"""One line of plain text per event: what `serve`, `worker` and `train` print and what `run` logs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

WAITING_SECONDS = 5.0
"""Sentences about waiting come at most this often."""
PATIENCE_SECONDS = 1.0
"""Waiting shorter than this is normal and not worth a line."""


def printable(text: str, *, lines: bool = False) -> str:
    """Text of anybody's for a terminal: what controls it (escapes, bidirectional marks) is shown, not obeyed.

    `lines`: line feeds stay.

    Example:
        >>> printable("a\x1b[2J\u202eb")
        'a\\x1b[2J\\u202eb'
    """
    if text.isprintable():
        return text
    kept = " \n" if lines else " "
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def amount(n: float) -> str:
    """A count in at most four digits: 950, 12.3k, 262k, 1.2M.

    Example:
        >>> amount(262144), amount(950), amount(1200000)
        ('262k', '950', '1.2M')
    """
    for limit, scale, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if abs(n) < limit:
            value = n / scale
            return f"{value:.0f}{unit}" if not unit or value >= 100 else f"{value:.1f}".removesuffix(".0") + unit
    return f"{n / 1e9:.1f}G"


def duration(seconds: float | None) -> str:
    """Seconds as people say them: 0.3 s, 12 s, 6 min, 2.5 h; "" for None."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Failed(NamedTuple):
    """What a worker's heartbeat says of groups that could not be made."""

    kinds: Mapping[str, int]
    """Kind of the error -> groups."""
    last: str
    """The last one, with file and line."""


def failures_of(beat: Mapping[str, Any]) -> Failed:
    """Any process may write a heartbeat, so nothing in it is certain to be there."""
    kinds, last = beat.get("failures"), beat.get("failure")
    sound = {str(k): n for k, n in kinds.items() if isinstance(n, int)} if isinstance(kinds, dict) else {}
    return Failed(sound, str(last or ""))


def percent(fraction: float) -> str:
    """A fraction as whole percent."""
    return f"{100 * fraction:.0f}%"


RECENT_STEPS = 20
"""Trained steps that sentences about waiting, and rates, are means of."""
LONG_WAIT = 0.2
"""Share of the trainer's time from which waiting for data is worth a sentence."""


class Waited(NamedTuple):
    """How long a trainer waited for data, and which side that makes the slow one."""

    share: float
    """0-1."""
    text: str
    is_long: bool
    """A person should know."""


def waited(wait: Sequence[float], total: Sequence[float]) -> Waited:
    """Of the last steps: seconds waited for data, and seconds in all, one each per step.

    Example:
        >>> waited([0.5, 0.36], [1.0, 1.0]).text
        'the trainer waited 43% of the last 2 steps for data: workers are slower than the trainer'
    """
    share = sum(wait) / max(sum(total), 1e-9)
    of = f"the last {len(wait)} steps" if len(wait) != 1 else "the last step"
    is_long = share >= LONG_WAIT
    side = ": workers are slower than the trainer" if is_long else ""
    if share < 0.05:
        side = ": the trainer is the slow side"
    return Waited(share=share, text=f"the trainer waited {percent(share)} of {of} for data{side}", is_long=is_long)


def example_lines(examples: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each of a step's examples. Rollouts are untrusted: what is not printable is shown escaped.

    Example:
        >>> example_lines([{"name": "best", "rollout_id": "a.3/0", "env": "a", "reward": 1.0, "advantage": 0.5,
        ...     "token_ids": [7, 9], "text": ""}])
        ['best a.3/0 of a, reward 1 (advantage +0.50): 7 9']
    """
    lines = []
    for example in examples:
        shown = example["text"] or " ".join(map(str, example["token_ids"]))
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
        lines.append(
            f"{example['name']} {example['rollout_id']} of {example['env']}, reward {example['reward']:.4g} "
            f"(advantage {example['advantage']:+.2f}): {shown}"
        )
    return lines


def shares(envs: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """env -> its fraction of the tokens."""
    total = sum(e["tokens"] for e in envs.values()) or 1
    return {name: e["tokens"] / total for name, e in sorted(envs.items())}


def drops_text(drops: Mapping[str, Any]) -> str:
    """``dropped 5: 3 stale 2 flat (31k tok)``; "" when nothing was dropped. `drops` is reason -> (rollouts, tokens)."""
    if not drops:
        return ""
    rollouts = sum(d[0] for d in drops.values())
    parts = " ".join(f"{d[0]} {reason}" for reason, d in sorted(drops.items(), key=lambda item: -item[1][0]))
    return f"dropped {rollouts}: {parts} ({amount(sum(d[1] for d in drops.values()))} tok)"


def step_line(event: Mapping[str, Any]) -> str:
    """A committed step, from the daemon's ``step`` event."""
    reward = event.get("reward")
    parts = [
        f"step {event['step']}",
        f"{amount(event['tokens'])} tok",
        f"fill {percent(event['fill'])}",
        f"groups {len(event['group_ids'])}",
        f"reward {reward:.2f}" if reward is not None else "",
        f"age {event['age']:.1f} max {event['max_age']}",
        " ".join(f"{env} {percent(share)}" for env, share in shares(event["envs"]).items()),
        drops_text(event.get("drops") or {}),
        f"{event['build_ms']:.0f} ms" if "build_ms" in event else "",
    ]
    return "  ".join(part for part in parts if part)


class ServeNarrator:
    """Tells a daemon's events line by line; a waiting sentence only when it lasts, and at most every few seconds.

    Args:
        say: takes a line.
        show: takes every waiting sentence at once, "" when there is none, for a place where it stands until the next
            one. `say` then gets only what is wrong with the workers.
    """

    def __init__(self, say: Callable[[str], None], show: Callable[[str], None] | None = None) -> None:
        self._say = say
        self._show = show
        self._lock = threading.Lock()
        self._pending = ""
        self._timer: threading.Timer | None = None
        self._last = -WAITING_SECONDS
        self._lost = False

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            self._waiting("")
            self._say(step_line(event))
        elif kind == "waiting":
            self._waiting(str(event["sentence"]))
        elif kind == "recovery":
            self._waiting("")
            self._say(_recovery(event))
        elif kind == "ended":
            self._waiting("")
            self._say(str(event["sentence"]))
        elif kind == "trouble" and self._show is None and event["sentence"] in self._pending:
            return  # it is about to be told
        elif kind in ("memory", "damaged", "trouble"):
            self._say(f"! {event['sentence']}")
        elif kind == "env":
            self._say(_env(event))
        elif kind == "config":
            self._say(_config(event))
        elif kind == "leader":
            self._waiting("")
            self._say(_leader(event))

    def close(self) -> None:
        """Forgets what it was about to say."""
        self._waiting("")

    def _waiting(self, sentence: str) -> None:
        if self._show is not None:
            self._show(sentence)
            return
        with self._lock:
            self._pending = sentence
            if not sentence:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = None
            elif self._timer is None:
                delay = max(PATIENCE_SECONDS, self._last + WAITING_SECONDS - time.monotonic())
                self._timer = threading.Timer(delay, self._flush)
                self._timer.daemon = True
                self._timer.start()

    def _flush(self) -> None:
        with self._lock:
            sentence, self._pending, self._timer = self._pending, "", None
            if sentence:
                self._last = time.monotonic()
                self._say(f"waiting: {sentence[:1].lower()}{sentence[1:]}")


def _recovery(event: Mapping[str, Any]) -> str:
    return (
        f"! the server had lost {event['forgotten']} steps that the trainer has trained: the run goes on after step "
        f"{event['step']} in epoch {event['epoch']}; {event['groups']} groups will not be trained again"
    )


def _config(event: Mapping[str, Any]) -> str:
    state = event["state"]
    if state == "taken":
        return f"settings: revision {event['revision']} from step {event['step']} on: {'; '.join(event['changes'])}"
    if state == "refused":
        return f"! settings: the old ones go on: {event['reason']}"
    return "settings: asked for, taken between two steps" if state == "asked" else "settings: nothing is new"


def _env(event: Mapping[str, Any]) -> str:
    if event["state"] == "dead":
        return f"! {event['sentence']}"
    return {
        "back": f"{event['env']} is back",
        "paused": f"{event['env']} is paused: steps go on without it",
        "resumed": f"{event['env']} takes part again",
    }[event["state"]]


def _leader(event: Mapping[str, Any]) -> str:
    if event.get("state") == "standby":
        return f"standing by: another batcher leads this run ({event.get('owner')}); takes over when it stops"
    return f"! lost the lead: {event.get('reason')}. Trying again."


class ScoreNarrator:
    """Tells a scorer's events: troubles at once, scored groups summed up every few seconds."""

    def __init__(self, say: Callable[[str], None], *, every_seconds: float = 10.0) -> None:
        self._say = say
        self._every = every_seconds
        self._since = time.monotonic()
        self._sums = [0, 0, 0]
        self._has_scored = False

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "ready":
            self._say(f"gives {', '.join(event['gives'])}")
        elif kind == "scored":
            for place, count in enumerate((1, event["rollouts"], event["tokens"])):
                self._sums[place] += count
            if not self._has_scored or time.monotonic() - self._since >= self._every:
                self._tell()
        elif kind == "stopped":
            self._tell()
            failed = f", {event['failed_groups']} not scored" if event["failed_groups"] else ""
            late = f", {event['late']} late" if event["late"] else ""
            self._say(f"stopped after {event['groups']} groups, {event['rollouts']} rollouts{late}{failed}")
        elif kind != "late":
            self._say(f"! {event['error']}")

    def _tell(self) -> None:
        groups, rollouts, tokens = self._sums
        if groups:
            rate = tokens / max(time.monotonic() - self._since, 1e-3)
            self._say(
                f"scored {groups} groups, {rollouts} rollouts, {amount(tokens)} tokens"
                + (f"  {amount(rate)} tokens/s" if self._has_scored else "")
            )
        self._since, self._sums, self._has_scored = time.monotonic(), [0, 0, 0], True
