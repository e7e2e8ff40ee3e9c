"""A page of metadata: what pushes amount to, and what stays packed until it is asked for."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import trees

from rlbuffer.records.group import Group
from rlbuffer.records.info import ROW_DTYPE, GroupInfo, RolloutInfo, rollouts_of
from rlbuffer.records.rollout import Rollout
from rlbuffer.wire.metadata import decode_infos, encode_info


def info(*rewards, group_id="g", **fields):
    rollouts = tuple(
        RolloutInfo(
            rollout_id=f"{group_id}/{i}",
            length=10 + i,
            prompt_tokens=4,
            loss_tokens=6 + i,
            reward=reward,
            min_version=7 - i,
            max_version=7 + i,
        )
        for i, reward in enumerate(rewards)
    )
    return GroupInfo(
        **{"group_id": group_id, "env": "a", "prompt_id": "p", "planned_size": 3, "rollouts": rollouts} | fields
    )


@pytest.mark.parametrize(
    ("rewards", "is_scored", "is_flat"),
    [
        ((1.0, 1.0, 1.0), True, True),
        ((0.0, -0.0), True, True),
        ((0.0, 1.0), True, False),
        ((None, None), False, True),
        ((None, 0.0), False, False),
        ((0.5,), True, True),
        ((0.1 + 0.2, 0.3, 0.3 - 2e-7), True, True),
        ((0.0, 1.1e-6), True, False),
        ((0.0, 1e-9), True, False),
        ((-1e-9, -2e-9), True, False),
        ((-1e9, -1e9 - 1), True, True),
        ((1e9, 1e9 - 900, 1e9), True, True),
        ((1e9, 1e9 - 1100), True, False),
        ((-1e12, 1e12), True, False),
        ((None, 0.0, 1e-7), False, False),
    ],
)
def test_what_rollouts_amount_to_is_the_same_packed_and_unpacked(rewards, is_scored, is_flat):
    made = info(*rewards)
    (found,) = decode_infos([encode_info(made)])
    n = len(rewards)
    expected = {
        "rollouts": n,
        "sequences": n,
        "tokens": sum(range(10, 10 + n)),
        "longest": 9 + n,
        "failed": 0,
        "oldest": 8 - n,
        "newest": 6 + n,
        "are_trained": True,
        "is_distinct": True,
        "is_scored": is_scored,
        "is_flat": is_flat,
    }
    assert {name: getattr(found.totals, name) for name in expected} == expected
    assert made.totals == found.totals
    assert found == made


def test_a_push_of_a_page_equals_copies_and_pickles_like_any_other():
    made = info(1.0, None, worker="w", created=1.5, needs=("x",), columns=(("entropy", "<f4", (2,)),))
    for change in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: replace(x), repr):
        (found,) = decode_infos([encode_info(made)])
        assert change(found) == change(made)
    assert found.totals == made.totals


def test_what_is_true_of_a_rollout_is_a_fold_over_its_sequences():
    rng = np.random.default_rng(7)
    rollouts = []
    for _ in range(20):
        sequences = [trees.sequence(way, int(rng.integers(9))) for way in trees.ways(rng, int(rng.integers(1, 5)))]
        rollouts.append(Rollout.from_sequences(sequences, reward=float(rng.random())))
    group = Group("a.0", env="a", prompt_id="p", rollouts=rollouts, planned_size=20)
    (found,) = decode_infos([encode_info(group.info())])
    assert found == group.info()
    numbers = rollouts_of(np.frombuffer(found.rows, ROW_DTYPE))
    for rollout, info, row in zip(group.rollouts, found.rollouts, numbers, strict=True):
        expected = {
            "length": rollout.length,
            "prompt_tokens": rollout.prompt_tokens,
            "loss_tokens": rollout.loss_tokens,
            "largest_token": max(int(s.tokens.max()) for s in rollout.sequences),
            "min_version": rollout.min_policy_version,
            "max_version": rollout.max_policy_version,
            "reward": rollout.reward,
        }
        assert {name: getattr(info, name) for name in expected} == expected
        assert {name: row[name] for name in expected} == expected
