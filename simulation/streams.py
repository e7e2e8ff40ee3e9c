"""A trainer that packs for itself: the real `Stream`, held and acknowledged in the ways that the seed draws."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from rlbuffer.client.stream import Stream, Taken
from rlbuffer.store.trainer import TrainerStore
from simulation.host import Host
from simulation.job import Job
from simulation.scheduler import Killed, Process

MOST_HELD = 3
"""Groups that an update takes, at most."""
PARTS, UNUSED = 0.3, 0.3
"""Share of the updates that end within a group, and of those that leave a rollout out."""


class StreamTrainer:
    """One start of a stream's trainer: takes groups, trains some at once, acknowledges, announces, checkpoints."""

    def __init__(self, host: Host, trainer: Any) -> None:
        self._host, self._world, self._trainer = host, host.world, trainer

    def run(self, job: Job, process: Process) -> None:
        """The process of the trainer."""
        world, plan, dice = self._world, self._world.plan, self._world.dice
        store = self._host.store(process, TrainerStore)
        store.open_run()
        stream = Stream(store, timeout_seconds=6.0)
        state = None if job.state is None else json.loads(json.dumps(job.state["stream"]))
        stream.resume(state)
        job.is_started = True
        updates = 0  # as trainers count, from 0 in each process
        stream.version(updates)
        held: list[Taken] = []
        next_place = stream.place + 1
        size = self._size()
        for taken in stream:
            if taken.place != next_place:
                world.invariants.fail("I3", f"the stream gives place {taken.place} behind {next_place - 1}")
            next_place = taken.place + 1
            self._check(job, taken)
            held.append(taken)
            if len(held) < size:
                continue
            world.scheduler.wait(plan.train_seconds)
            is_part = len(held) > 1 and dice.random() < PARTS
            whole = held[:-1] if is_part else held
            unused = [dice.choice(held).rollouts[0].rollout_id] if dice.random() < UNUSED and held[-1].rollouts else []
            unused = [rollout_id for rollout_id in unused if self._is_held_once(held, rollout_id)]
            if world.ends_untold(whole[-1].place):
                world.scheduler.kill(process)
                raise Killed
            stream.trained(whole[-1].place, part=1 if is_part else 0, unused=unused)
            self._trainer.trained = max(self._trainer.trained, whole[-1].place)
            job.at = whole[-1].place
            held, size, updates = held[len(whole) :], self._size(), updates + 1
            stream.version(updates)
            if updates % plan.checkpoint_every == 0 or taken.header.checkpoint_now:
                self._checkpoint(stream)

    def _size(self) -> int:
        """Groups of the next update. Where data end, one: what is left at the end fills no larger one."""
        plan = self._world.plan
        return 1 if plan.ends or plan.said else self._world.dice.randint(1, MOST_HELD)

    @staticmethod
    def _is_held_once(held: list[Taken], rollout_id: str) -> bool:
        return sum(rollout_id == r.rollout_id for taken in held for r in taken.rollouts) == 1

    def _check(self, job: Job, taken: Taken) -> None:
        """The group is that of the step, and the same one whenever it is given."""
        invariants, step = self._world.invariants, taken.place
        if taken.digest in invariants.lost_digests:
            return
        if invariants.digests.get(step) != taken.digest:
            invariants.fail("I3", f"the stream gives step {step} with digest {taken.digest}")
        if taken.damaged or invariants.is_damaged(step):
            return
        content = hashlib.sha256()
        for rollout in taken.rollouts:
            content.update(rollout.rollout_id.encode() + rollout.tokens.tobytes() + rollout.logprobs.tobytes())
        if invariants.trained_content.setdefault((step, 1, 0), content.hexdigest()) != content.hexdigest():
            invariants.fail("I3", f"the stream gives step {step} again with other rollouts")

    def _checkpoint(self, stream: Stream) -> None:
        state = stream.state
        self._trainer.keep(stream.place, {"step": stream.place, "digest": "", "adapters": {}, "stream": state})
        oldest = min(self._trainer.checkpoints) if len(self._trainer.checkpoints) > 1 else 0
        stream.checkpointed(oldest_kept=oldest)
