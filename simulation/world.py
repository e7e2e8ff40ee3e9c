"""One seed from its first event to its verdict.

Things go wrong for a few virtual seconds; then everything heals, and within ten more the next steps must come (I12).
At the end the real `verify` looks at what is left.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlbuffer.process.logs import heard
from rlbuffer.store.keys import Keys
from simulation import verdict
from simulation.actors import Trainer, Worker, batcher
from simulation.asking import ask, end
from simulation.circumstances import OWN_FAULT, come_first, fill, planner, stranger
from simulation.defects import Defects
from simulation.gateways import Agent, Gateway, gateway
from simulation.host import Host
from simulation.invariants import Invariants
from simulation.log import Log
from simulation.lua import Engine
from simulation.network import LATEST_SECONDS, Network
from simulation.people import damage, operator, releaser, take_back
from simulation.plan import Plan
from simulation.reasons import LOOK_SECONDS, Reasons
from simulation.scheduler import BEGINNING, Process, Scheduler
from simulation.scorers import scorer
from simulation.server import Command, Server
from simulation.stand_ins import installed

# Log lines of the processes stand in the events, where they are looked for.
logging.getLogger("rlbuffer").addHandler(logging.NullHandler())

BUSY_CALLS = 30_000
"""Round trips of a seed above which somebody asks without ever waiting: twenty times what seeds need."""
DRAIN_LOOKS = 20
"""For a moment at which the server's loss of its newest writes costs a trained step; 50 ms apart."""
AFTER_LOSS_SECONDS = 1.5
"""Seconds that things go wrong for longer where a loss is planned: also while the run is recovered from it."""
EARLY = 0.15
"""Seconds at which a run is taken back before a trainer has joined it."""
LAST_EVENTS = 30
RUN = "sim"

_ENGINE: list[Engine] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a seed."""

    seed: int
    violation: str
    """"" when every invariant held."""
    event: int
    """Events until then."""
    calls: int
    """Round trips."""
    seconds: float
    """Virtual."""
    steps: int
    plan: str
    branches: frozenset[int]
    """Branches of the Lua files that were entered (:mod:`simulation.branches`)."""
    log: tuple[str, ...]
    """The last events before a violation."""


class World:
    """Everything of one seed."""

    def __init__(self, plan: Plan, *, keep_log: int = LAST_EVENTS) -> None:
        if not _ENGINE:
            _ENGINE.append(Engine())
        self.plan = plan
        self.run = RUN
        self._keep_all = keep_log > LAST_EVENTS
        self.dice = random.Random(f"run {plan.seed}")
        self.rare_dice = random.Random(f"rare {plan.seed}")
        self.beside_dice = random.Random(f"versions beside steps {plan.seed}")
        """For what is so rare that the other draws of a seed shall stay what they are."""
        self.scheduler = Scheduler()
        self.clock_ahead = 0.0
        """Seconds by which the server's clock was set forward."""
        self.server = Server(lambda: self.scheduler.now + self.clock_ahead, _ENGINE[0])
        self.network = Network(self.scheduler, self.server, plan, self.dice)
        self.invariants = Invariants(self.server, self.network, RUN)
        self._log = Log(self.scheduler, self.invariants.script_of, keep_log)
        self.sentence = ""
        """What the batcher says that it waits for."""
        self.is_over = False
        self.was_disturbed = False
        """The run was reset: processes of before may end in ways that are an error else."""
        self.was_left = False
        """Somebody wrote into the run before it was begun again, so it was deleted once more."""
        self.was_taken_back = False
        self.loses_again = False
        """The server loses its newest writes once the next trainer trains steps again."""
        """Steps were made void: who worked on them, or in the epoch of before, ends."""
        self.was_rolled_back = False
        """Acknowledged pushes may be lost."""
        self._loses_when_apart = False
        """The server loses its newest writes when one rank has a step and another has not."""
        self.losses = 0
        """Grows when the server loses acknowledged writes, or the run."""
        self.samples = 0
        """Samples of the gateways' engine."""
        self.gateways: list[Gateway] = []
        """Those that were started, also when they are dead."""
        self.host = Host(self)
        self.reasons = Reasons(self)
        self.trainer = Trainer(self.host)
        check = self.server.on_event

        def logged(commands: Sequence[Command], replies: list[object]) -> None:
            check(commands, replies)
            if self.network.calls > BUSY_CALLS:
                self.invariants.fail("end", f"more than {BUSY_CALLS} round trips; the last is {self.network.sender}'s")
            self._log.add(self.network.sender, commands, number=self.invariants.events, reply=replies[0])

        self.server.on_event = logged
        self.network.on_fault = self._fault
        defects = Defects(self.server, RUN, plan.seed, self.invariants.fail)

        def before(commands: Sequence[Command]) -> None:
            if commands[0][0] == b"EVALSHA" and commands[0][1] in self.server.scripts:
                name = self.invariants.script_of(commands[0])
                come_first(self, name, commands[0])
                defects.before(name, commands[0])

        self.network.before = before
        self.invariants.on_moment = self._moment

    def simulate(self) -> Result:
        """Runs the seed."""
        constants: dict[tuple[str, str], Any] = {
            **self.plan.constants(),
            ("rlbuffer.daemon.pending", "Batcher"): planner(self),
        }
        with installed(self.scheduler, self.dice, constants), heard("rlbuffer.daemon", self._heard):
            try:
                self._begin()
                self._run(
                    self.plan.fault_seconds + self.plan.away + (AFTER_LOSS_SECONDS if self.plan.rollback else 0.0)
                )
                self._heal()
                self._judge()
            finally:
                self._end()
        return Result(
            seed=self.plan.seed,
            violation=self.invariants.violation,
            event=self.invariants.events,
            calls=self.network.calls,
            seconds=self.scheduler.now - BEGINNING,
            steps=max(self.invariants.digests, default=0),
            plan=self.plan.describe(),
            branches=_ENGINE[0].entered(),
            log=self._log.lines() if self.invariants.violation or self._keep_all else (),
        )

    def _heard(self, line: Mapping[str, Any]) -> None:
        """A batcher has logged it."""
        task = self.scheduler.current
        if task is None:
            return
        self.reasons.heard(task.process, line)
        match line["event"]:
            case "waiting":
                self.sentence = line["text"]
            case "ready" | "step":
                self.note(f"{task.process.name}: {line['event']}  {line['step']}")
            case "leader":
                self.note(f"{task.process.name}: {line['event']} {line['state']} ")

    def note(self, sentence: str) -> None:
        """A line of the log that is no event of the server."""
        self._log.add(sentence)

    # -- course ----------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        plan, host, later = self.plan, self.host, self.scheduler.after
        later(LOOK_SECONDS, self.reasons.look)
        for index in range(plan.batchers):
            later(plan.late + 0.3 * index, partial(host.keep, f"batcher {index}", partial(batcher, host), (OWN_FAULT,)))
        for index in range(plan.writers):
            worker = Worker(host, index)
            later(0.1, partial(host.keep, worker.name, worker.run))
        for index in range(plan.scorers):
            later(0.1, partial(host.keep, f"scorer {index}", partial(scorer, host, index)))
        for index in range(plan.gateways):
            later(0.2 + 0.1 * index, partial(host.keep, f"gateway {index}", partial(gateway, host)))
        for index in range(plan.agents):
            later(0.3, partial(host.keep, f"agent {index}", Agent(host, index).run))
        later(0.2, self.trainer.begin)
        if plan.operator:
            later(1.0, partial(host.keep, "operator", partial(operator, host)))
            later(1.3, partial(host.keep, "operator who asks", partial(ask, host)))
            later(1.5, partial(host.keep, "operator who asks, too", partial(ask, host)))
        if plan.said:
            later(1.0, partial(host.keep, "operator who ends", partial(end, host)))
        if plan.memory:
            later(0.1, partial(fill, self))
        if plan.strangers:
            later(0.5, partial(host.keep, "operator without the client", partial(stranger, host)))
        if plan.releaser:
            later(1.0, partial(host.keep, "operator 2", partial(releaser, host)))
        if plan.taken_back:
            later(plan.fault_seconds * plan.taken_back if plan.taken_back > EARLY else EARLY, self.take_back)
        for when in plan.damages:
            later(plan.fault_seconds * when, partial(damage, self))
        for when, seconds in plan.clock_steps:
            later(plan.fault_seconds * when, partial(self._set_clock, seconds))
        for whose, since, until, seconds in plan.clocks:
            later(plan.fault_seconds * since, partial(self._put_off, whose, seconds))
            later(plan.fault_seconds * until, partial(self._put_off, whose, -seconds))
        if plan.refusal:
            begin = plan.fault_seconds * self.dice.uniform(0.1, 0.8)
            later(begin, partial(self._refuse, plan.refusal))
            later(begin + self.dice.uniform(0.2, 1.5), partial(self._refuse, ""))
        if plan.reset:
            later(plan.fault_seconds * self.dice.uniform(0.3, 0.7), self.reset)
        if plan.away:
            later(plan.fault_seconds * self.rare_dice.uniform(0.4, 0.8), self._leave)
        if plan.full:
            begin = plan.fault_seconds * self.dice.uniform(0.1, 0.8)
            later(begin, partial(self._set_full, True))
            later(begin + self.dice.uniform(0.3, 1.5), partial(self._set_full, False))
        if plan.failover:
            later(0.5, self._sync)
            for _ in range(self.dice.choice((1, 1, 2))):
                later(plan.fault_seconds * self.dice.uniform(0.2, 0.9), self._fail_over)
        if plan.rollback:
            later(0.5, self._sync)
            later(plan.fault_seconds * self.dice.uniform(0.4, 0.8), self._roll_back)

    def _run(self, seconds: float) -> None:
        self.scheduler.run(lambda: bool(self.invariants.violation), self.scheduler.now + seconds)

    def _heal(self) -> None:
        self.note("everything heals")
        self.network.is_healed = True
        self._healed = self.scheduler.now
        self.network.down_until = 0.0
        self.network.cut_until.clear()
        self.server.is_full = False
        self.server.refusal = ""
        self.server.used = self.server.limit // 3
        if self.plan.reset:
            self.scheduler.after(LATEST_SECONDS + 0.1, self._delete_what_came_late)

    def _delete_what_came_late(self) -> None:
        """Deletes a run that was deleted before and got late writes: nobody can begin a run beside them, so a person is
        asked to delete it."""
        if self.server.data and Keys(RUN).meta.encode() not in self.server.data:
            self.reset()

    def _judge(self) -> None:
        if self.plan.ends or self.plan.said:
            verdict.ends(self.host)
        else:
            verdict.goes_on(self.trainer, self)
        if self.invariants.violation:
            return
        # Late messages on their way arrive first.
        self._run(max(0.0, self._healed + LATEST_SECONDS + 0.1 - self.scheduler.now))
        verdict.is_sound(self)

    def _end(self) -> None:
        """Ends every process, so that nothing is left hanging in the middle of real code."""
        self.is_over = True
        self.server.on_event = lambda commands, replies: None
        for process in {task.process: None for task in self.scheduler.tasks}:
            self.scheduler.kill(process)
        self.scheduler.run(lambda: not self.scheduler.tasks, self.scheduler.now + 60.0)

    # -- disturbances ----------------------------------------------------------------------------------------------
    def _set_full(self, is_full: bool) -> None:
        self.note("the server is full" if is_full else "the server has room again")
        self.server.is_full = is_full and not self.network.is_healed

    def _refuse(self, text: str) -> None:
        self.note(f"the server refuses: {text}" if text else "the server takes writes again")
        self.server.refusal = "" if self.network.is_healed else text

    def _set_clock(self, seconds: float) -> None:
        self.note(f"the server's clock is set {'forward' if seconds > 0 else 'back'} by {abs(seconds):g} s")
        self.clock_ahead += seconds
        if seconds < 0:
            self.invariants.clock_set_back()

    def _put_off(self, whose: str, seconds: float) -> None:
        """The clock of the server, or of these processes and of those that are started in their place."""
        if whose == "server":
            self._set_clock(seconds)
            return
        self.note(f"the clocks of {whose}s are set {'forward' if seconds > 0 else 'back'} by {abs(seconds):g} s")
        self.host.clocks[whose] += seconds
        for process in {task.process for task in self.scheduler.tasks if task.process.name.startswith(whose)}:
            process.clock_ahead += seconds

    def take_back(self, keep: int = -1) -> None:
        """To a checkpoint, or to step `keep`."""
        self.was_taken_back = self.trainer.is_held = True
        self.trainer.end()
        self.host.start("operator 3", partial(take_back, self.host, keep), lambda process: None)

    def restart(self) -> None:
        """The server comes back at once, without its scripts."""
        if not self.network.is_healed:
            self.note("the server is started again")
            self.server.restart()
            self.network.generation += 1

    def _leave(self) -> None:
        """The trainer ends; the server comes back without it, while groups are being sampled."""
        self.note("the trainer ends, and nobody starts it again for a while")
        self.trainer.is_held = True
        self.trainer.end()
        self.scheduler.after(self.rare_dice.uniform(0.05, 0.5), self.restart)
        self.scheduler.after(self.plan.away, self._come_back)

    def _come_back(self) -> None:
        self.trainer.is_held = False
        self.trainer.begin()

    def reset(self) -> None:
        """Somebody deletes the run."""
        self.was_disturbed = True
        if self.plan.left and Keys(RUN).meta.encode() in self.server.data:
            self.note("somebody deletes the run's meta")
            self.server.delete(Keys(RUN).meta.encode())
            self.server.changes.clear()
            left = BEGINNING + self.plan.fault_seconds - self.scheduler.now
            self.scheduler.after(self.dice.uniform(0.5, 0.9) * left, self.reset)
            return
        self.note("the run is deleted")
        self.losses += 1
        self.server.data.clear()
        self.server.expiry.clear()
        self.invariants.forget()
        self.trainer.checkpoints.clear()
        self.trainer.trained = 0
        self.trainer.end()
        self.scheduler.after(0.3, self.trainer.begin)

    def _sync(self) -> None:
        self._saved = self.server.snapshot(), self.invariants.snapshot()
        self.scheduler.after(1.0, self._sync)

    def _roll_back(self, looks: int = DRAIN_LOOKS) -> None:
        """Mostly when a step was trained that is lost by it: then there is something to recover. Often it is one that
        no checkpoint holds yet: then who comes next resumes below the recovery."""
        kind, is_used_again = random.Random(f"loss {self.plan.seed}").random(), self.plan.config.max_uses > 1
        is_common = kind <= 0.3 and not is_used_again
        known = int(self._saved[0][0].get(Keys(RUN).meta.encode(), {}).get(b"step", 0))
        if kind > 0.6:
            known = max([known, *self.trainer.checkpoints])
        if looks and not is_common and self.trainer.trained <= known and not self.network.is_healed:
            self.scheduler.after(0.05, partial(self._roll_back, looks - 1))
            return
        job = self.trainer.job
        comes_again = random.Random(f"again {self.plan.seed}").random() < (0.1 if is_used_again else 0.6)
        if self.plan.own:
            self._loses_when_apart = True
            self.scheduler.after(1.0, self.one_has_a_step)  # at the latest
        elif comes_again and job is not None and not self.network.is_healed:
            self.loses_again = True
            self.trainer.die(job)
        else:
            self.forget()

    def one_has_a_step(self) -> None:
        """One rank was given a step, and another has not asked for it yet."""
        if self._loses_when_apart:
            self._loses_when_apart = False
            self.forget()

    def forget(self) -> None:
        """The server loses its newest writes."""
        self.note("the server forgets what came after its last fsync")
        self.network.generation += 1
        self._lose()
        self.network.down_until = self.scheduler.now + 0.2
        self._moment("a loss")

    def _lose(self) -> None:
        """Loses what was acknowledged since the last look at the disk, or the last word to the replica."""
        self.was_rolled_back = True
        self.losses += 1
        if Keys(RUN).meta.encode() not in self._saved[0][0]:
            self.was_disturbed = True  # the run is lost whole, and begun again
        on_disk, known = self._saved
        self.server.roll_back(on_disk)
        self.invariants.roll_back(known, self.trainer.job.at if self.trainer.job else 0)

    def ends_untold(self, step: int) -> bool:
        """True when a trainer ends before it reports a step that the server has lost: nobody learns of it."""
        here = self.invariants.field(self.invariants.keys.meta, b"step")
        resumes_here = max(self.trainer.checkpoints, default=0) <= here < step
        if not resumes_here or self.network.is_healed or self.dice.random() < 0.6:
            return False
        self.note(f"the trainer is killed, and has not reported step {step}, which the server has lost")
        return True

    def _fail_over(self) -> None:
        """Planned, and then nothing is lost; or the replica had not got what came last."""
        is_behind = self.dice.random() < 0.5 and hasattr(self, "_saved")
        self.note(f"another server is the primary{', without what came last' * is_behind}")
        self.network.fail_over(self.plan.failover)
        if is_behind:
            self._lose()
        else:
            self.server.restart()  # scripts are of one server

    def _fault(self, process: Process, fault: str, commands: Sequence[Command]) -> None:
        self._log.add(f"{process.name}: {fault}, at", commands)
        self.reasons.disturbed(process, fault)
        if fault == "stopped" and process.name.startswith("rank"):
            self.trainer.stopped(process)

    def _moment(self, what: str) -> None:
        """Something after which a trainer should write a checkpoint: some end before they do."""
        job, retired = self.trainer.job, self.invariants.field(self.invariants.keys.meta, b"retired")
        needs_one = what == "a recovery" and max(self.trainer.checkpoints, default=0) < retired
        if self.plan.own and self.plan.rollback:
            return  # the ranks of before go on with what they have
        if not self.network.is_healed and job is not None and self.dice.random() < (0.9 if needs_one else 0.4):
            self.note(f"{what}: the trainer is killed")
            seconds = self.dice.uniform(0.0, 0.05 if needs_one else 0.3)
            self.scheduler.after(seconds, partial(self.trainer.die, job))
