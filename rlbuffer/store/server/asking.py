"""A connection for one question to a node of a cluster or to a sentinel: who has a slot, who is the primary."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool, SSLConnection
from redis.retry import Retry

NODE_SECONDS = 2.0
"""Longest that one node is waited for, twice: for the connection and for its answer."""


def pool_of(place: tuple[str, int], options: Mapping[str, Any]) -> ConnectionPool:
    """Connections to the node at a host and port, with these options of login and TLS."""
    return ConnectionPool(
        host=place[0],
        port=place[1],
        protocol=2,
        driver_info=None,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=NODE_SECONDS,
        socket_connect_timeout=NODE_SECONDS,
        redis_connect_func=_introduced,
        **options,
    )


def _introduced(connection: Any) -> None:
    """Logs in. Over TLS it then reads any answer, for a server of TLS 1.3 sends tickets that nobody asked for: redis-py
    gives out no connection on which something can be read. Without a login nothing else would take them off."""
    connection.on_connect()
    if isinstance(connection, SSLConnection):
        connection.send_command("PING", check_health=False)  # type: ignore[no-untyped-call]
        with suppress(redis.ResponseError):  # one that PING is not allowed to has answered, too
            connection.read_response()
