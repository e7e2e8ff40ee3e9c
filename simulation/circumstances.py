"""Circumstances that are not in every seed: steps that take longer than a lease, memory that is short, strangers."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.errors import ConfigError, WrongAnswer
from rlbuffer.records.step_plan import Decision
from rlbuffer.store.viewer import Viewer
from rlbuffer.wire.payload import encode_push
from simulation.client import encoded
from simulation.host import AWAY, Host, World
from simulation.rollouts import made_group
from simulation.scheduler import Process
from simulation.server import Command
from simulation.slow_groups import Watched
from simulation.values import LARGEST

LIMIT = 1_000_000_000
"""Value of maxmemory while memory is short, in bytes."""
SHORT = (0.6, 0.72, 0.9)
"""Memory in use then, as shares of the limit: it is watched, a checkpoint is asked for, steps retire early."""
AHEAD_MS = 7_200_000
"""How far an id of a stranger lies ahead of the clock, where it does."""
FAR_AHEAD = 0.2
"""Share of a stranger's entries with an id of a time that lies far ahead."""
REPEATED = 0.01
"""Share of commits that come twice in a row."""
UNLINKED = 0.02
"""Share of pushes whose payloads a stranger removes."""
JAMMED = 0.005
"""Share of pushes that find a pool whose last id a stranger has set to the largest."""
OWN_FAULT = "a function of the user's own failed"


def planner(world: World) -> type[Batcher]:
    """The batcher, with the time that it takes to decide; now and then a function of the user's own fails in it."""
    plan, dice, scheduler = world.plan, world.dice, world.scheduler

    class Slow(Watched):
        fail = staticmethod(world.invariants.fail)

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


# -- strangers ---------------------------------------------------------------------------------------------------------
def stranger(host: Host, process: Process) -> None:
    """Writes into the pool, and among the tickets, what no client writes; a worker's rights are enough for it."""
    world, store, pushes = host.world, host.store(process, Viewer), count()
    while not world.network.is_healed:
        world.scheduler.wait(world.dice.uniform(0.2, 1.0))
        fields, entry_id = world.dice.choice(_strange(world)), "*"
        if world.dice.random() < FAR_AHEAD:
            entry_id = f"{world.server.now_ms() + AHEAD_MS}-0"
        ticket = {world.dice.choice(("no number", "9" * 30)): world.dice.choice((0, world.server.now_ms() + 500))}

        def write(client: Any, fields: Any = fields, entry_id: str = entry_id, ticket: Any = ticket) -> None:
            # A try whose answer was lost is another push: two of one payload would be what `verify` reports.
            client.xadd(
                store.keys.pool, {**fields, "key": f"z.{next(pushes)}"} if "key" in fields else fields, entry_id
            )
            client.zadd(store.keys.tickets("a"), ticket)

        try:
            if store.look(lambda client: client.exists(store.keys.meta)):
                store.look(write)
        except (WrongAnswer, *AWAY):
            continue  # an id like it was given already


# -- at the wrong moment -----------------------------------------------------------------------------------------------
def come_first(world: World, name: str, command: Command) -> None:
    """Does what may come between a look and the script that relies on it."""
    if world.server.refusal:
        return
    args = command[3 + int(command[2]) :]
    if name == "OPEN":
        _write_first(world)
    elif name == "RECOVER":
        _drop_first(world, args)
    elif name == "LEASE" and args[0] == b"refuse":
        _take_back_first(world)
    elif name == "ATTEMPT":
        _halt_first(world, args)
    elif name == "COMMIT" and world.rare_dice.random() < REPEATED:
        world.note("the request comes twice, and the answer to the second is heard")
        world.server.execute([command])
    elif name == "PUSH" and world.plan.strangers:
        if world.dice.random() < UNLINKED:
            world.note("somebody removes its payload before that")
            world.server.execute([encoded(["UNLINK", args[2]])])
        elif world.rare_dice.random() < JAMMED:
            _jam_first(world)


def _write_first(world: World) -> None:
    """Somebody writes into the pool of a run that was deleted, and that is begun again."""
    if not (world.plan.left and world.was_disturbed) or world.was_left:
        return
    world.was_left = True
    world.note("somebody writes into the pool before that")
    sender, world.network.sender = world.network.sender, "operator without the client"
    world.server.execute([encoded(["XADD", world.invariants.keys.pool, "*", "nothing", "of this"])])
    world.network.sender = sender
    world.scheduler.after(0.2, world.reset)


def _jam_first(world: World) -> None:
    """Somebody sets the pool's last id to the largest, and back behind the next command."""
    pool = world.server.data.get(world.invariants.keys.pool.encode())
    if pool is None:
        return
    world.note("somebody jams the pool for a moment")
    last, pool.last = pool.last, (LARGEST, LARGEST)

    def back() -> None:
        pool.last = last

    world.scheduler.after(0.0, back)


def _drop_first(world: World, args: Sequence[bytes]) -> None:
    """An operator drops what a recovery names. Of a group of several pushes the next would be a duplicate of it."""
    entries, keys = 12 + 3 * int(args[11]), world.invariants.keys
    if not int(args[entries]) or world.dice.random() < 0.2:
        return
    pending = next((e for e in world.invariants.pool.values() if b"%d-%d" % e.entry_id == args[entries + 1]), None)
    if pending is None or sum(e.group == pending.group for e in world.invariants.pool.values()) > 1:
        return
    names = (keys.lease, keys.pool, keys.ledger, keys.closed, keys.garbage, keys.history, keys.meta, keys.reuse)
    drop = ["", keys.payload_prefix, 100, 1, pending.group, pending.env, "void", 1, "", 1, args[entries + 1]]
    _ask_first(world, f"drops {pending.group}", "DROP", names, drop)


def _take_back_first(world: World) -> None:
    """An operator takes the settings back that the leader is about to refuse."""
    keys, meta = world.invariants.keys, world.server.data[world.invariants.keys.meta.encode()]
    if b"config" in meta and world.dice.random() < 0.5:
        seen = (meta[b"config"], meta[b"config_digest"], meta[b"revision"], meta.get(b"wanted_digest", b""))
        _ask_first(world, "takes the settings back", "ASK", (keys.meta, keys.allowance), ["config", *seen])


def _halt_first(world: World, args: Sequence[bytes]) -> None:
    """No batcher is awake when a trainer hands back a state below the retired steps."""
    retired = world.invariants.field(world.invariants.keys.meta, b"retired")
    if not args[5] or int(args[2]) >= retired or world.dice.random() < 0.15:
        return
    world.note("all batchers stand still before that")
    for process in {task.process for task in world.scheduler.tasks if task.process.name.startswith("batcher")}:
        process.stopped_until = world.scheduler.now + 1.5


def _ask_first(world: World, what: str, script: str, keys: Sequence[str], args: Sequence[Any]) -> None:
    sha = next((sha for sha in world.server.scripts if world.invariants.script_of([b"", sha]) == script), None)
    if sha is not None:
        world.note(f"an operator {what} before that")
        world.server.execute([encoded(["EVALSHA", sha, len(keys), *keys, *args])])


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
    """A push that is whole, except a reward that no client lets through."""
    group = made_group(world.dice, f"beyond-{world.dice.randrange(10**6)}", "a", 0)
    push = encode_push(group)
    reward = struct.pack("<d", world.dice.choice((1e39, -1.7e308, float("inf"), float("nan"))))
    body = push.metadata.replace(struct.pack("<d", 1.0), reward)[:-4]
    metadata = body + struct.pack(">I", zlib.crc32(body))
    amounts = {"rollouts": str(len(push.info.rollouts)), "tokens": str(push.info.tokens)}
    return {"env": "a", "group": group.group_id, "key": "z.1", "metadata": metadata, **amounts}
