"""Surroundings of the processes of a simulated run: the world around them, and who starts them again when they end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rlbuffer.errors import EpochChanged, ServerRefused, ServerUnreachable
from rlbuffer.store.session import Role
from simulation.invariants import Invariants
from simulation.network import Network, SimulatedConnection
from simulation.plan import Plan
from simulation.scheduler import Killed, Process, Scheduler
from simulation.server import Server

AWAY = (ServerUnreachable, ServerRefused)


class Listener(Protocol):
    """Hears what batchers say of themselves (:class:`simulation.reasons.Reasons`)."""

    def heard(self, process: Process, line: Mapping[str, Any]) -> None:
        """A batcher has said it of itself."""


class World(Protocol):
    """Knowledge and actions of a process in its world (:class:`simulation.world.World`)."""

    plan: Plan
    run: str
    dice: random.Random
    rare_dice: random.Random
    scheduler: Scheduler
    server: Server
    network: Network
    invariants: Invariants
    sentence: str
    reasons: Listener
    is_over: bool
    was_disturbed: bool
    was_left: bool
    was_taken_back: bool
    was_rolled_back: bool
    loses_again: bool

    def one_has_a_step(self) -> None:
        """One rank was given a step, and another has not asked for it yet."""

    def note(self, text: str) -> None:
        """Into the log of the run."""


class Host:
    """Starts processes and starts them again when they end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clocks: Counter[str] = Counter()
        """First word of processes' names -> seconds by which their clocks are ahead."""

    def store(self, process: Process, role: type[Role]) -> Role:
        """The process's own store, for its role."""
        connection = SimulatedConnection(self.world.network, process)
        return role(connection, self.world.run, patience_seconds=self.world.plan.patience_seconds)

    def start(self, name: str, main: Callable[[Process], None], on_end: Callable[[Process], None]) -> Process:
        """A process that runs `main`; `on_end` is called when it has ended, however."""
        process = Process(name)
        process.clock_ahead = self.clocks[name.split(" ")[0]]

        def body() -> None:
            try:
                main(process)
            except (Killed, Exception) as error:
                process.outcome = error
            if self.world.is_over or name.startswith("operator"):
                return
            self.world.scheduler.kill(process)
            self.world.note(f"{name} ended: {describe(process.outcome)}")
            on_end(process)

        self.world.scheduler.spawn(process, body)
        return process

    def keep(self, name: str, main: Callable[[Process], None], expected: tuple[str, ...] = ()) -> None:
        """Starts it as :meth:`start` does, again and again; an error is a violation, except the server's absence and
        `expected`."""

        def ended(process: Process) -> None:
            outcome = process.outcome
            # A writer whose line of versions was given up begins again, as workers and scorers do.
            allowed = (*AWAY, EpochChanged)
            is_fault = isinstance(outcome, Exception) and not isinstance(outcome, allowed)
            if is_fault and not self.world.was_disturbed and not any(words in str(outcome) for words in expected):
                self.world.invariants.fail("end", f"{name} died of {describe(outcome)}")
            delay = 0.05 if self.world.network.is_healed else self.world.dice.uniform(0.02, 1.5)
            self.world.scheduler.after(delay, lambda: self.keep(name, main, expected))

        self.start(name, main, ended)


def describe(error: BaseException | None) -> str:
    """An outcome, for the log."""
    return "done" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
