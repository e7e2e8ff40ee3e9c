"""What a door needs of its trainer: a version that it knows, and names. What is missing is said in one sentence."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from rlbuffer.errors import RlbufferError

Versions = tuple[tuple[int, int], tuple[int, int]]
"""From the first on and before the second."""


def supported_version(door: str, package: str, title: str, versions: Versions, otherwise: str) -> str:
    """The trainer's version. `title` is its name for people, `otherwise` what to do with another one.

    Raises:
        RlbufferError: the door does not know it.
    """
    version = importlib.metadata.version(package)
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not versions[0] <= numbers < versions[1]:
        first, below = (".".join(map(str, numbers)) for numbers in versions)
        raise RlbufferError(
            f"rlbuffer.doors.{door} knows {title} >={first},<{below}, and this is {version}: install one of those, or "
            f"{otherwise}"
        )
    return version


def need(door: str, owner: str, thing: Any, *names: str, whose: str, use: str = "") -> None:
    """Raises RlbufferError unless `thing`, which the trainer calls `owner`, has all of these names."""
    for name in names:
        if not hasattr(thing, name):
            used = f" ({use})" if use else ""
            raise RlbufferError(f"rlbuffer.doors.{door} needs {owner}.{name}{used}, and {whose} has none")
