"""TICKET: leave to sample, by number, so that an epoch of prompts is neither skipped nor doubled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlbuffer.store.session import Session, text


class TicketMoves(Session):
    """What workers take and the batcher closes."""

    def take_tickets(self, env: str, n: int, *, ttl_seconds: float) -> list[int]:
        """TICKET take: up to `n` numbers, fewer (or none) while the allowance is out.

        Repeated over a lost reply all the same: numbers that were given out unheard expire and are taken again.
        """
        keys = (self.keys.tickets(env), self.keys.allowance, self.keys.numbers)
        reply = self.move("ticket", keys, ("take", env, n, round(1000 * ttl_seconds)))
        return [int(number) for number in reply]

    def renew_tickets(self, env: str, numbers: Sequence[int], *, ttl_seconds: float) -> None:
        """Keeps tickets out; one that was closed meanwhile stays closed."""
        if numbers:
            self.move("keep", (self.keys.tickets(env),), (max(1, round(1000 * ttl_seconds)), *numbers))

    def release_tickets(self, env: str, numbers: Sequence[int]) -> None:
        """Gives tickets back unused: they are taken again first."""
        if numbers:
            self.move("keep", (self.keys.tickets(env),), (0, *numbers))

    def close_tickets(self, env: str, numbers: Sequence[int]) -> None:
        """Deletes the tickets of ingested groups, and of numbers that no group is wanted of."""
        if numbers:
            # A plain ZREM, because it passes at the memory limit where TICKET is refused.
            self.look(lambda client: client.zrem(self.keys.tickets(env), *numbers))

    def pause(self, env: str) -> bool:
        """The env takes part in no step until it is resumed. -> False when it was paused already."""

        def add(client: Any) -> Any:
            seconds, _ = client.time()
            return client.zadd(self.keys.paused, {env: int(seconds)}, nx=True)

        return bool(self.look(add))

    def resume(self, env: str) -> bool:
        """-> False when it was not paused."""
        return bool(self.look(lambda client: client.zrem(self.keys.paused, env)))

    def paused(self) -> frozenset[str]:
        """Envs that an operator has paused."""
        return frozenset(text(env) for env in self.look(lambda client: client.zrange(self.keys.paused, 0, -1)))

    def allowances(self) -> Mapping[str, int]:
        """env -> tickets that may be out."""
        reply = self.look(lambda client: client.hgetall(self.keys.allowance))
        return {text(env): int(n) for env, n in reply.items()}
