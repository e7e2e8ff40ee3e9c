"""The server's append-only file after a start: half a transaction in it must not come to life at the next one.

Every script with two writes is MULTI..EXEC in the file. When the file ends inside one (a power cut, a full disk), Redis
up to 8.0 and Valkey 8.1 cut it behind the last whole command and leave the MULTI. The next commands stand behind that,
and the next start executes the torn half with them. The memory of the first start is right, and so is a file that
is written from it again: BGREWRITEAOF, once per start of the server, before anything is decided.

Valkey 9.1 reverts the incomplete transaction itself.
"""

from __future__ import annotations

import logging
from typing import Any

import redis

from rlbuffer.errors import ServerUnsuitable, clause
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.store.server.binary import version_tuple
from rlbuffer.store.server.suitable import identity

_log = logging.getLogger(__name__)

REVERTS_FROM = {"valkey": (9, 1)}
"""Servers that need no help: tried with every cut of a transaction. Where an older one is not known, it is helped."""
UNDER_WAY = "rewriting already in progress"


def until_whole(client: redis.Redis, address: str) -> Waiting | None:
    """None when the file can be trusted, or nobody can rewrite it; else what is waited for. Has it rewritten.

    Raises:
        ServerUnsuitable: this user may not have it rewritten.
    """
    info: dict[str, Any] = dict(client.info("server"))
    name, version = identity(info)
    if name in REVERTS_FROM and version_tuple(version) >= REVERTS_FROM[name]:
        return None
    facts: dict[str, Any] = dict(client.info("persistence"))
    if not facts.get("aof_enabled"):
        return None
    is_under_way = bool(facts.get("aof_rewrite_in_progress") or facts.get("aof_rewrite_scheduled"))
    failures = int(facts.get("aof_rewrites_consecutive_failures", 0))
    if int(facts.get("aof_rewrites", 0)) - failures - int(facts.get("aof_rewrite_in_progress", 0)) > 0:
        return None
    if not is_under_way:
        try:
            client.execute_command("BGREWRITEAOF")  # type: ignore[no-untyped-call]
        except redis.ResponseError as error:
            if "unknown command" in str(error):
                _log.warning(
                    "Warning: %s %s at %s has no BGREWRITEAOF, as managed servers do. Its append-only file may hold "
                    "half a transaction after a cut in the middle of a write; its next start would execute that.",
                    name.capitalize(),
                    version,
                    address,
                )
                return None
            if UNDER_WAY not in str(error):
                raise ServerUnsuitable(
                    f"{name.capitalize()} {version} at {address} was started anew, and its append-only file may "
                    "hold half a transaction, which the next start would execute. It cannot be rewritten from here: "
                    f"{clause(error)}.\n"
                    "  Give this user the right:    ACL SETUSER NAME +bgrewriteaof   (deploy/users.acl has it)\n"
                    "  Or rewrite it by hand, once per start of the server:   redis-cli BGREWRITEAOF"
                ) from error
    return Waiting(kind=Wait.SERVER_START, groups=failures)
