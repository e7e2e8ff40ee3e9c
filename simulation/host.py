"""Surroundings of the processes of a simulated run: the world around them, and who starts them again when they end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from rlbuffer.errors import EpochChanged, ServerRefused, ServerUnreachable
from rlbuffer.store.session import Role
from simulation.network import SimulatedConnection
from simulation.scheduler import Killed, Process

AWAY = (ServerUnreachable, ServerRefused)
World = Any
"""A :class:`simulation.world.World`, whose file imports this one."""


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
