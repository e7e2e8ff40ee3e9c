"""One setting explained: what it means, may be and is, where its value comes from, and what it is checked against."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlbuffer.checks.loading import checks_of
from rlbuffer.config.explain import known_settings, meant_by, pattern_of, tables
from rlbuffer.config.loading import PREFIX, Given, places
from rlbuffer.errors import ConfigError
from rlbuffer_cli.text import as_json

LISTED_SETTINGS = 12
"""Settings of one last name that an error lists."""
_SECRET = re.compile(r"(?:^|[._])(?:api_?key|password|secret|token|credentials?)$", re.IGNORECASE)
"""Settings whose values nobody shall read over a shoulder: options of envs and samplers may hold keys of services."""


def explain(key: str, given: Given) -> list[dict[str, Any]]:
    """``rlbuffer.explanation/1`` of the setting `key`, or of those of the table `key`. The last part of a name is
    enough where it is unique.

    Raises:
        ConfigError: there is no such setting, or several.
    """
    pattern = pattern_of(key)
    inside = [table.settings for table in tables() if table.name == pattern]
    same = [name for name in known_settings() if name.rpartition(".")[2] == key]
    if pattern in known_settings():
        return [_explained(pattern, key, given)]
    if inside and pattern:
        return [_explained(setting.name, setting.name, given) for setting in inside[0]]
    if len(same) > 1:
        named = ", ".join(same[:LISTED_SETTINGS])
        raise ConfigError(f"{key!r} is the last part of several settings: {named}. Write one of them.", setting=key)
    if same:
        return [_explained(same[0], same[0], given)]
    raise ConfigError(f"{key} is not a setting.{meant_by(key)}", setting=key)


def _explained(name: str, asked: str, given: Given) -> dict[str, Any]:
    setting = known_settings()[name]
    return {
        "schema": "rlbuffer.explanation/1",
        "name": name,
        "meaning": setting.meaning,
        "values": setting.values.replace("`", ""),
        "default": setting.default.replace("`", ""),
        "variable": "" if "NAME" in name else PREFIX + name.replace(".", "__").upper(),
        "given": [
            {"name": setting_name, "value": shown(setting_name, value), "source": source}
            for setting_name, value, source in _values(name, asked, given)
        ],
        "checked": [
            {"check": check.name, "text": check.about, "settings": list(check.settings)} for check in checks_of(name)
        ],
    }


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


def explained_lines(explained: Mapping[str, Any]) -> Iterator[str]:
    """What :func:`explain` gives in lines for people; values are as `config show` shows them."""
    yield explained["name"]
    yield f"  {explained['meaning']}"
    yield f"  values    {explained['values']}"
    yield f"  default   {explained['default']}"
    for each in explained["given"]:
        name = "" if each["name"] == explained["name"] else f"{each['name']} = "
        value = "not set" if each["value"] is None else as_toml(each["value"])
        yield f"  value     {name}{value}   ({each['source']})"
    if explained["variable"]:
        yield f"  variable  {explained['variable']}"
    for check in explained["checked"]:
        yield f"  checked   {check['text']}   ({check['check']})"


def shown(name: str, value: Any) -> Any:
    """The value of a setting as people may see it."""
    from rlbuffer.store.server.address import HIDDEN, redacted

    if value and _SECRET.search(name):
        return HIDDEN
    return redacted(value) if name == "redis_url" and value else value


def as_toml(value: Any) -> str:
    """The value as a file of settings has it."""
    return json.dumps(as_json(value), default=str)
