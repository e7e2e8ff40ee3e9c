"""A server's identity, and the checks that a run can live there: program, version, eviction rule, one shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

from rlbuffer.errors import ServerUnsuitable
from rlbuffer.store.server.binary import MINIMUM_VERSION, version_tuple


def identity(info: Mapping[str, Any]) -> tuple[str, str]:
    """Name (``redis`` or ``valkey``) and version from INFO; Valkey reports the version of a compatible Redis, too."""
    if "valkey_version" in info:
        return "valkey", str(info["valkey_version"])
    return "redis", str(info.get("redis_version", ""))


def check_suitable(client: redis.Redis, address: str, source: str) -> None:
    """Checks that a run can live on the server. A user who may not ask (ACL) is trusted.

    `source` ends every message: where the address comes from.

    Raises:
        ServerUnsuitable: it is too old, evicts keys, or is a cluster of several shards.
    """
    try:
        info: dict[str, Any] = dict(client.info())
    except redis.exceptions.NoPermissionError:
        return
    name, version = identity(info)
    place = f"{name.capitalize()} {version} at {address}"
    if version_tuple(version) < MINIMUM_VERSION:
        raise ServerUnsuitable(f"{place} is too old: a run needs Redis 7.0 or Valkey 7.2, or newer.{source}")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ServerUnsuitable(
            f"{place} may evict keys of a run (maxmemory-policy {policy}).{source}\n"
            "  Set it:   redis-cli config set maxmemory-policy noeviction"
        )
    if info.get("cluster_enabled"):
        cluster = client.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
        shards = int(cluster.get("cluster_size", 0))
        if shards > 1:
            raise ServerUnsuitable(
                f"{place} is a cluster of {shards} shards; this version works with one shard.{source}"
            )
