"""The user's own functions, named by a dotted path: ``package.module:name``."""

from __future__ import annotations

import importlib
from typing import Any

from rlbuffer.errors import ConfigError


def load(setting: str, path: str, takes: str) -> Any:
    """What `path` names. A class is called without arguments first.

    Args:
        setting: where the path stands, ``batcher.order``.
        path: ``package.module:name``.
        takes: arguments of a call, for the message.

    Raises:
        ConfigError: it cannot be imported, or is not callable; the message says why.
    """
    module, _, name = path.partition(":")
    try:
        named = getattr(importlib.import_module(module), name)
        found = named() if isinstance(named, type) else named
    except Exception as error:  # the user's own code may raise anything while it is imported
        raise refused(setting, path, f"cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise refused(setting, path, f"is not callable but {type(found).__name__}: it takes {takes}")
    return found


def refused(setting: str, path: str, why: str) -> ConfigError:
    """The error of a function of the user's own."""
    return ConfigError(f"{setting} = {path!r} {why}", setting=setting)
