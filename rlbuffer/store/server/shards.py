"""A cluster of several shards: clients that send each command to the shard of its key.

Who has which slot is known to redis-py's `NodesManager`. Its `RedisCluster` is not used for commands: it follows MOVED
without a word, and here that is a loss, after which a leader reads everything again; its pipeline sends every command
whose reply was lost once more, writes too; and it asks for COMMAND, a right that no role needs otherwise.

An answer of ASK or TRYAGAIN is waited out, and is no loss: nothing was carried out, and nothing is gone. A slot that is
moving has one owner again soon, and then MOVED leads there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import redis
from redis.client import Pipeline
from redis.cluster import ClusterNode, NodesManager
from redis.connection import ConnectionPool
from redis.crc import key_slot
from redis.exceptions import RedisClusterException
from redis.maint_notifications import MaintNotificationsConfig

from rlbuffer.store.server.answers import LOGIN, NoPrimary, reason_of, words_of
from rlbuffer.store.server.sentinels import ASKING

KEYLESS = frozenset(
    {"ACL", "BGREWRITEAOF", "CLIENT", "CLUSTER", "COMMAND", "CONFIG", "DBSIZE", "EXEC", "INFO", "MULTI", "PING", "ROLE"}
    | {"SCAN", "SCRIPT", "SLOWLOG", "TIME"}
)
"""Commands without a key: the shard of the control keys gets them, or in a pipeline that of the command beside them."""
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
        self._nodes: NodesManager | None = None
        self.home = 0
        """The slot of the control keys."""

    def owner(self, slot: int) -> Place:
        """The primary that has a slot. Raises NoPrimary: no node answers, or none has it."""
        nodes = self._nodes or self._asked()
        try:
            return _place(nodes.get_node_from_slot(slot))
        except RedisClusterException as error:
            raise NoPrimary(f"no node of the cluster has slot {slot}") from error

    def primaries(self) -> list[Place]:
        """Every primary once; that of the control keys first."""
        home = self.owner(self.home)
        nodes = self._nodes or self._asked()
        return [home, *sorted({*map(_place, nodes.get_nodes_by_server_type("primary"))} - {home})]

    def forget(self) -> None:
        """Has the next caller ask who has what."""
        self._nodes = None

    def _asked(self) -> NodesManager:
        try:
            nodes = NodesManager(
                [ClusterNode(host, port) for host, port in self._known],  # type: ignore[no-untyped-call]
                from_url=True,  # as otherwise options of TLS are not taken
                maint_notifications_config=MaintNotificationsConfig(enabled=False),
                **ASKING,
                **self._options,
            )
        except RedisClusterException as error:
            raise _meaning(error) from error
        self._known = {*self._given, *map(_place, nodes.nodes_cache.values())}
        self._nodes = nodes
        return nodes


def _meaning(error: RedisClusterException) -> redis.RedisError:
    """The last node's error, which stands below that of redis-py: it takes every error that a node answers for the word
    of one without a cluster."""
    last = error.__cause__
    if isinstance(last, RedisClusterException):
        last = last.__context__
        if isinstance(last, redis.ResponseError) and not isinstance(last, LOGIN):
            words = words_of(last).partition(",")[0]
            return NoPrimary(
                f"what answers is no node of a cluster ({words}). The address of one server begins with redis:// or "
                "rediss://"
            )
    if isinstance(last, LOGIN):
        return last
    return NoPrimary(f"none of its nodes answers: {reason_of(last) if isinstance(last, redis.RedisError) else last}")


def _place(node: ClusterNode) -> Place:
    return node.host, node.port


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
    """A pipeline whose commands go to their shards, one shard after the other."""

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
        for node, node_places in places.items():
            with node.pipeline(transaction=False) as pipe:
                pipe.command_stack = [stack[at] for at in node_places]
                for at, reply in zip(node_places, pipe.execute(raise_on_error=False), strict=True):
                    replies[at] = reply
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
