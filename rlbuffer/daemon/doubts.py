"""Payloads that ranks could not read: told by name, and from then on looked into before each commit.

Usually nobody but the ranks reads a payload: PIN compares sizes. A producer whose payloads are never sound would get
into every step with that, so after the first damaged one the leader reads what it is about to commit.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlbuffer.errors import NotFound, PayloadError, StepRetired
from rlbuffer.packing.further_columns import Columns, specs_of
from rlbuffer.process.logs import fields
from rlbuffer.records.info import ROW_DTYPE, GroupInfo
from rlbuffer.records.step_plan import StepPlan
from rlbuffer.records.waiting import Problem, Trouble
from rlbuffer.state.text import printable
from rlbuffer.store.payloads import Trainable, read_rollouts
from rlbuffer.store.records import PartRollout, PoolEntry
from rlbuffer.store.viewer import Viewer

_log = logging.getLogger(__name__)
WATCHED_STEPS = 64
"""Payloads are looked into until so many steps were committed since the last bad one."""
RANK_FRESH_SECONDS = 10.0
"""Ranks beat every second; one that is silent for longer may be of a trainer that is gone."""


def beyond_vocabulary(infos: Mapping[str, GroupInfo], beats: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Pushes with a token that the model of the ranks of these heartbeats does not have. -> entry id -> which."""
    most = Trainable.of(beat for beat in beats if beat["seconds_ago"] <= RANK_FRESH_SECONDS).vocabulary
    largest = [(key, np.frombuffer(info.rows, ROW_DTYPE)["largest_token"].max()) for key, info in infos.items()]
    return {
        key: f"token {token} is outside of the model's vocabulary of {most}"
        for key, token in largest
        if most is not None and token >= most
    }


class Doubts:
    """The bad payloads that one leader knows of. `step`: the last one that is committed."""

    def __init__(self, store: Viewer, step: int) -> None:
        self._store = store
        self._known = self._counts(step)
        self._found_at: int | None = None
        """Last committed step when a look into payloads found a bad one."""

    def look(self, step: int) -> None:
        """Asks what the ranks have found, and tells of what is new."""
        counts = self._counts(step)
        for damaged, count in counts.items():
            if count > self._known.get(damaged, 0):
                problem = Problem(kind=Trouble.DAMAGED, step=damaged, count=count, detail=self._whose(damaged))
                _log.warning("%s", problem, extra=fields("damaged", step=damaged, rollouts=count))
        self._known = counts
        if self._found_at is not None and step >= self._found_at + WATCHED_STEPS:
            self._found_at = None

    @property
    def are_any(self) -> bool:
        """Payloads must be looked into."""
        return bool(self._known) or self._found_at is not None

    def problems(self) -> tuple[Problem, ...]:
        """The last damaged step, if there is one."""
        if not self._known:
            return ()
        step = max(self._known)
        return (Problem(kind=Trouble.DAMAGED, step=step, count=self._known[step]),)

    def unsound(self, plan: StepPlan, entries: Mapping[str, PoolEntry], columns: Columns) -> dict[str, str]:
        """Entries of the plan with a rollout that no rank could train. -> entry id -> what is wrong."""
        schema = specs_of(columns)
        beats = self._store.heartbeats("rank").values()
        can = Trainable.of(beat for beat in beats if beat["seconds_ago"] <= RANK_FRESH_SECONDS)
        refs: list[PartRollout] = []
        for ref in plan.rollouts:
            entry = entries[ref.entry_id]
            if entry.info is not None:
                refs.append(
                    PartRollout(
                        payload_key=entry.payload_key,
                        index=ref.index,
                        info=entry.info.sequences[ref.index],
                        group_id=ref.group_id,
                        env=ref.env,
                        adapter=ref.adapter,
                        advantage=0.0,
                    )
                )
        entry_of = {entry.payload_key: entry_id for entry_id, entry in entries.items()}
        bad: dict[str, str] = {}
        for part, outcome in read_rollouts(self._store, refs, schema, can):
            if isinstance(outcome, str):
                bad.setdefault(entry_of[part.payload_key], f"rollout {part.info.rollout_id}: {outcome}")
        if bad:
            self._found_at = plan.step - 1
        return bad

    def _counts(self, step: int) -> dict[int, int]:
        return self._store.damaged_in(max(1, step - WATCHED_STEPS + 1), step)

    def _whose(self, step: int) -> str:
        """Envs and workers of the step's damaged rollouts, those with most of them first."""
        names = set(self._store.damaged_of(step))
        try:
            members = [member for part in self._store.read_parts(step) for member in part.rollouts]
        except (NotFound, PayloadError, StepRetired):
            return ""
        sources = Counter(
            f"env {m.env} by {m.worker or 'an unnamed worker'}"
            for m in members
            if f"{m.group_id} {m.info.rollout_id}" in names
        )
        largest = [printable(f"{count} of {source}") for source, count in sources.most_common(3)]
        return ", ".join(largest) + (f" and {len(sources) - 3} other sources" if len(sources) > 3 else "")
