"""People, and what only chance does: groups dropped by hand, runs taken back, bytes that change in payloads."""

from __future__ import annotations

from collections.abc import Sequence

from rlbuffer.errors import EpochChanged, LeaseLost, NotFound, RunGone, StepRetired
from rlbuffer.records.step_plan import Drop
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.operator import OperatorStore
from rlbuffer.store.records import PoolEntry
from rlbuffer.store.session import text
from simulation.host import AWAY, Host, World
from simulation.scheduler import Process


# -- operator ----------------------------------------------------------------------------------------------------------
def operator(host: Host, process: Process) -> None:
    """Drops a pending group by hand, every now and then."""
    store = host.store(process, OperatorStore)
    while not host.world.network.is_healed:
        host.world.scheduler.wait(host.world.dice.uniform(0.1, 1.0))
        try:
            store.meta()  # how long tombstones are kept
            pool = store.read_pool(count=50)
            if not pool:
                continue
            group = host.world.dice.choice(pool).group_id
            entries = [entry for entry in pool if entry.group_id == group]
            store.drop_pending([(_drop_of(entries), entries)])
        except (RunGone, *AWAY):
            continue


def releaser(host: Host, process: Process) -> None:
    """Takes groups back that were trained and wait for another use, also while a plan with them is on its way."""
    store = host.store(process, LeaderStore)
    while not host.world.network.is_healed:
        host.world.scheduler.wait(host.world.dice.uniform(0.05, 0.4))
        try:
            store.meta()
            used = store.reused()
            token = store.look(lambda client: client.hget(store.keys.lease, "token"))
            if used and token:
                entries = host.world.dice.choice(used).entries
                store.drop(int(text(token)), [(_drop_of(entries), entries)])
        except (LeaseLost, *AWAY):
            continue


def _drop_of(entries: Sequence[PoolEntry]) -> Drop:
    return Drop(
        group_id=entries[0].group_id,
        env=entries[0].env,
        reason="void",
        rollouts=sum(e.rollouts for e in entries),
        tokens=sum(e.tokens for e in entries),
        entry_ids=tuple(e.entry_id for e in entries),
    )


def take_back(host: Host, keep: int, process: Process) -> None:
    """`rlbuffer runs rewind`, with --keep-pending or without, to a checkpoint. The trainer is stopped before, and
    starts again."""
    world, trainer = host.world, host.world.trainer
    store = host.store(process, OperatorStore)
    with_pool = world.dice.random() < 0.5
    while True:
        try:
            meta = store.meta()
            if keep < 0:
                choice = [step for step in trainer.checkpoints if meta.retired <= step <= meta.step]
                keep = world.dice.choice(choice or [0])
            world.note(f"the operator takes the run back to step {keep}{', with its pool' if with_pool else ''}")
            if with_pool:
                store.rewind(keep, force=True)
            else:
                store.void_from(keep + 1, force=True)
        except AWAY:
            world.scheduler.wait(0.1)  # it may have been done: asked again it does no harm
            continue
        except EpochChanged as error:
            world.note(f"asks again: {error}")
            continue
        except (NotFound, StepRetired, RunGone) as error:
            world.note(f"refused: {error}")
        else:
            for step in [step for step in trainer.checkpoints if step > keep]:
                del trainer.checkpoints[step]
        break
    trainer.is_held = False
    world.scheduler.after(0.1, trainer.begin)


# -- damage ------------------------------------------------------------------------------------------------------------
def damage(world: World) -> None:
    """Changes a byte of a payload that somebody needs, or loses it: a disk or memory did."""
    invariants, data = world.invariants, world.server.data
    keys = sorted(
        {e.payload for e in invariants.pool.values()} | {k for s in invariants.steps.values() for k in s.payloads}
    )
    if not keys:
        return
    key = world.dice.choice(keys)
    fields = data.get(key)
    if not fields:
        return
    field = world.dice.choice(sorted(fields))
    old = fields[field]
    if world.dice.random() < 0.3 and len(fields) > 1:
        del fields[field]
    else:
        at = world.dice.randrange(len(old))
        fields[field] = old[:at] + bytes([old[at] ^ (1 << world.dice.randrange(8))]) + old[at + 1 :]
    world.note(f"payload {field.decode()} of {key.decode()} is damaged")
    invariants.damaged.add((key, field))
