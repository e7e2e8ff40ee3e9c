"""Every recorded decision, made once more: the same batcher that is told the same decides the same, to the last byte.

Told is what the leader had read and known at each commit, from the archive's fields alone. Between two commits it is
asked where the leader has dropped something, and where rules go by the clock as often as a leader looks. A takeover,
settings that were changed, and steps that were taken back make another batcher of the saved state.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlbuffer.archive.decisions import RecordedPush, digest_again
from rlbuffer.batcher.adapters import at_step
from rlbuffer.batcher.batcher import Batcher
from rlbuffer.batcher.turn import take_turn
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.records.states import Reason, Trait
from rlbuffer.records.step_plan import Decision, Drop
from rlbuffer.what_if.recorded import Commit, Recorded, config_of

LOOK_SECONDS = 0.02
"""A leader looks as often where nothing comes."""
BY_OTHERS = frozenset(reason for reason in Reason if Trait.OF_OTHERS in reason.traits)
"""Reasons of drops that are not the batcher's to decide."""
BY_OPERATORS = frozenset(reason for reason in BY_OTHERS if Trait.CLOSES in reason.traits)
"""Those of whole groups, which the next leadership does not find."""


@dataclass(slots=True, kw_only=True)
class Repeated:
    """What came of it."""

    steps: int
    """Recorded."""
    equal: int = 0
    """Steps whose digest (SHA-256) came out again, from the first on."""
    differs: str = ""
    """The first step that did not, and how."""
    drops: int = 0
    """Drops, of groups or parts of them, that the run or these decisions made until the last of these steps."""
    equal_drops: int = 0
    """Those that both made, for the same reason, in the same words."""

    @property
    def is_exact(self) -> bool:
        """Every commit and every drop."""
        return self.equal == self.steps and self.drops == self.equal_drops


@dataclass(slots=True, kw_only=True)
class _Leadership:
    batcher: Batcher
    first: Commit
    """Its first one: a leadership begins with a takeover, with other settings, or behind steps that were taken back."""
    by_clock: bool
    """A decision may be another one though nothing came."""
    pending: dict[str, RecordedPush] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    used: dict[str, int] = field(default_factory=dict)
    """Entry of a group that was trained and may be again -> how often it was: a drop of one only releases it."""
    state: Mapping[str, Any] | None = None

    def add(self, push: RecordedPush) -> None:
        self.pending[push.entry_id] = push
        now, came = max(push.pushed, self.first.since), max(push.came, self.first.since)
        self.batcher.add(push.info, entry_id=push.entry_id, now=now, pushed=push.pushed, came=came)

    def drop(self, drops: tuple[Drop, ...]) -> None:
        self.batcher.dropped(drops)
        for drop in drops:
            for entry_id in drop.entry_ids:
                self.pending.pop(entry_id, None)
            if Trait.CLOSES in drop.reason.traits:
                self.closed.add(drop.group_id)

    def lose(self, groups: set[str]) -> None:
        """Operators dropped these groups: the next leadership does not find them."""
        if groups:
            self.closed |= groups
            self.pending = {key: push for key, push in self.pending.items() if push.info.group_id not in groups}

    def commit(self, decision: Decision) -> None:
        assert decision.plan is not None
        self.batcher.committed(decision.plan)
        self.state = decision.state
        for use in decision.plan.entries:
            if use.is_kept:
                self.used[use.entry_id] = use.uses + 1
            else:
                self.pending.pop(use.entry_id, None)
                self.closed.add(use.info.group_id)


def repeat(recorded: Recorded, progress: Callable[[int], None] = lambda steps: None) -> Repeated:
    """Makes the decisions of a run again. `progress` gets the number of steps that are made."""
    out, by_entry = Repeated(steps=len(recorded.commits)), {push.entry_id: push for push in recorded.pushes}
    committed = {group for commit in recorded.commits for group in commit.header.group_ids}
    # What could not be trained was found when the step was made, and then another one was decided.
    broken = {drop.group_id for drop in recorded.drops if drop.reason == Reason.INVALID} - committed
    pushes = deque(push for push in recorded.pushes if push.info.group_id not in broken)
    turns = deque(recorded.drop_turns)
    before: Commit | None = None
    leadership, drops = None, dict[tuple[str, ...], Drop]()
    free_since = until = 0.0
    for commit in recorded.commits:
        free_at, then = recorded.free_at(commit), partial(recorded.then, before, commit)
        while turns and turns[0].place(commit) < (commit.since, commit.decided):
            turn = turns.popleft()
            at = turn.at
            if leadership is None or turn.place(commit) >= (commit.since, commit.began):
                leadership = _led(leadership, commit, recorded)
            if gone := {drop.group_id for drop in turn.drops if drop.reason in BY_OPERATORS}:
                _read(leadership, pushes, min((turn.drops[0].at_ms, 0), commit.read))
                leadership.lose(gone)
            if all(drop.reason in BY_OTHERS for drop in turn.drops):
                continue
            looked = max(free_at, leadership.first.began, free_since)
            _clock(leadership, commit, pushes, looked=looked, until=at, drops=drops, then=then)
            _read(leadership, pushes, turn.read)
            is_held = at < free_at if turn.is_held is None else turn.is_held
            _decide(leadership, then(at, turn), at, drops, is_held=is_held)
            free_since = until = at
        leadership = _led(leadership, commit, recorded)
        looked = max(free_at, leadership.first.began, free_since)
        _clock(leadership, commit, pushes, looked=looked, until=commit.decided, drops=drops, then=then)
        _read(leadership, pushes, commit.read)
        decision = _decide(leadership, commit, commit.decided, drops)
        assert decision is not None
        if decision.plan is None or decision.plan.group_ids != commit.header.group_ids:
            was = "no step" if decision.plan is None else f"{len(decision.plan.group_ids)} groups, others than those"
            out.differs = f"step {commit.step.step}: {was} where the run has {len(commit.header.group_ids)}"
            break
        digest = digest_again(recorded.archive, commit.step, commit.header, decision, by_entry)
        if digest != commit.step.digest:
            out.differs = f"step {commit.step.step}: the same groups, laid out otherwise"
            break
        out.equal, before = out.equal + 1, commit
        progress(out.equal)
        leadership.commit(decision)
        free_since, until = commit.step.committed_ms / 1000, commit.decided
        while turns and turns[0].place(commit) <= (commit.since, commit.decided):  # of the same turn
            leadership.lose({drop.group_id for drop in turns.popleft().drops if drop.reason in BY_OPERATORS})
    made = Counter((drop.group_id, str(drop.reason), drop.detail) for drop in drops.values())
    was_made = Counter(
        (drop.group_id, drop.reason, drop.detail)
        for drop in recorded.drops
        if drop.reason not in BY_OTHERS and recorded.decided_at(drop) <= until
    )
    out.drops, out.equal_drops = (made | was_made).total(), (made & was_made).total()
    return out


def _read(leadership: _Leadership, pushes: deque[RecordedPush], last: tuple[int, int]) -> None:
    """Takes in the pushes up to this place in the pool."""
    while pushes and pushes[0].order <= last:
        leadership.add(pushes.popleft())


def _clock(
    leadership: _Leadership,
    commit: Commit,
    pushes: deque[RecordedPush],
    *,
    looked: float,
    until: float,
    drops: dict[tuple[str, ...], Drop],
    then: Callable[[float], Commit],
) -> None:
    """The looks of a leader whose rules go by the clock: when something came, and while nothing comes."""
    while leadership.by_clock and looked < until:
        came = pushes[0].came if pushes and pushes[0].order <= commit.read else until
        looked = min(max(came, looked), looked + LOOK_SECONDS)
        _read(leadership, pushes, min((round(1000 * looked), sys.maxsize), commit.read))
        if looked < until:
            _decide(leadership, then(looked), looked, drops)


def _led(before: _Leadership | None, commit: Commit, recorded: Recorded) -> _Leadership:
    """The leadership that made a commit: the one before, or another that reads the pool again."""
    if before is not None and before.first.is_of_one_leader(commit):
        return before
    state = None
    if before is not None:
        last = recorded.before(commit)
        progress = None if last is None else last.header.adapters
        state = at_step(before.state, step=commit.step.step - 1, progress=progress)
    config = config_of(recorded.archive, commit.step.revision)
    batcher = Batcher(config, state, needs_advantage=recorded.needs_advantage)
    made = _Leadership(batcher=batcher, first=commit, by_clock=_goes_by_clock(config))
    if before is not None:
        made.closed, made.used, made.state = before.closed, before.used, state
        batcher.close(sorted(before.closed))
        again: dict[str, list[RecordedPush]] = {}
        for push in before.pending.values():
            if push.entry_id in made.used:
                again.setdefault(push.info.group_id, []).append(push)
        for parts in again.values():
            pushed = min(parts[0].pushed, commit.since)
            entries, uses = [(part.entry_id, part.info) for part in parts], made.used[parts[0].entry_id]
            batcher.restore(entries, uses=uses, now=commit.since, pushed=pushed)
            made.pending |= {part.entry_id: part for part in parts}
        for push in before.pending.values():
            if push.entry_id not in made.used:
                made.add(push)
    return made


def _goes_by_clock(config: BatcherConfig) -> bool:
    limits = [config.max_age_seconds, *(config.for_env(env).max_age_seconds for env in config.envs)]
    return (
        config.spillover != "block"
        or config.on_dead_env == "borrow"
        or config.fill_timeout_seconds is not None
        or config.slow == "wait"
        or any(limit is not None for limit in limits)
    )


def _decide(
    leadership: _Leadership, commit: Commit, now: float, drops: dict[tuple[str, ...], Drop], *, is_held: bool = False
) -> Decision | None:
    turn = take_turn(
        leadership.batcher,
        step=commit.step.step,
        published=commit.published,
        under_way={},
        is_held=is_held,
        world_size=commit.header.world_size,
        now=now,
    )
    drops.update({drop.entry_ids: drop for drop in turn.drops if not leadership.used.keys() >= {*drop.entry_ids}})
    leadership.drop(turn.drops)
    return turn.decision
