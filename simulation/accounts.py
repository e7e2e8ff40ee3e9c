"""The invariants' memory of the run: pushes that are pending, steps that are live; and how the ledger names amounts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rlbuffer.wire import payload

UNITS = ("rollouts", "tokens")
FATES = ("pushed", "packed", "trained", "dropped")


@cache
def ledger_place(field: bytes) -> tuple[str, str, str]:
    """Env, fate and unit of a field of the ledger; every reason of a drop is one fate. Fields beside the account are no
    fate."""
    env, *fate, unit = field.decode().split(":") if b":" in field else ("", field.decode(), "")
    return env, fate[0], unit


def counted(value: bytes) -> int:
    """An amount, as a drop counts it."""
    return int(value) if value.isdigit() and len(value) <= 15 else 0


def incarnation_of(payload_key: bytes) -> str:
    """Producer that pushed it."""
    return payload_key.decode().rpartition(":")[2].rpartition(".")[0]


@dataclass(slots=True)
class Pending:
    """A pool entry."""

    payload: bytes
    group: str
    env: str
    amounts: tuple[int, int]
    """Rollouts, tokens."""
    metadata: bytes
    pushed_ms: int
    """Time at which its rollouts came first, by the server's clock."""
    entry_id: tuple[int, int]
    came: float
    """The same by the true clock."""

    def ids(self) -> set[str]:
        """Its rollouts."""
        return {r.rollout_id for r in payload.decode_info(self.metadata).rollouts}

    def oldest(self) -> int:
        """The oldest version that sampled it."""
        return min(r.min_version for r in payload.decode_info(self.metadata).rollouts)


@dataclass(slots=True)
class Live:
    """A committed step that was not retired."""

    payloads: frozenset[bytes]
    amounts: dict[str, list[int]]
    """env -> rollouts, tokens."""
    places: dict[str, set[tuple[bytes, bytes]]]
    """rollout -> payload key, field."""
    parts: int
    """Ranks that it is planned for."""
    groups: dict[str, int]
    """env -> groups that train for the first time."""
