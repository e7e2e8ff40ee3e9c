"""A check, what it finds, and what it looks at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from rlbuffer.config.loading import Loaded
from rlbuffer.config.settings import RunSettings, ScoreSettings, WorkerSettings
from rlbuffer.errors import ConfigError
from rlbuffer.records.waiting import Problem

if TYPE_CHECKING:  # settings are shown without a server
    from rlbuffer.store.server.connection import Connection

Parts = Collection[str]
"""Parts that shall run here: ``serve``, ``train``, ``worker`` or ``worker.NAME``, ``gateway``, ``score`` or
``score.NAME``, and ``run``, which wants workers."""
EVERYTHING: Parts = ("run", "serve", "worker", "gateway", "score", "train")
"""Parts that `rlbuffer run` starts."""


class Level(StrEnum):
    """How it stands with one thing: as it should be; works, but hardly as meant, or not for long; cannot work, or would
    train wrongly."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a check has seen."""

    level: Level
    text: str
    """What was seen, with its values."""
    settings: tuple[str, ...] = ()
    """The settings that make it; their places are told with the text."""
    fix: str = ""
    """What to do, a sentence; "" where the text says it, or all is well."""
    check: str = ""
    """Name of the check."""
    problem: Problem | None = None
    """What it was seen by, where that is a problem of the run."""
    archive: str = ""
    """Folder of the run's archive, beside a problem; "" where its batcher says none."""


def ok(text: str) -> Finding:
    """Nothing to do."""
    return Finding(level=Level.OK, text=text)


def warning(text: str, *settings: str, fix: str = "") -> Finding:
    """Works, but hardly as meant."""
    return Finding(level=Level.WARNING, text=text, settings=settings, fix=fix)


def failure(text: str, *settings: str, fix: str = "") -> Finding:
    """Cannot work."""
    return Finding(level=Level.FAILURE, text=text, settings=settings, fix=fix)


def refused(error: ConfigError) -> Finding:
    """A refusal as a failure of the setting that it names."""
    return failure(str(error), error.setting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What checks look at."""

    loaded: Loaded
    parts: frozenset[str] = frozenset()
    connection: Connection | None = None
    """To the server, for checks of level ``server``."""

    @property
    def settings(self) -> RunSettings:
        """The settings."""
        return self.loaded.settings

    @property
    def workers(self) -> dict[str, WorkerSettings]:
        """The workers that shall run here."""
        return {n: o for n, o in self.settings.worker.items() if {"worker", f"worker.{n}"} & self.parts}

    @property
    def scorers(self) -> dict[str, ScoreSettings]:
        """The scorers that shall run here."""
        return {n: o for n, o in self.settings.score.items() if {"score", f"score.{n}"} & self.parts}

    @property
    def server(self) -> Connection:
        """The connection of a check of level ``server``."""
        assert self.connection is not None
        return self.connection


Run = Callable[[Context], Iterable[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that is looked at."""

    name: str
    about: str
    """What must hold, for `rlbuffer config explain`."""
    settings: tuple[str, ...]
    """Settings that its findings can name; NAME stands for a name that the user chooses."""
    level: str
    """``settings``: with every loading; ``host``: before something starts, too; ``server``: by `doctor` alone."""
    parts: frozenset[str]
    """It is made where one of these shall run; none: always."""
    run: Run
    lasts: bool = False
    """What it looks at may change while a run goes on, and nobody else looks: the leader makes it again and again."""

    def found(self, context: Context) -> Iterator[Finding]:
        """What it finds, where one of its parts shall run."""
        if not self.parts or self.parts & {part.partition(".")[0] for part in context.parts}:
            yield from (replace(finding, check=self.name) for finding in self.run(context))


CHECKS: list[Check] = []
"""All of them, in the order in which they are made."""


def check(settings: str = "", *, parts: Parts = (), lasts: bool = False) -> Callable[[Run], Run]:
    """Makes a function a check, with its name, the beginning of its docstring as what must hold, and its file's level.

    Args:
        settings: names of those that its findings can name, with blanks between them.
        parts: it is made where one of these shall run; none: always.
        lasts: it is made again and again while a run goes on.
    """

    def add(run: Run) -> Run:
        about = " ".join((run.__doc__ or "").partition("\n\n")[0].split()).removesuffix(".")
        name, level = run.__name__.replace("_", "-"), run.__module__.rpartition(".")[2]
        named = tuple(settings.split())
        of = frozenset(parts)
        CHECKS.append(Check(name=name, about=about, settings=named, level=level, parts=of, run=run, lasts=lasts))
        return run

    return add


def found(context: Context, level: str) -> Iterator[Finding]:
    """What the checks of a level find."""
    for each in CHECKS:
        if each.level == level:
            yield from each.found(context)
