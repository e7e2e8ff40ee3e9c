"""What teaches: every rule that asks whether a group is flat gives the same answer."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType

import numpy as np
import pytest
from batcher_calls import RNG, ask, drops_of, put

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.losses import LossChoice, needs_advantage
from rlbuffer.records.waiting import Wait
from rlbuffer.testing import make_group

OWN = (("advantages", "<f4", ()),)
FLAT = [0.5] * 4


def made(*, needs=True, **settings):
    config = BatcherConfig(**({"row_tokens": 100, "step_groups": 0, "max_age": 99} | settings))
    return Batcher(config, needs_advantage=needs)


def group_of(rewards, *, columns=(), named=None, loss_tokens=None, truncated=(), lengths=None):
    """What `put` takes for such a group."""
    size = len(rewards)
    group = make_group(env="a", size=size, lengths=lengths or (25,) * size, rewards=rewards, group_id="g")
    rollouts = []
    for i, info in enumerate(group.info().rollouts):
        changes = {"is_truncated": i in truncated, "rewards": {} if named is None else {"acc": named[i]}}
        if loss_tokens is not None and not loss_tokens[i]:
            changes |= {"loss_tokens": 0, "prompt_tokens": info.length}
        rollouts.append(info.changed(**changes))
    return {"rollouts": tuple(rollouts), "columns": columns, "lengths": (25,) * size, "planned": size}


def by_accuracy(rewards, lengths, facts):
    right = np.array([named["acc"] for named in facts["rewards"]])
    return right - right.mean()


CASES = [
    # what trains, settings, needs an advantage, teaches
    ("equal rewards", group_of(FLAT), {}, True, False),
    ("rewards equal but for rounding", group_of([0.1, 0.1, 0.1, 0.30000000000000004 / 3]), {}, True, False),
    ("rewards", group_of([0.0, 1.0, 0.0, 1.0]), {}, True, True),
    ("one rollout", group_of([1.0]), {}, True, False),
    ("own advantages", group_of(FLAT, columns=OWN), {}, True, True),
    ("another column", group_of(FLAT, columns=(("teacher_logprobs", "<f4", ()),)), {}, True, False),
    ("a loss that needs none", group_of(FLAT), {}, False, True),
    ("no baseline", group_of(FLAT), {"advantage": "reinforce"}, True, True),
    ("one rollout, no baseline", group_of([1.0]), {"advantage": "reinforce"}, True, True),
    ("one rollout, no baseline, nothing won", group_of([0.0]), {"advantage": "reinforce"}, True, False),
    ("no baseline, nothing won", group_of([0.0] * 4), {"advantage": "reinforce"}, True, False),
    ("lengths", group_of([1.0] * 4, lengths=(10, 20, 25, 25)), {"advantage": "length_penalty"}, True, True),
    (
        "an estimator of one's own",
        group_of([0.0, 0.1, 0.2, 0.3], named=[0.0] * 4),
        {"advantage": "own:acc"},
        True,
        False,
    ),
    ("its own reasons", group_of(FLAT, named=[0.0, 1.0, 0.0, 1.0]), {"advantage": "own:acc"}, True, True),
    ("a shaped reward", group_of([0.0, 0.1, 0.2, 0.3], named=[0.0] * 4), {"flat_by": "acc"}, True, False),
    ("a named reward", group_of(FLAT, named=[0.0, 1.0, 0.0, 1.0]), {"flat_by": "acc"}, True, True),
    ("a name that is not there", group_of(FLAT), {"flat_by": "acc"}, True, False),
    ("the whole reward", group_of(FLAT, columns=OWN), {"flat_by": "reward"}, False, False),
    ("a masked rest", group_of([0.0, 1.0, 0.5], truncated=(0, 1)), {"truncated": "mask"}, True, False),
    ("what is not trained", group_of([0.0, 1.0, 0.5], loss_tokens=(0, 0, 1)), {}, True, False),
    ("nothing trained", group_of([0.0, 1.0], loss_tokens=(0, 0), columns=OWN), {}, False, False),
    ("nothing but cut", group_of([0.0, 1.0], truncated=(0, 1), columns=OWN), {"truncated": "mask"}, False, False),
]


@pytest.fixture(autouse=True)
def _own_estimator(monkeypatch):
    module = ModuleType("own")
    module.acc = by_accuracy
    monkeypatch.setitem(sys.modules, "own", module)


@pytest.mark.parametrize(("fields", "settings", "needs", "teaches"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_everything_that_asks_whether_a_group_teaches_gets_one_answer(fields, settings, needs, teaches):
    def batcher(**more):
        its = made(needs=needs, **settings, **more)
        put(its, "g", **fields)
        return its

    # dropped when it comes, or beyond its share
    for flat in ("drop", 0.0):
        decision = ask(batcher(step_groups=1, flat=flat))
        assert (decision.plan is not None) is teaches
        assert [drop[:2] for drop in drops_of(decision)] == ([] if teaches else [("g", "flat")])
    # the last step
    last = batcher(step_groups=4)
    last.set_sources(done=["a"])
    decision = ask(last)
    assert (decision.plan is not None, [d[1] for d in drops_of(decision)]) == (teaches, [] if teaches else ["flat"])
    # the time to fill is over
    late = batcher(step_groups=4, fill_timeout_seconds=10.0)
    assert (ask(late, now=1000.0).plan is not None) is teaches
    # a full step says how much of it teaches
    full = ask(batcher(step_groups=1)).plan
    assert full is None or full.flat == (0 if teaches else 1)
    # priority
    seen = []
    sys.modules["own"].order = lambda group, rng: seen.append(group.lesson) or 0.0
    ask(batcher(step_groups=1, order="own:order"))
    assert [lesson >= 0 for lesson in seen] == [teaches]
    # figures
    info = dataclasses.replace(
        make_group(env="a", size=len(fields["lengths"]), group_id="g").info(),
        **{key: fields[key] for key in ("rollouts", "columns")},
    )
    counted = made(needs=needs, **settings)
    group = counted.add(info, entry_id="1-0", now=0.0)
    assert group is not None
    assert counted.teaching.of(group) is teaches


def test_by_priority_own_advantages_go_first_and_what_teaches_nothing_last():
    its = made(step_groups=4, order="priority")
    for name, rewards, columns in (
        ("flat", FLAT, ()),
        ("weak", [0, 1e-3], ()),
        ("even", [0, 1], ()),
        ("own", FLAT, OWN),
    ):
        put(its, name, **group_of([float(reward) for reward in rewards], columns=columns))
    lane = its.pools["a"].lanes[""]
    ask(its)
    assert [group.group_id for group in lane.ranked.walk(oldest=0)] == ["own", "even", "weak", "flat"]


@pytest.mark.parametrize("closing", ["full", "end", "timeout"])
@pytest.mark.parametrize("kind", ["nothing trained", "nothing but cut"])
def test_a_step_in_which_no_token_trains_is_never_committed(closing, kind):
    _, fields, settings, _, _ = next(case for case in CASES if case[0] == kind)
    its = made(step_groups=2 if closing == "full" else 9, fill_timeout_seconds=10.0, **settings)
    for name in ("g", "h"):
        put(its, name, **{**fields, "rollouts": fields["rollouts"]})
    if closing == "end":
        its.set_sources(done=["a"])
    decision = ask(its, now=1000.0 if closing == "timeout" else 0.0)
    assert decision.plan is None
    assert {drop[:2] for drop in drops_of(decision)} == {("g", "flat"), ("h", "flat")}


def test_what_is_not_trained_stays_beside_what_is():
    its = made(step_groups=2)
    put(its, "g", **group_of([0.0, 1.0], loss_tokens=(0, 0)))
    put(its, "h", **group_of([0.0, 1.0]))
    plan = ask(its).plan
    assert (plan.group_ids, plan.normalizers.groups, plan.flat) == (("g", "h"), 2, 1)


def test_a_step_that_waits_for_something_to_learn_says_so():
    its = made(step_groups=4, fill_timeout_seconds=10.0)
    put(its, "g", **group_of(FLAT))
    before, after = ask(its, now=9.0).why, ask(its, now=10.0).why
    assert (before.kind, after.kind) == (Wait.FILLING, Wait.NOTHING_TO_LEARN)


def test_a_failing_estimator_fails_where_a_step_is_made_and_not_where_a_push_is_read(monkeypatch):
    from rlbuffer.errors import ConfigError

    monkeypatch.setattr(sys.modules["own"], "acc", lambda rewards, lengths, facts: 1 / 0)
    its = made(step_groups=1, flat="drop", advantage="own:acc")
    put(its, "g", **group_of(FLAT))
    with pytest.raises(ConfigError):
        its.next(1, world_size=1, now=0.0, rng=RNG)


@pytest.mark.parametrize(
    ("loss", "needs"),
    [
        ({}, True),
        ({"name": "gspo"}, True),
        ({"name": "my_losses:own"}, True),
        ({"entropy_bonus": 0.1}, True),
        ({"kl_beta": 0.1}, False),
        ({"name": "teacher:loss", "columns": ("teacher_logprobs",)}, False),
    ],
)
def test_a_loss_needs_advantages_unless_its_settings_say_what_else_it_learns_from(loss, needs):
    assert needs_advantage(LossChoice(**loss)) is needs
