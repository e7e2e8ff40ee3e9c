"""Parts merge into groups, and a group decides when it is whole.

::

    forming --(planned_size valid rollouts, or nothing more to come, or the timeout)--> ready
       |                                                                                  |
       +------------------------------> dropped(reason) <---------------------------------+

A part is one push, so one pool entry. Its rollouts are judged as it arrives: valid ones join, others
are set aside with a reason and are accounted for together with the entry that holds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from rlbuffer.narration.numbers import plural
from rlbuffer.records.info import GroupInfo, RolloutInfo, are_flat, row_of, unfrozen
from rlbuffer.records.lengths import by_bucket
from rlbuffer.records.states import Reason
from rlbuffer.records.step_plan import Drop, EntryUse, PlannedPush

REWARD = "reward"
"""Need of a group whose rollouts are not scored yet."""
_REASONS = tuple(Reason)
"""In the order of tables."""
_UnfrozenUse = unfrozen(EntryUse)


class Member(NamedTuple):
    """A valid rollout of a group, and where its payload is."""

    entry_id: str
    place: int
    """Payload field of that push."""
    info: RolloutInfo


class Rejected(NamedTuple):
    """The reason why a part, or one rollout of it, does not join its group."""

    reason: Reason
    detail: str


class GroupState:
    """One group as the batcher holds it: its parts, its valid rollouts, and running sums of them."""

    __slots__ = (
        "_ids",
        "_members",
        "_whole",
        "adapter",
        "arrived",
        "env",
        "flatness",
        "group_id",
        "is_closed",
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
        self.parts: dict[str, GroupInfo] = {}
        """entry id -> push, of the parts that hold a valid rollout."""
        self.rejected: dict[str, list[tuple[Reason, int, RolloutInfo]]] = {}
        """entry id -> (reason, index in the push, rollout) of what those parts hold besides."""
        self.rollouts = 0
        """Number of valid rollouts."""
        self.arrived = 0
        """Distinct rollouts seen, valid or not."""
        self.needs: frozenset[str] = frozenset()
        self.is_closed = False
        """Ready: takes no more rollouts."""
        self.flatness: str | None = None
        """Why it teaches nothing, "" when it teaches; None until it is judged (:mod:`rlbuffer.batcher.teaching`)."""
        self.tokens = 0
        """Of the valid rollouts."""
        self.min_version = 0
        self.max_version = 0
        # The first part, if all of it joined. Most groups of a large pool are one such push, and nobody looks at their
        # rollouts until they are selected or dropped: the list of them and their ids are made when they are asked for.
        self._whole: tuple[str, GroupInfo] | None = None
        self._members: list[Member] | None = None
        self._ids: set[str] | None = None

    @property
    def members(self) -> list[Member]:
        """Valid rollouts, in order of arrival."""
        if self._members is None:
            entry_id, rollouts = ("", ()) if self._whole is None else (self._whole[0], self._whole[1].rollouts)
            self._members = [Member(entry_id, index, rollout) for index, rollout in enumerate(rollouts)]
        return self._members

    @property
    def infos(self) -> Sequence[RolloutInfo]:
        """The valid rollouts alone, in order of arrival."""
        if self._members is None:
            return () if self._whole is None else self._whole[1].rollouts
        return [member.info for member in self._members]

    @property
    def pushes(self) -> list[tuple[PlannedPush, GroupInfo]]:
        """The places of the valid rollouts, in order of arrival; of a group of one whole push nothing is unpacked."""
        about = self.group_id, self.env, self.adapter
        if self._members is None and self._whole is not None:
            entry_id, info = self._whole
            return [(PlannedPush(entry_id, *about, range(self.rollouts)), info)]
        its = [(key, [m.place for m in of]) for key, of in groupby(self.members, attrgetter("entry_id"))]
        return [(PlannedPush(entry_id, *about, places), self.parts[entry_id]) for entry_id, places in its]

    @property
    def rows(self) -> bytes:
        """The numbers of the valid rollouts, in order of arrival: a :data:`~rlbuffer.records.info.ROW` each."""
        if self._members is None and self._whole is not None:
            return self._whole[1].rows
        return b"".join([row_of(member.info) for member in self.members])

    @property
    def ids(self) -> set[str]:
        """The ids of the rollouts that came, valid or not."""
        if self._ids is None:
            self._ids = {info.rollout_id for info in self.infos}
        return self._ids

    @property
    def has_equal_rewards(self) -> bool:
        """True when the rewards of the valid rollouts tell nothing apart."""
        if self._members is None and self._whole is not None:
            return self._whole[1].totals.is_flat
        return are_flat([info.reward for info in self.infos])

    @property
    def reward(self) -> float | None:
        """Mean reward of the valid rollouts; None when there are none."""
        rewards = self.rewards
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def rewards(self) -> list[float]:
        """The rewards of the valid rollouts; all have one once the group is ready."""
        return [info.reward for info in self.infos if info.reward is not None]

    def take(self, entry_id: str, info: GroupInfo, row_tokens: int) -> Rejected | None:
        """Merges one part. -> why the whole part is rejected, or None when a rollout of it joined."""
        if (
            self.env != info.env
            or self.prompt_id != info.prompt_id
            or self.adapter != info.adapter
            or self.planned_size != info.planned_size
        ):
            return self._foreign(info)
        if not info.totals.rollouts:
            return Rejected(Reason.INVALID, "a part without rollouts")
        if self._takes_whole(entry_id, info, row_tokens):
            return None
        members, ids = self.members, self.ids
        joined: list[Member] = []
        rejected: list[tuple[Reason, int, RolloutInfo]] = []
        details: dict[Reason, str] = {}
        for index, rollout in enumerate(info.rollouts):
            rejection = self._judge(rollout, info, row_tokens, len(members) + len(joined))
            if rejection is None or rejection.reason in (Reason.OVERSIZED, Reason.INVALID):
                ids.add(rollout.rollout_id)
                self.arrived += 1
            if rejection is None:
                joined.append(Member(entry_id, index, rollout))
            else:
                rejected.append((rejection.reason, index, rollout))
                details.setdefault(rejection.reason, rejection.detail)
        if not joined:
            reason = most_common(reason for reason, _, _ in rejected)
            return Rejected(reason, details[reason])
        self.parts[entry_id] = info
        self.needs |= set(info.needs)
        if rejected:
            self.rejected[entry_id] = rejected
        oldest = min(m.info.min_version for m in joined)
        self.min_version = min(self.min_version, oldest) if members else oldest
        self.max_version = max(self.max_version, *(m.info.max_version for m in joined))
        self.tokens += sum(m.info.length for m in joined)
        members.extend(joined)
        self.rollouts = len(members)
        return None

    def exchange(
        self, old: str, entry_id: str, info: GroupInfo, row_tokens: int
    ) -> list[tuple[str, GroupInfo, Rejected]]:
        """Puts a push in the place of one of its parts: the same rollouts, with what that one needed.

        -> the parts (entry id, push, why) that do not fit any more.
        """
        parts = [(entry_id, info) if key == old else (key, part) for key, part in self.parts.items()]
        # Rollouts of parts that were rejected whole have come all the same.
        elsewhere = self.ids - {r.rollout_id for part in self.parts.values() for r in part.rollouts}
        self.parts, self.rejected = {}, {}
        self.rollouts = self.arrived = self.tokens = self.min_version = self.max_version = 0
        self.needs = frozenset()
        self._whole = self._members = self._ids = None
        out = []
        for key, part in parts:
            why = self.take(key, part, row_tokens)
            if why is not None:
                out.append((key, part, why))
        if elsewhere:
            self.ids.update(elsewhere)
            self.arrived += len(elsewhere)
        return out

    def _foreign(self, info: GroupInfo) -> Rejected:
        for name in ("env", "prompt_id", "adapter"):
            mine, theirs = getattr(self, name), getattr(info, name)
            if mine != theirs:
                return Rejected(Reason.INVALID, f"{name} {theirs!r} differs from the group's {mine!r}")
        return Rejected(
            Reason.INVALID, f"planned_size {info.planned_size!r} differs from the group's {self.planned_size!r}"
        )

    def _takes_whole(self, entry_id: str, info: GroupInfo, row_tokens: int) -> bool:
        """Merges a part of which nothing can be rejected, the first one of its group: nearly every push is one.

        -> whether it did. A leader that takes over looks at every push of its pool here, and at no rollout.
        """
        totals = info.totals
        if (
            self.arrived
            or self.rollouts
            or self.is_closed
            or totals.rollouts > self.planned_size
            or totals.longest > row_tokens
            or not (totals.is_scored or REWARD in info.needs)
            or not totals.is_distinct
        ):
            return False
        self.parts[entry_id] = info
        self._whole = (entry_id, info)
        self._members = self._ids = None
        self.rollouts = self.arrived = totals.rollouts
        if info.needs:
            self.needs = frozenset(info.needs)
        self.min_version, self.max_version, self.tokens = totals.oldest, totals.newest, totals.tokens
        return True

    def _judge(self, rollout: RolloutInfo, part: GroupInfo, row_tokens: int, valid: int) -> Rejected | None:
        if rollout.rollout_id in self.ids:
            return Rejected(Reason.DUPLICATE, f"rollout {rollout.rollout_id} came before")
        if self.is_closed or valid >= self.planned_size:
            return Rejected(Reason.LATE, f"the group was closed with {valid} of {plural(self.planned_size, 'rollout')}")
        if rollout.length > row_tokens:
            return Rejected(Reason.OVERSIZED, f"length {rollout.length} > row_tokens {row_tokens}")
        if rollout.reward is None and REWARD not in part.needs:
            return Rejected(Reason.INVALID, f"rollout {rollout.rollout_id} has no reward")
        return None

    def is_whole(self, min_group_size: int) -> bool:
        """True when the group can close now: all planned rollouts have come, and enough of them are valid."""
        return not self.needs and self.has_all and self.rollouts >= max(1, min_group_size)

    @property
    def has_all(self) -> bool:
        """True when as many rollouts as planned have come, valid or not: waiting longer brings nothing."""
        return self.arrived >= self.planned_size

    def too_small(self, min_group_size: int, *, is_over: bool, timeout_seconds: float | None) -> Rejected | None:
        """The reason why the group can no longer become ready, or None. `is_over`: its time is up, or, where
        `timeout_seconds` is None, its env sends nothing more."""
        if not is_over and (self.needs or not self.has_all):
            return None
        when = (
            ""
            if not is_over
            else ", and its env is done"
            if timeout_seconds is None
            else f" after {timeout_seconds:g} s"
        )
        if self.needs:
            return Rejected(Reason.SMALL, f"still needs {', '.join(sorted(self.needs))}{when}")
        least = max(1, min_group_size)
        if self.rollouts < least:
            return Rejected(Reason.SMALL, f"{plural(self.rollouts, 'valid rollout')} < min_group_size {least}{when}")
        return None

    def uses(self, max_uses: int = 1) -> list[EntryUse]:
        """The exact use of each of the group's entries when it is packed.

        Other rollouts of an entry are dropped with the first use.
        """
        if len(self.parts) == 1:
            packed = {entry_id: [self.rollouts, self.tokens] for entry_id in self.parts}
        else:
            packed = {entry_id: [0, 0] for entry_id in self.parts}
            for member in self.members:
                its = packed[member.entry_id]
                its[0] += 1
                its[1] += member.info.length
        rejected = self.rejected if not self.used else {}
        is_kept, out = self.used + 1 < max_uses, []
        for entry_id, (rollouts, tokens) in packed.items():
            made = _UnfrozenUse()
            made.entry_id = entry_id
            made.env = self.env
            made.packed_rollouts = rollouts
            made.packed_tokens = tokens
            made.dropped, made.left_out = _left_out(rejected[entry_id]) if entry_id in rejected else ((), ())
            made.group_id = self.group_id
            made.uses = self.used
            made.is_kept = is_kept
            made.__class__ = EntryUse
            out.append(made)
        return out

    def drop(self, reason: Reason, detail: str) -> Drop:
        """The drop of the whole group: all its entries with everything they hold.

        A group that was used holds nothing any more that the ledger could drop: it is only released.
        """
        return Drop(
            group_id=self.group_id,
            env=self.env,
            reason=reason,
            rollouts=0 if self.used else sum(p.totals.rollouts for p in self.parts.values()),
            tokens=0 if self.used else sum(p.tokens for p in self.parts.values()),
            entry_ids=tuple(self.parts),
            detail=detail,
            min_version=self.min_version,
            reward=self.reward,
        )


def _left_out(
    rejected: Sequence[tuple[Reason, int, RolloutInfo]],
) -> tuple[tuple[tuple[Reason, int, int], ...], tuple[tuple[int, Reason], ...]]:
    """The rollouts of an entry that are not packed, as its use names them: `dropped` and `left_out`."""
    lengths: dict[Reason, list[int]] = {}
    for reason, _, rollout in rejected:
        lengths.setdefault(reason, []).append(rollout.length)
    dropped = tuple((r, *sums) for r in _REASONS if r in lengths for sums in by_bucket(lengths[r]).values())
    return dropped, tuple((index, reason) for reason, index, _ in rejected)


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
    counts, order = Counter(reasons), _REASONS
    return max(counts, key=lambda reason: (counts[reason], -order.index(reason)))
