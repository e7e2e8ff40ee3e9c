"""A failed attempt has no reward: its group trains as if it had not been sampled, and it is counted."""

from __future__ import annotations

import json
import math
import pickle
import struct
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import InvalidRollout, PayloadError
from rlbuffer.records.failure import MAX_MESSAGE, Failure
from rlbuffer.records.group import Group
from rlbuffer.records.info import GroupInfo
from rlbuffer.records.rollout import Rollout, TokenSequence, without_logprobs
from rlbuffer.records.step_plan import Decision
from rlbuffer.records.truncation import truncated
from rlbuffer.testing import make_group
from rlbuffer.wire.checksum import crc32
from rlbuffer.wire.jsonl import group_from_line, line_of
from rlbuffer.wire.metadata import decode_info, encode_info
from rlbuffer.wire.payload import decode_rollout, decode_whole, encode_push

TIMEOUT = Failure("timeout", "no answer within 30 s")
REWARDS = [0.0, 1.0, 0.25, 0.0, 1.0, 0.7, 0.1, 0.9]


def with_failures(group: Group, *places: int, failure: Failure = TIMEOUT, **changes: Any) -> Group:
    rollouts = [replace(r, failure=failure, **changes) if i in places else r for i, r in enumerate(group.rollouts)]
    return replace(group, rollouts=tuple(rollouts))


def group_of(*failed: int, **changes: Any) -> Group:
    return with_failures(make_group(env="a", size=8, rewards=REWARDS, lengths=[9] * 8), *failed, **changes)


def without(group: Group, *places: int) -> Group:
    kept = tuple(rollout for i, rollout in enumerate(group.rollouts) if i not in places)
    return replace(group, rollouts=kept, planned_size=len(kept))


def decided(*groups: Group, **config: Any) -> Decision:
    made = Batcher(BatcherConfig(**{"row_tokens": 256, "step_groups": 1, **config}))
    for n, group in enumerate(groups):
        made.add(group.info(), entry_id=f"1-{n}", now=0.0)
    return made.next(1, world_size=1, now=0.0, rng=np.random.default_rng(0))


# -- records -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reward", [None, 0.0, 1.0, math.nan, math.inf, "no number"])
def test_what_is_given_as_the_reward_of_a_failed_attempt_is_not_looked_at(reward: Any) -> None:
    rollout = Rollout.from_completion(
        prompt_ids=[1, 5],
        token_ids=[7, 2],
        logprobs=[-0.7, -0.2],
        reward=reward,
        policy_version=3,
        failure=("timeout", "no answer within 30 s"),
        rewards={"right": 0.0},
        successes={"right": False},
    )
    assert (rollout.reward, dict(rollout.rewards), dict(rollout.successes)) == (None, {}, {})
    assert rollout.failure == TIMEOUT


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("timeout", "failure: expected (kind, message), got 'timeout'"),
        (("a b", ""), r"failure: expected a kind [A-Za-z0-9_.-]{1,64}, got 'a b'"),
        (("", ""), r"failure: expected a kind [A-Za-z0-9_.-]{1,64}, got ''"),
        (("timeout", None), "failure: expected a string for a message, got None"),
        (3, "failure: expected (kind, message), got 3"),
    ],
)
def test_a_failure_without_a_kind_is_refused(failure: Any, message: str) -> None:
    with pytest.raises(InvalidRollout) as refused:
        with_failures(make_group(), 0, failure=failure)
    assert str(refused.value) == message


def test_a_long_message_is_cut_and_one_that_is_no_unicode_is_escaped() -> None:
    (rollout,) = with_failures(make_group(size=1), 0, failure=Failure("tool", "\ud800" + "x" * 5000)).rollouts
    assert rollout.failure is not None
    assert (rollout.failure.message[:7], len(rollout.failure.message)) == (r"\ud800x", MAX_MESSAGE)


def test_a_failed_attempt_stays_one_when_it_is_cut_and_is_not_asked_for_logprobs() -> None:
    rollout = with_failures(make_group(lengths=[9]), 0).rollouts[0]
    assert truncated(rollout, 4).failure == TIMEOUT
    bare = replace(rollout, logprobs=np.zeros(9, np.float32))
    assert (without_logprobs(bare), without_logprobs(replace(bare, failure=None))) == ((), (0,))


# -- bytes -------------------------------------------------------------------------------------------------------------
def test_a_failure_comes_back_from_the_wire_from_json_and_from_a_pickle() -> None:
    group = with_failures(group_of(2), 5, 7, failure=Failure("tool.error", "404"))
    push = encode_push(group)
    info = decode_info(push.metadata)
    assert info == push.info
    assert [rollout.failure for rollout in info.rollouts] == ["", "", "timeout", "", "", "tool.error", "", "tool.error"]
    assert info.totals == push.info.totals
    assert (info.totals.failed, info.totals.is_scored, info.totals.is_flat) == (3, True, False)
    pairs = zip(push.payloads, info.rollouts, strict=True)
    assert [decode_rollout(data, expected=its) for data, its in pairs] == list(group.rollouts)
    assert group_from_line(line_of(group)).rollouts == group.rollouts
    assert pickle.loads(pickle.dumps(group)).rollouts == group.rollouts


def test_a_failed_attempt_of_several_sequences_is_one() -> None:
    first, *others = make_group(size=2, lengths=[9, 8]).rollouts
    branch = make_group(size=1, lengths=[7], seed=9).rollouts[0]
    further = Rollout.from_sequences([first, _sequence(branch)], reward=0.0, failure=TIMEOUT)
    group = replace(make_group(size=2), rollouts=(further, *others))
    push = encode_push(group)
    info = decode_info(push.metadata)
    assert ([r.failure for r in info.rollouts], info.totals.sequences) == (["timeout", ""], 3)
    assert info == push.info
    assert decode_whole(push.payloads[:2], info.rollouts[0].sequences) == group.rollouts[0]


def _sequence(rollout: Rollout) -> TokenSequence:
    return TokenSequence(
        tokens=rollout.tokens,
        loss_mask=rollout.loss_mask,
        logprobs=rollout.logprobs,
        version_spans=rollout.version_spans,
    )


@pytest.mark.parametrize("failure", [{"kind": "timeout", "message": "no answer within 30 s"}, list(TIMEOUT)])
def test_a_failure_may_be_an_object_or_a_list_in_json(failure: Any) -> None:
    line = json.loads(line_of(make_group(size=1)))
    line["rollouts"][0] |= {"failure": failure, "reward": 0}
    assert group_from_line(json.dumps(line)).rollouts[0].failure == TIMEOUT


def test_metadata_and_payload_must_agree_on_whether_an_attempt_failed() -> None:
    sound, failed = encode_push(group_of()), encode_push(group_of(0))
    for payloads, info in ((failed.payloads, sound.info), (sound.payloads, failed.info)):
        lying = info.rollouts[0].changed(size=len(payloads[0]), checksum=int.from_bytes(payloads[0][20:24], "little"))
        with pytest.raises(PayloadError, match="does not agree with the metadata"):
            decode_rollout(payloads[0], expected=lying)


def lied(info: GroupInfo, failures: dict[str, list[int]]) -> bytes:
    """Metadata of a writer of somebody else's, which says this of what failed."""
    values = msgspec.msgpack.decode(encode_info(info)[:-4])
    data = msgspec.msgpack.encode([*values[:-1], failures])
    return data + struct.pack(">I", crc32(data))


@pytest.mark.parametrize("place", [8, 2**40])
def test_a_failure_of_a_rollout_that_is_not_there_says_nothing(place: int) -> None:
    info = group_of(2).info()
    read = decode_info(lied(info, {"timeout": [place]}))
    assert [rollout.failure for rollout in read.rollouts] == [""] * 8
    assert (read.totals.failed, read.totals.is_scored) == (0, False)


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ({"timeout": [0]}, "failures: a rollout that failed has a reward"),
        ({"timeout": [-1]}, "Expected `int` >= 0"),
        ({"a b": [2]}, "Expected `str` matching regex"),
    ],
)
def test_metadata_with_a_failure_that_cannot_be_is_refused(failures: Any, message: str) -> None:
    with pytest.raises(PayloadError, match=message):
        decode_info(lied(group_of(2).info(), failures))


# -- decisions ---------------------------------------------------------------------------------------------------------
def by_facts(rewards: Any, lengths: Any, group: Any) -> Any:
    """An estimator of the user's own, which sees who is in the group."""
    return rewards - np.array([int(name.rpartition("/")[2]) for name in group["rollout_ids"]])


@pytest.mark.parametrize(
    "settings",
    [
        *({"advantage": name} for name in ("rloo", "grpo", "dr_grpo", "max_rl", "opo", "reinforce", "length_penalty")),
        {"advantage": f"{__name__}:by_facts"},
        {"advantage": "rloo", "advantage_scale": "batch"},
    ],
    ids=str,
)
def test_a_group_of_8_of_which_2_failed_trains_6_as_a_group_of_these_alone(settings: Any) -> None:
    group = group_of(2, 5)
    plan = decided(group, **settings).plan
    alone = decided(without(group_of(), 2, 5), **settings).plan
    assert plan is not None
    assert alone is not None
    assert plan.advantages.tobytes() == alone.advantages.tobytes()
    assert len(plan.advantages) == 6
    assert plan.normalizers == alone.normalizers
    assert {ref.index for ref in plan.rollouts} == {0, 1, 3, 4, 6, 7}
    assert plan.entries[0].dropped == (("failed", 2, 18),)
    assert plan.entries[0].left_out == ((2, "failed"), (5, "failed"))
    assert (plan.entries[0].packed_rollouts, plan.entries[0].packed_tokens) == (6, 54)


def test_a_group_of_which_all_failed_drops_with_the_kinds() -> None:
    group = with_failures(group_of(*range(6)), 6, 7, failure=Failure("tool"))
    decision = decided(group)
    assert decision.plan is None
    assert [(drop.reason, drop.detail, drop.rollouts, drop.tokens, drop.reward) for drop in decision.drops] == [
        ("failed", "timeout 6, tool 2", 8, 72, None)
    ]


def test_failed_attempts_do_not_make_a_group_large_enough() -> None:
    (drop,) = decided(group_of(0, 1, 2, 3, 4, 5), min_group_size=3).drops
    assert (drop.reason, drop.detail, drop.rollouts) == ("small", "2 valid rollouts < min_group_size 3", 8)


def test_a_group_is_flat_where_those_that_did_not_fail_are() -> None:
    (drop,) = decided(group_of(1, 2, 4, 5, 6, 7), flat="drop").drops  # rewards 0 and 0 are left
    assert drop.reason == "flat"


def test_a_part_of_failed_attempts_is_waited_for_no_longer() -> None:
    """It stays with its group, as it does in one push with the others: else the group would look as if it lacked it."""
    whole = group_of(0, 1)
    halves = [replace(whole, rollouts=whole.rollouts[:2]), replace(whole, rollouts=whole.rollouts[2:])]
    for parts in (halves, halves[::-1]):
        decision = decided(*parts)
        assert decision.plan is not None
        assert len(decision.plan.rollouts) == 6
        assert decision.drops == ()
        assert sorted((e.packed_rollouts, e.dropped) for e in decision.plan.entries) == [
            (0, (("failed", 2, 18),)),
            (6, ()),
        ]


def test_a_group_that_waits_for_a_scorer_leaves_out_what_failed() -> None:
    bare = replace(group_of(3), needs=("reward",))
    bare = replace(bare, rollouts=tuple(replace(r, reward=None) for r in bare.rollouts))
    made = Batcher(BatcherConfig(row_tokens=256, step_groups=1))
    made.add(bare.info(), entry_id="1-0", now=0.0)
    scored = replace(group_of(3), needs=())
    made.add(scored.info(), entry_id="1-1", now=0.0, replaces="1-0")
    plan = made.next(1, world_size=1, now=0.0, rng=np.random.default_rng(0)).plan
    assert plan is not None
    assert plan.entries[0].dropped == (("failed", 1, 9),)


def parts_of(order: str, **changes: Any) -> list[Group]:
    """A group of which each rollout is a push of its own; "F" failed, "E" failed before its first token."""
    whole = make_group(env="a", size=len(order), rewards=REWARDS[: len(order)], lengths=[9] * len(order), **changes)
    whole = with_failures(whole, *(place for place, kind in enumerate(order) if kind != "v"))
    rollouts = [truncated(r, r.prompt_tokens) if order[i] == "E" else r for i, r in enumerate(whole.rollouts)]
    return [replace(whole, rollouts=(rollout,)) for rollout in rollouts]


ORDERS = ["vF", "Fv", "vE", "Ev", "vvF", "Fvv", "vFv", "FFv", "FvE", "F", "FF", "FEF"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("takes_over", [False, True])
def test_each_failed_attempt_of_a_group_in_parts_is_counted_once_whatever_the_order(
    order: str, takes_over: bool
) -> None:
    """A leader that takes over while some parts are there reads these again."""
    parts = parts_of(order)
    made = Batcher(BatcherConfig(row_tokens=256, step_groups=1))
    for read in range(1 + takes_over):
        made = Batcher(BatcherConfig(row_tokens=256, step_groups=1))
        for n, part in enumerate(parts if read == takes_over else parts[:-1]):
            made.add(part.info(), entry_id=f"{n}-0", now=0.0)
    decision = made.next(1, world_size=1, now=0.0, rng=np.random.default_rng(0))
    valid, failed = order.count("v"), len(order) - order.count("v")
    if not valid:
        assert decision.plan is None
        assert [(drop.reason, drop.rollouts) for drop in decision.drops] == [("failed", 1)] * failed
        return
    assert decision.plan is not None
    assert decision.drops == ()
    assert len(decision.plan.rollouts) == valid
    assert [(use.packed_rollouts, [(why, n) for why, n, _ in use.dropped]) for use in decision.plan.entries] == [
        (1, []) if kind == "v" else (0, [("failed", 1)]) for kind in order
    ]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", ["F", "E"])
def test_a_scored_push_of_a_failed_attempt_is_counted_as_failed_also_when_its_group_is_ready(
    first: int, kind: str
) -> None:
    """A scorer takes each part by itself, and may come back with that of the failed attempt last."""
    made = Batcher(BatcherConfig(row_tokens=256, step_groups=1))
    parts = parts_of("v" + kind)
    for n, part in enumerate(parts):
        made.add(replace(part, needs=("ref_logprobs",)).info(), entry_id=f"{n}-0", now=0.0)
    for n in (first, 1 - first):
        made.add(parts[n].info(), entry_id=f"{n}-1", now=0.0, replaces=f"{n}-0")
    decision = made.next(1, world_size=1, now=0.0, rng=np.random.default_rng(0))
    assert decision.plan is not None
    assert decision.drops == ()
    assert {use.entry_id: [why for why, _, _ in use.dropped] for use in decision.plan.entries} == {
        "0-1": [],
        "1-1": ["failed"],
    }


@pytest.mark.parametrize(
    ("ends", "reason"), [("timeout", "small"), ("age", "stale"), ("seconds", "stale"), ("closed", "late")]
)
def test_a_failed_attempt_that_came_as_a_part_stays_failed_however_its_group_ends(ends: str, reason: str) -> None:
    made = Batcher(
        BatcherConfig(
            row_tokens=256,
            step_groups=2,
            max_age_seconds=9.0 if ends == "seconds" else None,
            min_group_size=2 if ends == "timeout" else 1,
        )
    )
    for n, part in enumerate(parts_of("Fvv" if ends == "timeout" else "Fv")[:2]):
        made.add(part.info(), entry_id=f"{n}-0", now=0.0)
    if ends == "closed":
        made.close([parts_of("Fv")[0].group_id])
    if ends == "age":
        made.set_published(9)
    now, step = {"timeout": (1e6, 1), "seconds": (10.0, 1), "age": (0.0, 9)}.get(ends, (0.0, 1))
    drops = made.next(step, world_size=1, now=now, rng=np.random.default_rng(0)).drops
    assert sorted((drop.reason, drop.rollouts, drop.entry_ids) for drop in drops) == sorted(
        [("failed", 1, ("0-0",)), (reason, 1, ("1-0",))]
    )
