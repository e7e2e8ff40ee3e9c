"""Where a run under faults is: on its embedded server, or on servers of which each has a replica."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from aof import Steps, keep_files, read_steps
from homes import Home
from own_server import OwnServer
from pairs import Pair
from shards import InTurns
from watched import Watched

from rlbuffer.store.keys import Keys

OPTIONS = {"appendfsync": "everysec", "auto-aof-rewrite-percentage": "0"}
EMBEDDED = "embedded server"
KEEP_SECONDS = 0.1


class Servers(Protocol):
    """What a Pair, a Watched and an InTurns have in common; a Pair announces nothing."""

    url: str
    primary: Any
    announce: Any

    @property
    def servers(self) -> Sequence[OwnServer]: ...
    def fail_over(self) -> None: ...
    def promote(self) -> None: ...
    def settle(self) -> None: ...
    def mend(self) -> None: ...


PLACES: Mapping[str, Any] = {
    "pair": Pair,
    "sentinels": Watched,
    "cluster": partial(InTurns, key=Keys("tiny").meta),
}
"""Name -> what makes its servers."""


@contextmanager
def servers_at(home: Home, place: str) -> Iterator[Servers | None]:
    """The servers of a place, to which the home's commands are led; None for the embedded one, which those start."""
    if place == EMBEDDED:
        yield None
        return
    with PLACES[place](home.path / "servers", options=OPTIONS) as servers:
        lead(home, servers.url)
        ended = threading.Event()
        keeper = threading.Thread(target=_keep_files, args=(servers, ended))
        keeper.start()
        try:
            yield servers
        finally:
            ended.set()
            keeper.join()


def _keep_files(servers: Servers, ended: threading.Event) -> None:
    """Those who watch may choose another primary by themselves, and nobody is asked before its file is gone."""
    while not ended.wait(KEEP_SECONDS):
        for server in servers.servers:
            keep_files(server.directory)


def lead(home: Home, url: str, *, looking: str | None = None) -> None:
    """Leads the commands of a home to an address; what only looks to another one, where that is given."""
    home.url = looking or url
    home.environment["RLBUFFER_REDIS_URL"] = url


def lose_primary(servers: Servers, committed: Steps, *, away_seconds: float = 0.0) -> float:
    """Kills the primary; its replica takes the place, and it comes back as one. -> seconds without a primary.

    Args:
        away_seconds: how long the replica of a Pair waits; elsewhere those who watch decide.
        committed: gets the steps in every server's file.
    """
    servers.primary.kill()
    began = time.monotonic()
    time.sleep(away_seconds)
    servers.promote()
    away = time.monotonic() - began
    note_steps(servers, committed)
    servers.mend()
    return away


def note_steps(servers: Servers, committed: Steps) -> None:
    """The steps in every server's file, before one of them loads what another has."""
    for server in servers.servers:
        committed |= read_steps(server.directory, "tiny")
