"""A server's identity, and the checks that a run can live there: program, version, eviction rule, one shard."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import redis

from rlbuffer.errors import ServerUnsuitable
from rlbuffer.store.server.answers import IS_SENTINEL
from rlbuffer.store.server.binary import MINIMUM_VERSION, version_tuple

FIGURES = {
    "used_memory": "used_memory",
    "maxmemory": "maxmemory",
    "unfreed": "lazyfree_pending_objects",
    "buffers": "mem_clients_normal",
}
"""Figure of a server -> field of INFO."""


def figures(info: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of INFO for :meth:`Connection.describe`. Without any, as in memory, nothing is used or limited."""
    name, version = identity(info) if info else ("memory", "")
    out = {"name": name, "version": version, "policy": info.get("maxmemory_policy", "noeviction")}
    out |= {figure: info.get(field, 0) for figure, field in FIGURES.items()}
    # The server leaves its own file's buffer out when it compares with the limit.
    out["used_memory"] -= int(info.get("mem_not_counted_for_evict", 0))
    return out


def fullest(infos: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The INFO of the server that is nearest to its limit; where none has one, of the largest."""
    return max(infos, key=lambda info: info.get("used_memory", 0) / (info.get("maxmemory") or 2**60))


def identity(info: Mapping[str, Any]) -> tuple[str, str]:
    """Name (``redis`` or ``valkey``) and version from INFO; Valkey reports the version of a compatible Redis, too."""
    if "valkey_version" in info:
        return "valkey", str(info["valkey_version"])
    return "redis", str(info.get("redis_version", ""))


def check_no_sentinel(info: Mapping[str, Any], address: str, source: str) -> None:
    """Raises ServerUnsuitable for INFO of a sentinel: it holds no data."""
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):
        services = [str(value["name"]) for name, value in info.items() if re.fullmatch(r"master\d+", name)]
        raise ServerUnsuitable(
            f"what answers at {address} holds no data: {IS_SENTINEL}. Services that it knows: "
            f"{', '.join(services) or 'none'}.{source}"
        )


def check_suitable(client: redis.Redis, address: str, source: str, *, is_cluster: bool = False) -> None:
    """Checks that a run can live on the server. A user who may not ask (ACL) is trusted.

    `source` ends every message: where the address comes from. `is_cluster`: the address says so.

    Raises:
        ServerUnsuitable: it is a sentinel, too old, evicts keys, or is a cluster of several shards, which the address
            does not say.
    """
    try:
        info: dict[str, Any] = dict(client.info())
    except redis.exceptions.NoPermissionError:
        return
    check_no_sentinel(info, address, source)
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
    if info.get("cluster_enabled") and not is_cluster:
        cluster = client.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
        shards = int(cluster.get("cluster_size", 0))
        if shards > 1:
            raise ServerUnsuitable(
                f"{place} is a cluster of {shards} shards. Write redis+cluster://HOST:PORT,HOST:PORT{source}"
            )
