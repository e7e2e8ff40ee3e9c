"""Open rollouts under any order of begins, calls, ends, pushes and sweeps, with repeats, against a plain model.

The model knows nothing of keys or scripts: only what a gateway and its agents may rely on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_runs import Run

from rlbuffer.errors import NotFound, OpenRolloutEnded, OpenRolloutFull, OpenRolloutUnknown, OtherEnd, TicketGone
from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Ticket
from rlbuffer.records.spans import VersionSpan
from rlbuffer.store.open_rollouts import Begun, End, OpenCall, OpenState, WaitingGroup, read_counts
from rlbuffer.testing import make_group

MOST_CALLS = 4
ENDS = (End(reward=0.0), End(reward=1.0), End(failure=Failure("tool", "away")))
ABANDONED = "abandoned"

moves = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from("xyz"), st.integers(1, 3)),
    st.tuples(
        st.just("call"),
        st.integers(0, 5),
        st.sampled_from("pq"),
        st.sampled_from(["newest", "none"]),
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.tuples(st.just("call again"), st.integers(0, 5), st.integers(0, 3), st.sampled_from("pq")),
    st.tuples(st.just("heard"), st.integers(0, 5), st.sampled_from("pq")),
    st.tuples(st.just("end"), st.integers(0, 5), st.sampled_from(range(len(ENDS)))),
    st.tuples(st.just("abandon"), st.integers(0, 5)),
    st.tuples(st.just("read what waits")),
    st.tuples(st.just("push"), st.integers(0, 3)),
    st.tuples(st.just("forget")),
)


@dataclass
class Rollout:
    """An open rollout as it should be."""

    capability: str
    calls: list[int] = field(default_factory=list)
    """Token that each has sampled."""
    recorded: list[OpenCall] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)
    """Request -> its newest call."""
    heard: dict[str, int] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    end: End | None = None
    is_pushed: bool = False
    is_forgotten: bool = False

    @property
    def state(self) -> OpenState:
        return OpenState.PUSHED if self.is_pushed else OpenState.OPEN if self.end is None else OpenState.ENDED


class Model:
    """Groups by the key of their caller; what was seen to wait, however long ago."""

    def __init__(self, run: Run) -> None:
        self.run, self.store = run, run.store
        run.lead()
        run.store.set_allowances({"a": 1000})
        self.groups: dict[str, tuple[Begun, list[Rollout]]] = {}
        self.rollouts: list[Rollout] = []
        self.seen: list[WaitingGroup] = []
        self.begun = self.samples = self.pushed_groups = 0

    def pick(self, index: int) -> Rollout | None:
        return self.rollouts[index % len(self.rollouts)] if self.rollouts else None

    def begin(self, key: str, size: int) -> None:
        (number,) = self.store.take_tickets("a", 1, ttl_seconds=60)
        ticket = Ticket(env="a", number=number, group_id=f"a.{number}")
        begun = self.store.begin(key, ticket, size=size, about={"key": key})
        if key in self.groups:
            before, _ = self.groups[key]
            assert (begun.group_id, begun.capabilities, begun.is_new) == (before.group_id, before.capabilities, False)
        else:
            assert (begun.number, begun.size, begun.is_new) == (number, size, True)
            made = [Rollout(capability) for capability in begun.capabilities]
            self.groups[key] = begun, made
            self.rollouts += made
            self.begun += size
        with pytest.raises(TicketGone):
            self.store.begin(f"another {key}", Ticket(env="a", number=10**6, group_id="a.1000000"), size=1, about={})

    def call(self, index: int, request: str, seen: str, after: int, version: int) -> None:
        its = self.pick(index)
        if its is None:
            return
        self.samples += 1
        newest = its.requests.get(request, 0)
        one = OpenCall(
            after=after,
            prompt=np.array([1], np.int32),
            tokens=np.array([self.samples], np.int32),
            logprobs=np.array([-1.0], np.float32),
            version_spans=(VersionSpan(version, 0, 1),),
        )
        names = {"request": request, "seen": newest if seen == "newest" else 0, "history": f"h{request}"}
        line = self.run.meta.epoch

        def record() -> Any:
            return self.store.record(its.capability, one, line=line, **names)

        if its.is_forgotten:
            refusal: Any = OpenRolloutUnknown
        elif its.end is not None:
            refusal = OpenRolloutEnded
        elif newest and names["seen"] != newest:
            answer = record()
            assert (answer.number, answer.is_new) == (newest, False)
            assert answer.call.tokens.tolist() == [its.calls[newest - 1]]
            return
        elif len(its.calls) >= MOST_CALLS:
            refusal = OpenRolloutFull
        elif after > len(its.calls):
            refusal = NotFound
        else:
            answer = record()
            its.calls.append(self.samples)
            its.recorded.append(one)
            its.versions.append(version)
            its.requests[request] = len(its.calls)
            assert (answer.number, answer.is_new) == (len(its.calls), True)
            return
        with pytest.raises(refusal):
            record()

    def call_again(self, index: int, which: int, request: str) -> None:
        """A call whose reply was lost comes once more, however late: it is there already."""
        its = self.pick(index)
        if its is None or which >= len(its.recorded):
            return

        def record() -> Any:
            names = {"request": request, "seen": 0, "history": "h", "line": self.run.meta.epoch}
            return self.store.record(its.capability, its.recorded[which], **names)

        if its.is_forgotten or its.end is not None:
            with pytest.raises(OpenRolloutUnknown if its.is_forgotten else OpenRolloutEnded):
                record()
            return
        answer = record()
        assert (answer.number, answer.is_new, answer.call.id) == (which + 1, False, its.recorded[which].id)

    def heard(self, index: int, request: str) -> None:
        its = self.pick(index)
        if its is not None and request in its.requests:
            self.store.heard(its.capability, request, its.requests[request])
            if its.end is None:
                its.heard[request] = its.requests[request]

    def end(self, index: int, which: int) -> None:
        its = self.pick(index)
        if its is None:
            return
        if its.is_forgotten or (its.end is not None and its.end != ENDS[which]):
            with pytest.raises(OpenRolloutUnknown if its.is_forgotten else OtherEnd):
                self.store.end(its.capability, ENDS[which])
            return
        assert self.store.end(its.capability, ENDS[which]) == ("ended" if its.end is None else "same")
        its.end = ENDS[which]

    def abandon(self, index: int) -> None:
        its = self.pick(index)
        if its is None:
            return
        group, i, _ = its.capability.rsplit(".", 2)
        self.run.client.zadd(self.store.keys.open, {f"{group}/{i}": 1}, xx=True)
        assert self.store.end_abandoned() == ([f"{group}/{i}"] if its.end is None else [])
        if its.end is None:
            its.end = self.store.look_up(its.capability).rollout.end
            assert its.end is not None
            assert its.end.failure is not None
            assert its.end.failure.kind == ABANDONED

    def read_what_waits(self) -> None:
        waiting = self.store.waiting()
        expected = {
            begun.group_id: [its.end for its in made]
            for begun, made in self.groups.values()
            if all(its.state is OpenState.ENDED for its in made)
        }
        assert {group.group_id: [one.end for one in group.rollouts] for group in waiting} == expected
        self.seen += waiting

    def push(self, index: int) -> None:
        if not self.seen:
            return
        waiting = self.seen[index % len(self.seen)]
        made = next((made for begun, made in self.groups.values() if begun.group_id == waiting.group_id), None)
        group = make_group(env="a", size=waiting.size, group_id=waiting.group_id)
        if made is None:  # forgotten: whoever read it then may not push it again
            with pytest.raises(OpenRolloutUnknown):
                self.store.push_rollouts(waiting, group)
            return
        status, _ = self.store.push_rollouts(waiting, group)
        assert status == ("duplicate" if made[0].is_pushed else "stored")
        self.pushed_groups += not made[0].is_pushed
        for its in made:
            its.is_pushed = True

    def forget(self) -> None:
        pushed = [key for key, (_, made) in self.groups.items() if made[0].is_pushed]
        assert self.store.forget_open_rollouts() == len(pushed)
        for key in pushed:
            for its in self.groups.pop(key)[1]:
                its.is_forgotten = True

    def check(self) -> None:
        for its in self.rollouts:
            if its.is_forgotten:
                with pytest.raises(OpenRolloutUnknown):
                    self.store.look_up(its.capability)
                continue
            for request in "pq":
                found = self.store.look_up(its.capability, request=request, histories=["none", f"h{request}"])
                newest = 0 if its.is_pushed else its.requests.get(request, 0)
                assert (found.request_call, found.history_call) == (newest, newest)
                assert found.is_heard == (newest > 0 and its.heard.get(request) == newest)
            rollout = found.rollout
            assert (rollout.state, rollout.calls, rollout.end) == (its.state, len(its.calls), its.end)
            assert rollout.oldest_version == min(its.versions, default=None)
            kept = [call.tokens.tolist() for call in self.store.read_calls(rollout.name)]
            assert kept == ([] if its.is_pushed else [[token] for token in its.calls])
        counts = read_counts(self.store).get("a")
        states = [its.state for its in self.rollouts]
        if counts is not None:
            assert (counts.begun, counts.open, counts.ended, counts.pushed, counts.calls) == (
                self.begun,
                *(states.count(state) for state in (OpenState.OPEN, OpenState.ENDED, OpenState.PUSHED)),
                sum(len(its.calls) for its in self.rollouts),
            )
        entries = [entry.group_id for entry in self.run.pool()]
        assert len(entries) == len(set(entries)) == self.pushed_groups
        assert self.store.verify().findings == ()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=st.lists(st.tuples(moves, st.sampled_from([1, 1, 2])), min_size=12, max_size=40))
def test_any_order_of_moves_leaves_what_the_model_has(
    made: list[Any], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlbuffer.store.gateway.MOST_CALLS", MOST_CALLS)
    monkeypatch.setattr("rlbuffer.store.leader.OPEN_KEPT_MS", -1000)
    run = Run("memory://", Path(tmp_path_factory.getbasetemp()))
    try:
        model = Model(run)
        for (name, *args), times in made:
            for _ in range(times):
                getattr(model, name.replace(" ", "_"))(*args)
        model.check()
    finally:
        run.close()
