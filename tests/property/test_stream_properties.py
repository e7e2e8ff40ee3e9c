"""Whatever a stream's trainer acknowledges, in whatever order and over however many starts, the ledger balances."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_runs import Run

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.client.stream import Stream, Taken
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.store.verify.verify import verify

GROUPS, SIZE = 6, 3
Act = tuple[str, int, int]
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("trained"), st.integers(-2, GROUPS), st.integers(0, 3)),
        st.tuples(st.just("unused"), st.integers(1, GROUPS), st.integers(0, SIZE - 1)),
        st.tuples(st.just("save"), st.just(0), st.just(0)),
        st.tuples(st.just("resume"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("version"), st.integers(0, 3), st.just(0)),
    ),
    max_size=30,
)


def committed(run: Run) -> None:
    """Commits a step for each of some groups, as the leader of a stream plans them."""
    run.lead()
    batcher = Batcher(BatcherConfig(1024, feeds="stream", max_age=9))
    batcher.set_published(0)
    for number in range(GROUPS):
        run.push(f"a.{number}", size=SIZE)
        (entry,) = run.pool()
        assert entry.info is not None
        batcher.add(entry.info, entry_id=entry.entry_id, now=0.0)
        plan = batcher.next(number + 1, world_size=1, now=0.0, rng=np.random.default_rng(0)).plan
        assert plan is not None
        entries = {entry.entry_id: entry}
        run.store.pin(plan.rollouts, entries)
        run.store.commit(plan, entries, meta=run.store.meta(), columns={}, state={})
        batcher.committed(plan)


class Model:
    """What the server must count: of each group what was unused when it was first acknowledged."""

    def __init__(self) -> None:
        self.unused: dict[int, set[str]] = {}
        """Place -> rollouts, of those that are acknowledged."""
        self.saved: Any = None

    def trainer(self, run: Run, state: Any) -> None:
        """Begins a start of the trainer."""
        self.stream = run.closes(Stream(run.store, timeout_seconds=20.0))
        self.stream.resume(state)
        self.held: dict[int, Taken] = {}
        self.noted: dict[int, set[str]] = {}
        if state is not None and state["unused"]:
            self.noted[self.stream.place + 1] = set(state["unused"])
        self.next = self.stream.place + 1

    def take(self, count: int) -> None:
        for taken in islice(self.stream, min(count, GROUPS + 1 - self.next)):
            assert taken.place == self.next
            self.held[taken.place], self.next = taken, taken.place + 1

    def trained(self, place: int, part: int) -> None:
        place = max(0, min(place, self.next - 1))
        self.stream.trained(place, part=part)
        for done in [number for number in self.held if number <= place]:
            self.held.pop(done)
            self.unused.setdefault(done, self.noted.pop(done, set()))

    def drop(self, place: int, which: int) -> None:
        taken = self.held.get(place)
        if taken is not None:
            rollout_id = taken.rollouts[which].rollout_id
            self.stream.trained(self.stream.place, part=self.stream.state["part"], unused=[rollout_id])
            self.noted.setdefault(place, set()).add(rollout_id)

    def check(self, run: Run) -> None:
        account = run.store.ledger().envs["a"]
        unused = sum(map(len, self.unused.values()))
        assert account.trained[0] == SIZE * len(self.unused) - unused
        assert account.dropped.get("unused", (0, 0))[0] == unused
        assert account.packed[0] == SIZE * (GROUPS - len(self.unused))
        assert account.pending == (0, 0)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ACTS)
def test_any_order_of_trained_parts_unused_and_resumes_balances(tmp_path: Path, acts: Sequence[Act]) -> None:
    run = Run("memory://", tmp_path)
    try:
        committed(run)
        model = Model()
        model.trainer(run, None)
        for what, one, other in acts:
            match what:
                case "take":
                    model.take(one)
                case "trained":
                    model.trained(one, other)
                case "unused":
                    model.drop(one, other)
                case "save":
                    model.saved = json.loads(json.dumps(model.stream.state))
                case "resume":
                    model.stream.close()
                    model.trainer(run, model.saved if one else None)
                case "version":
                    model.stream.version(one)
            model.check(run)
        report = verify(run.store)
        assert report.ok, report.findings
    finally:
        run.close()
