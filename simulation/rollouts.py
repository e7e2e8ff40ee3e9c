"""Groups to push: few tokens, made once and named anew, because making and encoding arrays is what costs."""

from __future__ import annotations

import random
from copy import copy
from functools import cache

from rlbuffer.records import Group
from rlbuffer.testing import make_group

SHAPES = 12


@cache
def _shape(number: int, version: int) -> Group:
    size = 2 + number % 2
    rewards = [float(i and number % 4 > 0) for i in range(size)]
    return make_group(seed=number, size=size, rewards=rewards, version=version)


def made_group(dice: random.Random, group_id: str, env: str, version: int) -> Group:
    """A group of two or three rollouts of 8 to 31 tokens, sampled by `version`."""
    group = copy(_shape(dice.randrange(SHAPES), version))
    rollouts = []
    for i, shape in enumerate(group.rollouts):
        rollout = copy(shape)
        object.__setattr__(rollout, "rollout_id", f"{group_id}/{i}")
        rollouts.append(rollout)
    for name, value in (("group_id", group_id), ("env", env), ("prompt_id", group_id), ("rollouts", tuple(rollouts))):
        object.__setattr__(group, name, value)
    return group
