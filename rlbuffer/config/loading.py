"""Settings from file, environment and flags, each with the place it came from. The last one wins.

``rlbuffer.toml`` (``--config``, ``RLBUFFER_CONFIG``, or the one in the current directory), then ``RLBUFFER_*``, then
flags. ``RLBUFFER_RUN`` is `run`, ``RLBUFFER_BATCHER__MAX_AGE`` is `batcher.max_age`: two underscores stand for the dot.
A mistake is one line that begins with its place; all that is wrong with single values is said at once.
"""

from __future__ import annotations

import copy
import errno
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from rlbuffer.config.explain import free_table_of, meant_by, parted
from rlbuffer.config.refusal import refusal, told
from rlbuffer.config.settings import RunSettings, WorkerSettings
from rlbuffer.errors import ConfigError
from rlbuffer.process.variables import is_service_link, variable

PREFIX = "RLBUFFER_"
DEFAULT_FILE = "rlbuffer.toml"
PASSWORDS = ("RLBUFFER_REDIS_PASSWORD", "RLBUFFER_REDIS_PASSWORD_FILE")
OTHER_VARIABLES = frozenset(
    {
        "RLBUFFER_CONFIG",
        "RLBUFFER_DEBUG",
        "RLBUFFER_GATEWAY_TOKEN",
        "RLBUFFER_GATEWAY_TOKEN_FILE",
        "RLBUFFER_REDIS_PASSWORD",
        "RLBUFFER_SERVER_BIN",
        "RLBUFFER_WEIGHTS_TOKEN",
    }
)
"""Variables that are not settings; RLBUFFER_TEST_* and the links of Kubernetes' Services neither."""
Path_ = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What was given, before anything of it is checked."""

    data: dict[str, Any]
    sources: dict[str, str]
    """Dotted name of every setting that was given -> ``rlbuffer.toml:7`` | ``RLBUFFER_RUN`` | ``--run``."""
    file: Path | None = None

    def put(self, path: Path_, value: Any, source: str) -> None:
        """Sets a value, and its source in place of those of everything inside it."""
        data = self.data
        for part in path[:-1]:
            if not isinstance(data.get(part), dict):
                data[part] = {}
            data = data[part]
        data[path[-1]] = value
        name = ".".join(path)
        for other in [s for s in self.sources if s == name or s.startswith(f"{name}.")]:
            del self.sources[other]
        self.sources.update({".".join(leaf): source for leaf in _leaves(value, path)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Settings and where each came from."""

    settings: RunSettings
    sources: Mapping[str, str]
    """As those of :class:`Given`."""
    file: Path | None = None
    warnings: tuple[str, ...] = ()
    """Combinations that work but hardly as meant, one sentence each (:func:`rlbuffer.checks.loading.load`)."""

    def place(self, *names: str) -> str:
        """Where these settings come from: ``rlbuffer.toml:9, :21``, or ``default``."""
        return places(self.sources, *names) or "default"

    def values(self) -> Iterator[tuple[str, Any]]:
        """Every setting as (dotted name, value), in the order of the records."""
        data = self.settings.model_dump(mode="json")
        for path in _leaves(data, ()):
            value: Any = data
            for part in path:
                value = value[part]
            yield ".".join(path), value


def load(
    config: str | Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[str, Any]] = MappingProxyType({}),
) -> Loaded:
    """Loads the settings of a run, each value checked by itself.

    Args:
        config: The file; None: ``RLBUFFER_CONFIG``, else ``./rlbuffer.toml`` if there is one.
        environ: None: the process's environment.
        flags: Dotted name -> (flag as typed, value); a value of None was not given.

    Raises:
        ConfigError: a file that cannot be read, settings or variables that do not exist, values out of range.
    """
    given = read(config, environ=environ, flags=flags)
    settings = validated(given.data, given.sources)
    return Loaded(settings=settings, sources=MappingProxyType(given.sources), file=given.file)


def sound(given: Given) -> tuple[RunSettings, dict[str, str]]:
    """The settings without those that are wrong by themselves; and a line for each of these -> its name.

    A wrong one counts as not given. A table that cannot be without it counts as not given, too, and nothing more is
    said of it.
    """
    data: dict[str, Any] = copy.deepcopy(given.data)
    wrong: dict[str, str] = {}
    while True:
        try:
            return RunSettings.model_validate(data), wrong
        except ValidationError as error:
            complaints = told(error, located=lambda name: located(given.sources, name), meant=_meant_in(given.sources))
        before = [*wrong.values()]
        for text, path in complaints.items():
            if not concerns(".".join(path), before):
                wrong[text] = ".".join(path)
        forgotten = [path for path in complaints.values() if _forget(data, path)]
        if not forgotten:
            return RunSettings(), wrong  # what cannot be taken out alone


def concerns(name: str, others: Iterable[str]) -> bool:
    """True for a setting that is one of `others`, or is in the table that one of them is, or is a table that has it."""
    return any(f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") for other in others)


def _forget(data: dict[str, Any], path: Path_) -> bool:
    """Takes a value out, or the innermost table of its name that is there. False: nothing of it is there."""
    for number, part in enumerate(path):
        inner = data.get(part)
        if part not in data:
            return False
        if number == len(path) - 1 or not isinstance(inner, dict) or path[number + 1] not in inner:
            del data[part]
            return True
        data = inner
    return False


def validated(data: Mapping[str, Any], sources: Mapping[str, str] = MappingProxyType({})) -> RunSettings:
    """The settings that `data` holds. Raises ConfigError with all that is wrong with single values."""
    try:
        return RunSettings.model_validate(data)
    except ValidationError as error:
        raise refusal(error, located=lambda name: located(sources, name), meant=_meant_in(sources)) from None


def _meant_in(sources: Mapping[str, str]) -> Callable[[str], str]:
    """:func:`meant_by`, and of a variable in which one underscore stands for a dot the variable that is right."""

    def meant(name: str) -> str:
        if sources.get(name, "").startswith(PREFIX) and (setting := parted(name)):
            right = PREFIX + setting.replace(".", "__").upper()
            return f" Did you mean {right}? Two underscores stand for the dot of {setting}."
        return meant_by(name)

    return meant


def read(
    config: str | Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[str, Any]] = MappingProxyType({}),
) -> Given:
    """Reads as :func:`load` does, and checks nothing.

    Raises:
        ConfigError: a file that cannot be read.
    """
    environ = os.environ if environ is None else environ
    named = config or variable("RLBUFFER_CONFIG", environ)
    file = Path(named or DEFAULT_FILE)
    given = _read_toml(file) if named or file.is_file() else Given(data={}, sources={})
    for key in sorted(environ):
        # `RLBUFFER_RUN= rlbuffer ...` is how a shell unsets one.
        if _is_setting(key) and (text := variable(key, environ)) and not is_service_link(key, text):
            path = tuple(_as_written(given.data, key.removeprefix(PREFIX).lower().split("__")))
            given.put(path, _value(text, is_free=bool(free_table_of(".".join(path)))), key)
    for name, (flag, value) in flags.items():
        if value is not None:
            given.put(tuple(name.split(".")), value, flag)
    place = given.sources.get("redis_url", "")
    if not named and given.data.get("redis_url") and place.startswith(f"{file}:"):
        # A password of the environment would go to an address that whoever made this folder has chosen.
        for password in PASSWORDS:
            if variable(password, environ):
                raise ConfigError(
                    f"{place}  redis_url is not given the password of {password}: the file was found in the current "
                    "folder, and nobody named it. Set RLBUFFER_REDIS_URL or --redis to the address, or name the file",
                    setting="redis_url",
                )
    if str(given.data.get("deterministic", False)).lower() in ("true", "1", "yes", "on"):
        _determine(given)
    return given


def _determine(given: Given) -> None:
    """Sets what ``deterministic = true`` implies where nothing else sets it; contradictions are found later."""
    source = f"deterministic, {given.sources['deterministic']}"
    tables = given.data.get("worker")
    workers = {n: t for n, t in tables.items() if isinstance(t, dict)} if isinstance(tables, dict) else {}
    batcher = given.data.get("batcher")
    groups = batcher.get("step_groups") if isinstance(batcher, dict) else None
    for worker in workers.values():
        groups = groups or worker.get("groups_in_flight")
    groups = groups or WorkerSettings.model_fields["groups_in_flight"].default
    names = {"batcher.max_age": 0, "batcher.lookahead": 0, "batcher.step_groups": groups}
    for name, value in (names | {f"worker.{worker}.groups_in_flight": groups for worker in workers}).items():
        if name not in given.sources:
            given.put(tuple(name.split(".")), value, source)


TYPED = ("--run", "RLBUFFER_RUN")
"""Sources of a run's name that somebody has typed for one command."""


def meant_run(loaded: Loaded, runs: Mapping[str, float], *, is_named: bool = False) -> str:
    """The run to look at where nothing shall be begun: the one that a flag or a variable names, or the file where the
    server has it, else the one that was opened last.

    Args:
        runs: those of the server -> when each was opened.
        is_named: the settings' run counts, wherever it comes from.
    """
    run, source = loaded.settings.run, loaded.place("run")
    if is_named or source in TYPED or not runs or (run in runs and source != "default"):
        return run
    return max(runs, key=lambda name: runs[name])


def folders_of(file: Path | None) -> list[str]:
    """The folders in which modules of the user's own are looked for, after ``sys.path``: the config file's folder."""
    return [] if file is None else [str(file.absolute().parent)]


# -- file --------------------------------------------------------------------------------------------------------------
_WORD = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
_HEAD = re.compile(rf"\s*\[\[?\s*({_WORD}(?:\s*\.\s*{_WORD})*)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(rf"\s*({_WORD}(?:\s*\.\s*{_WORD})*)\s*=")


_TOML_IN_WORDS = {
    "Cannot overwrite": "the name has a value already",
    "Cannot declare": "the table is there already",
    "Expected '=' after": "NAME = VALUE is expected, or [TABLE]",
    "Expected ']'": "the ] of a table's name is missing",
    "Expected newline": "something stands behind the value, on the same line: begin another line, or a comment with #",
    "Invalid initial character": "a name is expected: letters, digits, _ and -",
    "Invalid statement": "NAME = VALUE is expected, or [TABLE]",
    "Invalid value": "a value is expected: text stands in quotes",
    "Unclosed array": "the ] of a list is missing",
    "Unclosed inline": "the } of a table is missing",
    "Unterminated string": "the closing quote is missing",
    "Illegal character": "a character that no file of settings may have",
}
"""How a refusal of tomllib begins -> what to say."""


def _read_toml(file: Path) -> Given:
    try:
        text = file.read_text(encoding="utf-8-sig")
        data = tomllib.loads(text)
    except OSError as error:
        why = {errno.ENOENT: "there is none. `rlbuffer config init` writes one"}
        why[errno.EISDIR] = "it is a directory, name a file in it"
        reason = why.get(error.errno or 0) or error.strerror or error
        raise ConfigError(f"cannot read the config file {file}: {reason}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        message = re.sub(r" \(at .*\)$", "", str(error))
        reason = next((words for begin, words in _TOML_IN_WORDS.items() if message.startswith(begin)), message)
        raise ConfigError(f"{file}{f':{line[1]}' if line else ''}  not valid TOML: {reason}") from None
    lines = key_lines(text)
    sources = {}
    for path in _leaves(data, ()):
        line_number = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), 1)
        sources[".".join(path)] = f"{file}:{line_number}"
    return Given(data=data, sources=sources, file=file)


def key_lines(text: str) -> dict[Path_, int]:
    """Path of each table, and of each key that begins a line -> its line. One in an inline table has its table's."""
    lines: dict[Path_, int] = {}
    table: Path_ = ()
    for number, line in enumerate(text.splitlines(), 1):
        if head := _HEAD.match(line):
            table = _parts(head[1])
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault(table + _parts(key[1]), number)
    return lines


def _parts(dotted: str) -> Path_:
    return tuple(part.strip("\"'") for part in re.findall(_WORD, dotted))


def _leaves(value: Any, path: Path_) -> Iterator[Path_]:
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    else:
        yield path


# -- environment -------------------------------------------------------------------------------------------------------
def _is_setting(variable: str) -> bool:
    return variable.startswith(PREFIX) and variable not in OTHER_VARIABLES and variable[9:14] != "TEST_"


def _as_written(data: Any, parts: list[str]) -> Iterator[str]:
    """Names that the user chose are matched with those of the file, ignoring case."""
    for part in parts:
        names = list(data) if isinstance(data, Mapping) else []
        name = next((n for n in names if n.lower() == part), part)
        data = data.get(name) if isinstance(data, Mapping) else None
        yield name


def _value(text: str, *, is_free: bool) -> Any:
    """A variable's value: TOML where it is a list or a table or the user's own, else text that the record reads."""
    if is_free or text[:1] in "[{":
        try:
            return tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            pass
    return text


# -- places ------------------------------------------------------------------------------------------------------------
def places(sources: Mapping[str, str], *names: str) -> str:
    """Places of several settings, a repeated file name left out: ``rlbuffer.toml:9, :21``; "" for none."""
    out: list[str] = []
    last = ""
    for name in names:
        inside = (place for other, place in sources.items() if other.startswith(f"{name}."))
        if place := sources.get(name) or next(inside, ""):
            file, colon, line = place.rpartition(":")
            out.append(f":{line}" if colon and file == last else place)
            last = file if colon else ""
    return ", ".join(out)


def located(sources: Mapping[str, str], *names: str) -> str:
    """The places, of the table where a setting is missing in it; "" where all are defaults. Behind the line of a file
    stand two blanks; a flag stands before what it sets as it was typed."""
    given = []
    for name in names:
        while not places(sources, name) and "." in name:
            name = name.rpartition(".")[0]
        given.append(name)
    found = places(sources, *dict.fromkeys(given))
    return f"{found}{' ' if found.startswith('--') else '  '}" if found else ""
