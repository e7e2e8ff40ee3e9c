"""A cluster: a few real servers that share the slots, with a replica each where a test wants them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
from own_server import OwnServer, free_port
from redis.crc import key_slot

SLOTS = 16384
START_SECONDS = 60.0
PAYLOAD_SLOTS = 20
"""Moved at once under a run."""


class Cluster:
    """Primaries with an equal share of the slots each; ended by leaving the context.

    Args:
        replicas: of each primary.
        node_timeout_ms: silence after which a node counts as down.
    """

    def __init__(
        self,
        directory: Path,
        *,
        shards: int = 3,
        replicas: int = 0,
        program: str | None = None,
        options: Mapping[str, str] | None = None,
        node_timeout_ms: int = 1000,
    ) -> None:
        given = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": str(node_timeout_ms),
            "repl-diskless-sync-delay": "0",
        }
        with ExitStack() as ends:
            self.nodes = []
            for n in range(shards * (1 + replicas)):
                own = given | {"cluster-port": str(free_port())} | dict(options or {})
                self.nodes.append(ends.enter_context(OwnServer(directory / f"n{n}", program=program, options=own)))
            self._join(shards)
            self._ends = ends.pop_all()
        self.url = f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes[:2])}"

    def owner(self, key: str) -> OwnServer:
        """The primary that has a key, by the word of a node that is up."""
        slot = int(self._up()[0].ask("CLUSTER", "KEYSLOT", key))
        for first, last, primary, *_ in self._up()[0].ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == primary[1])
        raise LookupError(f"nobody has slot {slot}")

    def replica_of(self, primary: OwnServer) -> OwnServer:
        """A replica of it that is up."""
        its = _id(primary)
        return next(
            node
            for node in self._up()
            if any(b"myself,slave" in line and its in line for line in node.ask("CLUSTER", "NODES").splitlines())
        )

    def fail_over(self, primary: OwnServer) -> OwnServer:
        """A planned failover. -> the new primary."""
        chosen = self.replica_of(primary)
        chosen.ask("CLUSTER", "FAILOVER")
        self.wait_until(lambda: chosen.ask("ROLE")[0] == b"master")
        return chosen

    def move_slot(self, slot: int, source: OwnServer, target: OwnServer, *, pause_seconds: float = 0.0) -> int:
        """Moves a slot with what is in it, ten keys at a time, as redis-cli does. -> keys moved."""
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", _id(source).decode())
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", _id(target).decode())
        moved = 0
        while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 10):
            moved += len(keys)
            source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *(key.decode() for key in keys))
            time.sleep(pause_seconds)
        for node in (target, source):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", _id(target).decode())
        return moved

    def announce(self, ports: Sequence[int]) -> str:
        """Each node is known by another port from now on, that of what stands before it. -> the address by those."""
        for node, port in zip(self.nodes, ports, strict=True):
            node.ask("CONFIG", "SET", "cluster-announce-port", port)

        def named(node: OwnServer) -> set[int]:
            return {server[1] for _, _, *servers in node.ask("CLUSTER", "SLOTS") for server in servers}

        self.wait_until(lambda: all(named(node) == set(ports) for node in self.nodes))
        return f"redis+cluster://{','.join(f'127.0.0.1:{port}' for port in ports[:2])}"

    def wait_until(self, fact: Callable[[], object]) -> None:
        """Waits until a fact of the cluster is true."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if fact():
                    return
            except redis.RedisError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError("the cluster never came to it")
            time.sleep(0.02)

    def wait_until_well(self) -> None:
        """Waits until every node that is up finds that the cluster is whole, and every replica follows."""
        self.wait_until(lambda: all(_is_well(node) for node in self._up()))

    def _up(self) -> list[OwnServer]:
        return [node for node in self.nodes if node.is_up]

    def _join(self, shards: int) -> None:
        first = self.nodes[0]
        for n, node in enumerate(self.nodes):
            if n < shards:
                node.ask("CLUSTER", "ADDSLOTSRANGE", n * SLOTS // shards, (n + 1) * SLOTS // shards - 1)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
            bus = node.ask("CONFIG", "GET", "cluster-port")[b"cluster-port"]
            first.ask("CLUSTER", "MEET", "127.0.0.1", node.port, bus.decode())
        self.wait_until(
            lambda: all(len(node.ask("CLUSTER", "NODES").splitlines()) == len(self.nodes) for node in self.nodes)
        )
        for n, node in enumerate(self.nodes[shards:]):
            its = _id(self.nodes[n % shards]).decode()
            self.wait_until(partial(node.ask, "CLUSTER", "REPLICATE", its))
        self.wait_until_well()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.close()


def _id(node: OwnServer) -> bytes:
    name: bytes = node.ask("CLUSTER", "MYID")
    return name


def _is_well(node: OwnServer) -> bool:
    info: Any = node.ask("CLUSTER", "INFO")
    role: Any = node.ask("ROLE")
    return b"cluster_state:ok" in info and (role[0] == b"master" or role[3] == b"connected")


class InTurns:
    """Does what a Pair does with the shards of a cluster in turns: with that of a key, and with another."""

    def __init__(self, directory: Path, *, key: str, options: Mapping[str, str] | None = None) -> None:
        self._cluster = Cluster(directory, replicas=1, options=options)
        self.url, self.servers = self._cluster.url, self._cluster.nodes
        self.announce = self._cluster.announce
        self._key, self._turn, self._moves = key, 0, 0
        self._choose()

    def fail_over(self) -> None:
        """A planned failover."""
        self._cluster.fail_over(self.primary)

    def promote(self) -> None:
        """Waits until the replica has taken the place of the primary, which is down."""
        self._cluster.wait_until(lambda: self._replica.ask("ROLE")[0] == b"master")

    def move(self) -> str:
        """Moves the slot of the key to another shard; in the next turn twenty slots that are in use. -> a sentence."""
        self._moves += 1
        home = self._cluster.owner(self._key)
        target = next(node for node in map(self._cluster.owner, "abcdefghijkl") if node is not home)
        slots = [int(home.ask("CLUSTER", "KEYSLOT", self._key))]
        if self._moves % 2 == 0:
            with redis.Redis(port=home.port) as client:
                used = {key_slot(key) for key in client.scan_iter(count=1000)} - set(slots)
            slots = sorted(used)[:PAYLOAD_SLOTS]
        keys = sum(self._cluster.move_slot(slot, home, target) for slot in slots)
        self.settle()
        return f", {len(slots)} with {keys} keys from port {home.port} to {target.port}"

    def settle(self) -> None:
        """Waits until the cluster is whole again."""
        self._cluster.wait_until_well()
        self._choose()

    def mend(self) -> None:
        """Starts the killed server again, as a replica."""
        self.primary.start()
        self.settle()

    def _choose(self) -> None:
        home = self._cluster.owner(self._key)
        others = [node for node in map(self._cluster.owner, "abcdefghijkl") if node is not home]
        self.primary = others[0] if self._turn % 2 else home
        self._replica = self._cluster.replica_of(self.primary)
        self._turn += 1

    def __enter__(self) -> InTurns:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cluster.__exit__(kind, error, trace)
