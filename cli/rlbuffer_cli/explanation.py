"""One setting explained: what it means, may be and is, where its value comes from, and what it is checked against."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlbuffer.checks.check import Check
from rlbuffer.checks.loading import checks_of
from rlbuffer.config.explain import Setting, known, meant_by, pattern_of, tables
from rlbuffer.config.loading import PREFIX, Given, places
from rlbuffer.errors import ConfigError

LISTED_SETTINGS = 12
"""Settings of one last name that an error lists."""
_SECRET = re.compile(r"(?:^|[._])(?:api_?key|password|secret|token|credentials?)$", re.IGNORECASE)
"""Settings whose values nobody shall read over a shoulder: options of envs and samplers may hold keys of services."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A setting; its name has NAME where the user chooses one."""

    name: str
    meaning: Setting
    checks: tuple[Check, ...]
    given: Sequence[tuple[str, Any, str]]
    """(name, value, source) in the settings at hand: one, or one for each name that the user has chosen."""

    @property
    def variable(self) -> str:
        """The environment variable; "" where the name is the user's."""
        return "" if "NAME" in self.name else PREFIX + self.name.replace(".", "__").upper()


def explain(key: str, given: Given) -> list[Explained]:
    """The setting `key`, or those of the table `key`. The last part of a name is enough where it is unique.

    Raises:
        ConfigError: there is no such setting, or several.
    """
    pattern = pattern_of(key)
    inside = [table.settings for table in tables() if table.name == pattern]
    same = [name for name in known() if name.rpartition(".")[2] == key]
    if pattern in known():
        return [_explained(pattern, key, given)]
    if inside and pattern:
        return [_explained(setting.name, setting.name, given) for setting in inside[0]]
    if len(same) > 1:
        named = ", ".join(same[:LISTED_SETTINGS])
        raise ConfigError(f"{key!r} is the last part of several settings: {named}. Write one of them.", setting=key)
    if same:
        return [_explained(same[0], same[0], given)]
    raise ConfigError(f"{key} is not a setting.{meant_by(key)}", setting=key)


def _explained(name: str, asked: str, given: Given) -> Explained:
    return Explained(name=name, meaning=known()[name], checks=checks_of(name), given=list(_values(name, asked, given)))


def _values(name: str, asked: str, given: Given) -> Iterator[tuple[str, Any, str]]:
    """(name, value, source) of what was given, or the default."""
    asked = name.replace("NAME", asked.split(".")[name.split(".").index("NAME")]) if "NAME" in name else name
    pattern = asked.split(".")
    depth = len(pattern)
    paths = [path.split(".")[:depth] for path in given.sources]
    found = [path for path in paths if len(path) == depth and all(map(lambda a, b: b in ("NAME", a), path, pattern))]
    for name in dict.fromkeys(map(".".join, found)):
        value: Any = given.data
        for part in name.split("."):
            value = value[part]
        yield name, value, places(given.sources, name)


def explained_lines(explained: Explained) -> Iterator[str]:
    """The lines for people; values are as `config show` shows them."""
    yield explained.name
    yield f"  {explained.meaning.meaning}"
    yield f"  values    {_plain(explained.meaning.values)}"
    yield f"  default   {_plain(explained.meaning.default)}"
    for name, value, source in explained.given:
        alone = name == explained.name
        yield f"  value     {'' if alone else name + ' = '}{shown_value(name, value)}   ({source})"
    if explained.variable:
        yield f"  variable  {explained.variable}"
    for check in explained.checks:
        yield f"  checked   {check.about}   ({check.name})"


def explained_record(explained: Explained) -> dict[str, Any]:
    """``rlbuffer.explanation/1``."""
    return {
        "schema": "rlbuffer.explanation/1",
        "name": explained.name,
        "meaning": explained.meaning.meaning,
        "values": _plain(explained.meaning.values),
        "default": _plain(explained.meaning.default),
        "variable": explained.variable,
        "given": [
            {"name": name, "value": shown(name, value), "source": source} for name, value, source in explained.given
        ],
        "checked": [
            {"check": check.name, "text": check.about, "settings": list(check.settings)} for check in explained.checks
        ],
    }


def _plain(text: str) -> str:
    return text.replace("`", "")


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
