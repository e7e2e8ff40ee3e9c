"""What is not in every seed: steps that take longer than a lease, memory that is short, copies, strangers."""

from __future__ import annotations

import struct
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbuffer.batcher import Batcher
from rlbuffer.batches import Decision
from rlbuffer.errors import BackupError, ConfigError, RunGone
from rlbuffer.store.backup import write_backup
from rlbuffer.store.redis_store import RedisStore
from rlbuffer.store.restore import restore_backup
from rlbuffer.wire import encode_push
from simulation.actors import AWAY, Host
from simulation.network import SimulatedConnection
from simulation.rollouts import made_group
from simulation.scheduler import Process

if TYPE_CHECKING:
    from simulation.world import World

LIMIT = 1_000_000_000
"""maxmemory while memory is short, in bytes."""
SHORT = (0.6, 0.72, 0.9)
"""What is in use then, as shares of the limit: it is watched, a checkpoint is asked for, steps retire early."""
OWN_FAULT = "a function of the user's own failed"


def planner(world: World) -> type[Batcher]:
    """The batcher, with the time that it takes to decide; now and then a function of the user's own fails in it."""
    plan, dice, scheduler = world.plan, world.dice, world.scheduler

    class Slow(Batcher):
        def next(self, *args: Any, **kwargs: Any) -> Decision:
            if plan.stops and not world.network.is_healed and dice.random() < 0.03:
                raise ConfigError(OWN_FAULT, setting="order")
            decision = super().next(*args, **kwargs)
            if decision.plan is not None and dice.random() < plan.planning:
                scheduler.wait(plan.lease_seconds * dice.uniform(0.3, 2.0))
            return decision

    return Slow


# -- memory ------------------------------------------------------------------------------------------------------------
def fill(world: World) -> None:
    """Others fill the server, and leave it again."""
    server, dice = world.server, world.dice
    if world.network.is_healed:
        return
    server.limit, server.used = LIMIT, round(LIMIT * dice.choice(SHORT))
    world.note(f"{server.used / server.limit:.0%} of the server's memory is in use")
    world.scheduler.after(dice.uniform(0.2, 1.0), partial(fill, world))


# -- copies ------------------------------------------------------------------------------------------------------------
def copier(host: Host, process: Process) -> None:
    """`rlbuffer backup` while the run goes on, `rlbuffer restore` of what it wrote, and `verify` of that."""
    world, store = host.world, host.store(process)
    with tempfile.TemporaryDirectory(prefix="simulated-") as folder:
        number = 0
        while not world.network.is_healed:
            world.scheduler.wait(world.dice.uniform(0.2, 1.5))
            number += 1
            path = Path(folder) / f"{number}.backup"
            try:
                report = write_backup(store, path)
            except (BackupError, RunGone, *AWAY) as error:
                world.note(f"no copy: {error}")
                continue
            world.note(f"copied at step {report.step}")
            if report.missing and not _is_unsure(world):
                world.invariants.fail("copy", f"{report.missing} payloads were missing at step {report.step}")
            copy = f"{world.run}-{number}"
            if _put(host, process, copy, path):
                _look(world, copy)


def _is_unsure(world: World) -> bool:
    """What the copy lacks, the run may lack, too."""
    return bool(world.invariants.damaged or world.was_rolled_back or world.was_disturbed or world.plan.strangers)


def _put(host: Host, process: Process, copy: str, path: Path) -> bool:
    store = RedisStore(SimulatedConnection(host.world.network, process), copy)
    try:
        restore_backup(store, path)
    except Exception as error:
        if isinstance(error, AWAY):
            return False  # a restore is not repeated by itself; what it left goes away by itself
        raise
    return True


def _look(world: World, copy: str) -> None:
    """The copy is whole: `verify` finds nothing in it but what chance has changed."""
    if _is_unsure(world):
        return
    store = RedisStore(SimulatedConnection(world.network, Process("verify")), copy)
    try:
        findings = store.verify().findings
    except AWAY:
        return
    for finding in findings:
        world.invariants.fail("copy", f"{finding.invariant}: {finding.message}")


# -- strangers ---------------------------------------------------------------------------------------------------------
def stranger(host: Host, process: Process) -> None:
    """Writes into the pool what no client writes; a worker's rights are enough for it."""
    world, store = host.world, host.store(process)
    while not world.network.is_healed:
        world.scheduler.wait(world.dice.uniform(0.2, 1.0))
        fields = world.dice.choice(_strange(world))
        try:
            if store.look(lambda client: client.exists(store.keys.meta)):
                store.look(lambda client, fields=fields: client.xadd(store.keys.pool, fields))
        except AWAY:
            continue


def _strange(world: World) -> Sequence[Mapping[str, str | bytes]]:
    whole = {"env": "a", "group": "x", "key": "y.1", "rollouts": "2", "tokens": "9", "metadata": b"\xc1"}
    known = next((entry.group for entry in world.invariants.pool.values()), "x")
    return (
        {"nothing": "of this"},
        {"env": "a", "group": "x"},
        whole,
        {**whole, "env": "no env: %", "rollouts": "many", "tokens": "1" * 40},
        {**whole, "rollouts": "-3"},
        {**whole, "group": known},
        _beyond(world),
    )


def _beyond(world: World) -> Mapping[str, str | bytes]:
    """A push that is whole, but for a reward that no client lets through."""
    group = made_group(world.dice, f"beyond-{world.dice.randrange(10**6)}", "a", 0)
    push = encode_push(group)
    reward = struct.pack("<d", world.dice.choice((1e39, -1.7e308, float("inf"), float("nan"))))
    body = push.metadata.replace(struct.pack("<d", 1.0), reward)[:-4]
    metadata = body + struct.pack(">I", zlib.crc32(body))
    amounts = {"rollouts": str(len(push.info.rollouts)), "tokens": str(push.info.tokens)}
    return {"env": "a", "group": group.group_id, "key": "z.1", "metadata": metadata, **amounts}
