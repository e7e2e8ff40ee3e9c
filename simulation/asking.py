"""Operators who ask: pending groups dropped without a lease, short drains, other settings, ends of sources."""

from __future__ import annotations

from rlbuffer.client.operations import choose
from rlbuffer.client.writer import Writer
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.daemon.config_changes import config_digest
from rlbuffer.errors import ConfigChanged, ConfigError, EpochChanged, RunGone, ServerRefused, ServerUnreachable
from rlbuffer.store.operator import OperatorStore
from rlbuffer.store.worker import WorkerStore
from simulation.host import Host
from simulation.rollouts import made_group
from simulation.scheduler import Process

WISHES = ("drop", "drop", "drain", "config")
FILLS = (0.7, 0.8, 0.9)
"""Values of `close_fill` that are asked for: a setting that none of the invariants depends on."""


def ask(host: Host, process: Process) -> None:
    """Asks for something every now and then, until everything heals and nothing drains any more.

    It looks once more when all has healed: a server that was set back may have lost that the run goes on again.
    """
    store, dice = host.store(process, OperatorStore), host.world.dice
    is_draining, before = False, None
    while True:
        host.world.scheduler.wait(dice.uniform(0.1, 1.0))
        try:
            meta = store.meta()  # how long tombstones are kept, too
            if host.world.network.is_healed and not meta.draining_ms:
                return
            before = meta if dice.random() < 0.5 else before
            wish = "undrain" if is_draining or host.world.network.is_healed else dice.choice(WISHES)
            if wish == "undrain":
                store.ask_undrain()
                is_draining = False
            elif wish == "drain":
                is_draining = True  # also when the answer is lost
                store.ask_drain()
            elif wish == "config" and meta.config:
                # Settings that no leader can take: there is no such module. Some ask by what they saw a while ago.
                # Beside slow = "wait" that is refused before anybody is asked.
                change = {"close_fill": dice.choice(FILLS)} if dice.random() < 0.8 else {"order": "not.there:order"}
                config = BatcherConfig(**{**meta.config, **change})
                seen = before if before is not None and dice.random() < 0.3 else meta
                store.ask_config(config.as_dict(), config_digest(config), seen=seen)
            elif wish == "drop":
                chosen = choose(store, "")
                if chosen.drops:
                    store.drop_pending([dice.choice(chosen.drops)])
        except (ConfigChanged, ConfigError, RunGone, ServerRefused, ServerUnreachable):
            continue


def push_more(host: Host, process: Process) -> None:
    """`rlbuffer push` of a group more, into a run that has ended: it trains all the same."""
    store, world = host.store(process, WorkerStore), host.world
    writer = Writer(store, "late", epoch=store.open_run().epoch)
    world.invariants.joined(writer.incarnation, writer._producer.epoch)
    writer.push(made_group(world.dice, "a-late", "a", max(0, store.policy().version)))


def end(host: Host, process: Process) -> None:
    """`rlbuffer env done`, `env resume`, the start of `rlbuffer run`; when all has healed, every env is done.

    That is said again and again: a server that was set back may have lost it, and a request of before may come late.
    """
    store, world = host.store(process, OperatorStore), host.world
    share = world.dice.choice((0.5, 0.9))
    while True:
        world.scheduler.wait(world.dice.uniform(0.1, 1.0))
        try:
            meta = store.meta()
            epoch = meta.epoch
            if not meta.step:
                continue  # a run that trains nothing shows nothing
            if world.network.is_healed:
                for env in ("a", "b"):
                    store.say_done(env, epoch=epoch)
                continue
            env, chance = world.dice.choice(("a", "b")), world.dice.random()
            if chance < share:
                store.say_done(env, epoch=epoch)
            elif chance < share + 0.6 * (1 - share):
                store.forget_end(world.dice.choice((env, env, "c")))  # or of one that there is not
            else:
                for _ in range(world.dice.choice((1, 2))):  # its first workers may not have come yet
                    store.expect([f"w{index}" for index in range(world.plan.writers)])
        except (EpochChanged, RunGone, ServerRefused, ServerUnreachable):
            continue
