"""One setting explained: what it means, may be and is, where its value comes from, and what it is checked against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlbuffer.config.loading import PREFIX, Loaded
from rlbuffer.config.meanings import SettingMeaning, tables
from rlbuffer.config.rules import Rule, rules_of
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError
from rlbuffer.state.text import did_you_mean
from rlbuffer_cli.render.settings import shown, shown_value

LISTED_SETTINGS = 12
"""Settings of one last name that an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A setting; its name has NAME where the user chooses one."""

    name: str
    meaning: SettingMeaning
    rules: tuple[Rule, ...]
    given: Sequence[tuple[str, Any, str]]
    """(name, value, source) in the settings at hand: one, or one for each name that the user has chosen."""

    @property
    def variable(self) -> str:
        """The environment variable; "" where the name is the user's."""
        return "" if "NAME" in self.name else PREFIX + self.name.replace(".", "__").upper()


def known() -> dict[str, SettingMeaning]:
    """Every setting by its whole name."""
    return {
        f"{table.path}.{setting.name}".lstrip("."): setting
        for table in tables(RunSettings)
        for setting in table.settings
    }


def explain(key: str, loaded: Loaded) -> list[Explained]:
    """The setting `key`, or those of the table `key`. The last part of a name is enough where it is unique.

    Raises:
        ConfigError: there is no such setting, or several.
    """
    settings = known()
    pattern = _pattern(key, settings)
    if pattern:
        return [_explained(pattern, key, settings, loaded)]
    inside = [name for name in settings if name.rpartition(".")[0] == key and key]
    if inside:
        return [_explained(name, name, settings, loaded) for name in inside]
    same = [name for name in settings if name.rpartition(".")[2] == key]
    if len(same) == 1:
        return [_explained(same[0], same[0], settings, loaded)]
    if same:
        named = ", ".join(same[:LISTED_SETTINGS])
        raise ConfigError(f"{key!r} is the last part of several settings: {named}. Write one of them.", setting=key)
    # Tables by their whole names, settings by the last part of theirs, too.
    names = {*settings, *(name.rpartition(".")[0] for name in settings)}
    near = names | {name.rpartition(".")[2] for name in settings}
    hint = did_you_mean(key, names if "." in key else near) or did_you_mean(key.rpartition(".")[2], near)
    raise ConfigError(f"{key} is not a setting.{hint or ' `rlbuffer config show` lists all settings.'}", setting=key)


def _pattern(key: str, settings: Mapping[str, SettingMeaning]) -> str:
    """The name in the tables of `key`, which may have a name of the user's where they have NAME; "" for none."""
    parts = key.split(".")
    for name in settings:
        if name == key:
            return name
        other = name.split(".")
        if len(other) == len(parts) and all(b in ("NAME", a) for a, b in zip(parts, other, strict=True)):
            return name
    return ""


def _explained(name: str, asked: str, settings: Mapping[str, SettingMeaning], loaded: Loaded) -> Explained:
    return Explained(name=name, meaning=settings[name], rules=rules_of(name), given=list(_given(name, asked, loaded)))


def _given(name: str, asked: str, loaded: Loaded) -> Iterator[tuple[str, Any, str]]:
    data = loaded.settings.model_dump(exclude={"batcher"}) | {"batcher": loaded.settings.batcher.as_dict()}
    parts = name.split(".")
    if "NAME" not in parts:
        yield name, _at(data, parts), loaded.source(name)
        return
    place = parts.index("NAME")
    table = _at(data, parts[:place])
    chosen = asked.split(".")[place]
    for own in table if isinstance(table, Mapping) else ():
        if chosen in ("NAME", own):
            whole = [*parts[:place], own, *parts[place + 1 :]]
            yield ".".join(whole), _at(data, whole), loaded.source(".".join(whole))


def _at(data: Any, path: Sequence[str]) -> Any:
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


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
    for rule in explained.rules:
        others = ", ".join(name for name in rule.settings if name != explained.name)
        kind = "checked" if rule.is_strict else "warned"
        yield f"  {kind:<9} {rule.text}   (with {others})"


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
            {"text": rule.text, "settings": list(rule.settings), "refused": rule.is_strict} for rule in explained.rules
        ],
    }


def _plain(text: str) -> str:
    return text.replace("`", "")
