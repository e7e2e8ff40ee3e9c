"""Open rollouts: begun of a ticket, call by call on the server, ended, and pushed once, whichever gateway does it."""

from __future__ import annotations

import dataclasses
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_server import OwnServer
from store_runs import Run

from rlbuffer.errors import (
    EpochChanged,
    LeaseLost,
    NotFound,
    OpenRolloutEnded,
    OpenRolloutFull,
    OpenRolloutUnknown,
    OtherEnd,
    RunGone,
    ServerFull,
    TicketGone,
)
from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Group, Ticket
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import VersionSpan
from rlbuffer.store.open_rollouts import (
    Begun,
    End,
    OpenCall,
    OpenState,
    WaitingGroup,
    open_rollouts,
    read_counts,
)

pytest_plugins = ("store_fixtures",)
STALE = Failure("stale", "too old")


def begin(run: Run, key: str = "", *, size: int = 2, store: Any = None, **more: Any) -> Begun:
    """A group of open rollouts of a new ticket."""
    store = store or run.store
    run.lead()
    run.store.set_allowances({"a": 100})
    (number,) = store.take_tickets("a", 1, ttl_seconds=60)
    ticket = Ticket(env="a", number=number, group_id=f"a.{number}")
    return store.begin(key or uuid.uuid4().hex, ticket, size=size, about={"prompt": "3 + 5"}, **more)


def call(*tokens: int, after: int = 0, prompt: tuple[int, ...] = (1, 2), version: int = 0, **details: Any) -> OpenCall:
    """A call that has sampled these tokens."""
    return OpenCall(
        after=after,
        prompt=np.array(prompt, np.int32),
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        version_spans=(VersionSpan(version, 0, len(tokens)),),
        finish_reason="stop",
        details=details,
    )


def record(store: Any, capability: str, one: OpenCall, request: str, history: str = "") -> Any:
    """As a gateway does it: look up, sample, record."""
    found = store.look_up(capability, request=request)
    return store.record(
        capability, one, request=request, seen=found.request_call, history=history or f"h {request}", line=found.line
    )


def group_of(waiting: WaitingGroup, *, prompt_ids: Any = (1, 2), **more: Any) -> Group:
    """The group to push: each rollout one sequence of two sampled tokens, or a failure."""
    rollouts = [
        Rollout.from_completion(
            prompt_ids=prompt_ids,
            token_ids=[7, 8],
            logprobs=[-0.5, -0.5],
            policy_version=0,
            reward=rollout.end.reward,
            failure=STALE if waiting.is_void else rollout.end.failure,
        )
        for rollout in waiting.rollouts
    ]
    fields = {"group_id": waiting.group_id, "env": waiting.env, "prompt_id": "p", "planned_size": waiting.size}
    return Group(rollouts=rollouts, **{**fields, **more})


def end_all(run: Run, begun: Begun) -> WaitingGroup:
    for i, capability in enumerate(begun.capabilities):
        run.store.end(capability, End(reward=float(i)))
    return next(waiting for waiting in run.store.waiting() if waiting.group_id == begun.group_id)


def counts(run: Run) -> tuple[int, int, int, int]:
    its = read_counts(run.store)["a"]
    return its.begun, its.open, its.ended, its.pushed


# -- begin -------------------------------------------------------------------------------------------------------------
def test_the_same_key_begins_one_group_whoever_asks_again(run):
    first = begin(run, "k", size=3)
    (number,) = run.store.take_tickets("a", 1, ttl_seconds=60)
    again = run.again().begin("k", Ticket(env="a", number=number, group_id=f"a.{number}"), size=2, about={})
    assert (first.is_new, again.is_new) == (True, False)
    assert (again.group_id, again.capabilities, again.about) == (first.group_id, first.capabilities, first.about)
    assert run.store.begun("k").capabilities == first.capabilities
    assert run.store.begun("other") is None
    assert len(set(first.capabilities)) == 3
    assert counts(run) == (3, 3, 0, 0)
    assert run.store.verify().ok


def test_the_server_holds_no_capability(run):
    begun = begin(run, "a key that its caller drew")
    everything = repr(run.control_keys())
    for capability in begun.capabilities:
        assert capability.rpartition(".")[2] not in everything
    assert "a key that its caller drew" not in everything


def test_a_ticket_begins_one_group_and_one_that_is_not_out_none(run):
    begun = begin(run)
    ticket = Ticket(env="a", number=begun.number, group_id=begun.group_id)
    for taken in (ticket, Ticket(env="a", number=99, group_id="a.99")):
        with pytest.raises(TicketGone):
            run.store.begin("another key", taken, size=2, about={})
    assert counts(run) == (2, 2, 0, 0)


def test_times_are_of_the_servers_clock_and_a_ticket_stays_out_for_a_minute_longer_than_its_rollouts(run):
    keys, numbers = run.store.keys, ("calls", "sequences", "bytes", "tokens")

    def clock() -> int:
        seconds, microseconds = run.client.time()
        return 1000 * seconds + microseconds // 1000

    before = clock()
    begun = begin(run, size=1, idle_seconds=120.0)
    (capability,), (name,) = begun.capabilities, begun.names
    told = run.client.hmget(keys.open_rollout(name), "begun", "heard")
    assert [before <= int(at) <= clock() for at in told] == [True, True]
    assert run.client.hmget(keys.open_rollout(name), numbers) == [b"0"] * 4
    assert run.client.zscore(keys.tickets("a"), begun.number) == int(told[0]) + 180_000
    assert run.client.zscore(keys.open, name) == int(told[0]) + 120_000
    moves = (
        lambda: record(run.store, capability, call(5), "r"),
        lambda: run.store.heard(capability, "r", 1),
        lambda: run.store.touch(capability),
        lambda: run.store.freeze(capability),
        lambda: run.store.end(capability, End(reward=1.0)),
    )
    for number, move in enumerate(moves, 1):
        run.client.zadd(keys.tickets("a"), {str(begun.number): 1})
        before = clock()
        move()
        heard = run.client.zscore(keys.tickets("a"), begun.number) - 180_000
        assert before <= heard <= clock()
        if number < len(moves):
            assert run.client.zscore(keys.open, name) == heard + 120_000
            assert int(run.client.hget(keys.open_rollout(name), "heard")) == heard
    assert run.client.zscore(keys.open_ended, begun.group_id) == heard
    (waiting,) = run.store.waiting()
    before = clock()
    run.store.push_rollouts(waiting, group_of(waiting))
    assert before <= run.client.zscore(keys.open_pushed, begun.group_id) <= clock()


def test_a_ticket_that_was_closed_is_never_brought_back(run):
    begun = begin(run)
    run.store.close_tickets("a", [begun.number])
    run.store.touch(begun.capabilities[1])
    run.store.end(begun.capabilities[1], End(reward=1.0))
    assert run.client.zcard(run.store.keys.tickets("a")) == 0


@pytest.mark.parametrize(
    "wrong", [{"size": 0}, {"size": 513}, {"idle_seconds": 0.0}, {"idle_seconds": 841.0}, {"key": "x" * 513}]
)
def test_what_can_never_be_begun_is_refused_before_it_is_sent(run, wrong):
    asked = {"key": "k", "size": 2} | wrong
    ticket = Ticket(env="a", number=0, group_id="a.0")
    with pytest.raises(ValueError, match=next(iter(wrong))):
        run.store.begin(asked.pop("key"), ticket, about={}, **asked)


# -- calls -------------------------------------------------------------------------------------------------------------
def test_a_call_comes_back_as_it_was_recorded_and_the_next_gateway_finds_its_history(run):
    (capability, _) = begin(run).capabilities
    one = call(5, 6, version=3, message={"role": "assistant", "content": "hello"})
    assert record(run.store, capability, one, "r1", "after r1").number == 1
    two = call(8, after=1, prompt=(7,), version=2)
    assert record(run.again(), capability, two, "r2", "after r2").number == 2
    found = run.again().look_up(capability, request="r2", histories=["unknown", "after r2", "after r1"])
    assert (found.history, found.history_call, found.request_call, found.is_heard) == ("after r2", 2, 2, False)
    rollout = found.rollout
    assert (rollout.calls, rollout.tokens, rollout.oldest_version, rollout.state) == (2, 3, 2, OpenState.OPEN)
    for given, kept in zip((one, two), run.store.read_calls(rollout.name), strict=True):
        assert (kept.after, kept.version_spans, kept.finish_reason) == (given.after, given.version_spans, "stop")
        assert dict(kept.details) == dict(given.details)
        for name in ("prompt", "tokens", "logprobs"):
            assert np.array_equal(getattr(kept, name), getattr(given, name))
            assert getattr(kept, name).dtype == getattr(given, name).dtype
    assert [one.number for one in run.store.read_calls(rollout.name, [2, 9])] == [2]


def test_of_two_gateways_with_one_request_both_answer_what_was_recorded_first(run):
    (capability, _) = begin(run).capabilities
    found = run.store.look_up(capability, request="r")
    answers = [
        store.record(capability, call(token), request="r", seen=found.request_call, history="h", line=found.line)
        for store, token in ((run.store, 5), (run.again(), 6), (run.store, 5))
    ]
    assert [answer.is_new for answer in answers] == [True, False, False]
    assert {(answer.number, answer.call.tokens.tolist()[0]) for answer in answers} == {(1, 5)}
    assert run.store.look_up(capability).rollout.calls == 1


@pytest.mark.parametrize("between", [0, 1, 3])
def test_a_call_whose_reply_was_lost_is_recorded_once_whatever_came_after_it(run, between):
    (capability, _) = begin(run).capabilities
    line, mine = run.store.look_up(capability).line, call(5)
    others = [call(10 + i) for i in range(between)]
    for seen, one in enumerate([mine, *others]):
        run.store.record(capability, one, request="r", seen=seen, history="h", line=line)
    for seen in (0, 1, between + 1):
        again = run.again().record(capability, mine, request="r", seen=seen, history="h", line=line)
        assert (again.number, again.is_new, again.call.id, again.call.tokens.tolist()) == (1, False, mine.id, [5])
    assert run.store.look_up(capability).rollout.calls == between + 1


def test_a_number_that_was_given_to_another_call_after_a_loss_stands_for_that_one_alone(run):
    begun = begin(run)
    capability, key = begun.capabilities[0], run.store.keys.open_rollout(begun.names[0])
    line, before = run.store.look_up(capability).line, run.client.hgetall(key)
    lost = run.store.record(capability, call(5), request="r", seen=0, history="h", line=line).call
    run.client.delete(key)  # as a server that comes back without its newest writes
    run.client.hset(key, mapping=before)
    other = record(run.store, capability, call(6), "r").call
    assert other.number == lost.number == 1
    behind = {"after": 1, "prompt": np.array([7], np.int32)}
    late = OpenCall(after_id=lost.id, tokens=lost.tokens, logprobs=lost.logprobs, **behind)
    with pytest.raises(NotFound):
        record(run.store, capability, late, "r2")
    run.store.heard(capability, "r", 1, call_id=lost.id)
    assert not run.store.look_up(capability, request="r").is_heard
    run.store.heard(capability, "r", 1, call_id=other.id)
    assert run.store.look_up(capability, request="r").is_heard
    sound = OpenCall(after_id=other.id, tokens=lost.tokens, logprobs=lost.logprobs, **behind)
    assert record(run.store, capability, sound, "r2").call.after_id == other.id
    assert run.store.record(capability, lost, request="r3", seen=0, history="h3", line=line).is_new


def test_a_request_that_was_heard_may_be_sampled_again(run):
    (capability, _) = begin(run).capabilities
    record(run.store, capability, call(5), "r")
    assert not run.store.look_up(capability, request="r").is_heard
    run.store.heard(capability, "r", 1)
    assert run.store.look_up(capability, request="r").is_heard
    assert record(run.store, capability, call(6), "r").number == 2
    found = run.store.look_up(capability, request="r", histories=["h r"])
    assert (found.request_call, found.is_heard, found.history_call) == (2, False, 2)


def test_a_call_that_goes_on_from_none_that_is_there_is_refused(run):
    (capability, _) = begin(run).capabilities
    with pytest.raises(NotFound, match="no call 4"):
        record(run.store, capability, call(5, after=4), "r")


def test_another_capability_finds_nothing_and_no_message_has_it(run):
    begun = begin(run)
    other = begin(run).capabilities[0].rpartition(".")[2]
    for wrong in (f"{begun.group_id}.0.{other}", f"a.77.0.{other}", f"{begun.group_id}.5.{other}", "nonsense", ""):
        moves = (
            lambda wrong=wrong: run.store.look_up(wrong),
            lambda wrong=wrong: run.store.record(wrong, call(5), request="r", seen=0, history="h", line=1),
            lambda wrong=wrong: run.store.end(wrong, End(reward=1.0)),
        )
        for move in moves:
            with pytest.raises(OpenRolloutUnknown) as caught:
                move()
            assert other not in str(caught.value)
        run.store.touch(wrong) if wrong.count(".") > 2 else None
    assert counts(run)[1] == 4


SIZE = len(call(5).encoded())
"""Bytes of a call of one token."""


@pytest.mark.parametrize(("limit", "value"), [("MOST_CALLS", 2), ("MOST_BYTES", 2 * SIZE)])
def test_a_rollout_takes_calls_up_to_its_limits(run, monkeypatch, limit, value):
    monkeypatch.setattr(f"rlbuffer.store.gateway.{limit}", value)
    (capability, _) = begin(run).capabilities
    for i in range(2):
        record(run.store, capability, call(5), f"r{i}")
    with pytest.raises(OpenRolloutFull, match=f"2 calls of {2 * SIZE} bytes in 2 sequences"):
        record(run.store, capability, call(5), "one too many")
    assert run.store.look_up(capability).rollout.calls == 2
    line = run.store.look_up(capability).line
    again = run.store.record(capability, call(6), request="r1", seen=0, history="h", line=line)
    assert not again.is_new  # what is there is answered all the same


def test_a_rollout_takes_conversations_up_to_as_many_as_a_rollout_has_sequences(run, monkeypatch):
    monkeypatch.setattr("rlbuffer.store.gateway.MAX_SEQUENCES", 3)
    (capability, _) = begin(run).capabilities

    def add(request: str, after: Any = None) -> Any:
        behind = {} if after is None else {"after": after.number, "after_id": after.id}
        one = OpenCall(prompt=np.array([1], np.int32), tokens=np.array([5], np.int32), logprobs=np.zeros(1), **behind)
        return record(run.store, capability, one, request).call

    first = add("root")
    second = add("goes on", first)
    add("branches", first)
    third = add("goes on again", second)
    add("another root")
    assert run.store.look_up(capability).rollout.sequences == 3
    for after in (None, first, second):
        with pytest.raises(OpenRolloutFull, match="3 sequences"):
            add("one too many", after)
    add("the last goes on", third)
    assert run.store.look_up(capability).rollout.calls == 6


# -- ends --------------------------------------------------------------------------------------------------------------
def test_the_same_end_again_changes_nothing_and_another_one_is_refused(run):
    (capability, other) = begin(run).capabilities
    end = End(reward=1.0, rewards={"b": 0.5, "a": 0.25})
    assert run.store.end(capability, end) == "ended"
    assert run.again().end(capability, End(reward=1.0, rewards={"a": 0.25, "b": 0.5})) == "same"
    for different in (End(reward=0.0), End(reward=1.0), End(failure=STALE)):
        with pytest.raises(OtherEnd) as caught:
            run.store.end(capability, different)
        assert caught.value.end == end
    assert not run.store.fail(run.store.look_up(capability).rollout.name, STALE)
    assert run.store.fail(run.store.look_up(other).rollout.name, STALE)
    assert run.store.look_up(other).rollout.end == End(failure=STALE)


def test_a_call_after_the_end_is_refused_and_hears_the_end(run):
    (capability, _) = begin(run).capabilities
    record(run.store, capability, call(5), "r")
    run.store.end(capability, End(reward=1.0))
    with pytest.raises(OpenRolloutEnded) as caught:
        record(run.store, capability, call(6), "r2")
    assert caught.value.end == End(reward=1.0)
    run.store.heard(capability, "r", 1)
    assert run.store.look_up(capability).rollout.state == OpenState.ENDED
    assert run.store.verify().ok


def test_what_is_frozen_takes_no_call_and_waits_for_its_end(run):
    begun = begin(run, size=1)
    capability, (name,) = begun.capabilities[0], begun.names
    first = call(7, 8)
    record(run.store, capability, first, "r1")
    heard = run.store.look_up(capability).rollout.heard_ms
    run.store.freeze(capability)
    run.again().freeze(capability)
    found = run.store.look_up(capability).rollout
    assert (found.state, found.is_frozen, found.calls) == (OpenState.OPEN, True, 1)
    assert found.heard_ms >= heard
    with pytest.raises(OpenRolloutEnded, match=f"open rollout {name} is frozen"):
        record(run.again(), capability, call(9), "r2")
    again = record(run.store, capability, first, "r1")  # its reply was lost: it is there
    assert (again.is_new, again.number) == (False, 1)
    run.store.touch(capability)
    assert len(run.store.read_calls(name)) == 1
    assert run.store.end(capability, End(reward=1.0)) == "ended"
    assert not run.store.look_up(capability).rollout.is_frozen
    with pytest.raises(OpenRolloutEnded):
        run.store.freeze(capability)
    with pytest.raises(OpenRolloutUnknown):
        run.store.freeze(f"{capability[:-1]}{'B' if capability[-1] == 'A' else 'A'}")
    (waiting,) = run.store.waiting()
    assert str(run.store.push_rollouts(waiting, group_of(waiting))[0]) == "stored"
    assert run.store.verify().ok


def test_what_is_silent_until_its_deadline_ends_as_abandoned_and_nothing_else(run):
    begun = begin(run)
    assert run.store.end_abandoned() == []
    run.client.zadd(run.store.keys.open, {begun.names[0]: 1})
    assert run.store.end_abandoned() == [begun.names[0]]
    assert run.again().end_abandoned() == []
    states = [run.store.look_up(capability).rollout for capability in begun.capabilities]
    assert [state.state for state in states] == [OpenState.ENDED, OpenState.OPEN]
    assert states[0].end.failure.kind == "abandoned"


def test_a_deadline_that_was_moved_since_somebody_looked_stays(run):
    (name, *_) = begin(run, idle_seconds=120.0).names
    deadline = round(1000 * run.store.now()) + 300_000
    run.client.zadd(run.store.keys.open, {name: deadline})
    reply = run.store._end("expire", name, End(failure=STALE), 850_000)
    assert (reply[0], run.client.zscore(run.store.keys.open, name)) == (b"OPEN", deadline)


def test_a_deadline_of_a_clock_that_was_set_back_is_given_anew(run):
    begun = begin(run, idle_seconds=120.0)
    hours = 1000 * (run.store.now() + 36_000)
    run.client.zadd(run.store.keys.open, {begun.names[0]: hours})
    assert run.store.end_abandoned() == []
    deadline = run.store.look_up(begun.capabilities[0]).rollout.deadline_ms / 1000
    assert 110 < deadline - run.store.now() <= 120


# -- pushes ------------------------------------------------------------------------------------------------------------
def test_a_group_waits_once_all_have_ended_and_is_pushed_once(run):
    begun = begin(run)
    record(run.store, begun.capabilities[0], call(5), "r")
    run.store.end(begun.capabilities[0], End(reward=0.0))
    assert run.store.waiting() == []
    waiting = end_all(run, begun)
    assert (waiting.about, waiting.size, waiting.is_void) == ({"prompt": "3 + 5"}, 2, False)
    assert [rollout.end.reward for rollout in waiting.rollouts] == [0.0, 1.0]
    assert counts(run) == (2, 0, 2, 0)
    stored = run.store.push_rollouts(waiting, group_of(waiting))
    assert stored[0] == "stored"
    # Another gateway had read it before, and makes other bytes of it.
    other = group_of(waiting, metadata={"by": "another"})
    assert run.again().push_rollouts(waiting, other) == ("duplicate", stored[1])
    assert [entry.group_id for entry in run.pool()] == [begun.group_id]
    assert run.store.waiting() == []
    assert counts(run) == (2, 0, 0, 2)
    assert run.store.ledger().envs["a"].pushed == (2, 8)
    report = run.store.verify()
    assert report.ok
    states = ("open_rollouts", "open_rollouts_ended", "open_rollouts_pushed")
    assert [report.checked[name] for name in states] == [0, 0, 2]


def test_a_pushed_rollout_answers_as_before_and_its_calls_are_gone(run):
    begun = begin(run)
    record(run.store, begun.capabilities[1], call(5), "r")
    waiting = end_all(run, begun)
    run.store.push_rollouts(waiting, group_of(waiting))
    found = run.store.look_up(begun.capabilities[1], request="r", histories=["h r"])
    assert (found.rollout.state, found.rollout.calls, found.request_call) == (OpenState.PUSHED, 1, 0)
    assert run.store.read_calls(begun.names[1]) == []
    assert run.store.end(begun.capabilities[1], End(reward=1.0)) == "same"
    with pytest.raises(OtherEnd):
        run.store.end(begun.capabilities[1], End(reward=0.0))
    with pytest.raises(OpenRolloutEnded):
        record(run.store, begun.capabilities[1], call(5), "r")


def test_a_pushed_group_trains_like_any_other(run):
    begun = begin(run)
    waiting = end_all(run, begun)
    run.store.push_rollouts(waiting, group_of(waiting))
    run.lead()
    run.commit()
    run.train(1, oldest_kept=1)
    assert run.store.retire(1) == 1
    assert run.store.ledger().envs["a"].trained == (2, 8)
    assert run.store.verify().ok


@pytest.mark.parametrize("limit", [1, 16])
@pytest.mark.parametrize(
    "damage", ["end", "no end", "state", "about", "no about", "about is no map", "rollout", "group"]
)
def test_what_cannot_be_read_of_a_group_holds_up_no_other(run, damage, limit):
    wounded = [begin(run, f"wounded {i}") for i in range(3)]
    sound = begin(run, "sound")
    for one in (*wounded, sound):
        end_all(run, one)
    for one in wounded:
        rollout, group = run.store.keys.open_rollout(one.names[0]), run.store.keys.open_group(one.group_id)
        match damage:
            case "end":
                run.client.hset(rollout, "end", b"\xc1")
            case "no end":
                run.client.hdel(rollout, "end")
            case "state":
                run.client.hset(rollout, "state", "odd")
            case "about":
                run.client.hset(group, "about", b"\xc1")
            case "no about":
                run.client.hdel(group, "about")
            case "about is no map":
                run.client.hset(group, "about", b"\x01")
            case "rollout":
                run.client.delete(rollout)
            case "group":
                run.client.delete(group)
    pushed = set()
    for _ in range(4):
        for waiting in run.store.waiting(limit):
            rollouts = [End(failure=STALE) if one.end is None else one.end for one in waiting.rollouts]
            assert len(rollouts) == 2
            changed = WaitingGroup(
                **{
                    **_fields(waiting),
                    "rollouts": [_with_end(*pair) for pair in zip(waiting.rollouts, rollouts, strict=True)],
                }
            )
            assert run.store.push_rollouts(waiting, group_of(changed))[0] == "stored"
            pushed.add(waiting.group_id)
    is_there = damage != "group"
    assert pushed == {sound.group_id} | ({one.group_id for one in wounded} if is_there else set())


def test_a_group_that_waits_says_how_long_ago_its_ticket_was_taken(run):
    begun = begin(run)
    key = run.store.keys.open_group(begun.group_id)
    run.client.hincrby(key, "begun", -90_000)
    seconds = end_all(run, begun).seconds
    assert seconds is not None
    assert seconds >= 90.0
    run.client.hset(key, "begun", "long ago")
    (waiting,) = run.store.waiting()
    assert waiting.seconds is None


def test_only_what_waits_is_pushed(run):
    begun = begin(run)
    waiting = end_all(run, begun)
    with pytest.raises(ValueError, match="is not the group"):
        run.store.push_rollouts(waiting, group_of(waiting, group_id="a.99"))
    run.client.zrem(run.store.keys.open_ended, begun.group_id)
    with pytest.raises(OpenRolloutUnknown):
        run.store.push_rollouts(waiting, group_of(waiting))
    assert run.pool() == []
    assert len(run.payload_keys()) <= 1


def test_a_group_of_another_line_of_versions_takes_no_calls_and_is_pushed_as_failures(run):
    begun = begin(run)
    late = run.store.look_up(begun.capabilities[0])
    run.store.rewind(0)
    found = run.store.look_up(begun.capabilities[0])
    assert found.rollout.is_void
    for line in (late.line, found.line):
        with pytest.raises(EpochChanged) as changed:
            run.store.record(begun.capabilities[0], call(5), request="r", seen=0, history="h", line=line)
        assert (changed.value.epoch, changed.value.since) == (run.store.meta().epoch, found.line)
    waiting = end_all(run, begun)
    successes = group_of(WaitingGroup(**{**_fields(waiting), "is_void": False}))
    with pytest.raises(ValueError, match="another line"):
        run.store.push_rollouts(waiting, successes)
    assert run.store.push_rollouts(waiting, group_of(waiting))[0] == "stored"


def test_calls_go_on_behind_a_recovery_of_lost_writes_and_not_where_steps_were_lost(run):
    (first, *_) = begin(run).capabilities
    epoch = run.client.hincrby(run.store.keys.meta, "epoch", 1)  # as a recovery does
    assert record(run.store, first, call(5), "r").is_new
    run.client.hset(run.store.keys.meta, mapping={"epoch": epoch + 1, "line": epoch + 1})  # as where steps were lost
    run.client.hincrby(run.store.keys.meta, "epoch", 1)
    with pytest.raises(EpochChanged) as changed:
        record(run.store, first, call(5), "r2")
    assert (changed.value.epoch, changed.value.since) == (epoch + 2, epoch + 1)
    (second, *_) = begin(run).capabilities
    assert record(run.store, second, call(5), "r").is_new


def test_a_push_of_what_was_read_before_a_rewind_is_refused(run):
    waiting = end_all(run, begin(run))
    run.store.rewind(0)
    with pytest.raises(EpochChanged):
        run.store.push_rollouts(waiting, group_of(waiting))
    assert run.pool() == []
    assert [again.is_void for again in run.store.waiting()] == [True]


def _with_end(one: Any, end: End) -> Any:
    return dataclasses.replace(one, end=end)


def _fields(waiting: WaitingGroup) -> dict[str, Any]:
    return {name: getattr(waiting, name) for name in WaitingGroup.__dataclass_fields__}


# -- what stays --------------------------------------------------------------------------------------------------------
def test_what_was_pushed_is_forgotten_later_and_what_was_not_never(run, monkeypatch):
    pushed, waits, opened = begin(run, "pushed"), begin(run, "waits"), begin(run, "open")
    waiting = end_all(run, pushed)
    end_all(run, waits)
    run.store.push_rollouts(waiting, group_of(waiting))
    before = run.control_keys()
    assert run.store.forget_open_rollouts() == 0
    assert run.control_keys() == before
    monkeypatch.setattr("rlbuffer.store.leader.OPEN_KEPT_MS", -1000)
    assert run.store.forget_open_rollouts() == 1
    assert run.store.begun("pushed") is None
    with pytest.raises(OpenRolloutUnknown):
        run.store.end(pushed.capabilities[0], End(reward=0.0))
    assert not [key for key in run.control_keys() if pushed.group_id in key]
    assert None not in (run.store.begun("waits"), run.store.begun("open"))
    assert run.store.look_up(opened.capabilities[0]).rollout.state == OpenState.OPEN
    assert run.store.verify().ok


def test_groups_of_different_sizes_are_forgotten_at_once_and_a_young_one_among_them_stays(run):
    keys = run.store.keys
    groups = [begin(run, name, size=size) for name, size in (("a", 1), ("b", 3), ("young", 2), ("c", 2))]
    for begun in groups:
        waiting = end_all(run, begun)
        run.store.push_rollouts(waiting, group_of(waiting))
    _, _, young, _ = groups
    for begun in groups:
        if begun is not young:
            run.client.zadd(keys.open_pushed, {begun.group_id: 1000})
    forget = run.store._led
    where, args = [keys.lease, keys.open_pushed, keys.open_keys], [run.store.token, 3_600_000]
    for begun in groups:  # a look may be older than the push that it takes for an old one
        where += [keys.open_group(begun.group_id), *map(keys.open_rollout, begun.names)]
        args += [begun.group_id, begun.size]
    with pytest.raises(LeaseLost, match="leader holds it"):
        forget("forget", where, ["1", *args[1:]])
    assert int(forget("forget", where, args)[1]) == 3
    left = {begun.group_id for begun in groups if any(begun.group_id in key for key in run.control_keys())}
    assert left == {young.group_id}
    assert run.client.hvals(keys.open_keys) == [young.group_id.encode()]
    assert run.client.zrange(keys.open_pushed, 0, -1) == [young.group_id.encode()]
    assert run.store.verify().ok


def test_no_key_of_open_rollouts_has_a_time_to_live(run):
    waiting = end_all(run, begin(run))
    run.store.push_rollouts(waiting, group_of(waiting))
    begin(run)
    keys = [key for key in run.control_keys() if ":open" in key]
    assert len(keys) > 8
    assert {run.client.pttl(key) for key in keys} == {-1}


def test_a_reset_run_knows_nothing_of_what_was_open_and_nobody_writes_into_it(run):
    begun = begin(run)
    found = run.store.look_up(begun.capabilities[0])
    run.store.delete_run()
    moves = (
        lambda: run.store.record(begun.capabilities[0], call(5), request="r", seen=0, history="h", line=found.line),
        lambda: run.store.touch(begun.capabilities[0]),
        lambda: run.store.end(begun.capabilities[0], End(reward=1.0)),
        lambda: run.store.look_up(begun.capabilities[0]),
    )
    for move in moves:
        with pytest.raises(RunGone):
            move()
    assert run.control_keys() == {}
    run.meta = run.store.open_run()
    with pytest.raises(OpenRolloutUnknown):
        run.store.end(begun.capabilities[0], End(reward=1.0))


def test_views_show_what_is_open(run):
    begun = begin(run)
    record(run.store, begun.capabilities[1], call(5, 6), "r")
    run.client.zadd(run.store.keys.open, {begun.names[1]: 5})
    assert [(one.name, one.env, one.index, one.calls, one.tokens) for one in open_rollouts(run.store)] == [
        (begun.names[1], "a", 1, 1, 2),
        (begun.names[0], "a", 0, 0, 0),
    ]
    its = read_counts(run.store)["a"]
    assert (its.calls, its.tokens) == (1, 2)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run, begun: run.client.zrem(run.store.keys.open, begun.names[0]), "disagree"),
        (lambda run, begun: run.client.hset(run.store.keys.open_rollout(begun.names[0]), "state", "ended"), "are open"),
        (lambda run, begun: run.client.delete(run.store.keys.open_rollout(begun.names[0])), "missing"),
        (lambda run, begun: run.client.zadd(run.store.keys.open_ended, {begun.group_id: 1}), "it waits"),
        (lambda run, begun: run.client.hincrby(run.store.keys.open_counts, "a:ended", 1), "0 ended, 1 and 1 by"),
        (lambda run, begun: run.client.delete(run.store.keys.open_group(begun.group_id)), "is not there"),
    ],
)
def test_verify_names_what_is_wrong_with_open_rollouts(run, damage, words):
    begun = begin(run)
    assert run.store.verify().ok
    damage(run, begun)
    found = [finding.message for finding in run.store.verify().findings if finding.invariant == "I14"]
    assert any(words in message for message in found), found


# -- memory ------------------------------------------------------------------------------------------------------------
@pytest.mark.server
def test_at_the_memory_limit_nothing_is_begun_and_what_is_open_is_recorded_and_ended(tmp_path: Path) -> None:
    with OwnServer(tmp_path / "own") as server:
        run = Run(server.url, tmp_path)
        begun = begin(run)
        (number,) = run.store.take_tickets("a", 1, ttl_seconds=60)
        assert run.store.may_sample()
        run.client.config_set("maxmemory", "1mb")
        full = run.again()
        assert not full.may_sample()
        with pytest.raises(ServerFull):
            full.begin("k", Ticket(env="a", number=number, group_id=f"a.{number}"), size=1, about={})
        assert record(full, begun.capabilities[0], call(5), "r").is_new
        full.heard(begun.capabilities[0], "r", 1)
        waiting = end_all(run, begun)
        with pytest.raises(ServerFull):
            full.push_rollouts(waiting, group_of(waiting))
        run.client.config_set("maxmemory", "0")
        assert full.push_rollouts(waiting, group_of(waiting))[0] == "stored"
        assert run.store.verify().ok
        run.close()


def used_by_data(run: Run) -> int:
    """Bytes in use once the server has let go of what it read a large command into."""
    deadline = time.monotonic() + 60
    while (memory := run.client.info("memory"))["mem_clients_normal"] > 500_000:
        assert time.monotonic() < deadline, memory
        time.sleep(0.05)
    return int(memory["used_memory"])


@pytest.mark.server
def test_a_group_gives_up_its_calls_at_the_memory_limit_and_can_be_pushed_then(tmp_path: Path) -> None:
    with OwnServer(tmp_path / "own") as server:
        run = Run(server.url, tmp_path)
        begun, other = begin(run), begin(run)
        large = dataclasses.replace(call(5), details={"text": "x" * 3_000_000})
        assert record(run.store, begun.capabilities[0], large, "r").is_new
        assert record(run.store, other.capabilities[0], call(6), "r").is_new
        waiting, still_open = end_all(run, begun), run.store.look_up(other.capabilities[0]).rollout
        run.client.config_set("maxmemory", used_by_data(run) - 1_000_000)
        full = run.again()
        with pytest.raises(ServerFull):
            full.push_rollouts(waiting, group_of(waiting))
        assert not full.can_make_room()
        full.drop_calls(waiting, "no room")
        full.drop_calls(waiting, "no room")  # whoever comes later changes nothing
        (dropped,) = full.waiting()
        assert [its.dropped for its in dropped.rollouts] == ["no room"] * 2
        assert [its.end for its in dropped.rollouts] == [its.end for its in waiting.rollouts]
        assert full.read_calls(begun.names[0]) == []
        assert full.push_rollouts(dropped, group_of(dropped))[0] == "stored"
        assert full.can_make_room()
        assert run.store.end(begun.capabilities[0], End(reward=0.0)) == "same"
        full.drop_calls(dropped, "too late")
        full._end("drop", still_open.name, End(), "not ended")
        assert run.store.read_calls(other.names[0])[0].tokens.tolist() == [6]
        assert run.store.look_up(begun.capabilities[0]).rollout.state == OpenState.PUSHED
        assert run.store.verify().ok
        run.close()


@pytest.mark.server
@pytest.mark.parametrize("pushed_by", ["itself", "another gateway"])
def test_nothing_is_sampled_while_a_group_waits_whose_push_the_server_had_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pushed_by: str
) -> None:
    monkeypatch.setattr("rlbuffer.store.gateway.SHARE_SECONDS", -1.0)
    with OwnServer(tmp_path / "own") as server:
        run = Run(server.url, tmp_path)
        begun = begin(run)
        assert record(run.store, begun.capabilities[0], call(5), "r").is_new
        waiting = end_all(run, begun)
        # What branches of a conversation share is once in the calls, and in each sequence of the push.
        tokens = np.random.default_rng(0).integers(0, 2**31, 600_000, np.int32)
        large = group_of(waiting, prompt_ids=tokens)
        run.client.set("what others have", b"x" * 16_000_000)
        run.client.config_set("maxmemory", round(used_by_data(run) / 0.8))
        assert run.store.may_sample()
        with pytest.raises(ServerFull):
            run.store.push_rollouts(waiting, large)
        assert not run.store.may_sample()
        run.client.config_set("maxmemory", 0)
        assert not run.store.may_sample()
        store = run.store if pushed_by == "itself" else run.again()
        assert store.push_rollouts(waiting, large)[0] == "stored"
        assert run.store.may_sample()
        run.close()
