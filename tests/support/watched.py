"""A primary and a replica that sentinels watch: they see by themselves who is down, and choose the primary."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import redis
from own_server import START_SECONDS
from pairs import Node

PROGRAMS = ("redis-server", "redis-sentinel")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
"""Those that this machine lacks."""
SERVICE = "math"
SENTINELS = 3


def sentinel(
    directory: Path, port: int, *, quorum: int, down_seconds: float = 1.0, lines: Mapping[str, str] | None = None
) -> Node:
    """A sentinel of the primary at `port`; `down_seconds`: silence after which a server is down, `lines`: further ones
    of its file."""
    of = f"{SERVICE} "
    watches = {
        "sentinel monitor": f"{of}127.0.0.1 {port} {quorum}",
        "sentinel down-after-milliseconds": f"{of}{1000 * down_seconds:.0f}",
        "sentinel failover-timeout": f"{of}10000",
    }
    return Node(directory, program=shutil.which(PROGRAMS[1]), options=watches | dict(lines or {}))


class Watched:
    """Does what a Pair does with three servers, of which sentinels choose the primary; the address stays the same.

    A primary that has no replica takes no writes, as docs/guide/deploy.md has it.
    """

    def __init__(self, directory: Path, *, options: Mapping[str, str] | None = None, down_seconds: float = 1.0) -> None:
        given = {"repl-diskless-sync-delay": "0", "min-replicas-to-write": "1"} | dict(options or {})
        program = shutil.which(PROGRAMS[0])
        with ExitStack() as ends:
            self.servers = [
                ends.enter_context(Node(directory / name, program=program, options=given)) for name in "abc"
            ]
            self.primary, self._old = self.servers[0], self.servers[0]
            for replica in self.servers[1:]:
                replica.follow(self.primary)
            self.sentinels = [
                ends.enter_context(
                    sentinel(directory / f"s{n}", self.primary.port, quorum=2, down_seconds=down_seconds)
                )
                for n in range(SENTINELS)
            ]
            self._wait_for_replicas()
            self._ends = ends.pop_all()
        places = ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
        self.url = f"redis+sentinel://{places}/{SERVICE}/0"

    def fail_over(self) -> None:
        """A planned failover. The old primary takes no writes without replicas, and is none itself before `settle`.

        Sentinels that give one up, for no replica was good enough at that moment, are asked again.
        """
        _until(lambda: not self._asks_to_fail_over())
        self.promote()

    def promote(self) -> None:
        """Waits until all sentinels name the same other primary."""

        def named() -> set[int]:
            return {int(each.ask("SENTINEL", "MASTER", SERVICE)[b"port"]) for each in self.sentinels}

        _until(lambda: len(named()) == 1 and self.primary.port not in named())
        (port,) = named()
        self._old, (self.primary,) = self.primary, [server for server in self.servers if server.port == port]

    def announce(self, ports: Sequence[int]) -> str:
        """Each server is known by another port from now on, that of what stands before it. -> the address.

        For runs without failovers: `promote` looks for the servers' own ports.
        """
        places = dict(zip(self.servers, ports, strict=True))
        for server, port in places.items():
            server.ask("CONFIG", "SET", "replica-announce-port", port)
        for replica in self.servers[1:]:
            replica.ask("REPLICAOF", "127.0.0.1", places[self.primary])
            replica.wait_for(lambda ask: ask("INFO", "replication")["master_link_status"] == "up")
        for each in self.sentinels:
            each.ask("SENTINEL", "REMOVE", SERVICE)
            each.ask("SENTINEL", "MONITOR", SERVICE, "127.0.0.1", places[self.primary], 2)
        self._wait_for_replicas()
        return self.url

    def settle(self) -> None:
        """The old primary becomes a replica, at once; its sentinels make it one after about ten seconds."""
        self._old.follow(self.primary)
        self._wait_for_replicas()

    def mend(self) -> None:
        """Starts the killed server again, as a replica."""
        self._old.start()
        self.settle()

    def _wait_for_replicas(self) -> None:
        """Until a failover is possible: every sentinel knows the others, and two replicas that are up."""
        for each in self.sentinels:
            each.wait_for(lambda ask: int(ask("SENTINEL", "MASTER", SERVICE)[b"num-other-sentinels"]) == SENTINELS - 1)
            each.wait_for(lambda ask: [r[b"flags"] for r in ask("SENTINEL", "REPLICAS", SERVICE)] == [b"slave"] * 2)

    def _asks_to_fail_over(self) -> bool:
        """Asks while the first sentinel names the old primary. -> whether it does."""
        first = self.sentinels[0]
        if int(first.ask("SENTINEL", "MASTER", SERVICE)[b"port"]) != self.primary.port:
            return False
        with suppress(redis.ResponseError):  # one is under way, or the last one is not over for it
            first.ask("SENTINEL", "FAILOVER", SERVICE)
        return True

    def __enter__(self) -> Watched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.close()


def _until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not fact():
        if time.monotonic() > deadline:
            raise TimeoutError("the sentinels do not fail over")
        time.sleep(0.1)
