"""The size that a push may have for its server, and the time it may take.

A transaction counts whole against `client-query-buffer-limit`, each value against `proto-max-bulk-len`. A push above
them is not refused: the server closes the connection, each time that it is tried, which looks like a server that is
away. So sizes are compared before anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

MIB = 1 << 20
QUERY_BUFFER_BYTES = 1024 * MIB
VALUE_BYTES = 512 * MIB
"""The servers' defaults, for a user who may not read the settings (ACL) and for hosts that hide them."""
OVERHEAD_BYTES = MIB // 16
"""Bytes of a transaction beside its values: names, commands, and what the server has read ahead."""
QUICK_BYTES = 16 * MIB
"""Size up to which every command has the usual time."""
SLOWEST_BYTES_PER_SECOND = MIB
"""A line, or a disk, that takes less than this of a large push counts as broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushLimits:
    """The sizes that a server takes, in bytes."""

    transaction: int = QUERY_BUFFER_BYTES
    """The server's ``client-query-buffer-limit``."""
    value: int = VALUE_BYTES
    """The server's ``proto-max-bulk-len``."""
    memory: int = 0
    """The server's ``maxmemory``; 0: none."""

    def refusal(self, sizes: Mapping[str, int]) -> str:
        """The reason why values of these sizes can never be stored together; "" when they can. The keys name them."""
        total = sum(sizes.values())
        largest = max(sizes, key=sizes.__getitem__)
        if sizes[largest] > self.value:
            return f"{largest} takes {sizes[largest]} bytes, above the server's proto-max-bulk-len of {self.value}"
        if total + OVERHEAD_BYTES > self.transaction:
            return f"it takes {total} bytes, above the server's client-query-buffer-limit of {self.transaction}"
        if self.memory and total > self.memory:
            return f"it takes {total} bytes, above the server's maxmemory of {self.memory}"
        return ""


def read_limits(client: Any) -> PushLimits:
    """The limits that `client`'s server says it has, else those that servers have unless they are set otherwise."""
    defaults = PushLimits()
    try:
        settings = client.config_get("client-query-buffer-limit", "proto-max-bulk-len")
    except redis.ResponseError:  # not allowed, or a host that has no CONFIG
        settings = {}
    try:
        memory = int(client.info("memory").get("maxmemory", 0))
    except redis.ResponseError:
        memory = 0
    return PushLimits(
        transaction=int(settings.get("client-query-buffer-limit", defaults.transaction)),
        value=int(settings.get("proto-max-bulk-len", defaults.value)),
        memory=memory,
    )


def timeout_seconds(size: int, usual: float) -> float:
    """The time that a command of `size` bytes may take: `usual`, doubled until the slowest line has sent it."""
    if size <= QUICK_BYTES:
        return usual
    needed = usual + size / SLOWEST_BYTES_PER_SECOND
    return float(usual * 2 ** math.ceil(math.log2(needed / usual)))
