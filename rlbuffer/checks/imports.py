"""The user's modules, imported in a child that is thrown away; so nothing of theirs runs in the process that checks.

The process that needs a function imports it by :func:`rlbuffer.config.imports.load`, and says the same.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import rlbuffer
from rlbuffer.config.imports import defined_at, target
from rlbuffer.errors import ConfigError

IMPORT_SECONDS = 120.0
"""Longest that all imports may take: torch from a cold network disk must fit."""
MORE_SECONDS = 5.0
"""Longest that each may take which comes after that; behind as many the process is killed."""


class NamedFunction(NamedTuple):
    """A function that settings name."""

    setting: str
    path: str
    takes: str = ""
    """Arguments that it is called with, ``rewards, lengths, group``."""
    may_be_async: bool = False
    given: Mapping[str, Any] | None = None
    """Keywords to call it with here. It is one of rlbuffer's then, and gives (setting below, text, is it fatal)."""


class Wrong(NamedTuple):
    """Something that is wrong with it."""

    setting: str
    text: str
    is_fatal: bool = True


class Python(NamedTuple):
    """Another Python than this one, which a worker shall run with."""

    setting: str
    program: str
    environment: Mapping[str, str]


def wrong(asked: Sequence[NamedFunction], folders: Sequence[str], python: Python | None = None) -> list[Wrong]:
    """What is wrong with functions. Their modules are looked for in `folders`, too, after ``sys.path``."""
    if not asked:
        return []
    program, environment = (sys.executable, os.environ) if python is None else (python.program, python.environment)
    paths = filter(None, sys.path) if python is None else filter(None, [environment.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(
            [program, "-P", "-m", "rlbuffer.checks.imports", str(IMPORT_SECONDS)],
            input=json.dumps(asked, default=str).encode(),
            capture_output=True,
            timeout=IMPORT_SECONDS + (1 + len(asked)) * MORE_SECONDS,
            check=False,
            env={**environment, "PYTHONPATH": os.pathsep.join([*paths, *folders])},
        )
        answered, errors, why = done.stdout, done.stderr, f"ended the process with exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        answered, errors, why = error.stdout or b"", b"", f"took longer than {IMPORT_SECONDS:.0f} s"
    except OSError as error:
        answered, errors, why = b"", b"", f"cannot be run ({error.strerror})"
    last = b": ".join([b"", *errors.strip().splitlines()[-1:]]).decode(errors="replace")
    version, *lines = answered.decode(errors="replace").splitlines() or [""]
    if python is not None and version != rlbuffer.__version__:
        why = f"has rlbuffer {version}, this is {rlbuffer.__version__}" if version else f"has none: it {why}{last}"
        return [Wrong(python.setting, f"{python.setting} = {program!r} {why}")]
    answers = [[Wrong(*found) for found in json.loads(line)] for line in lines]
    found = [problem for answer in answers for problem in answer]
    if len(answers) < len(asked):  # the first one that is not answered is the one that did it
        one = asked[len(answers)]
        path = one.path if one.given is None else one.given.get("name", one.path)
        found.append(Wrong(one.setting, f"{one.setting}: the import of {path} {why}{last}"))
    return found


def problems_of(one: NamedFunction) -> Iterator[Wrong]:
    """What is wrong with one function, in this process."""
    setting = one.setting
    try:
        named = target(one.path)
        if one.given is not None:
            for below, text, is_fatal in named(**one.given) or ():
                yield Wrong(f"{setting}.{below}", f"{setting}.{below}: {text}", is_fatal)
            return
        if why := _misfit(named, one):
            yield Wrong(setting, f"{setting} = {one.path!r} {why}{defined_at(named)}")
    except ConfigError as error:
        below = f"{setting}.{error.setting}".rstrip(".")
        yield Wrong(below, f"{below}: {error}")
    except ImportError as error:
        yield Wrong(setting, f"{setting} = {one.path!r} {error}")


def _misfit(named: Any, one: NamedFunction) -> str:
    """Why it cannot be called as it will be; "" where it can, or tells no signature."""
    # A class is called with nothing first.
    takes = one.takes.split(", ") if one.takes and not isinstance(named, type) else []
    try:
        inspect.signature(named).bind(*takes)
    except TypeError as error:
        return f"does not fit: it is called with ({', '.join(takes)}): {error}"
    except ValueError:
        return ""
    is_async = inspect.iscoroutinefunction(named) and not one.may_be_async
    return f"is async: it is called with ({one.takes}), and nobody awaits it" if is_async else ""


def _end_by_error(seconds: float) -> None:
    """Has what takes longer than `seconds` end by an error, which has a place: the others are looked at then, a few
    seconds each."""

    def late(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, MORE_SECONDS)


def main() -> None:
    """The child: asked on stdin, it answers with its version and a line of JSON each on a stdout that modules lack."""
    _end_by_error(float(sys.argv[1]))
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        print(rlbuffer.__version__, file=answers, flush=True)
        for one in json.load(sys.stdin):
            print(json.dumps(list(problems_of(NamedFunction(*one)))), file=answers, flush=True)


if __name__ == "__main__":
    main()
