"""The sequences of a step's part as one table, of the same bytes as the part's. A pull works on all of them at once;
people read a record of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlbuffer.records.info import HAS_REWARD, IS_TRUNCATED, ROW_DTYPE, RolloutInfo
from rlbuffer.records.lazy import LazyRecords
from rlbuffer.store.records import PartRollout

PART_ROW = np.dtype(
    [
        ("source", "<u4"),
        ("index", "<u4"),
        ("rollout", "<u4"),
        ("sequence", "<u2"),
        ("sequences", "<u2"),
        ("number", "<u4"),
        ("rollout_loss_tokens", "<u4"),
        ("advantage", "<f4"),
        *ROW_DTYPE.descr,
    ]
)
"""A sequence of a part: its push among those of the part, its payload field and its rollout there; its place among the
sequences of the rollout and how many those are; the number of the rollout in the step, and what all of its sequences
train; its advantage, its numbers, and the reward of
its rollout."""
_NUMBERS = [
    *("length", "prompt_tokens", "loss_tokens", "turns", "largest_token"),
    *("min_version", "max_version", "size", "checksum"),
]
"""Columns that are fields of a :class:`~rlbuffer.records.info.RolloutInfo` as they stand."""


class SourcePush(NamedTuple):
    """A push that sequences of a part lie in."""

    payload_key: str
    group_id: str
    env: str
    adapter: str
    prompt_id: str
    planned_size: int
    worker: str
    pushed_ms: int
    entry_id: str = ""
    seconds: float | None = None


class PartRollouts(LazyRecords[PartRollout]):
    """The sequences of a part.

    Args:
        table: [sequences] of :data:`PART_ROW`.
        sources: the pushes that it names.
        ids: of each one's rollout; None for ``<group id>/<place of the rollout>``.
        rewards: named ones of each one's rollout; None where there are none.
    """

    def __init__(
        self,
        table: NDArray[np.void],
        sources: Sequence[SourcePush],
        ids: Sequence[str] | None = None,
        rewards: Sequence[Mapping[str, float]] | None = None,
    ) -> None:
        self.table, self._sources = table, sources
        self.rewards: Sequence[Mapping[str, float]] = [{}] * len(table) if rewards is None else rewards
        """Named rewards of each one's rollout."""
        numbers = table["rollout"].tolist()
        self._ids = [f"{i}/{n}" for i, n in zip(self.of_push("group_id"), numbers, strict=True)] if ids is None else ids

    @classmethod
    def joined(cls, parts: Iterable[PartRollouts]) -> PartRollouts:
        """The sequences of several parts of one step, one part after the other."""
        tables = [np.empty(0, PART_ROW)]
        sources: list[SourcePush] = []
        ids: list[str] = []
        rewards: list[Mapping[str, float]] = []
        for part in parts:
            tables.append(part.table.copy())
            tables[-1]["source"] += len(sources)
            sources += part._sources
            ids += part._ids
            rewards += part.rewards
        return cls(np.concatenate(tables), sources, ids, rewards)

    def of_push(self, name: str) -> list[Any]:
        """A value of the push of each sequence, by the name of a field of :class:`StepSource`."""
        values = [getattr(source, name) for source in self._sources]
        return [values[number] for number in self.table["source"].tolist()]

    @cached_property
    def reward(self) -> list[float | None]:
        """The reward of each one's rollout."""
        scored = (self.table["flags"] & HAS_REWARD != 0).tolist()
        return [reward if has else None for reward, has in zip(self.table["reward"].tolist(), scored, strict=True)]

    @property
    def are_truncated(self) -> list[bool]:
        """True for those whose sampling ended at a length limit."""
        truncated: list[bool] = (self.table["flags"] & IS_TRUNCATED != 0).tolist()
        return truncated

    @cached_property
    def infos(self) -> list[RolloutInfo]:
        """Each sequence as its payload has to be: that of the first has what is the rollout's own."""
        reward, rewards = self.reward, self.rewards
        if self.table["sequence"].any():
            are_first = (self.table["sequence"] == 0).tolist()
            reward = [value if first else None for value, first in zip(reward, are_first, strict=True)]
            rewards = [named if first else {} for named, first in zip(rewards, are_first, strict=True)]
        of_rollouts = zip(self._ids, reward, rewards, self.are_truncated, strict=True)
        # A pull makes one for each payload: named one by one they cost a fifth of what a mapping of names costs.
        return [
            RolloutInfo(
                rollout_id=rollout_id,
                length=length,
                prompt_tokens=prompt_tokens,
                loss_tokens=loss_tokens,
                reward=scalar,
                rewards=named,
                min_version=min_version,
                max_version=max_version,
                turns=turns,
                is_truncated=is_truncated,
                size=size,
                checksum=checksum,
                largest_token=largest_token,
            )
            for (rollout_id, scalar, named, is_truncated), (
                length,
                prompt_tokens,
                loss_tokens,
                turns,
                largest_token,
                min_version,
                max_version,
                size,
                checksum,
            ) in zip(of_rollouts, self.table[_NUMBERS].tolist(), strict=True)
        ]

    def __len__(self) -> int:
        return len(self.table)

    def _each(self) -> Iterator[PartRollout]:
        column_names = [
            name for name in PART_ROW.names or () if name not in {*(ROW_DTYPE.names or ()), "source", "rollout"}
        ]
        columns = zip(*[self.table[name].tolist() for name in column_names], strict=True)
        for source, values, info in zip(self.table["source"].tolist(), columns, self.infos, strict=True):
            yield PartRollout(
                **dict(zip(column_names, values, strict=True)),
                info=info,
                **self._sources[source]._asdict(),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """`<s>-<r+1>`: what planned rank r trains on; for another world size a pull makes one of its own of all of them."""

    step: int
    rank: int
    rollouts: PartRollouts
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    """``rows[micro_step]`` are the rank's rows; indices into `rollouts`, () a dummy."""
    row_tokens: int
    rows_per_micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """A committed step as it stands on the server: what its digest is computed over."""

    step: int
    digest: str
    """SHA-256 that COMMIT stored with it."""
    committed_ms: int
    """Server time of the commit, in milliseconds."""
    header: bytes
    parts: tuple[bytes, ...]
    """One per planned rank, in their order."""
    decoded: tuple[StepPart, ...]
    """The same, decoded."""
