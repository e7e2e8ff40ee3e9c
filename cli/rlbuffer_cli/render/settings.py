"""The values of settings as people may see them."""

from __future__ import annotations

import json
import re
from typing import Any

_SECRET = re.compile(r"(?:^|[._])(?:api_?key|password|secret|token|credentials?)$", re.IGNORECASE)
"""Settings whose values nobody shall read over a shoulder: options of envs and samplers may hold keys of services."""


def shown(name: str, value: Any) -> Any:
    """The value of a setting as people may see it."""
    from rlbuffer.store.server.address import HIDDEN, redacted

    if value and _SECRET.search(name):
        return HIDDEN
    return redacted(value) if name == "redis_url" and value else value


def shown_value(name: str, value: Any) -> str:
    """The value as TOML has it; a setting that is not set has none."""
    return "not set" if value is None else json.dumps(shown(name, value), default=plain)


def plain(value: Any) -> Any:
    """A value that JSON has no word for: a mapping as an object, anything else as text."""
    if hasattr(value, "items"):
        return dict(value)
    return str(value)
