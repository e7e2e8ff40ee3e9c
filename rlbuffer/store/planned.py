"""The rollouts of a planned step as the pool describes them, in columns: what a header and parts are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import PayloadError
from rlbuffer.records.info import HAS_REWARD, ROW, ROW_DTYPE, GroupInfo, rollouts_of, sequences_of
from rlbuffer.records.step_plan import StepPlan, version_trained
from rlbuffer.store.part_rollouts import PART_ROW
from rlbuffer.store.records import PoolEntry
from rlbuffer.wire.metadata import has_no_names, names_of


class Planned:
    """All columns are in the order of the plan: of its rollouts, or of their sequences.

    Raises:
        PayloadError: the plan names a rollout that its entry does not hold, or only some of its sequences.
    """

    def __init__(self, plan: StepPlan, entries: Mapping[str, PoolEntry]) -> None:
        self.plan, self.entries = plan, entries
        self.pushes = plan.rollouts.pushes
        self._infos: list[GroupInfo] = []
        rows = []
        for push in self.pushes:
            info, places = entries[push.entry_id].info, push.places
            is_whole = info is not None and places == range(info.totals.sequences)
            if info is None or not (is_whole or max(places) < info.totals.sequences):
                raise PayloadError(f"entry {push.entry_id} does not hold the rollouts of its step")
            self._infos.append(info)
            rows.append(info.rows if is_whole else b"".join([_row(info, place) for place in places]))
        self.rows: NDArray[np.void] = np.frombuffer(b"".join(rows), ROW_DTYPE)
        """[sequences] of :data:`~rlbuffer.records.info.ROW_DTYPE`."""
        self.numbers = rollouts_of(self.rows)
        """[rollouts] of it, over the sequences of each."""
        self.sequences = sequences_of(self.rows)
        """[rollouts] how many each has."""
        self._heads = np.cumsum(self.sequences) - self.sequences
        self._check_whole()

    def _check_whole(self) -> None:
        if all(info.totals.sequences == info.totals.rollouts for info in self._infos):
            return
        numbers = iter(self.numbers_in_push)
        for push, info in zip(self.pushes, self._infos, strict=True):
            group_numbers = dict.fromkeys(islice(numbers, len(push.places)))
            if [*push.places] != [*info.places_of([*group_numbers])]:
                raise PayloadError(f"entry {push.entry_id}: its step would hold a part of a rollout's sequences")

    @cached_property
    def places(self) -> list[int]:
        """[sequences] payload fields."""
        return [*chain.from_iterable([push.places for push in self.pushes])]

    @cached_property
    def numbers_in_push(self) -> list[int]:
        """[sequences] the place of its rollout among those of its push."""
        out: list[int] = []
        for push, info in zip(self.pushes, self._infos, strict=True):
            if info.totals.sequences == info.totals.rollouts:
                out += push.places
            else:
                rollout = np.repeat(np.arange(info.totals.rollouts), sequences_of(np.frombuffer(info.rows, ROW_DTYPE)))
                out += rollout[[*push.places]].tolist()
        return out

    @cached_property
    def names(self) -> tuple[list[str] | None, list[Mapping[str, float]] | None]:
        """[sequences] id and named rewards of its rollout. None: each is ``<group id>/<index>``; none has any."""
        if all(map(has_no_names, self._infos)):
            return None, None
        all_ids, all_named, numbers = list[str](), list[Mapping[str, float]](), iter(self.numbers_in_push)
        for push, info in zip(self.pushes, self._infos, strict=True):
            ids, named = names_of(info)
            group_numbers = [*islice(numbers, len(push.places))]
            is_whole = push.places == range(len(ids))
            all_ids += ids if is_whole else [ids[number] for number in group_numbers]
            all_named += named if is_whole else [named[number] for number in group_numbers]
        groups = [push.group_id for push in self.pushes for _ in push.places]
        has_own_ids = all_ids != [
            f"{group}/{number}" for group, number in zip(groups, self.numbers_in_push, strict=True)
        ]
        return all_ids if has_own_ids else None, all_named if any(all_named) else None

    @cached_property
    def are_scored(self) -> NDArray[np.bool_]:
        """[rollouts] True for those that have a reward."""
        are_scored: NDArray[np.bool_] = (self.numbers["flags"] & HAS_REWARD) != 0
        return are_scored

    @cached_property
    def ages(self) -> NDArray[np.int64]:
        """[rollouts] the version that the step trains - the oldest that sampled a token."""
        trained = [version_trained(self.plan.adapters, push.adapter, self.plan.step) for push in self.pushes]
        ages: NDArray[np.int64] = self.spread(trained)[self._heads] - self.numbers["min_version"].astype(np.int64)
        return ages

    @cached_property
    def by_env(self) -> dict[str, NDArray[np.int64]]:
        """env -> its rollouts, in the order of each one's first."""
        number: dict[str, int] = {}
        env_numbers = self.spread([number.setdefault(push.env, len(number)) for push in self.pushes])[self._heads]
        return {env: np.flatnonzero(env_numbers == i) for env, i in number.items()}

    @cached_property
    def origins(self) -> NDArray[np.int64]:
        """[sequences] the first of `pushes` that lies in the same entry."""
        first: dict[str, int] = {}
        return self.spread([first.setdefault(push.entry_id, i) for i, push in enumerate(self.pushes)])

    def table(self) -> NDArray[np.uint8]:
        """[sequences, bytes] of :data:`~rlbuffer.store.part_rollouts.PART_ROW`; sources are places in `pushes`."""
        data = np.empty((len(self.rows), PART_ROW.itemsize), np.uint8)
        data[:, -ROW.size :] = self.rows.view(np.uint8).reshape(-1, ROW.size)
        out = data.view(PART_ROW).reshape(-1)
        out["source"], out["index"], out["advantage"] = self.origins, self.places, self.plan.advantages
        out["rollout"], out["sequences"] = self.numbers_in_push, np.repeat(self.sequences, self.sequences)
        out["sequence"] = np.arange(len(self.rows)) - np.repeat(self._heads, self.sequences)
        out["number"] = np.repeat(np.arange(len(self.sequences)), self.sequences)
        for name, of in (("rollout_loss_tokens", "loss_tokens"), ("reward", "reward")):
            out[name] = np.repeat(self.numbers[of], self.sequences)
        out["flags"] |= np.repeat(self.numbers["flags"] & HAS_REWARD, self.sequences)
        return data

    def spread(self, of_pushes: Sequence[int]) -> NDArray[np.int64]:
        """[sequences] of a value for each of `pushes`."""
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
