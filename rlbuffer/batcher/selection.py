"""The groups that go into a step, in order: deficit round robin until the step is full or an env has nothing left.

The env whose deficit would reach a whole group soonest goes first. Envs whose deficit would be at or below 0 after the
credit for their next group do not compete. Simply taking the largest deficit drifts by up to 1.7 groups among eight
envs of unequal shares (simulated); with deadlines no env is ever further than one group from its share.
While some have nothing ready, each of them may be owed its mean group, and another one be ahead by all of these.
Source: Baruah, Cohen, Plaxton and Varvel 1996, Proportionate progress (earliest pseudo-deadline first).

Nothing is moved here. A trial walks the ready groups from the front, on copies of the deficits, and says why it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from rlbuffer.batcher.adapters import Queue
from rlbuffer.batcher.budget import Deficits, size_of
from rlbuffer.batcher.group import PooledGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of one step."""

    rows: int
    """Rows of the step: world size x micro_batches_per_rank x rows_per_micro_batch."""
    row_tokens: int
    groups: int | None = None
    """Exactly this many groups instead."""
    rollouts: int | None = None
    """Least number of rollouts instead."""
    flat: float | None = None
    """Largest share of the step that flat groups may take; None: they are not told apart."""
    used: float = 1.0
    """Largest share of the step that groups may take which were trained before."""

    @property
    def by_rows(self) -> bool:
        """True when the rows decide."""
        return self.groups is None and self.rollouts is None

    @property
    def tokens(self) -> int:
        """Tokens that the rows can hold."""
        return self.rows * self.row_tokens

    @property
    def total(self) -> int:
        """The amount that fills a step: groups, rollouts or tokens."""
        return self.groups or self.rollouts or self.tokens

    def lacks(self, *, groups: int, rollouts: int, tokens: int, adapters: int, close_fill: float) -> bool:
        """True when so much cannot fill a step, however it is selected and laid out."""
        if self.groups is not None:
            return groups < self.groups
        if self.rollouts is not None:
            return rollouts < self.rollouts
        # Any packing leaves at most one row of an adapter less than half full: below that there is always room.
        has_room = 2 * tokens <= (self.rows + 1 - adapters) * self.row_tokens
        return has_room and tokens < close_fill * self.tokens

    def amount(self, group: PooledGroup) -> int:
        """The amount that one group adds to it."""
        return 1 if self.groups is not None else group.rollouts if self.rollouts is not None else group.tokens

    def is_counted(self, groups: int, rollouts: int) -> bool:
        """True when so many close a step, where rows do not decide."""
        return groups == self.groups or (self.rollouts is not None and rollouts >= self.rollouts)


class Ended(StrEnum):
    """The rule that ended a trial."""

    FULL = "full"
    """The step's tokens are there, or the next group would exceed them (it is not part of the selection)."""
    COUNT = "count"
    """`step_groups` or `step_rollouts` is reached."""
    SHORT = "short"
    """An env with a budget is owed more than its mean group and has nothing ready: the step waits for it."""
    EMPTY = "empty"
    """Nothing that may go next is ready."""


@dataclass(slots=True)
class Trial:
    """The groups that a trial selected, and how it ended."""

    groups: list[PooledGroup] = field(default_factory=list)
    deficits: dict[str, float] = field(default_factory=dict)
    """Env -> its deficit after the last selected group."""
    ended: Ended = Ended.EMPTY
    tokens: int = 0
    rollouts: int = 0
    short: list[str] = field(default_factory=list)
    """Envs with a budget that are short, the neediest first."""
    lent: list[str] = field(default_factory=list)
    """Envs that are short, too, but not waited for: others fill their place."""
    surplus: list[PooledGroup] = field(default_factory=list)
    """Flat groups beyond what a step may hold of them."""
    exhausted: list[str] = field(default_factory=list)
    """Envs with a share of which every ready group is selected."""
    balanced: int = 0
    """Longest prefix of `groups` at `close_fill` or more with every env that has a budget within a mean group."""

    def add(self, group: PooledGroup) -> None:
        """Selects one more group."""
        self.groups.append(group)
        self.tokens += group.tokens
        self.rollouts += group.rollouts


@dataclass(slots=True)
class _Shares:
    """The part of a step's limits that its groups take."""

    limits: Limits
    flat: int = 0
    used: int = 0
    rows: int = 0
    """Rows that its tokens need at least."""
    over_half: int = 0
    """Sequences longer than half a row."""
    tokens_of: dict[str, int] = field(default_factory=dict)
    """Adapter -> tokens."""

    def add(self, group: PooledGroup, *, is_flat: bool) -> None:
        """Counts a group that is selected."""
        if group.used or is_flat:
            amount = self.limits.amount(group)
            self.used += amount * bool(group.used)
            self.flat += amount * is_flat

    def is_past_used(self, group: PooledGroup) -> bool:
        """True when groups that were trained before would take too much with this one."""
        return self.used + self.limits.amount(group) > self.limits.used * self.limits.total

    def is_past_flat(self, group: PooledGroup, share: float) -> bool:
        """True when flat groups would take more than `share` with this one."""
        return self.flat + self.limits.amount(group) > share * self.limits.total

    def is_past_rows(self, group: PooledGroup) -> bool:
        """Counts a group that goes next; True when no packing puts it into the rows, too."""
        row = self.limits.row_tokens
        # Sequences longer than half a row never share one: they fill a step long before its tokens do.
        self.over_half += sum(2 * length > row for length in group.lengths)
        # A row holds one adapter: each one's tokens need rows of their own.
        before = self.tokens_of.get(group.adapter, 0)
        after = self.tokens_of[group.adapter] = before + group.tokens
        self.rows += -(-after // row) - -(-before // row)
        return self.rows > self.limits.rows or self.over_half > self.limits.rows


def select(
    *,
    candidates: Mapping[str, Queue],
    deficits: Mapping[str, float],
    fractions: Mapping[str, float],
    means: Mapping[str, float],
    budgeted: Collection[str],
    limits: Limits,
    unit: str,
    close_fill: float,
    teaches: Callable[[PooledGroup], bool],
    excused: Collection[str] = (),
    overdue: Collection[str] = (),
    is_last: Callable[[PooledGroup], bool] | None = None,
) -> Trial:
    """Runs one trial.

    Args:
        candidates: env -> its ready groups in the order in which they should train.
        deficits: env -> what it is owed now.
        fractions: env -> share, summing to 1.
        means: env -> mean group in `unit`.
        budgeted: envs that the step waits for when they are short.
        limits: how much the step may hold.
        unit: tokens | rollouts | groups.
        close_fill: from this share of the tokens on a balanced step need not wait for one group too many.
        teaches: tells whether a group teaches anything; one that does not is flat.
        excused: envs of `budgeted` that it does not wait for now.
        overdue: envs of `budgeted` that have been short for too long: whatever goes before them closes the step. Their
            deficits from earlier steps are left out of the trial: else nothing could go before them.
        is_last: tells whether a group can train at this step and at no later one. Those go before all others; what
            their envs are ahead by then, they give back later. They stand first in `candidates`.
    """
    trial = Trial()
    owed = {env: deficits.get(env, 0.0) for env in fractions}
    heads = {env: candidates[env].head if env in candidates else None for env in fractions if fractions[env] > 0}
    left_out = {env: max(0.0, owed[env]) for env in overdue if env in heads and heads[env] is None}
    turns = Deficits(owed | {env: owed[env] - size for env, size in left_out.items()}, fractions)
    waited = {env for env in budgeted if env not in excused and env in fractions}
    places, means_of = turns.places(waited), np.array([means[env] for env in waited])
    by_rows, capacity, least = limits.by_rows, limits.tokens, close_fill * limits.tokens
    shares = _Shares(limits)

    def put(env: str, head: PooledGroup | None) -> None:
        heads[env] = head
        turns.offer(env, None if head is None else size_of(unit, tokens=head.tokens, rollouts=head.rollouts))
        if head is None and env in waited:
            turns.watch(env, means[env])

    def offer(env: str, head: PooledGroup | None) -> None:
        """While there are groups that cannot wait: of each env the next one of these."""
        if head is None or is_last is None or not is_last(head):
            heads[env] = head
            turns.offer(env, None)
        else:
            put(env, head)

    only_last = is_last is not None
    give = offer if only_last else put
    for env, head in heads.items():
        give(env, head)
    while True:
        trial.short = turns.short()
        if trial.short:
            trial.ended = Ended.SHORT
            break
        turn = turns.turn()
        if turn is None and only_last:
            only_last, give = False, put
            for env, head in heads.items():
                put(env, head)
            continue
        group = heads[turn] if turn is not None else None
        if group is None:
            trial.ended = Ended.EMPTY
            break
        env = group.env
        if group.used and shares.is_past_used(group):
            give(env, None)  # all that come after it were used, too
            continue
        is_flat = limits.flat is not None and not teaches(group)
        if limits.flat is not None and is_flat and shares.is_past_flat(group, limits.flat):
            trial.surplus.append(group)
            candidates[env].skip()
            give(env, candidates[env].head)
            continue
        if by_rows and shares.is_past_rows(group) and trial.groups:
            trial.ended = Ended.FULL
            break
        shares.add(group, is_flat=is_flat)
        trial.add(group)
        turns.charge(env, size_of(unit, tokens=group.tokens, rollouts=group.rollouts))
        candidates[env].take()
        give(env, candidates[env].head)
        if trial.tokens >= capacity if by_rows else limits.is_counted(len(trial.groups), trial.rollouts):
            trial.ended = Ended.FULL if by_rows else Ended.COUNT
            break
        if by_rows and trial.tokens >= least and bool((turns.owed(places) <= means_of).all()):
            trial.balanced = len(trial.groups)
    trial.deficits = turns.all()
    for env, size in left_out.items():
        trial.deficits[env] += size
    _name_overdue(trial, _short(heads, trial.deficits, means, left_out))
    trial.lent = _short(heads, trial.deficits, means, {env for env in budgeted if env in excused})
    trial.exhausted = [env for env, head in heads.items() if head is None]
    return trial


def _name_overdue(trial: Trial, late: Collection[str]) -> None:
    """Envs that are overdue are short, too; a step that would be empty without them is short."""
    trial.short += [env for env in late if env not in trial.short]
    if late and trial.ended is Ended.EMPTY:
        trial.ended = Ended.SHORT


def _short(
    heads: Mapping[str, PooledGroup | None],
    owed: Mapping[str, float],
    means: Mapping[str, float],
    budgeted: Collection[str],
) -> list[str]:
    names = [e for e, head in heads.items() if head is None and e in budgeted and owed[e] > means[e]]
    return sorted(names, key=lambda e: (-owed[e], e)) if names else names
