"""An append-only file cut at arbitrary bytes: the server is started twice on what is left, and the run goes on.

The first start may find half a transaction at the end of the file. The second start decides: the torn half may come to
life behind later writes.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from aof import commands
from every_role import EveryRole
from outcome import Outcome, Say
from own_server import OwnServer

from rlbuffer.client.buffer import Buffer
from rlbuffer.client.reader import Reader
from rlbuffer.client.writer import Writer
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.settings import RunSettings, ServerSettings
from rlbuffer.daemon import Daemon
from rlbuffer.errors import EpochChanged, RlbufferError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.server.binary import SERVER_BIN, find_binary
from rlbuffer.store.session import open_store
from rlbuffer.testing import make_group

SERVERS = "RLBUFFER_TEST_SERVERS"
"""Environment variable: further server programs, separated by colons."""
RUN = "torn"
CONFIG = BatcherConfig(64, step_groups=2, max_age=1000)
STEPS = 7
"""Before the cut: at most what a trainer remembers (docs/explain/protocol.md, Loss of acknowledged writes)."""
MORE = 3
"""After each of the two starts."""
KEPT = 3
"""Steps that the trainer's oldest checkpoint is behind: what is older retires."""


def programs() -> list[str]:
    """Every server program of this machine, the bundled one first."""
    found = [str(find_binary({}).path), *filter(None, map(shutil.which, ("redis-server", "valkey-server")))]
    found += filter(None, os.environ.get(SERVERS, "").split(":"))
    return list(dict.fromkeys(found))


def run_torn(directory: Path, *, program: str, cuts: int, seed: int, say: Say) -> Outcome:
    """Makes a run on a server of `program`, then cuts copies of its file `cuts` times."""
    version = find_binary({SERVER_BIN: program})
    outcome = Outcome(name=f"torn file, {version.name} {version.version}")
    began = time.monotonic()
    whole = _Story(directory / "whole", program)
    whole.go_on(STEPS)
    dice = random.Random(seed)
    places = draw_cuts(whole.file().read_bytes(), cuts, dice)
    refused = 0
    for number, place in enumerate(places):
        story = _Story(directory / str(number), program, like=whole)
        file = story.file()
        os.truncate(file, place)
        outcome.faults["cut"] += 1
        try:
            story.go_on(MORE)
            found = story.go_on(MORE) + story.trained_twice()
            outcome.findings += [f"cut at {place}: {line}" for line in found]
        except RlbufferError as error:
            refused += 1
            say(f"  cut at {place} of {len(whole.file().read_bytes())}: refused: {error}")
        shutil.rmtree(directory / str(number), ignore_errors=True)
    outcome.facts["refused, with what to do"] = refused
    outcome.facts["bytes"] = whole.file().stat().st_size
    outcome.seconds = time.monotonic() - began
    return outcome


def draw_cuts(data: bytes, count: int, dice: random.Random) -> list[int]:
    """Half of them anywhere, half inside a transaction: most bytes of a file are payloads."""
    inside: list[int] = []
    at, begun = 0, -1
    for command in commands(data):
        end = data.index(b"\r\n", at)
        at = end + 2
        for part in command:
            at += len(b"$%d\r\n" % len(part)) + len(part) + 2
        if command[0] == b"MULTI":
            begun = at
        elif command[0] == b"EXEC" and begun >= 0:
            inside.append(dice.randrange(begun, end))
            begun = -1
        elif begun >= 0:
            inside.append(at)  # behind a whole command of the transaction
    some = dice.sample(inside, min(len(inside), count // 2))
    return some + [dice.randrange(1, len(data)) for _ in range(count - len(some))]


class _Story:
    """A run on a server of its own: what was trained, as the trainer remembers it."""

    def __init__(self, directory: Path, program: str, *, like: _Story | None = None) -> None:
        self.trained: list[tuple[int, frozenset[str]]] = [] if like is None else list(like.trained)
        """Step and its rollouts, as they were trained, one after the other."""
        self.state: dict[str, Any] | None = None if like is None else like.state
        self._groups = 0 if like is None else like._groups
        self._directory, self._program = directory, program
        if like is not None:
            shutil.copytree(like._directory / "appendonlydir", directory / "appendonlydir")

    def file(self) -> Path:
        """The file that commands are appended to."""
        return max((self._directory / "appendonlydir").glob("*.incr.aof"), key=lambda path: path.stat().st_size)

    def go_on(self, steps: int) -> list[str]:
        """The server, a batcher, a worker and a trainer start and make so many more steps; the server ends by kill -9.

        -> findings of `verify` at the end.
        """
        with OwnServer(self._directory, program=self._program) as server, ExitStack() as opened:

            def store() -> EveryRole:
                made = open_store(EveryRole, server.url, run=RUN, home=self._directory, server=ServerSettings())
                opened.callback(made.close)
                return made

            own = store()
            self._begin(store())
            reader = Reader(store(), rank=0, world_size=1, timeout_seconds=60)
            with _serving(store()) as errors, closing(reader):
                self._train(reader, steps)
            if errors:
                raise errors[0]
            return [f"{finding.invariant}: {finding.message}" for finding in own.verify().findings]

    def _begin(self, store: EveryRole) -> None:
        self._store, self._writer = store, Writer(store, "w", epoch=store.open_run().epoch)

    def _train(self, reader: Reader, steps: int) -> None:
        last = self.trained[-1][0] if self.trained else 0
        if self.state is not None:
            reader.load_state_dict(self.state)
        reader.start(last)
        reader.announce(PolicyVersion(version=last))
        self._push()
        for step in reader.steps():
            rollouts = frozenset(sample.rollout_id for batch in step for sample in batch.samples)
            self.trained.append((step.number, rollouts))
            reader.announce(PolicyVersion(version=step.number))
            reader.trained(step)
            if step.number > KEPT:
                reader.checkpointed(step.number, oldest_kept=step.number - KEPT)
            self.state = reader.state_dict()
            self._push()
            steps -= 1
            if not steps:
                return

    def _push(self) -> None:
        for _ in range(3):
            self._groups += 1
            group = make_group(env="a", size=2, version=0, group_id=f"a.{self._groups}", seed=self._groups)
            try:
                self._writer.push(group)
            except EpochChanged:  # a recovery began another line of versions: a worker begins again, too
                self._begin(self._store)
                self._writer.push(group)

    def trained_twice(self) -> list[str]:
        """Rollouts in two trained steps."""
        seen: dict[str, int] = {}
        found = []
        for step, rollouts in self.trained:
            found += [
                f"{name} trained in step {seen[name]} and again in step {step}" for name in rollouts & seen.keys()
            ]
            seen |= dict.fromkeys(rollouts, step)
        return found


@contextmanager
def _serving(store: EveryRole) -> Iterator[list[BaseException]]:
    """Runs a batcher in a thread; afterwards the list has the error that ended it."""
    stop, errors = threading.Event(), list[BaseException]()

    def lead() -> None:
        try:
            Daemon(Buffer(store, settings=RunSettings()), CONFIG, lease_seconds=1.0).run(stop)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=lead, name="batcher")
    thread.start()
    try:
        yield errors
    finally:
        stop.set()
        thread.join()
