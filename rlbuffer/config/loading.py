"""Settings from file, environment and flags, each with the place it came from.

Order: ``rlbuffer.toml`` (``--config``, ``RLBUFFER_CONFIG``, or the one in the current directory) -> ``RLBUFFER_*`` ->
flags; the last one wins. ``RLBUFFER_RUN`` is `run`, ``RLBUFFER_BATCHER__MAX_AGE`` is `batcher.max_age`: two
underscores stand for the dot.

Every mistake is one line that begins with the place: ``rlbuffer.toml:8  batcher.max_agee is not a setting. ...``. All
are found at once: what is wrong is noted and left out, and the rest is looked at as if it had not been given. A
mistake that may only follow from another one is not named.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from rlbuffer.config.cross_checks import Checks, together
from rlbuffer.config.doubts import doubts
from rlbuffer.config.mistakes import Mistake, Mistakes, Places, complaint_at, place_of, places_of, with_place
from rlbuffer.config.sampling import why_not
from rlbuffer.config.setting_tree import Free, Leaf, Node, Section, children, run_schema
from rlbuffer.config.settings import RunSettings, WorkerSettings
from rlbuffer.config.toml_lines import key_lines
from rlbuffer.errors import ConfigError
from rlbuffer.state.text import did_you_mean, nearest

PREFIX = "RLBUFFER_"
DEFAULT_FILE = "rlbuffer.toml"
PASSWORDS = ("RLBUFFER_REDIS_PASSWORD", "RLBUFFER_REDIS_PASSWORD_FILE")
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
        """The source of the setting `name`: its place, its section's place, or ``default``."""
        return place_of(name, self.sources) or "default"

    def values(self) -> Iterator[tuple[str, Any]]:
        """Every setting as (dotted name, value), in the order of the schema."""
        settings = self.settings
        values = settings.model_dump(exclude={"batcher"}) | {"batcher": settings.batcher.as_dict()}
        for name in type(settings).model_fields:
            yield from _flatten((name,), values[name])


def _nothing_more(settings: RunSettings, places: Places, file: Path | None) -> Iterator[Mistake]:
    return iter(())


def load(
    config: str | Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[str, Any]] = MappingProxyType({}),
    checks: Checks = _nothing_more,
) -> Loaded:
    """Loads the settings of a run.

    Args:
        config: The file; None: ``RLBUFFER_CONFIG``, else ``./rlbuffer.toml`` if there is one.
        environ: None: the process's environment.
        flags: Dotted name -> (flag as typed, value); a value of None was not given.
        checks: further ones than those of the settings alone (:func:`rlbuffer.run.loading.load`).

    Raises:
        ConfigError: a file that cannot be read, settings or variables that do not exist, values out of range or that
            can never work together, and what `checks` find: all of it in one message.
    """
    loaded, mistakes = examine(config, environ=environ, flags=flags, checks=checks)
    mistakes.refuse()
    return loaded


def examine(
    config: str | Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[str, Any]] = MappingProxyType({}),
    checks: Checks = _nothing_more,
) -> tuple[Loaded, Mistakes]:
    """Loads as :func:`load` does, and gives the settings with what is wrong left out, beside everything that is.

    Raises:
        ConfigError: a file that cannot be read, or mistakes that nothing can be left out of.
    """
    environ = os.environ if environ is None else environ
    data: dict[str, Any] = {}
    sources: dict[str, str] = {}
    wrong = Mistakes()
    schema = run_schema()
    file = _find(config, environ)
    if file is not None:
        data = _read(file, schema, sources, wrong)
    for variable, value in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or variable.startswith("RLBUFFER_TEST_"):
            continue
        if value == "":  # `RLBUFFER_RUN= rlbuffer ...` is how a shell unsets one
            continue
        given = _variable(variable, value, schema, data, wrong)
        if given is not None:
            path, parsed = given
            _put(data, path, parsed)
            # A table takes the place of the file's, with everything that was in that.
            for name in [name for name in sources if name.startswith(f"{'.'.join(path)}.")]:
                del sources[name]
            is_table = isinstance(parsed, Mapping) and bool(parsed)
            sources |= {".".join(leaf): variable for leaf in (_leaf_paths(parsed, path) if is_table else [path])}
    for name, (flag, value) in flags.items():
        if value is not None:
            _put(data, tuple(name.split(".")), value)
            sources[name] = flag
    if data.get("redis_url") == "":
        data["redis_url"] = None
    if config is None and not environ.get("RLBUFFER_CONFIG") and sources.get("redis_url", "").startswith(f"{file}:"):
        _keep_password(str(data["redis_url"] or ""), environ, sources["redis_url"], wrong)
    if str(data.get("deterministic", False)).lower() in ("true", "1", "yes", "on"):
        _determine(data, sources)
    settings = _validated(data, sources, wrong)

    def places(*names: str) -> str:
        return places_of(names, sources)

    warnings = doubts(settings, places)
    for mistake in (*together(settings, places), *checks(settings, places, file)):
        if mistake.works:
            warnings += (mistake.text,)
        else:
            wrong.note(mistake.text, *mistake.settings)
    return Loaded(settings=settings, sources=MappingProxyType(sources), warnings=warnings, file=file), wrong


def _keep_password(url: str, environ: Mapping[str, str], place: str, wrong: Mistakes) -> None:
    """Notes that a password of the environment would go to an address that whoever made this folder has chosen."""
    given = [name for name in PASSWORDS if environ.get(name)]
    if url and given:
        wrong.note(
            f"{place}  redis_url is not given the password of {given[0]}: the file was found in the current folder, "
            "and nobody named it. Set RLBUFFER_REDIS_URL or --redis to the address, or name the file by --config",
            "redis_url",
        )


def _determine(data: dict[str, Any], sources: dict[str, str]) -> None:
    """Sets what ``deterministic = true`` implies where nothing else sets it; contradictions are found later."""
    place = f"deterministic, {sources['deterministic']}"
    workers = data.get("worker")
    named = {f"worker.{name}.groups_per_batch": options for name, options in workers.items()} if workers else {}
    sizes = [o["groups_per_batch"] for o in named.values() if isinstance(o, dict) and "groups_per_batch" in o]
    batcher = data.get("batcher")
    own = batcher.get("step_groups") if isinstance(batcher, dict) else None
    groups = own or (sizes or [WorkerSettings.model_fields["groups_per_batch"].default])[0]
    implied = {"batcher.max_age": 0, "batcher.lookahead": 0, "batcher.step_groups": groups} | dict.fromkeys(
        named, groups
    )
    for name, value in implied.items():
        if name not in sources:
            _put(data, tuple(name.split(".")), value)
            sources[name] = place


def folders_of(file: Path | None) -> list[str]:
    """The folders in which modules of the user's own are looked for, after ``sys.path``: the config file's folder."""
    return [] if file is None else [str(file.absolute().parent)]


def _validated(data: dict[str, Any], sources: Mapping[str, str], wrong: Mistakes) -> RunSettings:
    """The settings, what is wrong with them noted and left out."""
    while True:
        try:
            return RunSettings.model_validate(data)
        except ValidationError as error:
            mistakes = [(complaint_at(e, sources), tuple(str(part) for part in e["loc"])) for e in error.errors()]
        except ConfigError as error:
            mistakes = [(with_place(str(error), place_of(error.setting, sources)), tuple(error.setting.split(".")))]
        names = [_leave_out(data, path) for _, path in mistakes]
        for (text, path), name in zip(mistakes, names, strict=True):
            wrong.note(text, ".".join(path))
            wrong.leave_out(*[name] * bool(name))
        if not any(names):
            wrong.refuse()


def _leave_out(data: dict[str, Any], path: tuple[str, ...]) -> str:
    """Removes the innermost table entry on `path`. -> its name; "" when nothing of it is there (any more)."""
    inner: Any = data
    last: tuple[dict[str, Any], int] | None = None
    for depth, part in enumerate(path):
        if not isinstance(inner, dict) or part not in inner:
            break
        last, inner = (inner, depth), inner[part]
    if last is None:
        return ""
    table, depth = last
    del table[path[depth]]
    return ".".join(path[: depth + 1])


# -- file ----------------------------------------------------------------------------------------------------------
def _find(config: str | Path | None, environ: Mapping[str, str]) -> Path | None:
    if config is not None:
        return Path(config)
    if environ.get("RLBUFFER_CONFIG"):
        return Path(environ["RLBUFFER_CONFIG"])
    default = Path(DEFAULT_FILE)
    return default if default.is_file() else None


def _read(file: Path, schema: Section, sources: dict[str, str], wrong: Mistakes) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8-sig")
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

    for path in _leaf_paths(data):
        sources[".".join(path)] = place(path)
    known: dict[str, Any] = _known(data, schema, (), place, wrong)
    return known


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


def _known(
    value: Any, node: Node, path: tuple[str, ...], place: Callable[[tuple[str, ...]], str], wrong: Mistakes
) -> Any:
    """`value` without the settings that there are not; each is noted."""
    if isinstance(node, Free | Leaf):
        return value
    if not isinstance(value, Mapping):
        kind = "a section" if isinstance(node, Section) else "a table"
        name = ".".join(path)
        wrong.note(f"{place(path)}  {name} is {kind} ([{name}]), got {value!r}", name)
        wrong.leave_out(name)
        return {}
    out = {}
    for key, inner in value.items():
        child = node.fields.get(key) if isinstance(node, Section) else node.child
        full = (*path, key)
        if child is None:
            siblings = list(node.fields) if isinstance(node, Section) else []
            text, meant = _unknown(full, siblings)
            wrong.note(f"{place(full)}  {text}", ".".join(full))
            wrong.leave_out(*[".".join(meant)] * bool(meant))
        else:
            out[key] = _known(inner, child, full, place, wrong)
    return out


def _unknown(path: tuple[str, ...], siblings: list[str]) -> tuple[str, tuple[str, ...]]:
    """The sentence about a name that is no setting, and the name that may have been meant: the same word elsewhere
    first, then the nearest beside it, then anywhere."""
    reason = why_not(path[-1]) if path[0] in ("worker", "eval") and len(path) == 3 else ""
    if reason:
        return f"{'.'.join(path)} is not a setting: {reason}.", ()
    known = run_schema().names()
    elsewhere = {name[-1]: name for name in reversed(known) if "*" not in name[-1]}
    meant = elsewhere.get(path[-1])
    if meant is None:
        sibling = nearest(path[-1], siblings)
        meant = (*path[:-1], sibling) if sibling else None
    if meant is None:
        meant = elsewhere.get(nearest(path[-1], elsewhere, cutoff=0.75))
    hint = f" Did you mean {'.'.join(meant).replace('*', 'NAME')}?" if meant else ""
    text = f"{'.'.join(path)} is not a setting.{hint or ' `rlbuffer config show` lists all settings.'}"
    return text, meant or ()


# -- environment -----------------------------------------------------------------------------------------------------
def _variable(
    variable: str, text: str, schema: Section, data: Mapping[str, Any], wrong: Mistakes
) -> tuple[tuple[str, ...], Any] | None:
    """(path, value) of a variable; None when there is no such one. Names that the user chose are matched with those in
    the file, ignoring case."""
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
        wrong.note(f"{variable} is not a variable that rlbuffer knows.{_suggest_variable(variable)}", variable)
        return None
    if isinstance(node, Leaf) and not (node.is_structured or text[:1] in "[{"):
        return tuple(path), text
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    return tuple(path), _known(value, node, tuple(path), lambda path: variable, wrong)


def _suggest_variable(variable: str) -> str:
    names = [PREFIX + "__".join(k).upper() for k in run_schema().names() if "*" not in k] + sorted(OTHER_VARIABLES)
    return did_you_mean(variable, names, otherwise=" A setting's variable is e.g. RLBUFFER_BATCHER__MAX_AGE.")


def _put(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        inner = data.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = data[part] = {}
        data = inner
    data[path[-1]] = value


def _flatten(path: tuple[str, ...], value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten((*path, str(key)), inner)
    else:
        yield ".".join(path), value
