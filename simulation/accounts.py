"""The invariants' memory of the run: pushes that are pending, steps that are live."""

from __future__ import annotations

from dataclasses import dataclass

from rlbuffer.wire import payload


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
    """Time at which its rollouts came first."""
    entry_id: tuple[int, int]

    def ids(self) -> set[str]:
        """Its rollouts."""
        return {r.rollout_id for r in payload.decode_info(self.metadata).rollouts}


@dataclass(slots=True)
class Live:
    """A committed step that was not retired."""

    payloads: frozenset[bytes]
    amounts: dict[str, list[int]]
    """env -> rollouts, tokens."""
    places: dict[str, tuple[bytes, bytes]]
    """rollout -> payload key, field."""
    parts: int
    """Ranks that it is planned for."""
