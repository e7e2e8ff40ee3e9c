"""A committed step as people and their pages see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlbuffer.errors import NotFound
from rlbuffer.records.step_header import StepHeader
from rlbuffer.store.part_rollouts import StepPart
from rlbuffer.store.records import PartRollout
from rlbuffer.store.viewer import Viewer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """A committed step: its header, and every sequence of its rollouts with its place."""

    header: StepHeader
    rollouts: tuple[tuple[int, PartRollout], ...]
    """(planned rank, sequence of a rollout)."""
    rows: tuple[tuple[tuple[tuple[str, ...], ...], ...], ...] = field(default=())
    """``rows[rank][micro_step]``: each row's rollouts by their ids, sequences of several as ``g/0.2``."""
    row_tokens: int = 0
    """Tokens that a row can hold."""

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """Every rollout of the step."""
        return tuple(dict.fromkeys(r.info.rollout_id for _, r in self.rollouts))


def view_step(store: Viewer, n: int) -> StepView:
    """A committed step with every rollout's place. Raises NotFound when it was never committed, StepRetired later."""
    header = store.wait_step(n, block_seconds=0.0)
    if header is None:
        raise NotFound(f"run {store.run!r} has no step {n}: the last committed one is {store.meta().step}.")
    return step_view(header, store.read_parts(n))


def step_view(header: StepHeader, parts: Sequence[StepPart]) -> StepView:
    """A step put together from its header and its parts."""
    return StepView(
        header=header,
        rollouts=tuple((part.rank, member) for part in parts for member in part.rollouts),
        rows=tuple(
            tuple(tuple(tuple(part.rollouts[i].name for i in row) for row in step) for step in part.rows)
            for part in parts
        ),
        row_tokens=parts[0].row_tokens,
    )
