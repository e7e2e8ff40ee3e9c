"""What is known of a run, read in one round trip: equal to the account, whatever stands in heartbeats."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest
from daemon_runs import Served
from looks import lines_of
from store_runs import Run

from rlbuffer.client.run_state import read_run_state
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import RunGone
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import FINAL, Trouble, Wait, Waiting
from rlbuffer.state.run_state import Amount, RunState
from rlbuffer.state.step_record import StepRecord
from rlbuffer.store.keys import HEARTBEATS
from rlbuffer.testing import make_group
from rlbuffer.wire import payload
from rlbuffer_cli.view import run_view

pytest_plugins = ["store_fixtures"]

STRANGE: list[Any] = [
    *(
        None,
        "",
        "\x1b[2J",
        b"\xff",
        -1,
        2**64 - 1,
        float("nan"),
        True,
        [],
        [[{}]],
        {},
        {"math": 7},
        {"math": {"ages": 3}},
    ),
    *({"a": {"groups_ready": "x", "ages": {"\x1b": 1, "3": "x", "2": 4}}}, {7: {b"\xff": []}}),
]
"""What anybody may have written as any field of a heartbeat."""


def accounted(state: RunState, run: Run) -> bool:
    """The state has the account that `verify` recomputes."""
    report, ledger = run.store.verify(), run.store.ledger()
    assert report.ok, report
    amounts = {e.name: (e.pushed, e.pending, e.packed, e.trained, dict(e.dropped)) for e in state.envs if any(e.pushed)}
    return amounts == {
        env: (account.pushed, account.pending, account.packed, account.trained, account.dropped)
        for env, account in ledger.envs.items()
    }


@pytest.fixture
def mixed(run: Run) -> Run:
    """A trained step, a packed one, groups that are pending, whole and in part, a dropped one, and tickets."""
    run.step("a.0")
    run.step("a.1", "b.1")
    run.train(1)
    run.push("a.2")
    run.push("b.2", version=1)
    run.drop("stale", [entry for entry in run.pool() if entry.env == "b"])
    push_half(run, "a.3")
    run.store.set_allowances({"a": 3})
    assert len(run.store.take_tickets("a", 2, ttl_seconds=3600)) == 2
    return run


def test_the_state_is_the_account_in_two_round_trips_at_most(mixed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trips = []
    call = mixed.store.connection.call
    monkeypatch.setattr(
        mixed.store.connection, "call", lambda *given, **named: trips.append(1) or call(*given, **named)
    )
    state = read_run_state(mixed.store, history=100)
    assert len(trips) <= 2
    assert accounted(state, mixed)
    assert (state.step, state.trained_step, state.world_size) == (2, 1, 2)
    assert state.total.dropped == {"stale": Amount(2, state.envs[1].dropped["stale"].tokens)}
    assert {env.name: env.tickets for env in state.envs} == {"a": 2, "b": 0}
    assert [record["event"] for record in state.history] == ["drop", "step", "step"]
    assert read_run_state(mixed.store).history == ()


def push_half(run: Run, group_id: str) -> None:
    whole = make_group(env="a", group_id=group_id, size=4)
    run.sequence += 1
    half = replace(whole, rollouts=whole.rollouts[:2])
    run.store.push(half, producer="w", incarnation="u", sequence=run.sequence, epoch=run.meta.epoch)


def test_the_pool_is_known_from_the_leader_alone(run: Run) -> None:
    attempt = run.store.attempt(uuid="t", world_size=1, resume_step=0)
    run.store.announce(attempt.number, PolicyVersion(version=0, location="", size=0, checksum=""))
    for number in range(5):
        run.push(f"a.{number}")
    push_half(run, "a.9")
    assert [env.groups_ready for env in read_run_state(run.store).envs] == [None]
    served = Served(run)
    for _ in range(2):  # the second one stands by, and says nothing in the leader's place
        served.serve(BatcherConfig(64, step_groups=2, lookahead=0))

    def settled() -> RunState | None:
        state = read_run_state(run.store)
        kinds = (Wait.TRAINER_BUSY, Wait.TRAINER_GONE)
        is_settled = state.step == 1 and state.waiting is not None and state.waiting.kind in kinds
        return state if is_settled and state.envs[0].groups_ready == 3 else None

    state = served.wait_for(settled)
    assert (state.is_led, state.envs[0].groups_forming, state.envs[0].ages) == (True, 1, {"1": 4})
    assert accounted(state, run)
    served.close()
    after = read_run_state(run.store)
    assert (after.waiting, after.is_led) == (Waiting(kind=Wait.STOPPED), False)
    assert after.envs[0].groups_ready == 3, "the last leader's number"
    assert accounted(after, run)


def test_a_leader_that_was_killed_says_nothing_more(mixed: Run) -> None:
    mixed.store.release_lease()
    mixed.store.heartbeat("batcher", "leader", {"waiting": Waiting(kind=Wait.FILLING).record()})
    assert read_run_state(mixed.store).waiting == Waiting(kind=Wait.FILLING), "it may be taking over"
    mixed.age("batcher", "leader", 100.0)
    state = read_run_state(mixed.store)
    assert state.waiting is not None
    assert state.waiting.kind is Wait.NO_BATCHER
    assert round(state.waiting.seconds, -1) == 100
    mixed.lead()
    mixed.store.set_error("out of luck")
    mixed.store.release_lease()
    waiting = read_run_state(mixed.store).waiting
    assert waiting is not None
    assert (waiting.kind, waiting.detail) == (Wait.NO_BATCHER, "out of luck")


def test_a_batcher_that_ended_says_so_for_ever(mixed: Run) -> None:
    mixed.store.release_lease()
    for kind in FINAL:
        mixed.store.heartbeat("batcher", "leader", {"waiting": Waiting(kind=kind, step=3).record()})
        mixed.age("batcher", "leader", 100.0)
        assert read_run_state(mixed.store).waiting == Waiting(kind=kind, step=3)


def test_whatever_stands_in_heartbeats_the_account_is_the_same(mixed: Run) -> None:
    junk = {"raw": b"\xff\x00", "empty": b"", "old": b"12 ", "list": b"12 " + payload.dumps([1]), "late": b"9" * 40}
    names = ("waiting", "problems", "envs", "env", "gives", "step", "left", "rollouts_per_second")
    for value in STRANGE:
        for kind in HEARTBEATS:
            said = str(round(1000 * mixed.store.now())).encode() + b" " + msgpack.packb(dict.fromkeys(names, value))
            raw = dict.fromkeys(("leader", "\x1b[2J\u202e", "0"), said) | junk
            mixed.client.hset(mixed.store.keys.heartbeats(kind), mapping=raw)
        state = read_run_state(mixed.store)
        assert accounted(state, mixed), value
        assert len(state.processes) in (0, 3 * len(HEARTBEATS)), "what cannot be decoded is no heartbeat"
        json.dumps(state.as_object(), allow_nan=False)
        assert all(map(str, state.problems))


def test_a_step_that_somebody_else_wrote_has_the_numbers_of_it(mixed: Run) -> None:
    strange = {"a": "x", "b": 1, "c": {"d": b"\xff"}}
    written = dict.fromkeys((part.name for part in fields(StepRecord)), strange)
    mixed.store.add_record({**written, "digest": "d", "step": 3, "ranks": [4, {"wait": 1.0, "tokens": "x"}]})
    state = read_run_state(mixed.store)
    assert state.trained is not None
    assert (state.trained.step, state.trained.loss, state.trained.ranks) == (3, None, [{}, {"wait": 1.0}])
    assert (state.trained.rewards, state.trained.reward_parts) == ({"b": 1, "c": {}}, {"b": 1, "c": {}})
    assert lines_of(run_view(state))


@pytest.mark.parametrize(
    "value", [b"", b"\xff\x00", payload.dumps([1]), payload.dumps({"event": b"\xff", "step": [b"\xff"]})]
)
def test_what_nobody_can_read_is_named_and_the_rest_is_shown(mixed: Run, value: bytes) -> None:
    keys = mixed.store.keys
    mixed.client.hset(keys.policy, "\u202e", value)
    for key in (keys.records, keys.history, keys.eval):
        mixed.client.xadd(key, {"record": value})
        mixed.client.xadd(key, {"\u202e": value})
    for kind in HEARTBEATS:
        mixed.client.hset(keys.heartbeats(kind), mapping=dict.fromkeys(("leader", "\u202e", "0"), value))
    state = read_run_state(mixed.store, history=100)
    assert accounted(state, mixed)
    assert [problem.kind for problem in state.problems] == [Trouble.UNREADABLE]
    assert keys.policy in state.problems[0].detail or keys.history in state.problems[0].detail
    assert [record["event"] for record in state.history][-3:] == ["drop", "step", "step"]
    json.dumps(state.as_object(), allow_nan=False)
    "\n".join(lines_of(run_view(state))).encode()


def test_a_run_that_is_not_there_is_said_to_be_gone(run: Run) -> None:
    run.client.delete(run.store.keys.meta)
    with pytest.raises(RunGone):
        read_run_state(run.store)
