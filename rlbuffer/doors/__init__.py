"""Doors: the buffer behind the trainers that people have, each by one line of theirs.

A door is a codec (their samples as rollouts, and back) and a seam (their queue, their checkpoint). It checks what it
needs of the trainer when it is attached, by name and version; without the line the trainer is as it was. Trainers'
packages are imported when a door is opened. Open first: `trl`; `miles` is smaller; `verl` is a journal.
"""

from __future__ import annotations

import importlib
from types import ModuleType

DOORS = ("trl", "miles", "verl")


def __getattr__(name: str) -> ModuleType:
    """The door of that name: it needs no import of its own."""
    if name in DOORS:
        return importlib.import_module(f"rlbuffer.doors.{name}")
    raise AttributeError(f"module 'rlbuffer.doors' has no attribute {name!r}")
