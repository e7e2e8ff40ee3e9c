"""Scorers: the real search, claims, heartbeats and pushes of rlbuffer.scorer, with a judge that only takes time.

The order of `_serve_run` (look, claim, score, release) is written out here without its event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from rlbuffer.client.buffer import Buffer
from rlbuffer.client.producer import Producer
from rlbuffer.config.settings import RunSettings, ScoreSettings
from rlbuffer.records.group import Group
from rlbuffer.scorer.loop import SCORER_POLL_SECONDS, _Pending, _Scorer
from rlbuffer.store.scorer import ScorerStore
from rlbuffer.store.viewer import Viewer
from simulation.actors import NEED
from simulation.host import AWAY, Host
from simulation.scheduler import Process


def scorer(host: Host, index: int, process: Process) -> None:
    """The process of `rlbuffer score`."""
    world, plan = host.world, host.world.plan
    buffer = Buffer(host.store(process, Viewer), settings=RunSettings())
    store = buffer.store.role(ScorerStore)
    epoch = store.open_run().epoch
    producer = Producer(store, f"s{index}", epoch=epoch, patience_seconds=2 * plan.patience_seconds)
    world.invariants.joined(producer.incarnation, epoch)
    options = ScoreSettings(reward="judge:of", gives=(NEED,))
    real = _Scorer(buffer, process.name, options, None, None, threading.Event())
    real.at_once = world.dice.choice((1, 2, 4))
    real._beat.start()
    while True:
        if store.losses() != real._losses:
            real._forget()
        real._read_pool()
        claimed = real._claim()
        if not claimed:
            world.scheduler.wait(SCORER_POLL_SECONDS)
            continue
        ids = [pending.entry.entry_id for pending in claimed]
        real._beat.hold(ids)
        try:
            _score(host, real, producer, claimed)
        finally:
            if not process.is_dead:
                real._beat.hold([])
                store.release_scoring(ids, owner=real._owner)


def _score(host: Host, real: _Scorer, producer: Producer, claimed: Sequence[_Pending]) -> None:
    world = host.world
    for pending, group in [(pending, real._read(pending)) for pending in claimed]:
        if group is None:
            continue  # damaged or gone: tried again later
        world.scheduler.wait(world.dice.expovariate(1 / world.plan.sample_seconds))
        try:
            pushed = producer.push([(judged(group), pending.entry.entry_id)])[0]
        except AWAY:
            continue  # it may be there; the producer settles that before its next push, or leaves it behind
        real._found.pop(pending.entry.entry_id, None)
        if pushed.status == "stored" and not world.was_disturbed:
            world.invariants.expect_scored(group.group_id, pending.entry.entry_id)


def judged(group: Group) -> Group:
    """With what it needed."""
    rollouts = tuple(replace(rollout, rewards={**rollout.rewards, "judge": 0.5}) for rollout in group.rollouts)
    return replace(group, rollouts=rollouts, needs=tuple(need for need in group.needs if need != NEED))
