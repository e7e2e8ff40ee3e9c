"""One line of plain text per event of `serve`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rlbuffer.narration.numbers import amount, percent

WAITING_SECONDS = 5.0
"""Sentences about waiting come at most this often."""
QUIET_SECONDS = 1.0
"""Waiting shorter than this is normal and not worth a line."""


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
            return  # it is about to be said
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
                delay = max(QUIET_SECONDS, self._last + WAITING_SECONDS - time.monotonic())
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
