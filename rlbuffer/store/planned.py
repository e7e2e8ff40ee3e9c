"""The rollouts of a planned step as the pool describes them, in columns: what a header and parts are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import PayloadError
from rlbuffer.records.info import HAS_REWARD, ROW, ROW_DTYPE, GroupInfo
from rlbuffer.records.step_plan import PlannedPush, PlannedRollouts, RolloutRef, StepPlan, pushes_of, version_trained
from rlbuffer.store.part_rollouts import PART_ROW
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
        self._infos: list[GroupInfo] = []
        rows = []
        for push in self.pushes:
            info, places = entries[push.entry_id].info, push.places
            is_whole = info is not None and places == range(info.totals.rollouts)
            if info is None or not (is_whole or max(places) < info.totals.rollouts):
                raise PayloadError(f"entry {push.entry_id} does not hold the rollouts of its step")
            self._infos.append(info)
            rows.append(info.rows if is_whole else b"".join([_row(info, place) for place in places]))
        self.numbers: NDArray[np.void] = np.frombuffer(b"".join(rows), ROW_DTYPE)
        """[rollouts] of :data:`~rlbuffer.records.info.ROW_DTYPE`."""

    @cached_property
    def places(self) -> list[int]:
        """Payload fields."""
        return [*chain.from_iterable([push.places for push in self.pushes])]

    @cached_property
    def names(self) -> tuple[list[str], list[Mapping[str, float]]]:
        """Ids and named rewards."""
        all_ids, all_named = list[str](), list[Mapping[str, float]]()
        for push, info in zip(self.pushes, self._infos, strict=True):
            ids, named = names_of(info)
            is_whole = push.places == range(len(ids))
            all_ids += ids if is_whole else [ids[place] for place in push.places]
            all_named += named if is_whole else [named[place] for place in push.places]
        return all_ids, all_named

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
    def origins(self) -> NDArray[np.int64]:
        """The first of `pushes` that lies in the same entry."""
        first: dict[str, int] = {}
        return self.spread([first.setdefault(push.entry_id, i) for i, push in enumerate(self.pushes)])

    def table(self) -> NDArray[np.uint8]:
        """[rollouts, bytes] of :data:`~rlbuffer.store.part_rollouts.PART_ROW`, whose sources are places in `pushes`."""
        data = np.empty((len(self.numbers), PART_ROW.itemsize), np.uint8)
        data[:, -ROW.size :] = self.numbers.view(np.uint8).reshape(-1, ROW.size)
        out = data.view(PART_ROW).reshape(-1)
        out["source"], out["index"], out["advantage"] = self.origins, self.places, self.plan.advantages
        return data

    def spread(self, of_pushes: Sequence[int]) -> NDArray[np.int64]:
        """[rollouts] of a value for each of `pushes`."""
        return np.repeat(np.array(of_pushes, dtype=np.int64), [len(push.places) for push in self.pushes])


def numbered(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The different values, none below 0, in the order in which they come; and for each of `values` its place there."""
    places = np.arange(len(values))
    first = np.zeros(values.max(initial=-1) + 1, dtype=np.int64)
    first[values[::-1]] = places[::-1]  # of equal ones the last that is written stays: the first
    is_first = first[values] == places
    return values[is_first], (np.cumsum(is_first) - 1)[first[values]]


def _row(info: GroupInfo, place: int) -> bytes:
    return info.rows[ROW.size * place : ROW.size * (place + 1)]


def _check(refs: Sequence[RolloutRef], entries: Mapping[str, PoolEntry]) -> None:
    for ref in refs:
        info = entries[ref.entry_id].info
        if (
            info is None
            or not 0 <= ref.index < len(info.rollouts)
            or info.rollouts[ref.index].rollout_id != ref.rollout_id
        ):
            raise PayloadError(f"entry {ref.entry_id} does not hold rollout {ref.rollout_id} at index {ref.index}")
