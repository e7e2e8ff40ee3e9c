"""Every recorded decision, made once more: the same batcher that is told the same decides the same, to the last byte.

Told is what the leader had read and known at each commit, from the archive's fields alone. Between two commits it is
asked as a leader asks: when a push was read, and where rules go by the clock as often as a leader looks. A takeover,
and settings that were changed, make another batcher of the saved state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlbuffer.archive.decisions import RecordedPush, digest_again
from rlbuffer.batcher.batcher import Batcher
from rlbuffer.batcher.turn import take_turn
from rlbuffer.records.states import Reason, Trait
from rlbuffer.records.step_plan import Decision, Drop
from rlbuffer.what_if.recorded import Commit, Recorded, config_of

LOOK_SECONDS = 0.02
"""A leader looks as often where nothing comes."""
BY_OTHERS = frozenset(reason for reason in Reason if Trait.OF_OTHERS in reason.traits)
"""Reasons of drops that are not the batcher's to decide."""


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
    """Groups that the decisions dropped."""
    equal_drops: int = 0
    """Those that the run dropped for the same reason, in the same words."""

    @property
    def is_exact(self) -> bool:
        """Every commit and every drop."""
        return self.equal == self.steps and self.drops == self.equal_drops


@dataclass(slots=True, kw_only=True)
class _Leadership:
    batcher: Batcher
    since: float
    revision: int
    pending: dict[str, RecordedPush] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    used: dict[str, int] = field(default_factory=dict)
    """Entry of a group that was trained and may be again -> how often it was: a drop of one only releases it."""
    state: Mapping[str, Any] | None = None

    def add(self, push: RecordedPush) -> None:
        self.pending[push.entry_id] = push
        now = max(push.pushed, self.since)
        self.batcher.add(push.info, entry_id=push.entry_id, now=now, pushed=push.pushed)

    def drop(self, drops: tuple[Drop, ...]) -> None:
        self.batcher.dropped(drops)
        for drop in drops:
            for entry_id in drop.entry_ids:
                self.pending.pop(entry_id, None)
            self.closed.add(drop.group_id)

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


def repeat(recorded: Recorded) -> Repeated:
    """Makes the decisions of a run again."""
    out, by_entry = Repeated(steps=len(recorded.commits)), {push.entry_id: push for push in recorded.pushes}
    others = {group for group, (reason, _) in recorded.drops.items() if reason in BY_OTHERS}
    pushes = [push for push in recorded.pushes if push.info.group_id not in others]
    trained_at = {record["step"]: at for at, record in recorded.trained}
    leadership, given, drops = None, 0, dict[str, Drop]()
    for commit in recorded.commits:
        leadership = _led(leadership, commit, recorded)
        step, lookahead = commit.step.step, recorded.config.lookahead
        begins = trained_at.get(step - 1 - lookahead, leadership.since)
        config = config_of(recorded.archive, commit.step.revision)
        by_clock = config.spillover != "block" or config.fill_timeout_seconds is not None or config.slow == "wait"
        looked = begins
        while given < len(pushes) and pushes[given].order <= commit.read:
            push = pushes[given]
            while by_clock and looked + LOOK_SECONDS < push.pushed:
                looked += LOOK_SECONDS
                _decide(leadership, commit, looked, drops)
            leadership.add(push)
            given += 1
            if begins <= push.pushed < commit.decided:
                _decide(leadership, commit, push.pushed, drops)
        while by_clock and looked + LOOK_SECONDS < commit.decided:
            looked += LOOK_SECONDS
            _decide(leadership, commit, looked, drops)
        decision = _decide(leadership, commit, commit.decided, drops)
        if decision.plan is None or decision.plan.group_ids != commit.header.group_ids:
            was = "no step" if decision.plan is None else f"{len(decision.plan.group_ids)} groups, others than those"
            out.differs = f"step {step}: {was} where the run has {len(commit.header.group_ids)}"
            break
        digest = digest_again(recorded.archive, commit.step, commit.header, decision, by_entry)
        if digest != commit.step.digest:
            out.differs = f"step {step}: the same groups, laid out otherwise"
            break
        out.equal += 1
        leadership.commit(decision)
    out.drops = len(drops)
    out.equal_drops = sum(recorded.drops.get(group) == (str(drop.reason), drop.detail) for group, drop in drops.items())
    return out


def _led(before: _Leadership | None, commit: Commit, recorded: Recorded) -> _Leadership:
    """The leadership that made a commit: the one before, or another that reads the pool again."""
    revision = commit.step.revision
    if before is not None and (before.since, before.revision) == (commit.since, revision):
        return before
    config = config_of(recorded.archive, revision)
    batcher = Batcher(config, None if before is None else before.state, needs_advantage=recorded.needs_advantage)
    made = _Leadership(batcher=batcher, since=commit.since, revision=revision)
    if before is not None:
        made.closed, made.used, made.state = before.closed, before.used, before.state
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


def _decide(leadership: _Leadership, commit: Commit, now: float, drops: dict[str, Drop]) -> Decision:
    turn = take_turn(
        leadership.batcher,
        step=commit.step.step,
        published=commit.published,
        under_way={},
        is_held=False,
        world_size=commit.header.world_size,
        now=now,
    )
    drops.update({drop.group_id: drop for drop in turn.drops if not leadership.used.keys() >= {*drop.entry_ids}})
    leadership.drop(turn.drops)
    assert turn.decision is not None
    return turn.decision
