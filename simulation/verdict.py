"""The end that a seed must come to once everything has healed: the next steps, the end, and sound accounts."""

from __future__ import annotations

from functools import partial

from rlbuffer.store.keys import Keys
from rlbuffer.store.verify.verify import verify
from rlbuffer.store.viewer import Viewer
from simulation.actors import Trainer
from simulation.asking import push_more
from simulation.host import Host, World
from simulation.network import SimulatedConnection
from simulation.scheduler import Process

PROGRESS_SECONDS = 10.0
"""I12: the next step comes within this after the last fault has healed."""
SLOW_TASK_SECONDS = 20.0
"""And this, where some tasks take ten times as long: all workers may be in one, and the next may be one again."""
LAST_SECONDS = 30.0
"""The same for the end of a run whose data ends: all that is left, step by step."""


def goes_on(trainer: Trainer, world: World) -> None:
    """Two more steps, each within the time allowed; what stands still meanwhile wakes up in it."""
    invariants, scheduler, config = world.invariants, world.scheduler, world.plan.config
    longest = PROGRESS_SECONDS
    if config.slow == "wait":
        longest += SLOW_TASK_SECONDS + config.slow_wait_seconds
    for _ in range(2):
        target = trainer.trained + 1
        done = scheduler.run(
            lambda target=target: bool(invariants.violation) or trainer.trained >= target,
            scheduler.now + longest,
        )
        if not done:
            invariants.fail("I12", f"step {target} is not trained after {longest:g} s: {world.sentence}")


def ends(host: Host) -> None:
    """The run ends where its data end; and again, when somebody pushes more after it was said that nothing comes."""
    world = host.world
    invariants, scheduler = world.invariants, world.scheduler
    _await_end(world)
    if world.plan.said and not invariants.violation:
        late = host.start("operator who pushes", partial(push_more, host), lambda process: None)
        scheduler.run(lambda: late.is_dead or bool(invariants.pool), scheduler.now + LAST_SECONDS)
        _await_end(world)


def _await_end(world: World) -> None:
    store = Viewer(SimulatedConnection(world.network, Process("looks")), world.run)
    meta, pool = Keys(world.run).meta.encode(), Keys(world.run).pool.encode()
    invariants, scheduler = world.invariants, world.scheduler

    def has_ended() -> bool:
        pushes, facts = world.server.data.get(pool), world.server.data.get(meta) or {}
        return facts.get(b"ended", b"") == facts.get(b"step") and not (pushes and pushes.entries)

    if not scheduler.run(lambda: bool(invariants.violation) or has_ended(), scheduler.now + LAST_SECONDS):
        invariants.fail("I12", f"the run has not ended after {LAST_SECONDS:g} s: {world.sentence}")
    elif not invariants.violation:
        sources = store.sources()
        # A stranger may have put a ticket out since the leader looked; workers get none of an env that is done.
        others = sources.open - (set(sources.ends) if world.plan.strangers else set())
        # An env that nobody has pushed to may be unknown: the run ends over the others.
        if (
            not sources.done | sources.ends.keys() >= {"a", "b"} & store.ledger().envs.keys()
            or others
            or store.trainer().trained < store.meta().step
        ):
            invariants.fail("end", f"the run has ended, and {sources} is not")


def is_sound(world: World) -> None:
    """No process has failed, and `verify` finds nothing but what chance and strangers have done."""
    invariants, strangers = world.invariants, world.plan.strangers
    for failure in world.scheduler.failures:
        invariants.fail("end", failure)
    if invariants.violation:
        return
    store = Viewer(SimulatedConnection(world.network, Process("verify")), world.run)
    store.meta()
    invariants.check_heard()
    for finding in verify(store).findings:
        if any(key.decode() in finding.message for key, _ in invariants.damaged):
            continue  # it names what chance has changed, as it must
        if strangers and finding.invariant in ("I10", "I13"):
            continue  # likewise: what nobody has counted as pushed, what is no ticket,
        if any(f"pending push {ms}-{place}:" in finding.message for ms, place in invariants.strange):
            continue  # and an entry that looks well, but has no payload
        invariants.fail(f"verify {finding.invariant}", finding.message)
