"""Operations on a run that is at work: drop pending groups, drain it, and know when that is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlbuffer.client.filters import parse
from rlbuffer.client.groups import pending_groups
from rlbuffer.client.run_state import read_run_state
from rlbuffer.client.searching import TextOf, matching
from rlbuffer.records.states import Reason, State
from rlbuffer.records.step_plan import Drop
from rlbuffer.store.records import PoolEntry
from rlbuffer.store.viewer import Viewer


# -- drop --------------------------------------------------------------------------------------------------------------
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


# -- drain -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainState:
    """The state of a drain."""

    is_asked: bool
    """Nobody has undone it."""
    has_leader: bool
    tickets: Mapping[str, int] = field(default_factory=dict)
    """env -> tickets that are out."""
    forming: int = 0
    """Groups that wait for more of their rollouts."""
    is_idle: bool = False
    """No further step can be made of what is here, and the trainer, where there is one, has nothing to wait for."""

    @property
    def is_drained(self) -> bool:
        """Nothing is out, nothing forms, and no step can come any more."""
        return not self.tickets and not self.forming and self.is_idle

    def __str__(self) -> str:
        out = sum(self.tickets.values())
        envs = ", ".join(f"{env} {n}" for env, n in self.tickets.items())
        tickets = f"{out} ticket{'s are' if out != 1 else ' is'} out" + (f" ({envs})" if envs else "")
        groups = f"{self.forming} group{'s form' if self.forming != 1 else ' forms'}"
        steps = "no further step can be made" if self.is_idle else "further steps can be made"
        leader = "" if self.has_leader else ", no batcher is at work"
        return f"{tickets}, {groups}, {steps}{leader}"


class Drain:
    """Watches a run drain. Make it after `OperatorStore.ask_drain`."""

    def __init__(self, store: Viewer) -> None:
        self._store = store
        self._empty_since: float | None = None
        """Server time since when no ticket is out: none can be taken any more, so it stays that way."""

    def look(self) -> DrainState:
        """The state of the drain. The leader's word counts only when it is newer than the last ticket."""
        state = read_run_state(self._store)
        is_asked = state.draining_since is not None
        tickets = {env.name: env.tickets for env in state.envs if env.tickets}
        if tickets:
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = self._store.now()  # tickets were counted after `state.at`
        if not state.is_led:
            forming = sum(view.state == State.FORMING for view, _ in pending_groups(self._store))
            return DrainState(is_asked=is_asked, has_leader=False, tickets=tickets, forming=forming, is_idle=True)
        # One that has just taken over has said nothing yet: then it is still reading.
        leader, since = state.leader, self._empty_since
        is_newer = leader is not None and since is not None and state.at - leader.seconds_ago > since
        return DrainState(
            is_asked=is_asked,
            has_leader=True,
            tickets=tickets,
            forming=sum(env.groups_forming or 0 for env in state.envs),
            is_idle=leader is not None and is_newer and leader.idle,
        )


def pending_amounts(store: Viewer) -> tuple[int, int, int]:
    """Groups, rollouts and tokens in the pool."""
    amounts: Sequence[tuple[int, int]] = [
        (sum(entry.rollouts for entry in entries), sum(entry.tokens for entry in entries))
        for _, entries in pending_groups(store)
    ]
    return len(amounts), sum(rollouts for rollouts, _ in amounts), sum(tokens for _, tokens in amounts)
