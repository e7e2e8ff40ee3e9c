"""What a scorer does: it claims pending pushes, and pushes what it has added in their places.

Claims expire, so that another scorer takes over from a dead one. A claim keeps two scorers from the same work, no more:
a column or reward is added once, whoever holds the claim, for PUSH puts it in the place of an entry that must still be
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlbuffer.store.producer import ProducerStore


class ScorerStore(ProducerStore):
    """A run for a scorer."""

    def claim_scoring(
        self, entry_ids: Sequence[str], *, owner: str, ttl_seconds: float
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Claims pending entries, or prolongs claims. -> (those that `owner` holds now, those that are gone).

        A claim expires after `ttl_seconds`.
        """
        pool, keys = self.keys.pool, [self.keys.scoring(entry_id) for entry_id in entry_ids]
        milliseconds = max(1, round(1000 * ttl_seconds))

        def claim(pipe: Any) -> None:
            for entry_id, key in zip(entry_ids, keys, strict=True):
                pipe.xrange(pool, entry_id, entry_id).set(key, owner, nx=True, px=milliseconds).get(key)

        reply = self.piped(claim, lenient=True)
        gone = frozenset(e for e, entry in zip(entry_ids, reply[::3], strict=True) if not entry)
        claimed = frozenset(e for e, holder in zip(entry_ids, reply[2::3], strict=True) if holder == owner.encode())
        # No claim runs for longer than it was given for: one that would is of a clock that was set back since.
        held = [key for key, holder in zip(keys, reply[2::3], strict=True) if holder]
        self.paged(held, lambda pipe, key: pipe.pexpire(key, milliseconds, lt=True))
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

    def _where_mine(self, entry_ids: Sequence[str], owner: str, act: Any) -> None:
        # Between the look and the act a claim may expire and be another's: then two do the same work, and one is late.
        keys = [self.keys.scoring(entry_id) for entry_id in entry_ids]
        holders = self.look(lambda client: client.mget(keys)) if keys else []
        self.paged([key for key, holder in zip(keys, holders, strict=True) if holder == owner.encode()], act)
