"""The rollouts of a planned step as the pool describes them, in columns: what a header and parts are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import PayloadError
from rlbuffer.records.info import HAS_REWARD, IS_TRUNCATED, ROW, ROW_DTYPE
from rlbuffer.records.step_plan import PlannedPush, PlannedRollouts, RolloutRef, StepPlan, pushes_of, version_trained
from rlbuffer.store.records import PoolEntry
from rlbuffer.wire.metadata_pages import names_of


class Planned:
    """All columns are in the order of the plan's rollouts.

    Raises:
        PayloadError: the plan names a rollout that its entry does not hold.
    """

    def __init__(self, plan: StepPlan, entries: Mapping[str, PoolEntry]) -> None:
        if not isinstance(plan.rollouts, PlannedRollouts):
            _check(plan.rollouts, entries)
        self.plan = plan
        self.pushes: list[PlannedPush] = pushes_of(plan.rollouts)
        self.places: list[int] = []
        """Payload fields."""
        self.ids: list[str] = []
        self.named: list[Mapping[str, float]] = []
        """Named rewards."""
        rows = []
        for push in self.pushes:
            info = entries[push.entry_id].info
            is_whole = info is not None and push.places == range(info.totals.rollouts)
            if info is None or not (is_whole or max(push.places) < info.totals.rollouts):
                raise PayloadError(f"entry {push.entry_id} does not hold the rollouts of its step")
            ids, named = names_of(info)
            self.places += push.places
            if is_whole:
                self.ids += ids
                self.named += named
                rows.append(info.rows)
            else:
                self.ids += [ids[place] for place in push.places]
                self.named += [named[place] for place in push.places]
                rows += [info.rows[ROW.size * place : ROW.size * (place + 1)] for place in push.places]
        self.numbers: NDArray[np.void] = np.frombuffer(b"".join(rows), ROW_DTYPE)
        """[rollouts] of :data:`~rlbuffer.records.info.ROW_DTYPE`."""

    @cached_property
    def are_scored(self) -> NDArray[np.bool_]:
        """[rollouts] True for those that have a reward."""
        are_scored: NDArray[np.bool_] = (self.numbers["flags"] & HAS_REWARD) != 0
        return are_scored

    @cached_property
    def ages(self) -> NDArray[np.int64]:
        """The version that the step trains - the oldest that sampled a token."""
        trained = [version_trained(self.plan.adapters, push.adapter, self.plan.step) for push in self.pushes]
        return self.spread(trained) - self.numbers["min_version"].astype(np.int64)

    @cached_property
    def by_env(self) -> dict[str, NDArray[np.int64]]:
        """env -> its rollouts, in the order of each one's first."""
        number: dict[str, int] = {}
        its = self.spread([number.setdefault(push.env, len(number)) for push in self.pushes])
        return {env: np.flatnonzero(its == i) for env, i in number.items()}

    @cached_property
    def origins(self) -> list[int]:
        """The first of `pushes` that lies in the same entry."""
        first: dict[str, int] = {}
        its: list[int] = self.spread([first.setdefault(p.entry_id, i) for i, p in enumerate(self.pushes)]).tolist()
        return its

    def part_values(self, order: Sequence[int]) -> list[Iterator[Any]]:
        """The columns of the parts' rollouts but for the first, their source, with the rollouts in this order."""
        its = np.array(order, dtype=np.int64)
        numbers = self.numbers.take(its)  # a tenth of the time of an index
        rewards = numbers["reward"].astype(object)
        rewards[~self.are_scored[its]] = None
        ids, named, places = self.ids, self.named, self.places
        columns = (
            [places[i] for i in order],
            np.asarray(self.plan.advantages, dtype=np.float32)[its].tolist(),
            [ids[i] for i in order],
            *(numbers[name].tolist() for name in ("length", "prompt_tokens", "loss_tokens")),
            rewards.tolist(),
            [named[i] for i in order],
            *(numbers[name].tolist() for name in ("min_version", "max_version", "turns")),
            ((numbers["flags"] & IS_TRUNCATED) != 0).tolist(),
            *(numbers[name].tolist() for name in ("size", "checksum")),
        )
        return [iter(column) for column in columns]

    def spread(self, of_pushes: Sequence[int]) -> NDArray[np.int64]:
        """[rollouts] of a value for each of `pushes`."""
        return np.repeat(np.array(of_pushes, dtype=np.int64), [len(push.places) for push in self.pushes])


def _check(refs: Sequence[RolloutRef], entries: Mapping[str, PoolEntry]) -> None:
    for ref in refs:
        info = entries[ref.entry_id].info
        if (
            info is None
            or not 0 <= ref.index < len(info.rollouts)
            or info.rollouts[ref.index].rollout_id != ref.rollout_id
        ):
            raise PayloadError(f"entry {ref.entry_id} does not hold rollout {ref.rollout_id} at index {ref.index}")
