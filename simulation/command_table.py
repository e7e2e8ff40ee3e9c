"""The commands that are modelled, by name: each module of commands adds its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Args = Sequence[bytes]
MODELLED: dict[bytes, Callable[[Any, Any], Any]] = {}
GROWING: set[bytes] = set()
"""Commands that are refused at the memory limit."""


def command(name: str, *, grows: bool = False) -> Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]]:
    def register(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        MODELLED[name.encode()] = function
        if grows:
            GROWING.add(name.encode())
        return function

    return register
