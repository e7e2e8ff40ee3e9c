"""The processes: the real `Daemon`, `Writer` and `Reader`, with what starts, uses and restarts them.

The work of a worker or a trainer with its `Writer` or `Reader` is written out here in a few lines, in the order of
worker/loop.py (take, sample, push) and trainer/loop.py (announce, acknowledge, checkpoint); everything else is real.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from rlbuffer.client.buffer import Buffer
from rlbuffer.client.reader import Reader
from rlbuffer.client.writer import Terms, Writer
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon import Daemon
from rlbuffer.errors import (
    AttemptFenced,
    BatcherFailed,
    BatchTimeout,
    EnvDone,
    PushFailed,
    ResumeRefused,
    RlbufferError,
    StepRetired,
)
from rlbuffer.records.group import Group, Ticket
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.step_digest import digest_step
from rlbuffer.store.trainer import TrainerStore
from rlbuffer.store.viewer import Viewer
from rlbuffer.store.worker import WorkerStore
from simulation.host import AWAY, Host, describe
from simulation.job import Job
from simulation.rollouts import made_group
from simulation.scheduler import Killed, Process
from simulation.stand_ins import Event, Future
from simulation.streams import StreamTrainer

NEED = "rewards.judge"
"""Need of some groups, which a scorer meets."""
NEEDY = 0.5
"""Share of the groups that have this need, in runs that have a scorer."""
BESIDE = 0.7
"""Share of the versions that are on their way while the next step trains, in runs whose trainer does that."""
SLOW_TASKS = 0.2
"""Share of the groups that take ten times as long, in runs whose steps wait for such."""
KEPT_CHECKPOINTS = 2
"""Checkpoints that the trainer keeps."""


# -- batcher -----------------------------------------------------------------------------------------------------------
def batcher(host: Host, process: Process) -> None:
    """The process of `rlbuffer serve`."""
    buffer = Buffer(host.store(process, Viewer), settings=RunSettings())

    plan = host.world.plan
    # Started again, it goes on with what an operator has made of the settings, as a supervisor's does.
    daemon = Daemon(buffer, plan.config, lease_seconds=plan.lease_seconds, follows=True)
    stop, world = Event(host.world.scheduler), host.world
    if plan.stops and not world.network.is_healed:
        world.scheduler.after(world.dice.uniform(0.5, 3.0), stop.set)
    daemon.run(stop)  # type: ignore[arg-type]


# -- workers -----------------------------------------------------------------------------------------------------------
class Worker:
    """Takes tickets, samples, pushes; careless in the ways that the seed draws."""

    def __init__(self, host: Host, index: int) -> None:
        self.host = host
        self.world = host.world
        self.name = f"writer {index}"
        self._numbers = 0
        self._index = index

    def run(self, process: Process) -> None:
        """The process of `rlbuffer worker`."""
        world, plan, dice = self.world, self.world.plan, self.world.dice
        store = self.host.store(process, WorkerStore)
        writer = Writer(
            store,
            f"w{self._index}",
            epoch=store.open_run().epoch,
            patience_seconds=2 * plan.patience_seconds,
            terms=Terms(section=f"w{self._index}" if plan.said else ""),
        )
        world.invariants.joined(writer.incarnation, writer._producer.epoch)
        envs = ["a", "b"]
        while envs:
            env = dice.choice(envs)
            adapter = dice.choice(plan.adapters) if plan.adapters else ""
            policy = store.policy(adapter)
            version = max(0, policy.version)
            if plan.tickets:
                try:
                    taken = writer.take(env, dice.choice((1, 2)), timeout_seconds=0, size=plan.ends or None)
                except EnvDone:
                    envs.remove(env)
                    if plan.said and not world.network.is_healed and dice.random() < 0.3:
                        self._push_more(writer, env, version, process)
                    continue
                tickets = self._kept(writer, taken)
                names = [ticket.group_id for ticket in tickets]
            else:
                self._numbers += 1
                names = [f"{env}-{self._index}.{self._numbers}"]
                world.scheduler.wait(0.1 + 0.02 * len(world.invariants.pool))
            if not names:
                world.scheduler.wait(0.15)
                continue
            world.scheduler.wait(self._sample_seconds(names[0]))
            if plan.said and world.invariants.digests and dice.random() < 0.05:
                self._say_done(writer, env)
            if plan.tickets and dice.random() < 0.1:
                writer.renew(tickets)
            parts: list[Group] = []
            for name in names:
                group = made_group(dice, name, env, version, adapter)
                if not adapter and not plan.stream:
                    world.invariants.sampled[writer.incarnation, name] = version, policy.checksum
                if plan.scorers and dice.random() < NEEDY:
                    group = replace(group, needs=(NEED,))
                if plan.batches:
                    parts += self._parts_of(writer, group, process)
                else:
                    self._push(writer, group, process)
            if parts:
                self._send(writer, parts)

    def _sample_seconds(self, group: str) -> float:
        """How long a group takes; where steps wait for slow ones, some take ten times as long, whoever samples them."""
        plan = self.world.plan
        seconds = self.world.dice.expovariate(1 / plan.sample_seconds)
        is_slow = plan.config.slow == "wait" and random.Random(f"{group} {plan.seed}").random() < SLOW_TASKS
        return 10 * seconds if is_slow else seconds

    def _kept(self, writer: Writer, tickets: list[Ticket]) -> list[Ticket]:
        """The tickets that it samples for: some it gives back, some it closes without a group."""
        chance = self.world.dice.random()
        if not tickets or chance > 0.05:
            return tickets
        (writer.release if chance < 0.03 else writer.skip)(tickets[:1])
        return tickets[1:]

    def _say_done(self, writer: Writer, env: str) -> None:
        with suppress(*AWAY):  # it may be said or not
            writer.done(env)

    def _push_more(self, writer: Writer, env: str, version: int, process: Process) -> None:
        """A group without a ticket, as a producer with a file pushes it: of an env that was done, in a run that was."""
        self._numbers += 1
        group = made_group(self.world.dice, f"{env}-more-{self._index}.{self._numbers}", env, version)
        self._push(writer, group, process)

    def _push(self, writer: Writer, group: Group, process: Process) -> None:
        for part in self._parts_of(writer, group, process):
            self._send(writer, [part])

    def _parts_of(self, writer: Writer, group: Group, process: Process) -> list[Group]:
        """The pushes that a group is made of; one of them may come later, by itself."""
        plan, dice = self.world.plan, self.world.dice
        parts = [group]
        if not self.world.network.is_healed and dice.random() < plan.too_large:
            keys = self.world.invariants.keys
            self.world.network.too_large.add(f"{keys.payload_prefix}{{{keys.payload_prefix}{group.group_id}".encode())
        if dice.random() < plan.parts:
            cut = dice.randrange(1, len(group.rollouts))
            again = cut - 1 if cut > 1 and dice.random() < 0.3 else cut  # one rollout is in both parts
            parts = [replace(group, rollouts=group.rollouts[:cut]), replace(group, rollouts=group.rollouts[again:])]
        if dice.random() < plan.small:
            parts = parts[:1]
        elif dice.random() < plan.careless:
            parts.append(dice.choice(parts))
            if dice.random() < 0.5:
                late = parts.pop()
                delay = dice.uniform(0.1, 2.0)
                self.world.scheduler.after(delay, partial(self._push_late, writer, late, process))
        return parts

    def _push_late(self, writer: Writer, part: Group, process: Process) -> None:
        if not process.is_dead:
            self.world.scheduler.spawn(process, lambda: self._send(writer, [part]))

    def _send(self, writer: Writer, groups: list[Group]) -> None:
        """Pushes until it hears that all of it is there; now and then it gives it up instead."""
        while groups:
            try:
                for group, pushed in zip(groups, writer.push_many(groups), strict=True):
                    self._expect_stored(group, pushed.status)
                return
            except PushFailed as error:
                self._leave_out(writer, error.group)
                groups = [group for group in groups if group is not error.group]
            except AWAY:
                if self.world.dice.random() < 0.3:
                    return

    def _leave_out(self, writer: Writer, group: Group) -> None:
        """A prompt whose group can never be pushed must not keep the run from its end."""
        try:
            if self.world.plan.tickets:
                number = int(group.group_id.rpartition(".")[2])
                writer.skip([Ticket(env=group.env, number=number, group_id=group.group_id)])
        except AWAY:
            pass  # it expires, and is sampled again

    def _expect_stored(self, group: Group, status: str) -> None:
        pushed_ids = {r.rollout_id for r in group.rollouts}
        there = (pushed_ids <= part.ids() for part in self.world.invariants.parts.get(group.group_id, ()))
        if not (self.world.was_disturbed or self.world.was_rolled_back) and not any(there):
            self.world.invariants.fail(
                "I10", f"a push of group {group.group_id} was acknowledged ({status}), but it is not there"
            )


# -- trainer -----------------------------------------------------------------------------------------------------------
class Trainer:
    """`rlbuffer train`: all ranks of a job end together; the next job resumes from the newest checkpoint."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.world = host.world
        self.checkpoints: dict[int, dict[str, Any]] = {}
        self.job: Job | None = None
        self.trained = 0
        """Newest step that any attempt has trained."""
        self.is_held = False
        """Somebody takes the run back: no trainer may start meanwhile."""
        self._started: list[Job] = []

    def begin(self) -> None:
        """Starts a job; the one before may still be there and not know that it is over."""
        if self.is_held:
            return
        world, number = self.world, len(self._started) + 1
        world_size = world.plan.world_sizes[number % len(world.plan.world_sizes)]
        state = self.checkpoints[max(self.checkpoints)] if self.checkpoints else None
        job = self.job = Job(world.scheduler, world_size, state)
        self._started.append(job)
        world.invariants.restarted(job.at)
        is_behind = job.at < max(world.invariants.digests, default=0) and not world.network.is_healed
        if is_behind and world.plan.together:
            world.scheduler.after(world.dice.uniform(0.1, 0.8), world.restart)
        if is_behind and world.loses_again:
            world.loses_again = False
            world.scheduler.after(world.dice.uniform(0.1, 0.8), world.forget)
        if world.was_rolled_back or world.was_taken_back:
            self.trained = job.at
        for rank in range(world_size):
            name = f"rank {rank} of job {number}"
            job.processes.append(self.host.start(name, partial(self._rank, job, rank), partial(self._ended, job)))

    def stopped(self, process: Process) -> None:
        """A rank stands still: now and then somebody starts the trainer elsewhere, and the old one wakes up later."""
        job = self.job
        if job is None or process not in job.processes or self.world.dice.random() < 0.4:
            return

        def elsewhere() -> None:
            if self.job is job and not job.is_over:
                self.begin()

        self.world.scheduler.after(self.world.dice.uniform(0.1, 0.6), elsewhere)

    def end(self) -> None:
        """Kills every job that is there."""
        for job in self._started:
            self._over(job)

    def die(self, job: Job) -> None:
        """Kills a rank of a job; the others end with it."""
        if job is self.job and not job.is_over:
            self.world.scheduler.kill(job.processes[0])

    def _over(self, job: Job) -> None:
        job.is_over = True
        for process in job.processes:
            self.world.scheduler.kill(process)

    def _ended(self, job: Job, process: Process) -> None:
        outcome, world = process.outcome, self.world
        if isinstance(outcome, Exception) and not world.was_disturbed:
            expected: tuple[type[Exception], ...] = (AttemptFenced, BatchTimeout, BatcherFailed, *AWAY)
            resumed = 0 if job.state is None else job.state["step"]
            if job is not self.job or resumed < max(self.checkpoints, default=0):
                expected += (StepRetired,)  # another trainer has overtaken it; the next start finds a newer checkpoint
            if world.plan.stream and job.state is None:
                expected += (ResumeRefused,)  # it hands nothing back: it knows no step that the server has lost
            is_early = world.plan.memory and isinstance(outcome, StepRetired)
            if not (is_early or isinstance(outcome, expected)):
                world.invariants.fail("end", f"{process.name} died of {describe(outcome)}")
            if is_early and job is self.job and not job.is_over and resumed >= max(self.checkpoints, default=0):
                world.take_back(resumed)  # as the message says: no newer checkpoint will come
                return
        if job.is_over:
            return
        self._over(job)
        if job is self.job:
            delay = 0.05 if world.network.is_healed else world.dice.uniform(0.05, 1.0)
            world.scheduler.after(delay, lambda: self.begin() if self.job is job else None)

    def keep(self, step: int, state: dict[str, Any]) -> None:
        """A checkpoint of `step` is written."""
        self.checkpoints[step] = state
        for old in sorted(self.checkpoints)[:-KEPT_CHECKPOINTS]:
            del self.checkpoints[old]

    def _rank(self, job: Job, rank: int, process: Process) -> None:
        world, plan = self.world, self.world.plan
        if plan.stream:
            StreamTrainer(self.host, self).run(job, process)
            return
        store = self.host.store(process, TrainerStore)
        store.open_run()
        reader = Reader(store, rank=rank, world_size=job.world_size, timeout_seconds=6.0)
        if job.state is not None:
            reader.load_state_dict({name: value for name, value in job.state.items() if name != "adapters"})
        reader.start()
        if rank == 0:
            job.is_started = True
            # Samplers have this version, or a newer one, unless the server lost what was newer.
            digest = job.state["digest"] if job.state else ""
            reader.announce(PolicyVersion(version=job.at, checksum=digest))
            for adapter, version in job.adapters.items():
                reader.announce(PolicyVersion(version=version, adapter=adapter))
        while not job.is_started:  # a barrier: rank 0 has registered the attempt
            world.scheduler.wait(0.01)
        way: list[Future] = []  # the version that is on its way
        until = (lambda: any(each.has_failed() for each in way)) if plan.beside else None
        steps, pulls, passes = reader.steps(until=until), 0, 0
        while True:
            if plan.own:
                world.scheduler.wait(world.rare_dice.uniform(0.0, 0.3))
            step = next(steps, None)
            if step is None:
                self._arrived(way)
                return  # the run has ended
            if plan.own and job.is_first(rank, passes):
                world.one_has_a_step()
            digests = [] if plan.own else job.exchange(rank, step, f"digest {step.number} {pulls}")
            if len(set(digests)) > 1:
                if not world.was_rolled_back:
                    raise RlbufferError(f"the ranks hold different steps {step.number}")
                steps.close()  # type: ignore[attr-defined]
                steps, pulls = reader.steps(step.number, until=until), pulls + 1
                continue
            self._check(job, rank, step)
            world.scheduler.wait(plan.train_seconds)
            digests = job.exchange(rank, step, f"update {passes}")
            if len(set(digests)) > 1 and job is self.job:
                world.invariants.fail("I14", f"the ranks exchange gradients of different steps {step.number}")
            passes += 1
            self._arrived(way)
            if rank:
                reader.trained(step)
                continue
            publish = partial(self._publish, job, process, reader, store, step)
            if plan.beside and world.beside_dice.random() < BESIDE:
                reader.postpones(step)
                seconds = plan.train_seconds * world.beside_dice.uniform(0.0, 2.0)
                task = world.scheduler.spawn(process, partial(self._publish_late, seconds, publish))
                way.append(Future(world.scheduler, task))
            else:
                publish()
            if step.number % plan.checkpoint_every == 0 or step.header.checkpoint_now:
                self._arrived(way)
                self._checkpoint(reader, step.number)

    def _publish_late(self, seconds: float, publish: Callable[[], None]) -> None:
        self.world.scheduler.wait(seconds)
        publish()

    def _arrived(self, way: list[Future]) -> None:
        """Waits for the version that is on its way."""
        while way:
            way.pop().result()

    def _publish(self, job: Job, process: Process, reader: Reader, store: TrainerStore, step: Step) -> None:
        """Announces the version of a step, and then acknowledges the step."""
        world = self.world
        reader.announce(PolicyVersion(version=step.number, checksum=step.digest))
        for adapter, progress in step.adapters.items():
            if adapter and progress.ready_to_update:
                job.adapters[adapter] = progress.step
                reader.announce(PolicyVersion(version=progress.step, adapter=adapter))
        if world.ends_untold(step.number):
            world.scheduler.kill(process)
            raise Killed
        reader.trained(step)
        self.trained = max(self.trained, step.number)
        job.at = step.number
        if world.plan.spread:  # an odd world in any case: what happens in the others stays as it was
            store.add_record({"step": step.number})

    def _check(self, job: Job, rank: int, step: Step) -> None:
        invariants = self.world.invariants
        digest = invariants.digests.get(step.number)
        if step.digest in invariants.lost_digests:
            return
        if digest != step.digest:
            invariants.fail("I3", f"rank {rank} trains step {step.number} with digest {step.digest}, not {digest}")
        if job is self.job:  # the steps of one that was overtaken may be retired under it
            invariants.check_damage(rank, step)
        if step.damaged or invariants.is_damaged(step.number):
            return
        content, place = digest_step(step), (step.number, job.world_size, rank)
        if invariants.trained_content.setdefault(place, content) != content:
            invariants.fail("I3", f"rank {rank} of {job.world_size} replays step {step.number} with other bytes")

    def _checkpoint(self, reader: Reader, step: int) -> None:
        adapters = self.job.adapters if self.job is not None else {}
        self.keep(step, reader.state_dict() | {"adapters": dict(adapters)})
        reader.checkpointed(step, oldest_kept=min(self.checkpoints) if len(self.checkpoints) >= KEPT_CHECKPOINTS else 0)
