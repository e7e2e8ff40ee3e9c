"""Parts merge into a group, and the group knows whether more of it may come.

A part is one push, so one pool entry. Its rollouts are judged as it arrives: valid ones join, others are left out with
a reason and are accounted for together with the entry that holds them.

A group is a value: it is in no index and knows of none (:mod:`rlbuffer.batcher.pool`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec

from rlbuffer.records.info import GroupInfo, RolloutInfo, are_flat
from rlbuffer.records.states import Reason, Trait
from rlbuffer.records.step_plan import Drop, GroupPart
from rlbuffer.state.text import counted, plural

REWARD = "reward"
"""Need of a group whose rollouts are not scored yet."""
_ABOUT = ("env", "prompt_id", "adapter", "planned_size")
"""What all parts of a group have in common."""
_about = attrgetter(*_ABOUT)
_REASONS = tuple(Reason)
"""In the order of tables."""


class Rejected(NamedTuple):
    """The reason why a part, or one rollout of it, does not join its group."""

    reason: Reason
    detail: str


class PooledGroup:
    """One group as the batcher holds it: its parts, and running sums of the rollouts that have joined.

    Most groups are one push that joins whole, by sums that came with it: nobody looks at its rollouts until the group
    is selected or dropped.
    """

    __slots__ = (
        "_ids",
        "adapter",
        "env",
        "flatness",
        "group_id",
        "is_ready",
        "max_version",
        "min_version",
        "needs",
        "parts",
        "planned_size",
        "prompt_id",
        "pushed",
        "rejected",
        "rollouts",
        "since",
        "tokens",
        "used",
    )

    def __init__(self, info: GroupInfo, since: float, pushed: float | None = None, used: int = 0) -> None:
        self.group_id = info.group_id
        self.env = info.env
        self.prompt_id = info.prompt_id
        self.adapter = info.adapter
        self.planned_size = info.planned_size
        self.since = since
        """Time of the first part, on the clock that the batcher is given."""
        self.pushed = since if pushed is None else pushed
        """When the first part was pushed: before `since` when no batcher ran then."""
        self.used = used
        """Steps that trained it before."""
        self.is_ready = False
        """It takes no more rollouts."""
        self.flatness: str | None = None
        """Why it teaches nothing, "" when it teaches; None until it is judged (:mod:`rlbuffer.batcher.teaching`)."""
        self._empty()

    def _empty(self) -> None:
        self.parts: dict[str, GroupPart] = {}
        """entry id -> part, of those that count: their rollouts have joined, or take the place of planned ones."""
        self.rejected: dict[str, Rejected] = {}
        """entry id -> why, of the parts of which no rollout has joined. They stay as long as the group, as they would
        in one push with the others."""
        self.needs: frozenset[str] = frozenset()
        self.rollouts = self.tokens = 0
        """Of the rollouts that have joined, as are the versions."""
        self.min_version = self.max_version = 0
        self._ids: set[str] | None = None

    # -- what it holds ------------------------------------------------------------------------------------------------
    @property
    def infos(self) -> Sequence[RolloutInfo]:
        """The rollouts that have joined, in order of arrival."""
        by_part = [part.rollouts for part in self.parts.values()]
        return by_part[0] if len(by_part) == 1 else [rollout for rollouts in by_part for rollout in rollouts]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each of their sequences."""
        return [part.length for rollout in self.infos for part in rollout.sequences]

    @property
    def ids(self) -> set[str]:
        """The ids of the rollouts that came, valid or not."""
        if self._ids is None:
            self._ids = {info.rollout_id for info in self.infos}
        return self._ids

    @property
    def rewards(self) -> list[float]:
        """The rewards of the rollouts that have joined; all have one once the group is ready."""
        return [info.reward for info in self.infos if info.reward is not None]

    @property
    def is_flat(self) -> bool:
        """True when these rewards tell nothing apart."""
        if len(self.parts) == 1:
            (part,) = self.parts.values()
            if not part.left_out:
                return part.info.totals.is_flat
        return are_flat([info.reward for info in self.infos])

    # -- what it takes ------------------------------------------------------------------------------------------------
    def take(self, entry_id: str, info: GroupInfo, row_tokens: int) -> Rejected | None:
        """Merges one push. -> why all of it is rejected; None when it counts: a rollout of it joined, or one that was
        planned came and cannot be trained."""
        if _about(info) != _about(self):
            name = next(name for name in _ABOUT if getattr(info, name) != getattr(self, name))
            theirs, mine = getattr(info, name), getattr(self, name)
            return Rejected(Reason.INVALID, f"{name} {theirs!r} differs from the group's {mine!r}")
        totals = info.totals
        if not totals.rollouts:
            return Rejected(Reason.INVALID, "a part without rollouts")
        if self._joins_whole(info, row_tokens):
            part = GroupPart(
                entry_id=entry_id,
                info=info,
                joined=range(totals.rollouts),
                places=range(totals.sequences),
                packed_tokens=totals.tokens,
            )
            oldest, newest = totals.oldest, totals.newest
        else:
            kept, left_out = list[int](), list[tuple[int, Rejected]]()
            for place, rollout in enumerate(info.rollouts):
                why = self._judge(rollout, info, row_tokens, self.rollouts + len(kept))
                if why is None or Trait.INSTEAD in why.reason.traits:
                    self.ids.add(rollout.rollout_id)
                if why is None:
                    kept.append(place)
                else:
                    left_out.append((place, why))
            if not kept:
                return self._take_none(entry_id, info, [why for _, why in left_out])
            joined = [info.rollouts[place] for place in kept]
            reasons = tuple((place, why.reason) for place, why in left_out)
            part = GroupPart(
                entry_id=entry_id,
                info=info,
                joined=kept,
                places=info.places_of(kept),
                packed_tokens=sum(rollout.length for rollout in joined),
                left_out=reasons,
            )
            oldest, newest = min(r.min_version for r in joined), max(r.max_version for r in joined)
        if info.needs:
            self.needs |= set(info.needs)
        self.min_version = min(self.min_version, oldest) if self.rollouts else oldest
        self.max_version = max(self.max_version, newest)
        self.parts[entry_id] = part
        self.rollouts += part.packed_rollouts
        self.tokens += part.packed_tokens
        return None

    def _take_none(self, entry_id: str, info: GroupInfo, reasons: Sequence[Rejected]) -> Rejected | None:
        """Holds a push of which no rollout joins. -> why, where none of them takes the place of a planned one."""
        counting = [why for why in reasons if Trait.INSTEAD in why.reason.traits]
        reason = most_common(why.reason for why in counting or reasons)
        why = next(why for why in reasons if why.reason is reason)
        if reason is Reason.FAILED:
            why = Rejected(reason, counted(Counter(r.failure for r in info.rollouts if r.failure)))
        if not counting:
            return why
        self.keep_rejected(entry_id, info, why, [why.reason for why in reasons])
        return None

    def keep_rejected(self, entry_id: str, info: GroupInfo, why: Rejected, reasons: Sequence[Reason] = ()) -> None:
        """Keeps a push of which no rollout joins; `reasons`: of each, where it is not `why` for all."""
        reasons = reasons or [why.reason] * info.totals.rollouts
        self.parts[entry_id] = GroupPart(
            entry_id=entry_id, info=info, joined=[], places=[], packed_tokens=0, left_out=tuple(enumerate(reasons))
        )
        self.rejected[entry_id] = why

    def exchange(
        self, old: str, entry_id: str, info: GroupInfo, row_tokens: int
    ) -> list[tuple[str, GroupInfo, Rejected]]:
        """Puts a push in the place of one of its parts: the same rollouts, with what that one needed.

        -> the parts (entry id, push, why) that do not fit any more.
        """
        parts = [(entry_id, info) if key == old else (key, part.info) for key, part in self.parts.items()]
        # Rollouts of parts that were rejected whole have come all the same.
        elsewhere = self.ids - {r.rollout_id for part in self.parts.values() for r in part.info.rollouts}
        self._empty()
        judged = [(key, part, self.take(key, part, row_tokens)) for key, part in parts]
        self.ids.update(elsewhere)
        return [(key, part, why) for key, part, why in judged if why is not None]

    def _joins_whole(self, info: GroupInfo, row_tokens: int) -> bool:
        """True of a part of which :meth:`_judge` rejects nothing, the first one of its group: nearly every push is one,
        and its sums say so."""
        totals = info.totals
        return (
            not self.parts
            and not self.arrived
            and not self.is_ready
            and totals.rollouts <= self.planned_size
            and totals.longest <= row_tokens
            and totals.is_distinct
            and not totals.failed
            and (totals.is_scored or REWARD in info.needs)
        )

    def _judge(self, rollout: RolloutInfo, part: GroupInfo, row_tokens: int, valid: int) -> Rejected | None:
        if rollout.rollout_id in self.ids:
            return Rejected(Reason.DUPLICATE, f"rollout {rollout.rollout_id} came before")
        if self.is_ready or valid >= self.planned_size:
            return Rejected(Reason.LATE, f"the group was closed with {valid} of {plural(self.planned_size, 'rollout')}")
        if rollout.failure:
            return Rejected(Reason.FAILED, f"rollout {rollout.rollout_id} failed: {rollout.failure}")
        if (longest := max(part.length for part in rollout.sequences)) > row_tokens:
            return Rejected(Reason.OVERSIZED, f"length {longest} > row_tokens {row_tokens}")
        if rollout.reward is None and REWARD not in part.needs:
            return Rejected(Reason.INVALID, f"rollout {rollout.rollout_id} has no reward")
        return None

    # -- what becomes of it -------------------------------------------------------------------------------------------
    @property
    def arrived(self) -> int:
        """Distinct rollouts that came, valid or not."""
        return self.rollouts if self._ids is None else len(self._ids)

    @property
    def is_whole(self) -> bool:
        """All rollouts that were planned have come."""
        return self.arrived >= self.planned_size

    @property
    def is_waiting(self) -> bool:
        """True while waiting may help: rollouts that were planned have not come, or something is still to be added."""
        return bool(self.needs) or not self.is_whole

    def too_small(self, least: int, when: str = "") -> Rejected | None:
        """Why it cannot be trained if nothing more comes; None when it can. `when` is added to the sentence."""
        if self.needs:
            return Rejected(Reason.SMALL, f"still needs {', '.join(sorted(self.needs))}{when}")
        if self.rollouts < max(1, least):
            least, valid = max(1, least), plural(self.rollouts, "valid rollout")
            return Rejected(Reason.SMALL, f"{valid} < min_group_size {least}{when}")
        return None

    def uses(self, max_uses: int = 1) -> list[GroupPart]:
        """Its parts as the step that packs it uses them. Other rollouts of an entry are dropped with the first use."""
        if max_uses == 1 and not self.used:
            return [*self.parts.values()]
        return [
            msgspec.structs.replace(
                part,
                left_out=() if self.used else part.left_out,
                uses=self.used,
                is_kept=self.used + 1 < max_uses,
            )
            for part in self.parts.values()
        ]

    def drop(self, reason: Reason, detail: str) -> Drop:
        """The drop of the whole group: all its entries with everything they hold.

        A group that was used holds nothing any more that the ledger could drop: it is only released.
        """
        rewards, infos = self.rewards, [] if self.used else [part.info for part in self.parts.values()]
        return Drop(
            group_id=self.group_id,
            env=self.env,
            reason=reason,
            rollouts=sum(info.totals.rollouts for info in infos),
            tokens=sum(info.tokens for info in infos),
            entry_ids=tuple(self.parts),
            detail=detail,
            min_version=self.min_version,
            reward=sum(rewards) / len(rewards) if rewards else None,
        )


def drop_part(entry_id: str, info: GroupInfo, why: Rejected) -> Drop:
    """The drop of one pool entry that does not join its group."""
    rewards = [r.reward for r in info.rollouts if r.reward is not None]
    return Drop(
        group_id=info.group_id,
        env=info.env,
        reason=why.reason,
        rollouts=info.totals.rollouts,
        tokens=info.tokens,
        entry_ids=(entry_id,),
        detail=why.detail,
        min_version=info.totals.oldest,
        reward=sum(rewards) / len(rewards) if rewards else None,
    )


def most_common(reasons: Iterable[Reason]) -> Reason:
    """The reason that occurs most often; of equals the first in the order of tables."""
    counts = Counter(reasons)
    return max(_REASONS, key=lambda reason: counts[reason])
