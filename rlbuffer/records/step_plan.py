"""The batcher's decisions: the plan of a step, and the groups it drops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlbuffer.records.info import HAS_REWARD, ROW_DTYPE, GroupInfo, RolloutInfo, rollouts_of, sequences_of
from rlbuffer.records.lazy import LazyRecords
from rlbuffer.records.states import ClosedBy, Reason
from rlbuffer.records.waiting import Waiting

Row = tuple[int, ...]
"""Indices of the rollouts of one row; () is a dummy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The place of each rollout of a step: its rank, its micro-step and its row."""

    rows: tuple[tuple[tuple[Row, ...], ...], ...]
    """``rows[micro_step][rank]`` is a tuple of `rows_per_micro_batch` rows; a row is a tuple of indices, () a dummy."""
    world_size: int
    """Ranks."""
    row_tokens: int
    """Tokens that a row may hold."""
    rows_per_micro_batch: int = 1
    """Rows of one forward pass on one rank."""
    pad_to_multiple_of: int = 1
    """Rows are padded to a multiple of this many tokens."""

    @property
    def micro_steps(self) -> int:
        """Forward passes that every rank makes."""
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Normalizers:
    """The update's counts over all ranks: what a loss divides by.

    A step's are counted as it is planned, and whole. A step that is cut into several updates has others for each slice
    (:func:`rlbuffer.trainer.update.slices.slices_of`).
    """

    loss_tokens: int
    """Trained tokens."""
    rollouts: float
    """Rollouts, also those of which no token is trained; of a slice the sum of the shares of rollouts that lie in it: a
    fraction where other slices have some of a rollout's sequences."""
    groups: int
    """Groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRef:
    """One rollout of a step plan, or one sequence of it, and where its payload is."""

    entry_id: str
    """Pool entry (one push) that holds it."""
    index: int
    """Payload field of that push: ``str(index)``."""
    rollout_id: str
    group_id: str
    env: str
    adapter: str
    length: int
    """Tokens."""
    loss_tokens: int
    """Trained tokens; 0 where the step masks it."""
    min_version: int
    """Oldest policy version that sampled a token."""


class GroupPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One push, which is one entry of the pool, as a part of its group, and then as a step uses it: packed and dropped
    add up to the whole entry. A large step has thousands."""

    entry_id: str
    info: GroupInfo
    """What was pushed."""
    joined: Sequence[int]
    """Places in the push of the rollouts that have joined the group, and that its step trains; a range where all
    have."""
    places: Sequence[int]
    """The payload fields of their sequences."""
    packed_tokens: int
    """Tokens of them."""
    left_out: tuple[tuple[int, Reason], ...] = ()
    """(place in the push, reason) of every other rollout; () when the group was used before: they went with its first
    use."""
    uses: int = 0
    """Steps that trained its group before."""
    is_kept: bool = False
    """Its group may be used again after this step."""

    @property
    def packed_rollouts(self) -> int:
        """Rollouts that have joined."""
        return len(self.joined)

    @property
    def rollouts(self) -> Sequence[RolloutInfo]:
        """Those that have joined."""
        rollouts = self.info.rollouts
        return rollouts if len(self.joined) == len(rollouts) else [rollouts[place] for place in self.joined]

    @property
    def rows(self) -> bytes:
        """Their numbers: a :data:`~rlbuffer.records.info.ROW` for each sequence."""
        return self.info.rows_of(self.places)

    @property
    def dropped(self) -> tuple[tuple[Reason, int, int], ...]:
        """(reason, rollouts, tokens) of what is left out, a row per reason."""
        if not self.left_out:  # of nearly every entry: a large step asks thousands
            return ()
        lengths: dict[Reason, list[int]] = {}
        for place, reason in self.left_out:
            lengths.setdefault(reason, []).append(self.info.rollouts[place].length)
        return tuple((r, len(lengths[r]), sum(lengths[r])) for r in Reason if r in lengths)


class PlannedRollouts(LazyRecords[RolloutRef]):
    """The sequences of a step plan: in columns, and by record where somebody asks. All are in the order of the plan.

    Args:
        entries: every pool entry that the step uses, in the order of its rollouts.
        masks: nothing of a truncated rollout is trained.
    """

    def __init__(self, entries: Sequence[GroupPart], *, masks: bool = False) -> None:
        self.entries, self.masks = entries, masks

    @cached_property
    def pushes(self) -> list[GroupPart]:
        """Those of its entries of which it trains something."""
        return [use for use in self.entries if len(use.places)]

    @cached_property
    def rows(self) -> NDArray[np.void]:
        """[sequences] of :data:`~rlbuffer.records.info.ROW_DTYPE`."""
        return np.frombuffer(b"".join([use.rows for use in self.pushes]), ROW_DTYPE)

    @cached_property
    def numbers(self) -> NDArray[np.void]:
        """[rollouts] of the same, over the sequences of each."""
        return rollouts_of(self.rows)

    @cached_property
    def sequences(self) -> NDArray[np.int64]:
        """[rollouts] how many each has."""
        return sequences_of(self.rows)

    @cached_property
    def heads(self) -> NDArray[np.int64]:
        """[rollouts] the place of each one's first sequence."""
        heads: NDArray[np.int64] = np.cumsum(self.sequences) - self.sequences
        return heads

    @cached_property
    def are_scored(self) -> NDArray[np.bool_]:
        """[rollouts] True for those that have a reward."""
        are_scored: NDArray[np.bool_] = (self.numbers["flags"] & HAS_REWARD) != 0
        return are_scored

    @cached_property
    def by_env(self) -> dict[str, NDArray[np.int64]]:
        """env -> its rollouts, in the order of each one's first."""
        number: dict[str, int] = {}
        env_numbers = self.spread([number.setdefault(use.info.env, len(number)) for use in self.pushes])[self.heads]
        return {env: np.flatnonzero(env_numbers == i) for env, i in number.items()}

    @cached_property
    def places_in_push(self) -> list[int]:
        """[sequences] the place of its rollout among those of its push."""
        out: list[int] = []
        for use in self.pushes:
            totals = use.info.totals
            if totals.sequences == totals.rollouts:
                out += use.places
            else:
                counts = sequences_of(np.frombuffer(use.info.rows, ROW_DTYPE))
                out += np.repeat(np.arange(totals.rollouts), counts)[[*use.places]].tolist()
        return out

    def spread(self, of_pushes: Sequence[int]) -> NDArray[np.int64]:
        """[sequences] of a value for each of `pushes`."""
        return np.repeat(np.array(of_pushes, dtype=np.int64), [len(use.places) for use in self.pushes])

    def __len__(self) -> int:
        return sum([len(use.places) for use in self.entries])

    def _each(self) -> Iterator[RolloutRef]:
        for use in self.pushes:
            for place in use.places:
                info = use.info.sequences[place]
                yield RolloutRef(
                    entry_id=use.entry_id,
                    index=place,
                    rollout_id=info.rollout_id,
                    group_id=use.info.group_id,
                    env=use.info.env,
                    adapter=use.info.adapter,
                    length=info.length,
                    loss_tokens=0 if self.masks and info.is_truncated else info.loss_tokens,
                    min_version=info.min_version,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterProgress:
    """The progress of an adapter with a step, this step included; "" is all weights, whose own steps are the run's."""

    samples: int
    """Rollouts trained in this run."""
    tokens: int
    """Tokens of them."""
    step: int
    """Its own steps: the version that it has once this step is trained."""
    ready_to_update: bool
    """Its batch is whole with this step: its optimizer steps once, then its version `step` can be published."""
    version: int
    """The version that it has while this step trains: what ages are counted from."""
    gathered: int = 0
    """Rollouts since its last own step, those of this step included."""
    rollouts: int = 0
    """Rollouts of this step."""
    waiting_for_version: int | None = None
    """Publish after this step even if it is no regular point, unless this version or a newer one is published."""


def version_trained(adapters: Mapping[str, AdapterProgress], adapter: str, step: int) -> int:
    """The version of `adapter` that `step` trains: a rollout's age there is this - its `min_policy_version`."""
    progress = adapters.get(adapter)
    return step - 1 if progress is None else progress.version


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rollouts that one step trains on, and their places; immutable once committed.

    Example:
        >>> import numpy as np
        >>> import rlbuffer
        >>> batcher = rlbuffer.batcher.Batcher(rlbuffer.BatcherConfig(16, step_groups=2))
        >>> for seed in (3, 4):
        ...     info = rlbuffer.testing.make_group(env="math", lengths=[8, 12], seed=seed).info()
        ...     _ = batcher.add(info, entry_id=f"{seed}-0", now=0.0)
        >>> step = batcher.next(1, world_size=2, now=0.0, rng=np.random.default_rng(0)).plan
        >>> step.group_ids, str(step.closed_by), step.tokens
        (('math.3', 'math.4'), 'groups', 40)
        >>> step.rollouts[0].rollout_id, step.advantages.tolist()
        ('math.3/0', [-1.0, 1.0, -1.0, 1.0])
        >>> step.plan.rows  # micro-steps of ranks of rows of rollouts
        ((((1,),), ((3,),)), (((0,),), ((2,),)))
    """

    step: int
    """Number of the step, from 1."""
    group_ids: tuple[str, ...]
    """Groups in the order in which they were selected; of a step that closes at a number of them, by name."""
    rollouts: PlannedRollouts
    """The rollouts that `plan` indexes; each sequence of one that has several."""
    advantages: NDArray[np.float32]
    """[rollouts] float32, as `rollouts`; broadcast to the trained tokens (a column ``advantages`` wins)."""
    plan: Plan
    """The place of each rollout."""
    normalizers: Normalizers
    """Counts over all ranks."""
    tokens: int
    """Tokens of all rollouts."""
    closed_by: ClosedBy
    """The rule that ended its selection."""
    adapters: Mapping[str, AdapterProgress] = field(default_factory=dict)
    """Adapter -> how far it is with this step, of all that were trained so far."""
    flat: int = 0
    """Groups of it that teach nothing."""

    @property
    def entries(self) -> Sequence[GroupPart]:
        """Every pool entry that the commit consumes."""
        return self.rollouts.entries

    def ages(self) -> NDArray[np.int64]:
        """[rollouts] the version that the step trains - the oldest that sampled a token."""
        rollouts = self.rollouts
        trained = [version_trained(self.adapters, use.info.adapter, self.step) for use in rollouts.pushes]
        oldest = rollouts.numbers["min_version"].astype(np.int64)
        ages: NDArray[np.int64] = rollouts.spread(trained)[rollouts.heads] - oldest
        return ages


@dataclass(frozen=True, slots=True)
class Drop:
    """A group, or rollouts of one, that will not be trained."""

    group_id: str
    """The group."""
    env: str
    """Its env."""
    reason: Reason
    """The rule by which it goes."""
    rollouts: int
    """Rollouts that go."""
    tokens: int
    """Tokens of them."""
    entry_ids: tuple[str, ...] = ()
    """Pool entries that the drop consumes whole."""
    detail: str = ""
    """The rule with its value and its limit: ``age 3 > max_age 1 at step 12``."""
    min_version: int = 0
    """Oldest policy version that sampled a token of them."""
    reward: float | None = None
    """Mean reward, for the history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The batcher's proposal for now. Nothing has happened yet: only `Batcher.committed` moves its state."""

    plan: StepPlan | None
    """The step that can be committed now; None while it has to wait."""
    state: Mapping[str, Any]
    """The batcher's own state as after this plan; msgpack types; goes into the commit."""
    drops: tuple[Drop, ...] = ()
    """Groups and rollouts that must be dropped now, whether or not there is a plan."""
    why: Waiting | None = None
    """Reason why there is no plan; None when there is one."""
    allowances: Mapping[str, int] = field(default_factory=dict)
    """env -> tickets that may be out."""
    waiting_for_version: int | None = None
    """The plan's header asks for this version: what is published is too old for the step after it."""
    dead: Mapping[str, float] = field(default_factory=dict)
    """env -> seconds that it has been silent, for envs that a step needs and that are silent for too long."""
    is_over: bool = False
    """Nothing is pending, and no env sends anything more."""

    @property
    def waiting(self) -> str:
        """Reason why there is no plan, in a sentence; empty when there is one."""
        return "" if self.why is None else str(self.why)
