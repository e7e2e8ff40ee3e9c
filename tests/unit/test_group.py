import pytest

from rlbuffer.batcher.group import PooledGroup
from rlbuffer.records.info import GroupInfo, RolloutInfo
from rlbuffer.records.step_plan import GroupPart


def rollout(name, *, length=10, reward=1.0, version=0):
    return RolloutInfo(
        rollout_id=name,
        length=length,
        prompt_tokens=2,
        loss_tokens=length - 2,
        reward=reward,
        min_version=version,
        max_version=version,
    )


def part(*rollouts, planned_size=4, **fields):
    base = {"group_id": "g", "env": "a", "prompt_id": "p"}
    return GroupInfo(planned_size=planned_size, rollouts=tuple(rollouts), **(base | fields))


def state_of(*parts, row_tokens=100):
    state = PooledGroup(parts[0], since=0.0)
    verdicts = [state.take(f"{n}-0", p, row_tokens) for n, p in enumerate(parts)]
    return state, [verdict or state.rejected.get(f"{n}-0") for n, verdict in enumerate(verdicts)]


def test_a_rollout_without_reward_is_invalid_unless_something_is_still_to_be_added():
    assert state_of(part(rollout("r0", reward=None)))[1] == [("invalid", "rollout r0 has no reward")]
    state, verdicts = state_of(part(rollout("r0", reward=None), needs=("reward",), planned_size=1))
    assert verdicts == [None]
    assert state.is_waiting
    needy = part(rollout("r0", reward=None), needs=("reward",))
    assert state_of(needy, part(rollout("r1", reward=None)))[1] == [None, ("invalid", "rollout r1 has no reward")]
    other = part(rollout("r0", reward=None), needs=("ref_logprobs",))
    assert state_of(other)[1] == [("invalid", "rollout r0 has no reward")]


@pytest.mark.parametrize(
    ("field", "value", "detail"),
    [
        ("env", "b", "env 'b' differs from the group's 'a'"),
        ("prompt_id", "q", "prompt_id 'q' differs from the group's 'p'"),
        ("adapter", "x", "adapter 'x' differs from the group's ''"),
        ("planned_size", 8, "planned_size 8 differs from the group's 4"),
    ],
)
def test_a_part_that_contradicts_its_group_is_invalid(field, value, detail):
    _, verdicts = state_of(part(rollout("r0")), part(rollout("r1"), **{field: value}))
    assert verdicts[1] == ("invalid", detail)


def test_entries_are_accounted_for_exactly():
    parts = (
        part(rollout("r0"), rollout("r1", length=101), rollout("r2", reward=None)),
        part(rollout("r0", length=11), rollout("r3", length=12), rollout("r4"), rollout("r5", length=14)),
    )
    state, _ = state_of(*parts)
    assert state.uses() == [
        GroupPart(
            entry_id="0-0",
            info=parts[0],
            joined=[0],
            places=[0],
            packed_tokens=10,
            left_out=((1, "oversized"), (2, "invalid")),
        ),
        GroupPart(
            entry_id="1-0",
            info=parts[1],
            joined=[1, 2, 3],
            places=[1, 2, 3],
            packed_tokens=36,
            left_out=((0, "duplicate"),),
        ),
    ]
    assert [(part.packed_rollouts, part.dropped) for part in state.uses()] == [
        (1, (("oversized", 1, 101), ("invalid", 1, 10))),
        (3, (("duplicate", 1, 11),)),
    ]


def test_a_drop_takes_all_entries_with_everything_they_hold():
    state, _ = state_of(part(rollout("r0", reward=0.5), rollout("r1", length=101)), part(rollout("r2", version=2)))
    drop = state.drop("stale", "age 3 > max_age 1 at step 4")
    assert (drop.entry_ids, drop.rollouts, drop.tokens) == (("0-0", "1-0"), 3, 121)
    assert (drop.reward, drop.min_version) == (0.75, 0)
