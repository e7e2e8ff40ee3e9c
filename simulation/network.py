"""The network: every round trip takes its time, and what the seed draws may happen to it.

==============  ====================================================================================================
lost request    never reaches the server; the client sees a reset
lost reply      carried out; the client sees a reset
late            the client gives up, the server carries it out later: it hung, or a proxy held it
twice           carried out and answered, and once more at once or later
killed          the process ends before or after the server has carried it out
stopped         the process stands still (SIGSTOP) before or after, for longer than a lease
restart         the server comes back without its scripts; everybody's connections break
cut             nothing of this process gets through for a while
failover        behind the same address stands another primary; connections of before lead to the demoted one, which
                refuses writes (READONLY), everything for a while (MASTERDOWN), or as a cluster's node (MOVED)
==============  ====================================================================================================

Late requests come within :data:`LATEST_SECONDS`. Above this stands the real :class:`Connection.call`: what is repeated,
for how long, and what the server's refusals mean.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from redis.exceptions import ConnectionError as Reset
from redis.exceptions import TimeoutError as NoAnswer

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import RlbufferError
from rlbuffer.store.limits import PushLimits
from rlbuffer.store.server.connection import Connection
from rlbuffer.store.server.script import Script
from simulation.client import SimulatedClient
from simulation.draws import FAULTS
from simulation.keyspace import error
from simulation.plan import Plan
from simulation.scheduler import Killed, Process, Scheduler
from simulation.server import WRITES, Command, Server

LATEST_SECONDS = 2.0
READONLY = "READONLY You can't write against a read only replica."
UNBLOCKED = "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)"


class Network:
    """Carries requests between processes and the server."""

    def __init__(self, scheduler: Scheduler, server: Server, plan: Plan, dice: random.Random) -> None:
        self.scheduler = scheduler
        self.server = server
        self.plan = plan
        self.dice = dice
        self.is_healed = False
        """No faults any more."""
        self.down_until = 0.0
        """Nobody reaches the server."""
        self.cut_until: dict[Process, float] = {}
        self.on_fault: Callable[[Process, str, Sequence[Command]], None] = lambda process, fault, commands: None
        self.before: Callable[[Sequence[Command]], None] = lambda commands: None
        """Called before the server carries something out."""
        self.sender = ""
        """Whose request is being carried out."""
        self.is_repetition = False
        """What is being carried out was given up or answered before: it comes late."""
        self.calls = 0
        self.generation = 0
        """Grows when the server goes away: connections of before are broken."""
        self.too_large: set[bytes] = set()
        """Groups whose payloads the server takes from nobody until all heals: it closes the connection in the middle of
        them. A run that begins anew has groups of the same names."""
        self._connected: dict[Process, int] = {}
        self.primary = 0
        """Grows when another server becomes the primary: connections of before stay, and lead to the old one."""
        self.demoted = ""
        """What that one answers."""
        self._leads_to: dict[Process, int] = {}
        self._kinds = [name for name in FAULTS if plan.faults.get(name, 0) > 0]
        self._weights = [plan.faults[name] for name in self._kinds]
        self._rate = sum(self._weights)

    def draw(self, process: Process) -> str:
        """The fault of the next round trip; "" for nothing."""
        if self.is_healed or self.dice.random() >= self._rate:
            return ""
        kind = self.dice.choices(self._kinds, self._weights)[0]
        if kind in ("killed", "stopped") and not self.plan.may_die(process.name):
            return ""
        return kind

    def carry(self, process: Process, commands: Sequence[Command], *, is_transaction: bool) -> list[Any]:
        """One round trip of `process`."""
        if process.is_dead:
            raise Killed
        self.calls += 1
        scheduler, dice = self.scheduler, self.dice
        fault = self.draw(process)
        if fault:
            self.on_fault(process, fault, commands)
        generation = self._connected.setdefault(process, self.generation)
        slow = not self.is_healed and dice.random() < self.plan.slow
        scheduler.wait(dice.uniform(0.0002, 0.002) if not slow else dice.uniform(0.002, 0.2))
        if self.plan.planning and len(commands) > 1 and not self.is_healed and process.name.startswith("batcher"):
            # Looking for the payloads of a large step takes its time, too.
            looks = dice.random() < self.plan.planning / 4
            scheduler.wait(self.plan.lease_seconds * dice.uniform(0.1, 1.2) if looks else 0.0)
        is_late = dice.random() < 0.5
        if fault == "killed" and not is_late:
            scheduler.kill(process)
            raise Killed
        if fault == "stopped" and not is_late:
            self._stop(process)
        if fault == "restart":
            self.server.restart()
            self.generation += 1
            self.down_until = scheduler.now + dice.uniform(0.05, 1.0)
        if fault == "cut":
            self.cut_until[process] = scheduler.now + dice.uniform(0.2, 2.5)
        # Each thread of a process has a connection of its own: what was on its way breaks, whoever noticed it first.
        if generation != self.generation:
            self._connected[process] = self.generation
            raise Reset("simulated: connection closed by server")
        if max(self.down_until, self.cut_until.get(process, 0.0)) > scheduler.now:
            scheduler.wait(0.01)
            raise Reset("simulated: connection refused")
        if self._leads_to.setdefault(process, self.primary) != self.primary and (refused := self._demoted(commands)):
            return [error(refused)] * len(commands)
        cut_off = set() if self.is_healed else self.too_large
        if any(c[0] == b"HSET" and c[1].rpartition(b":")[0] in cut_off for c in commands):
            raise Reset("simulated: connection closed by server")
        if fault == "lost request":
            raise Reset("simulated: connection reset")
        if fault == "late":
            self._later(process, commands, is_transaction, dice.uniform(0.0, LATEST_SECONDS))
            scheduler.wait(dice.uniform(0.0, 0.3))
            raise NoAnswer("simulated: no answer")
        if fault == "twice":
            self._later(process, commands, is_transaction, dice.choice((0.0, 0.0, dice.uniform(0.0, LATEST_SECONDS))))
        replies = self._execute(process, commands, is_transaction, is_cut=fault == "lost reply")
        if fault == "killed":
            scheduler.kill(process)
            raise Killed
        if fault == "lost reply":
            raise Reset("simulated: connection reset by peer")
        if fault == "stopped":
            self._stop(process)
        return replies

    def hang_up(self, process: Process) -> None:
        """The process keeps no connection that it has: the next one leads to the primary."""
        self._leads_to.pop(process, None)

    def fail_over(self, answer: str) -> None:
        """Another server is the primary; processes that block at the old one hear so."""
        self.primary, self.demoted = self.primary + 1, answer
        for wakes in self.server.waiting.values():
            for wake in wakes:
                wake()
        self.server.waiting.clear()

    def _demoted(self, commands: Sequence[Command]) -> str:
        """The refusals of the demoted server; it answers reads by what the new primary tells it, mostly."""
        is_write = any(command[0] == b"EVALSHA" or command[0] in WRITES for command in commands)
        if self.demoted.startswith("MOVED") or (self.demoted.startswith("MASTERDOWN") and not self.is_healed):
            return self.demoted
        return READONLY if is_write else ""

    def wait_for_entry(self, process: Process, command: Command, key: bytes, seconds: float) -> Any:
        """A blocking XREAD."""
        deadline, primary = self.scheduler.now + seconds, self.primary
        while True:
            if self.primary != primary:
                raise error(UNBLOCKED)
            reply = self.carry(process, (command,), is_transaction=False)[0]
            if isinstance(reply, Exception):
                raise reply
            if reply is not None or self.scheduler.now >= deadline:
                return reply
            task = self.scheduler.current
            if task is None:
                return None
            self.server.waiting.setdefault(key, []).append(partial(self.scheduler.wake, task))
            self.scheduler.wait(deadline - self.scheduler.now)
            if self.scheduler.now >= deadline:
                return None

    def _execute(
        self, process: Process, commands: Sequence[Command], is_transaction: bool, *, is_cut: bool
    ) -> list[Any]:
        pieces = _pieces(commands)
        if len(pieces) > 1:
            if is_cut:  # the connection breaks after any of them
                del pieces[self.dice.randrange(1, 1 + len(pieces)) :]
            return self._execute_pieces(process, pieces)
        self.sender = process.name
        if not self.is_healed:
            self.before(commands)
        if commands[0][0] == b"MULTI":
            return self._carried_out(commands)
        if is_transaction or len(commands) == 1 or self.is_healed or self.dice.random() < 0.9:
            return self.server.execute(commands, is_transaction=is_transaction)
        # A pipeline is no transaction: others come in between.
        cut, generation = self.dice.randrange(1, len(commands)), (self.generation, self.primary)
        replies = self.server.execute(commands[:cut])
        self.scheduler.wait(self.dice.uniform(0, 0.01))
        if generation != (self.generation, self.primary):
            raise Reset("simulated: connection closed by server")
        self.sender = process.name
        return replies + self.server.execute(commands[cut:])

    def _execute_pieces(self, process: Process, pieces: Sequence[Sequence[Command]]) -> list[Any]:
        """Others come in between."""
        replies, generation = list[Any](), (self.generation, self.primary)
        for piece in pieces:
            if not self.is_healed and self.dice.random() < 0.1:
                self.scheduler.wait(self.dice.uniform(0, 0.01))
                if generation != (self.generation, self.primary):
                    raise Reset("simulated: connection closed by server")
            self.sender = process.name
            if not self.is_healed:
                self.before(piece)
            replies += self._carried_out(piece)
        return replies

    def _carried_out(self, piece: Sequence[Command], is_transaction: bool = False) -> list[Any]:
        if piece[0][0] != b"MULTI":
            return self.server.execute(piece, is_transaction=is_transaction)
        within = piece[1:-1]
        return [b"OK", *[b"QUEUED"] * len(within), self.server.execute(within, is_transaction=True)]

    def _later(self, process: Process, commands: Sequence[Command], is_transaction: bool, seconds: float) -> None:
        commands, generation = [list(command) for command in commands], (self.generation, self.primary)

        def arrive() -> None:
            if generation != (self.generation, self.primary):
                return  # the server that it was on its way to is gone, and its connection with it
            self.sender = f"{process.name} (late)"
            self.is_repetition = True
            try:
                for piece in _pieces(commands):
                    self._carried_out(piece, is_transaction)
            finally:
                self.is_repetition = False

        self.scheduler.after(seconds, arrive)

    def _stop(self, process: Process) -> None:
        process.stopped_until = self.scheduler.now + self.plan.stop_seconds(self.dice)
        self.scheduler.wait(0.0)


def _pieces(commands: Sequence[Command]) -> list[list[Command]]:
    """A pipeline as the server carries it out: each transaction and each script by itself."""
    pieces: list[list[Command]] = []
    for command in commands:
        if not pieces or command[0] in (b"MULTI", b"EVALSHA") or pieces[-1][-1][0] in (b"EXEC", b"EVALSHA"):
            pieces.append([])
        pieces[-1].append(command)
    return pieces


class SimulatedConnection(Connection):
    """The real connection's logic over the simulated network."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process
        super().__init__("redis://simulated", home=Path(), server=ServerSettings(), name=process.name)

    @property
    def is_cluster(self) -> bool:
        return self._network.plan.spread

    def _make_client(self, timeout_seconds: float) -> Any:
        return SimulatedClient(self)

    def _hang_up(self) -> None:
        self._network.hang_up(self._process)

    def _check_server(self) -> None:
        """The modelled server is suitable."""

    def limits(
        self, patience_seconds: float = 0.0, *, on_retry: Callable[[RlbufferError], object] | None = None
    ) -> PushLimits:
        return PushLimits()

    def script(self, text: str) -> Script:
        return Script(lambda: self.client, self._network.plan.broken(text))

    def close(self) -> None:
        self._is_closed = True

    def round_trip(self, commands: Sequence[Command], *, is_transaction: bool) -> list[Any]:
        return self._network.carry(self._process, commands, is_transaction=is_transaction)

    def round_trip_blocking(self, command: Command, key: bytes, seconds: float) -> Any:
        return self._network.wait_for_entry(self._process, command, key, seconds)
