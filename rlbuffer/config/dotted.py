"""The user's own functions, named by a dotted path: ``package.module:name``."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from rlbuffer.errors import ConfigError
from rlbuffer.state.text import did_you_mean


def load(setting: str, path: str, takes: str) -> Any:
    """Loads the callable that `path` names. A class is called without arguments first.

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
        target = named() if isinstance(named, type) else named
    except (Exception, SystemExit) as error:  # the user's own code may raise anything while it is imported
        raise refused(setting, path, f"cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(target):
        raise refused(setting, path, f"is not callable but {type(target).__name__}: it takes {takes}")
    return target


def refused(setting: str, path: str, why: str) -> ConfigError:
    """The error of a function of the user's own."""
    return ConfigError(f"{setting} = {path!r} {why}", setting=setting)


FOLDERS: list[str] = []
"""Folders of the user's modules that this process looks in beside those of Python: the config file's."""


def make_importable(folders: Sequence[str]) -> list[str]:
    """Lets modules in `folders` be imported here, and in the processes of a run that this one starts.

    They come last on ``sys.path``, so that a file there takes no installed module's place. -> the ones that are new.
    """
    added = [folder for folder in folders if folder not in FOLDERS]
    FOLDERS.extend(added)
    sys.path.extend(added)
    return added


def forget(folders: Sequence[str]) -> None:
    """Takes back what :func:`make_importable` has added."""
    for folder in folders:
        FOLDERS.remove(folder)
        sys.path.remove(folder)


# -- without running any of it -----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The answer about a path that files alone can give."""

    why_not: str = ""
    """Reason why it cannot be imported; "" when nothing speaks against it."""
    keywords: tuple[str, ...] | None = None
    """Names of what the function takes; None where that is not known, or it takes anything."""
    required: tuple[str, ...] = ()
    """Those of them that have no default."""
    positional: tuple[int, float] | None = None
    """Least and greatest number of arguments that it takes by position; None where they are not known."""
    is_async: bool = False
    is_class: bool = False
    lacks: tuple[str, ...] = ()
    """Members asked for that a class that stands alone does not have."""
    place: str = ""
    """``FILE:LINE`` of its definition."""


def look_up(path: str, folders: Sequence[str] = (), members: Sequence[str] = ()) -> Seen:
    """Looks for what `path` names in the source files, and runs none of them: they may import torch, or take minutes.

    `folders` are searched after ``sys.path``; `members` are what a class must have. It does not see what only running
    would show (a call that raises, a name that is made at run time).
    """
    module, _, name = path.partition(":")
    first = name.partition(".")[0]
    if not module or not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
        return Seen(why_not=f"is not package.module:name{_meant(module, name)}")
    there = sys.modules.get(module)
    if there is not None:  # what it holds counts, its file tells how that is called
        if not hasattr(there, first):
            return Seen(why_not=f"cannot be imported: {module} has no {first}")
        file = str(getattr(there, "__file__", None) or "")
        seen = _look_into(Path(file), name, folders, members) if file.endswith(".py") else Seen()
        return Seen() if seen.why_not else seen
    spec = _find(module, folders)
    if isinstance(spec, str):
        return Seen(why_not=f"cannot be imported: {spec}{_meant(module, name)}")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return Seen()
    return _look_into(Path(spec.origin), name, folders, members)


def _meant(module: str, name: str) -> str:
    """A hint at what to write in place of a file's name."""
    if not module.endswith(".py") or not name:
        return ""
    return f". Write {module.removesuffix('.py').removeprefix('./').replace('/', '.')}:{name}"


def _find(module: str, folders: Sequence[str]) -> ModuleSpec | str:
    """The module's place, or why there is none."""
    search: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for count, part in enumerate(parts, 1):
        full = ".".join(parts[:count])
        if search is None:
            spec = _find_top(part, folders)
        else:
            spec = PathFinder.find_spec(full, search)
        if spec is None:
            return f"there is no module {full}"
        if count < len(parts):
            if spec.submodule_search_locations is None:
                return f"there is no module {module}: {full} is no package"
            try:
                search = list(spec.submodule_search_locations)
            except KeyError:  # a namespace inside a package that was not imported
                search = [str(Path(folder) / part) for folder in search or ()]
    return spec or f"there is no module {module}"


def _find_top(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ValueError, ImportError):  # it is imported, and says nothing of where from
        spec = None
    return spec or PathFinder.find_spec(name, [*folders])


def is_installed(module: str, folders: Sequence[str] = ()) -> bool:
    """True when the top-level `module` could be imported; it is not imported."""
    return module in sys.modules or _find_top(module, folders) is not None


def _look_into(file: Path, name: str, folders: Sequence[str], members: Sequence[str]) -> Seen:
    tree = _parsed(file)
    if isinstance(tree, str):
        return Seen(why_not=f"cannot be imported: {tree}")
    wrong = next(_wrong_imports(tree, file, folders), "")
    if wrong:
        return Seen(why_not=f"cannot be imported: {wrong}")
    named, is_open = _names(tree)
    first = name.partition(".")[0]
    if first not in named:
        hint = did_you_mean(first, named)
        return Seen() if is_open else Seen(why_not=f"cannot be imported: {file} has no {first}{'.' * bool(hint)}{hint}")
    node = named[first]
    if name != first:
        return Seen()
    if isinstance(node, ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.Set):
        return Seen(why_not=f"is not callable: {file}:{node.lineno} makes it a value")
    return _signature(node, file, members)


def _parsed(file: Path) -> ast.Module | str:
    """The module, or why it cannot be read."""
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        return f"{file}:{getattr(error, 'lineno', None) or 1}: {getattr(error, 'msg', error)}"
    except OSError as error:
        return f"{file}: {error.strerror}"


def _wrong_imports(tree: ast.Module, file: Path, folders: Sequence[str]) -> Iterator[str]:
    """The statements that end the import in any case: modules and names that there are not, an exception raised outside
    of conditions."""
    for node in tree.body:
        if isinstance(node, ast.Raise):
            yield f"{file}:{node.lineno} raises {ast.unparse(node.exc) if node.exc else 'an exception'}"
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules = [node.module]
        for module in modules:
            needed = module.partition(".")[0]
            beside = (file.parent / f"{needed}.py").is_file() or (file.parent / needed).is_dir()
            if not is_installed(needed, folders):
                if not beside:
                    yield f"{file}:{node.lineno} imports {needed}, which is not installed"
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    missing = _lacking(module, alias.name, folders)
                    if missing:
                        yield f"{file}:{node.lineno} imports {alias.name} from {module}: {missing}"


def _lacking(module: str, name: str, folders: Sequence[str]) -> str:
    """The reason why `name` cannot be imported from `module`; "" when nothing speaks against it. The module's own
    imports are not looked at."""
    there = sys.modules.get(module)
    if there is not None and (hasattr(there, name) or not hasattr(there, "__file__")):
        return ""
    spec = _find(module, folders)
    if isinstance(spec, str):
        return spec
    if name == "*" or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    if spec.submodule_search_locations and PathFinder.find_spec(f"{module}.{name}", spec.submodule_search_locations):
        return ""
    tree = _parsed(Path(spec.origin))
    if isinstance(tree, str):
        return tree
    named, is_open = _names(tree)
    if is_open or name in named:
        return ""
    hint = did_you_mean(name, named)
    return f"it has no such name{'.' * bool(hint)}{hint}"


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported, those inside of conditions included."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for name in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, name, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _names(tree: ast.Module) -> tuple[dict[str, ast.AST], bool]:
    """Name -> what it stands for, of all names that the module binds; and whether it may bind others."""
    named: dict[str, ast.AST] = {}
    is_open = False
    for node in _statements(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            named[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            named |= {(alias.asname or alias.name).partition(".")[0]: node for alias in node.names}
            is_open |= any(alias.name == "*" for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.With):
            value = getattr(node, "value", None) or node
            targets = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            named |= {target.id: value for target in targets}
    return named, is_open or "__getattr__" in named or "globals" in ast.dump(tree)


def _signature(node: ast.AST, file: Path, members: Sequence[str]) -> Seen:
    """The signature that the source of a function or class shows. Decorators may change all of it."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return Seen()
    place = f"{file}:{node.lineno}"
    if node.decorator_list:
        return Seen(place=place)
    if not isinstance(node, ast.ClassDef):
        return _arguments(node, 0, place)
    if node.bases or node.keywords:
        return Seen(place=place)
    methods = {inner.name: inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)}
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)} | {*methods}
    names |= {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    is_open = bool({"__getattr__", "__getattribute__", "__call__", "setattr", "__dict__"} & names)
    lacks = () if is_open else tuple(member for member in members if member not in names)
    if "__init__" not in methods:
        return Seen(keywords=(), is_class=True, lacks=lacks, place=place)
    return replace(_arguments(methods["__init__"], 1, place), is_class=True, lacks=lacks)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, skipped: int, place: str) -> Seen:
    given = node.args
    by_position = [*given.posonlyargs, *given.args][skipped:]
    needed = by_position[: len(by_position) - len(given.defaults)] if given.defaults else by_position
    only = [a.arg for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    named = tuple(argument.arg for argument in [*given.args, *given.kwonlyargs] if argument not in given.args[:skipped])
    return Seen(
        keywords=None if given.kwarg else named,
        required=(*(argument.arg for argument in needed), *only),
        positional=None if only else (len(needed), float("inf") if given.vararg else len(by_position)),
        is_async=isinstance(node, ast.AsyncFunctionDef),
        place=place,
    )
