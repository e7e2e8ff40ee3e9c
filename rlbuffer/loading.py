"""Settings from file, environment and flags, each with the place it came from.

Order: ``rlbuffer.toml`` (``--config``, ``RLBUFFER_CONFIG``, or the one in the current directory) -> ``RLBUFFER_*`` ->
flags; the last one wins. ``RLBUFFER_RUN`` is `run`, ``RLBUFFER_BATCHER__MAX_AGE`` is `batcher.max_age`: two
underscores stand for the dot.

Every error is one line that begins with the place: ``rlbuffer.toml:8  batcher.max_agee is not a setting. ...``
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from rlbuffer.cross_checks import check_together
from rlbuffer.errors import ConfigError
from rlbuffer.schema import Free, Leaf, Node, Section, children, run_schema
from rlbuffer.settings import RunSettings
from rlbuffer.toml_lines import key_lines

PREFIX = "RLBUFFER_"
DEFAULT_FILE = "rlbuffer.toml"
OTHER_VARIABLES = frozenset(
    {
        "RLBUFFER_CONFIG",
        "RLBUFFER_DEBUG",
        "RLBUFFER_REDIS_PASSWORD",
        "RLBUFFER_SERVER_BIN",
        "RLBUFFER_WEIGHTS_TOKEN",
    }
)
"""Variables that are not settings; RLBUFFER_TEST_* neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Settings and where each came from."""

    settings: RunSettings
    sources: Mapping[str, str]
    """Dotted name of every setting that was given -> ``rlbuffer.toml:7`` | ``RLBUFFER_RUN`` | ``--run``."""
    warnings: tuple[str, ...] = ()
    """Combinations that work but hardly as meant, one sentence each."""
    file: Path | None = None

    def source(self, name: str) -> str:
        """Where the setting `name` came from: its place, its section's place, or ``default``."""
        return place_of(name, self.sources) or "default"

    def values(self) -> Iterator[tuple[str, Any]]:
        """Every setting as (dotted name, value), in the order of the schema."""
        settings = self.settings
        values = settings.model_dump(exclude={"batcher"}) | {"batcher": settings.batcher.as_dict()}
        for name in type(settings).model_fields:
            yield from _flatten((name,), values[name])


def load(
    config: str | Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[str, Any]] = MappingProxyType({}),
) -> Loaded:
    """Loads the settings of a run.

    Args:
        config: The file; None: ``RLBUFFER_CONFIG``, else ``./rlbuffer.toml`` if there is one.
        environ: None: the process's environment.
        flags: Dotted name -> (flag as typed, value); a value of None was not given.

    Raises:
        ConfigError: a file that cannot be read, a setting or variable that does not exist, or a value out of range.
    """
    environ = os.environ if environ is None else environ
    data: dict[str, Any] = {}
    sources: dict[str, str] = {}
    schema = run_schema()
    file = _find(config, environ)
    if file is not None:
        data = _read(file, schema, sources)
    for variable, value in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or variable.startswith("RLBUFFER_TEST_"):
            continue
        if value == "":  # `RLBUFFER_RUN= rlbuffer ...` is how a shell unsets one
            continue
        path, parsed = _variable(variable, value, schema, data)
        _put(data, path, parsed)
        sources[".".join(path)] = variable
    for name, (flag, value) in flags.items():
        if value is not None:
            _put(data, tuple(name.split(".")), value)
            sources[name] = flag
    if data.get("redis_url") == "":
        data["redis_url"] = None
    if isinstance(data.get("batcher"), dict):
        data["batcher"].setdefault("row_tokens", RunSettings().batcher.row_tokens)
    try:
        settings = RunSettings.model_validate(data)
    except ValidationError as error:
        raise _translated(error, sources) from None
    except ConfigError as error:
        raise _placed(error, sources) from None
    warnings = check_together(settings, lambda *names: _places(names, sources))
    return Loaded(settings=settings, sources=MappingProxyType(sources), warnings=warnings, file=file)


def place_of(name: str, sources: Mapping[str, str]) -> str:
    """Place of `name`, else of something inside it, else of what it is in; "" when it was never given."""
    if name in sources:
        return sources[name]
    for other, place in sources.items():
        if other.startswith(f"{name}."):
            return place
    return ""


# -- file ----------------------------------------------------------------------------------------------------------
def _find(config: str | Path | None, environ: Mapping[str, str]) -> Path | None:
    if config is not None:
        return Path(config)
    if environ.get("RLBUFFER_CONFIG"):
        return Path(environ["RLBUFFER_CONFIG"])
    default = Path(DEFAULT_FILE)
    return default if default.is_file() else None


def _read(file: Path, schema: Section, sources: dict[str, str]) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config file {file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text (byte {error.start})") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_toml_error(file, str(error))) from None
    lines = key_lines(text)

    def place(path: tuple[str, ...]) -> str:
        return f"{file}:{lines.get(path) or lines.get(path[:-1]) or 1}"

    _check_names(data, schema, (), place)
    for path in _leaf_paths(data):
        sources[".".join(path)] = place(path)
    return data


def _toml_error(file: Path, message: str) -> str:
    head, _, tail = message.rpartition(" (at line ")
    if not head:
        return f"{file} is not valid TOML: {message}"
    line, _, column = tail.rstrip(")").partition(", column ")
    return f"{file}:{line}  not valid TOML: {head} (column {column})"


def _leaf_paths(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaf_paths(value, (*path, key))
        else:
            yield (*path, key)


def _check_names(value: Any, node: Node, path: tuple[str, ...], place: Any) -> None:
    if isinstance(node, Free | Leaf):
        return
    if not isinstance(value, Mapping):
        kind = "a section" if isinstance(node, Section) else "a table"
        raise ConfigError(f"{place(path)}  {'.'.join(path)} is {kind} ([{'.'.join(path)}]), got {value!r}")
    for key, inner in value.items():
        child = node.fields.get(key) if isinstance(node, Section) else node.child
        if child is None:
            full = (*path, key)
            siblings = list(node.fields) if isinstance(node, Section) else []
            raise ConfigError(f"{place(full)}  {_unknown(full, siblings)}", setting=".".join(full))
        _check_names(inner, child, (*path, key), place)


def _unknown(path: tuple[str, ...], siblings: list[str]) -> str:
    """What to say of a name that is none; the same word elsewhere first, then the nearest beside it, then anywhere."""
    known = run_schema().names()
    elsewhere = {name[-1]: name for name in reversed(known) if "*" not in name[-1]}
    found = elsewhere.get(path[-1])
    if found is None:
        close = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.6)
        found = (*path[:-1], close[0]) if close else None
    if found is None:
        close = difflib.get_close_matches(path[-1], list(elsewhere), n=1, cutoff=0.75)
        found = elsewhere[close[0]] if close else None
    nearest = f" Did you mean {'.'.join(found).replace('*', 'NAME')}?" if found else ""
    return f"{'.'.join(path)} is not a setting.{nearest or ' `rlbuffer config show` lists all settings.'}"


# -- environment -----------------------------------------------------------------------------------------------------
def _variable(variable: str, text: str, schema: Section, data: Mapping[str, Any]) -> tuple[tuple[str, ...], Any]:
    """(path, value) of a variable. Names that the user chose are matched with those in the file, ignoring case."""
    path: list[str] = []
    node: Node | None = schema
    known: Any = data
    for part in variable.removeprefix(PREFIX).lower().split("__"):
        names = list(known) if isinstance(known, Mapping) else []
        name = next((n for n in names if n.lower() == part), part)
        node = children(node, name) if node is not None else None
        path.append(name)
        known = known.get(name) if isinstance(known, Mapping) else None
        if node is None:
            break
    if node is None or isinstance(node, Section):
        raise ConfigError(f"{variable} is not a variable that rlbuffer knows.{_suggest_variable(variable)}")
    if isinstance(node, Leaf) and not (node.is_structured or text[:1] in "[{"):
        return tuple(path), text
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    _check_names(value, node, tuple(path), lambda path: variable)
    return tuple(path), value


def _suggest_variable(variable: str) -> str:
    names = [PREFIX + "__".join(k).upper() for k in run_schema().names() if "*" not in k] + sorted(OTHER_VARIABLES)
    close = difflib.get_close_matches(variable, names, n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else " A setting's variable is e.g. RLBUFFER_BATCHER__MAX_AGE."


def _put(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        inner = data.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = data[part] = {}
        data = inner
    data[path[-1]] = value


# -- errors ----------------------------------------------------------------------------------------------------------
def _translated(error: ValidationError, sources: Mapping[str, str]) -> ConfigError:
    """The first of pydantic's complaints as one line; the rest usually follow from it."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        section = name.rpartition(".")[0]
        text = f"{name} is required"
        return ConfigError(_with_place(text, place_of(section, sources)), setting=name)
    message = first["msg"].removeprefix("Value error, ")
    text = f"{name} = {first['input']!r}: {message[:1].lower()}{message[1:]}"
    place = place_of(name, sources)
    while not place and "." in name:
        name = name.rpartition(".")[0]
        place = place_of(name, sources)
    return ConfigError(_with_place(text, place), setting=".".join(str(part) for part in first["loc"]))


def _placed(error: ConfigError, sources: Mapping[str, str]) -> ConfigError:
    return ConfigError(_with_place(str(error), place_of(error.setting, sources)), setting=error.setting)


def _with_place(text: str, place: str) -> str:
    return f"{place}  {text}" if place else text


def _places(names: tuple[str, ...], sources: Mapping[str, str]) -> str:
    """Places of several settings, a repeated file name left out: ``rlbuffer.toml:9, :21``."""
    out: list[str] = []
    last = ""
    for name in names:
        place = place_of(name, sources) or "default"
        file, colon, line = place.rpartition(":")
        out.append(f":{line}" if colon and file == last else place)
        last = file if colon else ""
    return ", ".join(out)


def _flatten(path: tuple[str, ...], value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten((*path, str(key)), inner)
    else:
        yield ".".join(path), value
