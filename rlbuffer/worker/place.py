"""The prompts that an env's ticket numbers stand for, compared with those of the worker before.

Tickets count on through every restart and resume. What they count is the worker's: its file, its seed. A run that goes
on with another file would pass over as many of its prompts as were sampled of the old one, and nobody would know. So
each worker says before its first ticket what decides which prompt a number is. It is kept with the run, and where it
is not what the worker before said, this one tells.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlbuffer.errors import Skip
from rlbuffer.records.checks import escaped, shown
from rlbuffer.worker.envs import Env
from rlbuffer.worker.failures import RunningCalls

PROBED = 4
"""Prompts of an env without an identity that are compared: the first ones. A worker begins later by what they take."""
NAMED = 8
"""Most differences that are named."""
MOST_KEPT = 2**16
"""Characters of an identity that are read: what is longer did not come from here."""


def identity_of(env: Env, calls: RunningCalls) -> str:
    """What decides which prompt a number is, as it is kept: the env's own identity, or a digest of its first prompts;
    "" where those cannot be had now.

    It is for a thread, and raises what the env raises for its identity: it is the user's code.
    """
    identity = getattr(env, "identity", None)
    if isinstance(identity, Mapping):
        return as_text(identity)
    try:
        with calls.running("prompt"):
            first = [_prompt(env, number) for number in range(PROBED)]
    except Exception:  # its tickets will meet it, and say it
        return ""
    digest = hashlib.sha256(json.dumps(first).encode()).hexdigest()[:12]
    return as_text({"env": "of your own", f"digest of its first {PROBED} prompts": digest})


def as_text(identity: Mapping[str, Any]) -> str:
    """An identity as it is kept: equal ones are the same text, and one that is too long is a digest."""
    text = json.dumps({str(name): value for name, value in identity.items()}, sort_keys=True, default=str)
    return text if len(text) <= MOST_KEPT else json.dumps({"digest": hashlib.sha256(text.encode()).hexdigest()})


def changes(before: str, now: str) -> str:
    """What differs between two identities, by name, with both values; "" where nothing does."""
    old, new = _read(before), _read(now)
    names = [name for name in {**new, **old} if name not in old or name not in new or old[name] != new[name]]
    return ", ".join(f"{_word(name)} {_value(old, name)} -> {_value(new, name)}" for name in names[:NAMED])


def _prompt(env: Env, number: int) -> Any:
    try:
        prompt = env.prompt(number)
    except Skip:
        return None
    return [str(prompt.prompt_id), np.asarray(prompt.tokens).tolist()]


def _read(kept: str) -> Mapping[str, Any]:
    """An identity that was kept; none where it is no such text: anybody may have written it."""
    try:
        identity = json.loads(kept[: MOST_KEPT + 1])
    except (ValueError, RecursionError):
        return {}
    return identity if isinstance(identity, dict) else {}


def _word(name: str) -> str:
    return escaped(" ".join(name.split())[:80])


def _value(identity: Mapping[str, Any], name: str) -> str:
    return shown(identity[name]) if name in identity else "none"
