"""The user's own functions, named by a dotted path: ``package.module:name``."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
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
    """What can be said of a path by looking at files alone."""

    why_not: str = ""
    """Why it cannot be imported; "" when nothing speaks against it."""
    keywords: tuple[str, ...] | None = None
    """Names of what the function takes; None where that is not known, or it takes anything."""


def look_up(path: str, folders: Sequence[str] = ()) -> Seen:
    """Looks for what `path` names in the source files, and runs none of them: they may import torch, or take minutes.

    `folders` are searched after ``sys.path``. What only running would show (a module that raises, a name that is made
    at run time) is not found.
    """
    module, _, name = path.partition(":")
    first = name.partition(".")[0]
    if not module or not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
        return Seen(why_not="is not package.module:name")
    there = sys.modules.get(module)
    if there is not None:
        return Seen(why_not="" if hasattr(there, first) else f"cannot be imported: {module} has no {first}")
    found = _find(module, folders)
    if isinstance(found, str):
        return Seen(why_not=f"cannot be imported: {found}")
    if found.origin is None or not found.origin.endswith(".py"):
        return Seen()
    return _look_into(Path(found.origin), module, name, folders)


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
    """Whether the top-level `module` could be imported; it is not."""
    return module in sys.modules or _find_top(module, folders) is not None


def _look_into(file: Path, module: str, name: str, folders: Sequence[str]) -> Seen:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        return Seen(why_not=f"cannot be imported: {file}:{line}: {getattr(error, 'msg', error)}")
    except OSError as error:
        return Seen(why_not=f"cannot be imported: {file}: {error.strerror}")
    for line, needed in _imports(tree):
        if not is_installed(needed, folders) and not (file.parent / f"{needed}.py").is_file():
            return Seen(why_not=f"cannot be imported: {file}:{line} imports {needed}, which is not installed")
    named, is_open = _names(tree)
    first = name.partition(".")[0]
    if first not in named:
        near = get_close_matches(first, named, n=1)
        hint = f". Did you mean {near[0]}?" if near else ""
        return Seen() if is_open else Seen(why_not=f"cannot be imported: {file} has no {first}{hint}")
    node = named[first]
    if name != first:
        return Seen()
    if isinstance(node, ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.Set):
        return Seen(why_not=f"is not callable: {file}:{node.lineno} makes it a value")
    return Seen(keywords=_keywords(node))


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported, those inside of conditions included."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for name in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, name, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, top-level module) of what is imported in any case: not inside of conditions."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.partition(".")[0]


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


def _keywords(node: ast.AST) -> tuple[str, ...] | None:
    """What a function, or the class's own ``__init__``, takes by keyword."""
    skipped = 0
    if isinstance(node, ast.ClassDef):
        made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if not made or node.decorator_list:
            return None
        node, skipped = made[0], 1
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.args.kwarg or node.decorator_list:
        return None
    return tuple(argument.arg for argument in [*node.args.args[skipped:], *node.args.kwonlyargs])
