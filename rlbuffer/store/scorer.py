"""What a scorer does: it claims pending pushes, and pushes what it has added in their places.

Claims lapse, so that another scorer takes over from a dead one. A claim keeps two scorers from the same work, no more:
a column or reward is added once, whoever holds the claim, for PUSH puts it in the place of an entry that must still be
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlbuffer.store.producer import ProducerStore
from rlbuffer.store.session import answers


class ScorerStore(ProducerStore):
    """A run for a scorer."""

    def claim_scoring(
        self, entry_ids: Sequence[str], *, owner: str, ttl_seconds: float
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Claims pending entries, or prolongs claims. -> (those that `owner` holds now, those that are gone).

        A claim lapses after `ttl_seconds`.
        """
        pool, keys = self.keys.pool, [self.keys.scoring(entry_id) for entry_id in entry_ids]
        milliseconds = max(1, round(1000 * ttl_seconds))

        def claim(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                for entry_id, key in zip(entry_ids, keys, strict=True):
                    pipe.xrange(pool, entry_id, entry_id)
                    pipe.set(key, owner, nx=True, px=milliseconds)
                    pipe.get(key)
                return answers(pipe)

        reply = self.look(claim)
        gone = frozenset(e for e, entry in zip(entry_ids, reply[::3], strict=True) if not entry)
        claimed = frozenset(e for e, holder in zip(entry_ids, reply[2::3], strict=True) if holder == owner.encode())
        self._clamp([key for key, holder in zip(keys, reply[2::3], strict=True) if holder], milliseconds)
        if gone:
            self.release_scoring(sorted(gone & claimed), owner=owner)
        self.renew_scoring(sorted(claimed - gone), owner=owner, ttl_seconds=ttl_seconds)
        return claimed - gone, gone

    def renew_scoring(self, entry_ids: Sequence[str], *, owner: str, ttl_seconds: float) -> None:
        """Prolongs claims that `owner` holds."""
        milliseconds = max(1, round(1000 * ttl_seconds))
        self._where_mine(entry_ids, owner, lambda pipe, key: pipe.pexpire(key, milliseconds))

    def release_scoring(self, entry_ids: Sequence[str], *, owner: str) -> None:
        """Gives claims back."""
        self._where_mine(entry_ids, owner, lambda pipe, key: pipe.delete(key))

    def _clamp(self, keys: Sequence[str], milliseconds: int) -> None:
        """No claim runs for longer than it was given for: one that would is of a clock that was set back since."""

        def clamp(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.pexpire(key, milliseconds, lt=True)
                return answers(pipe)

        if keys:
            self.look(clamp)

    def _where_mine(self, entry_ids: Sequence[str], owner: str, act: Any) -> None:
        # Between the look and the act a claim may lapse and be another's: then two do the same work, and one is late.
        if not entry_ids:
            return
        keys = [self.keys.scoring(entry_id) for entry_id in entry_ids]

        def move(client: Any) -> None:
            mine = [key for key, holder in zip(keys, client.mget(keys), strict=True) if holder == owner.encode()]
            with client.pipeline(transaction=False) as pipe:
                for key in mine:
                    act(pipe, key)
                pipe.execute()

        self.look(move)
