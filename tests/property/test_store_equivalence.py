"""The same random moves on ``memory://`` and on a real server give the same replies, and leave the run in order.

Ids, times, tokens and digests differ between two runs by nature: ids and digests are compared by the order in which
they were first seen, times and tokens not at all.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every_role import EveryRole
from looks import allowances
from store_runs import rollouts_of

from rlbuffer.config.settings import ServerSettings
from rlbuffer.errors import RlbufferError, ServerUnreachable
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.step_plan import Drop, Normalizers, Plan, StepPlan
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.records import PoolEntry
from rlbuffer.store.server import embedded
from rlbuffer.store.session import open_store
from rlbuffer.testing import make_group

pytestmark = pytest.mark.server

MOVES_PER_RUN = 150


def random_moves(seed: int) -> list[tuple[Any, ...]]:
    """Moves as a run makes them, and every tenth or so as it must not make them."""
    dice = random.Random(seed)

    def owner() -> str:
        return dice.choices(["one", "two"], [9, 1])[0]

    def trainer() -> str:
        return dice.choices(["x", "y"], [9, 1])[0]

    def small(top: int = 3) -> int:
        return dice.randint(0, top)

    makers: dict[str, tuple[int, Callable[[], tuple[Any, ...]]]] = {
        "push": (40, lambda: (dice.choice("pq"), dice.choices([-1, 0, 1, 2], [1, 2, 16, 1])[0], 1 + small(2))),
        "push_old_epoch": (2, lambda: (dice.choice("pq"),)),
        "lease": (8, lambda: (owner(),)),
        "release": (2, lambda: (dice.choices(["one", "two"], [1, 4])[0],)),
        "commit": (20, lambda: (owner(), small(), 1 + small(2), dice.choices([0, 1, 2], [1, 8, 1])[0])),
        "drop": (6, lambda: (owner(), small(), dice.choice(["stale", "late", "small"]))),
        "retire": (6, lambda: (owner(), small(9))),
        "attempt": (6, lambda: (trainer(), dice.choice([0, None, None, 9]))),
        "report": (14, lambda: (trainer(), dice.choices([0, 1, 2], [2, 8, 1])[0], small(4))),
        "announce": (6, lambda: (trainer(), small(9))),
        "allow": (4, lambda: (owner(), small(6))),
        "take": (8, lambda: (1 + small(2),)),
        "give": (8, lambda: (dice.choice(["renew", "release", "close"]), [small(9) for _ in range(small())])),
        "look": (10, lambda: (small(9),)),
    }
    names = dice.choices(list(makers), [weight for weight, _ in makers.values()], k=MOVES_PER_RUN)
    return [("lease", "one"), *((name, *makers[name][1]()) for name in names)]


class World:
    """One run, and what its processes remember."""

    def __init__(self, url: str, home: Path) -> None:
        self.store = open_store(EveryRole, url, run=f"t{uuid.uuid4().hex[:8]}", home=home, server=ServerSettings())
        self.epoch = self.store.open_run().epoch
        self.leaders = {owner: LeaderStore(self.store.connection, self.store.run) for owner in ("one", "two")}
        self.attempts: dict[str, int] = {}
        self.sequences = {"p": 0, "q": 0}
        self.groups = 0
        self.seen: list[PoolEntry] = []
        """Every entry that was ever pending: committing one twice must be refused alike."""
        self.names: dict[str, str] = {}

    def do(self, move: tuple[Any, ...]) -> Any:
        """Carries out a move. -> its reply or its error, with what differs by nature replaced."""
        try:
            reply = getattr(self, move[0])(*move[1:])
        except RlbufferError as error:
            reply = (type(error).__name__, str(error))
        return self._plain(reply)

    def _plain(self, reply: Any) -> Any:
        def known(found: re.Match[str]) -> str:
            return self.names.setdefault(found[0], f"#{len(self.names)}")

        words = repr(reply).replace(self.store.run, "RUN")
        words = re.sub(r"\b[0-9a-f]{64}\b|\b\d{13}-\d+\b", known, words)
        # Times and tokens are not told apart: two of them may fall into one millisecond in one world only.
        return re.sub(r"\b\d{13}\b", "#ms", words)

    def push(self, producer: str, delta: int, size: int) -> Any:
        sequence = max(1, self.sequences[producer] + delta)
        self.groups += 1
        env = "ab"[self.groups % 2]
        group = make_group(env=env, size=size, group_id=f"{env}.{self.groups}", seed=self.groups)
        reply = self.store.push(group, producer=producer, incarnation=producer, sequence=sequence, epoch=self.epoch)
        self.sequences[producer] = max(sequence, self.sequences[producer])
        self._remember()
        return reply

    def push_old_epoch(self, producer: str) -> Any:
        sequence = self.sequences[producer] + 1
        return self.store.push(make_group(), producer=producer, incarnation=producer, sequence=sequence, epoch=3)

    def lease(self, owner: str) -> Any:
        lease = self.leaders[owner].lease(owner, ttl_seconds=60)
        return lease.held, lease.owner, lease.token

    def release(self, owner: str) -> None:
        self.leaders[owner].release_lease()

    def commit(self, owner: str, skip: int, world_size: int, offset: int) -> Any:
        # Mostly what is pending, now and then what was pending once.
        used = self.seen[-4:] if skip == 0 else self.store.read_pool(count=5)
        leader, meta = self.leaders[owner], self.store.meta()
        plan = _plan(used, max(1, meta.step + offset), world_size)
        by_id = {e.entry_id: e for e in used}
        broken = leader.pin(plan.rollouts, by_id)
        status, detail = leader.commit(plan, by_id, meta=meta, columns={}, state={"step": plan.step})
        return broken, status, detail if status == "gone" else detail.digest

    def drop(self, owner: str, skip: int, reason: str) -> None:
        drops = []
        for entry in self.seen[-3:][skip:]:  # some of them consumed already
            drop = Drop(group_id=entry.group_id, env=entry.env, reason=reason, rollouts=1, tokens=entry.tokens)
            drops.append((drop, [entry]))
        self.leaders[owner].drop(drops)

    def retire(self, owner: str, up_to: int) -> Any:
        return self.leaders[owner].retire(up_to)

    def attempt(self, name: str, resume_step: int | None) -> Any:
        # A name that was fenced comes back as another attempt, as a restarted trainer would.
        fresh = f"{name}{len(self.attempts)}"
        at = self.store.trainer().oldest_kept if resume_step is None else resume_step
        attempt = self.store.attempt(uuid=fresh, world_size=2, resume_step=at)
        self.attempts[name] = attempt.number
        return attempt.resume_step, attempt.trained, attempt.oldest_kept

    def report(self, name: str, ahead: int, kept_behind: int) -> Any:
        number = self.attempts.get(name, 1)
        trained = self.store.trainer().trained + ahead
        oldest_kept = max(0, trained - kept_behind)
        self.store.report(number, epoch=self.epoch, trained=trained, digest="", oldest_kept=oldest_kept)
        return self.store.trainer().trained, self.store.trainer().oldest_kept

    def announce(self, name: str, version: int) -> Any:
        number = self.attempts.get(name, 1)
        return self.store.announce(number, PolicyVersion(version=version)), self.store.policy().version

    def allow(self, owner: str, n: int) -> Any:
        self.leaders[owner].set_allowances({"a": n})
        return allowances(self.store)

    def take(self, n: int) -> Any:
        return self.store.take_tickets("a", n, ttl_seconds=60)

    def give(self, what: str, numbers: list[int]) -> None:
        if what == "renew":
            self.store.renew_tickets("a", numbers, ttl_seconds=60)
        else:
            getattr(self.store, f"{what}_tickets")("a", numbers)

    def look(self, step: int) -> Any:
        parts = self.store.read_parts(step + 1)
        payloads = [self.store.read_payloads(part.rollouts) for part in parts]
        header = self.store.wait_step(step + 1, block_seconds=0)
        return parts, payloads, header

    def summary(self) -> Any:
        """Everything that can be seen of the run."""
        store = self.store
        meta = store.meta()
        pool = [(e.group_id, e.rollouts, e.tokens, e.error) for e in store.read_pool()]
        history = [{k: v for k, v in record.items() if k != "at"} for record in store.history()]
        closed, findings = sorted(store.closed_groups()), store.verify().findings
        shown = (meta.step, meta.retired, meta.error, store.ledger(), pool, history, closed, store.load_state())
        return self._plain((shown, list(store.headers()), findings)), findings

    def _remember(self) -> None:
        known = {e.entry_id for e in self.seen}
        self.seen += [e for e in self.store.read_pool() if e.entry_id not in known]


def _plan(entries: list[PoolEntry], step: int, world_size: int) -> StepPlan:
    refs = rollouts_of(entries)
    rows = tuple(tuple(tuple(range(r, len(refs), world_size)) for _ in range(1)) for r in range(world_size))
    return StepPlan(
        step=step,
        group_ids=tuple(dict.fromkeys(ref.group_id for ref in refs)),
        rollouts=refs,
        advantages=np.linspace(-1, 1, len(refs), dtype=np.float32),
        plan=Plan(rows=(rows,), world_size=world_size, row_tokens=512),
        normalizers=Normalizers(loss_tokens=sum(r.loss_tokens for r in refs), rollouts=len(refs), groups=len(entries)),
        tokens=sum(r.length for r in refs),
        closed_by="fill",
    )


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    home = Path(tempfile.mkdtemp(prefix="rlb-"))
    try:
        running = embedded.ensure(home, ServerSettings(appendfsync="no"))
    except ServerUnreachable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    yield running.address
    running.release()
    shutil.rmtree(home, ignore_errors=True)


@pytest.mark.parametrize("seed", range(8))
def test_memory_and_server_answer_alike_and_the_run_stays_in_order(address: str, seed: int) -> None:
    home = Path("unused")
    memory, real = World(f"memory://{uuid.uuid4().hex}", home), World(address, home)
    try:
        for move in random_moves(seed):
            assert memory.do(move) == real.do(move), move
        (in_memory, findings), (on_server, _) = memory.summary(), real.summary()
        assert in_memory == on_server
        assert findings == ()
        # The moves went somewhere: a run that only refuses would prove nothing.
        assert memory.store.meta().step >= 3
    finally:
        memory.store.close()
        real.store.close()
