"""A cluster of several shards: who has which slot, and clients that send each command to the shard of its key.

redis-py's `RedisCluster` is not used: it follows MOVED and learns the slots again without a word, and here both count
as a loss, after which a leader reads everything again. Its nodes' connections would also be its own, not those that
gather, receive and are given up at a loss.

An answer of ASK or TRYAGAIN is waited out, and is no loss: nothing was carried out, and nothing is gone. A slot that is
moving has one owner again soon, and then MOVED leads there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import redis
from redis.client import Pipeline
from redis.connection import ConnectionPool
from redis.crc import key_slot

from rlbuffer.store.server.answers import LOGIN, NoPrimary, reason_of, words_of
from rlbuffer.store.server.asking import pool_of
from rlbuffer.store.server.gathering import connections

CLUSTER_SLOTS = 16384
KEYLESS = frozenset(
    {"ACL", "BGREWRITEAOF", "CLIENT", "CLUSTER", "COMMAND", "CONFIG", "DBSIZE", "EXEC", "INFO", "MULTI", "PING", "ROLE"}
    | {"SCAN", "SCRIPT", "SLOWLOG", "TIME"}
)
"""Commands without a key: the shard of the control keys gets them, or in a pipeline that of the command beside them."""
_RANDOM = random.Random()  # the global one is the user's: a checkpoint keeps its state
Place = tuple[str, int]
"""Host and port."""


class Shards:
    """The primaries of a cluster and their slots, by the word of its nodes; asked for again after :meth:`forget`.

    Args:
        places: some nodes, primaries or replicas.
        options: login and TLS of a connection to one of them.
    """

    def __init__(self, places: Sequence[Place], options: Mapping[str, Any]) -> None:
        self._given, self._known, self._options = places, set(places), options
        self._owners: Sequence[Place | None] | None = None
        """The primary of each slot."""
        self.home = 0
        """The slot of the control keys."""

    def owner(self, slot: int) -> Place:
        """The primary that has a slot.

        Raises:
            NoPrimary: no node answers, or none has it.
        """
        place = self._all()[slot]
        if place is None:
            raise NoPrimary(f"no node of the cluster has slot {slot}", is_down=True)
        return place

    def primaries(self) -> list[Place]:
        """Every primary once; that of the control keys first."""
        home = self.owner(self.home)
        return [home, *sorted({place for place in self._all() if place is not None} - {home})]

    def forget(self) -> None:
        """Has the next caller ask who has what."""
        self._owners = None

    def _all(self) -> Sequence[Place | None]:
        owners = self._owners
        if owners is None:
            owners = self._owners = self._asked()
        return owners

    def _asked(self) -> Sequence[Place | None]:
        """The first answer. Nodes are asked in a drawn order: one that is away or behind keeps nobody for long."""
        failures = []
        for place in _RANDOM.sample(sorted(self._known), len(self._known)):
            try:
                return self.ask(place)
            except NoPrimary as error:
                if error.is_mistake:
                    raise
                failures.append(error)
        raise NoPrimary(f"none of its nodes answers: {'; '.join(sorted(map(str, failures)))}") from failures[0]

    def ask(self, place: Place) -> Sequence[Place | None]:
        """The primary of each slot, by the node at `place`.

        Raises:
            NoPrimary: it is away, or no node of a cluster.
        """
        at = f"{place[0]}:{place[1]}"
        try:
            with redis.Redis.from_pool(pool_of(place, self._options)) as node:
                ranges = node.execute_command("CLUSTER SLOTS")
        except LOGIN:
            raise
        except redis.ResponseError as error:
            raise NoPrimary(
                f"what answers at {at} is no node of a cluster ({words_of(error).partition(',')[0]}). The address of "
                "one server begins with redis:// or rediss://",
                is_mistake=True,
            ) from error
        except redis.RedisError as error:
            raise NoPrimary(f"{at} {reason_of(error)}") from error
        owners: list[Place | None] = [None] * CLUSTER_SLOTS
        nodes = set(self._given)
        for first, last, *servers in ranges:
            its = [(server[0].decode() if server[0] else place[0], int(server[1])) for server in servers]
            owners[first : last + 1] = [its[0]] * (last + 1 - first)
            nodes.update(its)
        self._known = nodes
        return owners


def shards_of(options: Mapping[str, Any]) -> Shards | None:
    """The cluster among the options of an address; None for any other address."""
    if "nodes" not in options:
        return None
    return Shards(options["nodes"], {name: value for name, value in options.items() if name != "nodes"})


def slot_of(args: Sequence[Any]) -> int | None:
    """The slot of a command's first key; None where it has none."""
    name = args[0].partition(" ")[0]
    is_script = name in ("EVAL", "EVALSHA")
    if name in KEYLESS or (is_script and not int(args[2])):
        return None
    if is_script:
        return slot_of_key(args[3])
    return slot_of_key(args[args.index(b"STREAMS") + 1 if name == "XREAD" else 1])


def slot_of_key(key: str | bytes) -> int:
    """The slot of a key."""
    return key_slot(key.encode() if isinstance(key, str) else key)


class Routed(redis.Redis):
    """A client of all shards: a command goes to the shard of its first key, a scan to all of them.

    A transaction, and a command of several keys, has the keys of one shard.
    """

    def __init__(self, shards: Shards, make: Callable[..., redis.Redis]) -> None:
        """`make` makes the client of a node, of its `host` and `port`."""
        super().__init__(connection_pool=make().connection_pool)  # for what commands ask of it; it connects to nobody
        self._shards, self._make = shards, make
        self._nodes: dict[Place, redis.Redis] = {}

    def node(self, slot: int | None) -> redis.Redis:
        """The client of the shard that has a slot; None: that of the control keys."""
        return self._at(self._shards.owner(self._shards.home if slot is None else slot))

    def primaries(self) -> list[redis.Redis]:
        """A client of each shard; that of the control keys first."""
        return [self._at(place) for place in self._shards.primaries()]

    def split(self, keys: Mapping[str, Any]) -> list[tuple[redis.Redis, dict[str, Any]]]:
        """The items of each shard, with its client."""
        parts: dict[redis.Redis, dict[str, Any]] = {}
        for key, value in keys.items():
            parts.setdefault(self.node(slot_of_key(key)), {})[key] = value
        return list(parts.items())

    def pools(self) -> list[ConnectionPool]:
        """Those of all nodes that were met."""
        return [node.connection_pool for node in list(self._nodes.values())]

    def execute_command(self, *args: Any, **options: Any) -> Any:
        return self.node(slot_of(args)).execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> _Routes:
        return _Routes(self, transaction)

    def scan_iter(self, *args: Any, **options: Any) -> Iterator[Any]:
        for node in self.primaries():
            yield from node.scan_iter(*args, **options)

    def _at(self, place: Place) -> redis.Redis:
        if place not in self._nodes:
            self._nodes.setdefault(place, self._make(host=place[0], port=place[1]))
        return self._nodes[place]


class _Routes(Pipeline):
    """A pipeline whose commands go to their shards: all are sent before the first reply is read."""

    transaction: bool  # type: ignore[assignment]

    def __init__(self, client: Routed, transaction: bool) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, None)
        self._client = client

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] == "WATCH":
            self.connection_pool = self._client.node(slot_of(args)).connection_pool
        return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        places: dict[redis.Redis, list[int]] = {}
        for at, slot in enumerate(self._slots()):
            places.setdefault(self._client.node(slot), []).append(at)
        if self.watching or len(places) <= 1:
            for node in () if self.watching else places:
                self.connection_pool = node.connection_pool
            return list(super().execute(raise_on_error))
        stack, self.command_stack = self.command_stack, []
        replies: list[Any] = [None] * len(stack)
        with connections([node.connection_pool for node in places]) as opened:
            for connection, its in zip(opened, places.values(), strict=True):
                connection.send_packed_command(connection.pack_commands([stack[at][0] for at in its]))
            for connection, its in zip(opened, places.values(), strict=True):
                for at in its:
                    try:
                        args, options = stack[at]
                        replies[at] = self.parse_response(connection, args[0], **options)  # type: ignore[no-untyped-call]
                    except redis.ResponseError as error:
                        replies[at] = error
        if raise_on_error:
            self.raise_first_error(stack, replies)  # type: ignore[no-untyped-call]
        return replies

    def _slots(self) -> list[int | None]:
        """The slot of each command. One without a key goes with the one before it, MULTI with the one behind it."""
        slots = [slot_of(args) for args, _ in self.command_stack]
        if self.transaction:
            return [next((slot for slot in slots if slot is not None), None)] * min(1, len(slots))
        for at, (args, _) in enumerate(self.command_stack):
            if args[0] == "MULTI":
                slots[at] = slots[at + 1]
            elif slots[at] is None and at:
                slots[at] = slots[at - 1]
        return slots
