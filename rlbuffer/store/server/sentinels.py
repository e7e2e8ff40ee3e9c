"""The sentinels of a service, by redis-py's own client."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.connection import SSLConnection
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from rlbuffer.store.server.address import SENTINEL_LOGIN
from rlbuffer.store.server.answers import NoPrimary

NODE_SECONDS = 2.0
"""Longest that a sentinel, or a node of a cluster, is waited for, twice: for the connection and for its answer."""
ASKING: Mapping[str, Any] = {
    "protocol": 3,  # whose greeting takes the tickets off a TLS connection: redis-py uses none with something to read
    "driver_info": None,
    "socket_timeout": NODE_SECONDS,
    "socket_connect_timeout": NODE_SECONDS,
    "retry": Retry(NoBackoff(), 0),
}
"""Options of a connection for a question: who is the primary, who has a slot."""
_RANDOM = random.Random()  # the global one is the user's: a checkpoint keeps its state


class Watchers(Sentinel):
    """The sentinels of a service."""

    def __init__(self, places: Sequence[tuple[str, int]], service: str, options: Mapping[str, Any]) -> None:
        """`options`: login and TLS of a connection to one of them."""
        super().__init__(places, sentinel_kwargs={**ASKING, **options})  # type: ignore[no-untyped-call]
        self.places, self.service = places, service

    def discover_master(self, service_name: str) -> Any:
        """The primary, by the first that names one; raises NoPrimary.

        They are asked in a drawn order: one that is cut off and behind keeps nobody for long. redis-py moves the one
        that answered to the front of the list that it walks, so each call has a list of its own.
        """
        shuffled = copy(self)
        shuffled.sentinels = _RANDOM.sample(self.sentinels, len(self.sentinels))
        try:
            return Sentinel.discover_master(shuffled, service_name)  # type: ignore[no-untyped-call]
        except MasterNotFoundError as error:
            named = ", ".join(f"{host}:{port}" for host, port in self.places)
            raise NoPrimary(
                f'none of its sentinels ({named}) names a primary of "{service_name}" that is up. '
                "`rlbuffer doctor` asks each of them"
            ) from self._refusal(shuffled.sentinels) or error

    @staticmethod
    def _refusal(sentinels: Sequence[Redis]) -> RedisError | None:
        """Why one of them cannot be asked: redis-py keeps only the words of it."""
        for sentinel in sentinels:
            try:
                sentinel.ping()
            except RedisError as error:
                return error
        return None


def watchers_of(options: Mapping[str, Any]) -> Watchers | None:
    """The sentinels among the options of an address; None where there are none."""
    if "sentinels" not in options:
        return None
    login = {name: options[key] for name, key in SENTINEL_LOGIN.items() if key in options}
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    is_tls = options.get("connection_class") is SSLConnection
    return Watchers(options["sentinels"], options["service"], login | tls | {"ssl": is_tls})
