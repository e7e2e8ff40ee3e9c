"""Short names for what tests do with a batcher."""

from __future__ import annotations

import dataclasses

import numpy as np

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.testing import make_group

RNG = np.random.default_rng(0)


def batcher(state=None, **settings):
    return Batcher(BatcherConfig(**({"row_tokens": 100, "step_groups": 0} | settings)), state)


def put(
    made,
    name,
    *,
    env="a",
    lengths=(25,) * 4,
    version=0,
    now=0.0,
    entry=None,
    planned=None,
    first=0,
    pushed=None,
    uses=0,
    replaces="",
    **fields,
):
    group = make_group(
        env=env,
        size=len(lengths),
        lengths=lengths,
        version=version,
        group_id=name,
        planned_size=planned or len(lengths),
        rewards=fields.pop("rewards", [float(i % 2) for i in range(len(lengths))]),
    )
    info = dataclasses.replace(group.info(), **fields)
    rollouts = [r.changed(rollout_id=f"{name}/{first + i}") for i, r in enumerate(info.rollouts)]
    info = dataclasses.replace(info, rollouts=tuple(rollouts))
    entry_id = entry or f"{name}-0"
    if uses:
        made.restore([(entry_id, info)], uses=uses, now=now, pushed=pushed)
    else:
        made.add(info, entry_id=entry_id, now=now, pushed=pushed, replaces=replaces)


def ask(made, step=1, *, now=0.0, world_size=2):
    return made.next(step, world_size=world_size, now=now, rng=RNG)


def pending_tokens(made, env):
    its = made.pools.get(env)
    return 0 if its is None else its.ready_tokens + its.forming_tokens


def drops_of(decision):
    return [(d.group_id, d.reason, d.detail, d.rollouts, d.tokens) for d in decision.drops]
