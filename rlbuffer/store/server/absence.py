"""Remedies for a server that is not there: start one, change the address, or look at TLS."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from typing import Any

import redis

from rlbuffer.store.server import tls
from rlbuffer.store.server.address import is_cluster, is_sentinel


def remedy(error: redis.RedisError, *, url: str, options: Mapping[str, Any], origin: str, is_known: bool) -> str:
    """The lines below a message that nothing answers at `url`.

    `options` are those of the url, `origin` says where it comes from; `is_known`: the server has answered before.
    """
    if not is_known and _refused(error) is None:
        suspicion = _suspicion(error, url, options)
        if suspicion:
            return f"  {suspicion}"
    instead = "leave redis_url out"
    if origin.startswith("--"):
        instead = f"leave {origin.split()[0]} out"
    elif re.fullmatch(r"[A-Z0-9_]+", origin):
        instead = f"unset {origin}"
    return f"  {_start_one(url, options)}\n  Or use the embedded one: {instead}."


def _suspicion(error: redis.RedisError, url: str, options: Mapping[str, Any]) -> str:
    """The likely mistake with TLS; "" for none."""
    kind = "sentinel" if is_sentinel(url) else "cluster" if is_cluster(url) else ""
    if not kind:
        return tls.suspicion(error, options, is_tls=url.startswith("rediss:"))
    host, port = (options.get("sentinels") or options["nodes"])[0]
    words = tls.suspicion(error, {"host": host, "port": port}, is_tls=url.startswith("rediss+"))
    return words.replace("://", f"+{kind}://")


def _start_one(url: str, options: Mapping[str, Any]) -> str:
    """The way to start the server that is not there, or to see what its sentinels think."""
    if is_sentinel(url):
        host, port = options["sentinels"][0]
        return f"Ask them what they wait for:   redis-cli -h {host} -p {port} sentinel ckquorum {options['service']}"
    if is_cluster(url):
        host, port = options["nodes"][0]
        return f"Ask one how the others are:   redis-cli -h {host} -p {port} cluster nodes"
    if url.startswith("unix:"):
        return f"Start one:   valkey-server --unixsocket {options.get('path', '')}   (or redis-server)"
    if url.startswith("rediss:"):
        return "Start one there, with TLS (valkey-server or redis-server)."
    return f"Start one there:   valkey-server --port {options.get('port', 6379)}   (or redis-server)"


def _refused(error: BaseException) -> BaseException | None:
    """The error that says that nothing listens there, or that the host does not exist."""
    below = error.__cause__ or error.__context__
    return below if isinstance(below, ConnectionRefusedError | socket.gaierror) else None
