"""Functions of the user's own, named by a path (``package.module:name``), and the folders where they are looked for."""

from __future__ import annotations

import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlbuffer.errors import ConfigError

FOLDERS: list[str] = []
"""Folders of the user's modules that this process looks in beside those of Python: the config file's."""
_NOT_THE_USERS = (
    f"{Path(__file__).parents[1]}/",
    "<",
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
)


def target(path: str) -> Callable[..., Any]:
    """The function or class that `path` names.

    Raises:
        ImportError: it cannot be imported, or called; the end of a sentence, with the user's file and line.
    """
    module, _, names = path.partition(":")
    if not names or module.endswith(".py"):
        meant = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise ImportError(f"is not package.module:name. Write {meant}:{names or 'NAME'}")
    try:
        value: Any = importlib.import_module(module)
        for name in names.split("."):
            value = getattr(value, name)
    except (Exception, SystemExit) as error:  # the user's own code may raise anything while it is imported
        is_absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        where = ". Put it beside the file of settings, or its folder on PYTHONPATH" * is_absent
        raise ImportError(f"cannot be imported: {type(error).__name__}: {error}{place_of(error)}{where}") from error
    if not callable(value):
        raise ImportError(f"is not callable but {type(value).__name__}")
    called: Callable[..., Any] = value
    return called


def load(setting: str, path: str, takes: str) -> Any:
    """Loads the callable that `path` names. A class is called without arguments first.

    Args:
        setting: where the path stands, ``batcher.order``.
        path: ``package.module:name``.
        takes: arguments of a call, for the message.

    Raises:
        ConfigError: it cannot be imported, or is not callable; the message says why.
    """
    try:
        named = target(path)
        made: Any = named() if isinstance(named, type) else named
    except ImportError as error:
        raise refused(setting, path, str(error)) from error
    except (Exception, SystemExit) as error:  # as above
        raise refused(setting, path, f"cannot be imported: {type(error).__name__}: {error}{place_of(error)}") from error
    if not callable(made):
        raise refused(setting, path, f"is not callable but {type(made).__name__}: it takes {takes}")
    return made


def refused(setting: str, path: str, why: str) -> ConfigError:
    """The error of a function of the user's own."""
    return ConfigError(f"{setting} = {path!r} {why}", setting=setting)


def place_of(error: BaseException) -> str:
    """`` (FILE:LINE)``, the innermost line of the user's own; of a SyntaxError the line that it names."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THE_USERS)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def defined_at(named: Any) -> str:
    """`` (FILE:LINE)`` of a function or class, of another object that of its class; "" where there is none. Of a
    partial or decorated function it is the function's own."""
    try:
        named = inspect.unwrap(named.func if isinstance(named, partial) else named)
        code = named if inspect.isroutine(named) or isinstance(named, type) else type(named)
        return f" ({inspect.getsourcefile(code)}:{inspect.getsourcelines(code)[1]})"
    except (OSError, TypeError, ValueError):
        return ""


def failed_in(named: Any, error: BaseException) -> str:
    """What the user's own `named` has raised, and where; its beginning where what it gave is wrong."""
    return f"{type(error).__name__}: {error}{place_of(error) or defined_at(named)}"


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
