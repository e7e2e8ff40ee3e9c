"""Pending groups that an operator drops: chosen by a filter, each whole."""

from __future__ import annotations

from dataclasses import dataclass

from rlbuffer.client.filters import parse
from rlbuffer.client.groups import pending_groups
from rlbuffer.client.searching import TextOf, matching
from rlbuffer.records.states import Reason
from rlbuffer.records.step_plan import Drop
from rlbuffer.store.records import PoolEntry
from rlbuffer.store.viewer import Viewer


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Pending groups that a filter chose."""

    drops: tuple[tuple[Drop, tuple[PoolEntry, ...]], ...] = ()
    """Every group whole, with all its pushes."""

    @property
    def rollouts(self) -> int:
        """Rollouts of them, as they were pushed."""
        return sum(drop.rollouts for drop, _ in self.drops)

    @property
    def tokens(self) -> int:
        """Tokens of them, as they were pushed."""
        return sum(drop.tokens for drop, _ in self.drops)

    def envs(self) -> dict[str, tuple[int, int, int]]:
        """env -> groups, rollouts, tokens."""
        out: dict[str, tuple[int, int, int]] = {}
        for drop, _ in self.drops:
            groups, rollouts, tokens = out.get(drop.env, (0, 0, 0))
            out[drop.env] = (groups + 1, rollouts + drop.rollouts, tokens + drop.tokens)
        return dict(sorted(out.items()))


def choose(store: Viewer, where: str, *, text_of: TextOf | None = None) -> Chosen:
    """Pending groups, forming or ready, that match the filter; `text_of` as in `list_groups`. Raises FilterError."""
    drops = []
    for view, entries in matching(store, pending_groups(store), parse(where), text_of=text_of):
        drop = Drop(
            group_id=view.group_id,
            env=view.env,
            reason=Reason.OPERATOR,
            rollouts=sum(entry.rollouts for entry in entries),
            tokens=sum(entry.tokens for entry in entries),
            entry_ids=tuple(entry.entry_id for entry in entries),
            detail=f"rlbuffer drop --where {where!r}",
            min_version=view.min_version,
            reward=view.reward,
        )
        drops.append((drop, tuple(entries)))
    return Chosen(drops=tuple(drops))
