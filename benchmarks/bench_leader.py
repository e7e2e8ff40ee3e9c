"""The leader's cost of a pool of 100,000 ready groups: the takeover, and every step after it.

The real daemon over a real server. What is ready is put there by pipelines, because pushing is not what is measured.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import redis
from every_role import EveryRole

from benchmarks.report import Report
from rlbuffer.batcher.batcher import Batcher
from rlbuffer.client.buffer import Buffer
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.settings import RunSettings, ServerSettings
from rlbuffer.daemon import Daemon
from rlbuffer.process.logs import heard
from rlbuffer.records.info import GroupInfo, RolloutInfo
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.session import open_store
from rlbuffer.wire import payload

POOLS = (1_000, 10_000, 100_000)
GROUP_SIZE = 8
STEP_GROUPS = 16
STEPS = 40
WARM = 5
"""Steps before those that are measured."""
MAX_RATIO = 1.3
"""A step over the largest pool may cost this much of one over the smallest."""
TAKEOVER_SECONDS = 3.0
"""CPU of the leader from its start to its first decision over the largest pool."""
LARGE = {256: 12, 4_096: 3}
"""Groups of a large step -> how many such steps are measured."""
MOVES: dict[str, tuple[type, str]] = {
    "decide": (Batcher, "next"),
    "pin": (LeaderStore, "pin"),
    "commit": (LeaderStore, "commit"),
}
"""Name -> the call that it is."""
MOST_MS, MOST_SERVER_MS = {256: 12.0, 4_096: 150.0}, 3.0
"""CPU that the leader may take for all three, and the server for a COMMIT of the smaller step."""
PAYLOAD = b"x" * 16
"""Stands for a rollout: PIN looks at sizes only."""
PAGE = 500
CONFIG = BatcherConfig(
    row_tokens=8192,
    step_groups=STEP_GROUPS,
    lookahead=STEPS + WARM,
    max_age=10**6,
    budgets={f"env{i}": 0.25 for i in range(4)},
)
"""A lookahead over all steps: nobody trains, so nothing but the leader and the server works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU seconds, and wall seconds beside them."""

    leader: float
    server: float
    wall: float

    def __sub__(self, other: Cost) -> Cost:
        return Cost(leader=self.leader - other.leader, server=self.server - other.server, wall=self.wall - other.wall)


def run(report: Report) -> None:
    """Takes over each pool and makes steps from it."""
    report.begin(
        "leader",
        measures=f"the real daemon on a real server: from its start to its first decision, then {STEPS} steps of "
        f"{STEP_GROUPS} groups of {GROUP_SIZE} rollouts over 4 envs; CPU seconds of the leader and of the server; then "
        "larger steps, medians of each move",
        not_measured="pushes, pulls and reports at the same time, the network (a unix socket here), groups that go "
        "stale or come in parts, payloads of real size; `wall` waits 20 ms per step for new pushes",
    )
    costs = {pool: measure(pool) for pool in POOLS}
    base = _per_step(costs[POOLS[0]][1])
    report.table(
        ["groups ready", "takeover: leader s", "server s", "wall s", "step: leader ms", "server ms", "of the smallest"],
        [
            [
                f"{pool:,}",
                f"{takeover.leader:.2f}",
                f"{takeover.server:.2f}",
                f"{takeover.wall:.2f}",
                f"{1e3 * steps.leader / STEPS:.2f}",
                f"{1e3 * steps.server / STEPS:.2f}",
                f"{_per_step(steps) / base:.2f}x",
            ]
            for pool, (takeover, steps) in costs.items()
        ],
    )
    takeover, steps = costs[POOLS[-1]]
    ratio = _per_step(steps) / base
    name = f"plan and commit over {POOLS[-1]:,} ready groups cost at most {MAX_RATIO} x those over {POOLS[0]:,}"
    report.line(f"\n{name}: {ratio:.2f} x, met: {report.target(name, ratio <= MAX_RATIO)}")
    name = f"the first decision over {POOLS[-1]:,} ready groups comes within {TAKEOVER_SECONDS:g} s of the leader's CPU"
    report.line(f"{name}: {takeover.leader:.2f} s, met: {report.target(name, takeover.leader <= TAKEOVER_SECONDS)}\n")
    rows, targets = [], {}
    for groups, count in LARGE.items():
        rollouts = groups * GROUP_SIZE
        with watched() as moves:
            # One step more than is made: an env that has nothing ready would hold the last one up.
            _, cost = measure(groups * (2 + count), groups=groups, warm=1, steps=count)
        took = {
            name: [median(seconds[1 : count + 1]) for seconds in zip(*its, strict=True)] for name, its in moves.items()
        }
        leader = [1e3 * took[name][0] for name in took]
        rows.append([f"{rollouts:,}", *leader, sum(leader), 1e3 * took["commit"][1], 1e3 * cost.leader / count])
        targets[f"decide, pin, commit of {rollouts:,} rollouts, ms of the leader"] = sum(leader), MOST_MS[groups]
        if groups == min(LARGE):
            targets[f"commit of {rollouts:,} rollouts, ms of the server"] = 1e3 * took["commit"][1], MOST_SERVER_MS
    names = ["rollouts of a step", *(f"{name} ms" for name in MOVES), "all three", "server's commit", "whole turn"]
    report.table(names, [[row[0], *(f"{value:.1f}" for value in row[1:])] for row in rows])
    for name, (value, most) in targets.items():
        report.line(f"{name}: {value:.1f}, at most {most:g}, met: {report.target(name, value <= most)}")


@contextmanager
def watched() -> Iterator[dict[str, list[tuple[float, float]]]]:
    """Within it, every decision, PIN and COMMIT of a leader: name -> CPU seconds of the leader and of the server."""
    spent_on: dict[str, list[tuple[float, float]]] = {name: [] for name in MOVES}
    client: list[redis.Redis] = []
    before = {name: getattr(owner, name_there) for name, (owner, name_there) in MOVES.items()}

    def timed(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **named: Any) -> Any:
            if isinstance(self, LeaderStore):
                client[:] = [self.connection.client]
            server, leader = server_seconds(client), time.process_time()
            result = before[name](self, *args, **named)
            leader = time.process_time() - leader
            if name != "decide" or result.plan is not None:
                spent_on[name].append((leader, server_seconds(client) - server))
            return result

        return call

    for name, (owner, name_there) in MOVES.items():
        setattr(owner, name_there, timed(name))
    try:
        yield spent_on
    finally:
        for name, (owner, name_there) in MOVES.items():
            setattr(owner, name_there, before[name])


def server_seconds(client: Sequence[redis.Redis]) -> float:
    """CPU so far of the server; 0 while no client of it is known."""
    facts: Any = client[0].info("cpu") if client else {}
    return float(facts.get("used_cpu_user", 0.0)) + float(facts.get("used_cpu_sys", 0.0))


def measure(pool: int, *, groups: int = STEP_GROUPS, warm: int = WARM, steps: int = STEPS) -> tuple[Cost, Cost]:
    """Returns the seconds from the start to the first decision, and those of the measured steps of so many groups."""
    config = replace(CONFIG, step_groups=groups)
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    store = open_store(EveryRole, None, run="bench", home=home, server=ServerSettings(appendfsync="everysec"))
    try:
        fill(store, pool)
        store.attempt(uuid="bench", world_size=8, resume_step=0)
        attempt = store.trainer().number
        store.announce(attempt, PolicyVersion(version=0))
        stop, marks = threading.Event(), {}

        def hear(line: dict[str, Any]) -> None:
            if line["event"] == "step" and line["step"] in (1, warm, warm + steps):
                marks[line["step"]] = spent(store)
            if line["event"] == "step" and line["step"] == warm + steps:
                stop.set()
            if line["event"] == "ready":
                # The trainer's word, so that the leader need not wait for it.
                store.report(attempt, epoch=store.meta().epoch, trained=0, digest="", oldest_kept=0)

        begun = spent(store)
        with heard("rlbuffer.daemon", hear):
            Daemon(Buffer(store, settings=RunSettings()), config).run(stop)
        return marks[1] - begun, marks[warm + steps] - marks[warm]
    finally:
        store.close()
        shutil.rmtree(home, ignore_errors=True)


def fill(store: EveryRole, groups: int) -> None:
    """Makes `groups` whole groups pending."""
    store.open_run()
    rng, keys = np.random.default_rng(0), store.keys
    drawn = rng.integers(64, 512, (groups, GROUP_SIZE))
    for start in range(0, groups, PAGE):
        with store.connection.client.pipeline(transaction=False) as pipe:
            for number in range(start, min(start + PAGE, groups)):
                info = make_info(number, drawn[number])
                info = replace(info, rollouts=tuple(r.changed(size=len(PAYLOAD)) for r in info.rollouts))
                pipe.hset(
                    keys.payload(info.group_id, f"u.{number}"), mapping={str(i): PAYLOAD for i in range(GROUP_SIZE)}
                )
                entry = {"env": info.env, "group": info.group_id, "key": f"u.{number}", "rollouts": GROUP_SIZE}
                pipe.xadd(keys.pool, {**entry, "tokens": info.tokens, "metadata": payload.encode_info(info)})  # type: ignore[dict-item]
            pipe.execute()


def make_info(number: int, lengths: np.ndarray) -> GroupInfo:
    """A whole group of GROUP_SIZE rollouts; envs take turns."""
    name = f"g{number}"
    return GroupInfo(
        group_id=name,
        env=f"env{number % 4}",
        prompt_id=name,
        planned_size=GROUP_SIZE,
        rollouts=tuple(
            RolloutInfo(
                rollout_id=f"{name}/{i}",
                length=length,
                prompt_tokens=32,
                loss_tokens=length - 32,
                reward=float(i % 2),
                min_version=0,
                max_version=0,
            )
            for i, length in enumerate(lengths.tolist())
        ),
    )


def spent(store: EveryRole) -> Cost:
    """CPU so far of this process and of the server, and the time."""
    facts: Any = store.connection.client.info("cpu")
    server = float(facts["used_cpu_user"]) + float(facts["used_cpu_sys"])
    return Cost(leader=time.process_time(), server=server, wall=time.perf_counter())


def _per_step(steps: Cost) -> float:
    return (steps.leader + steps.server) / STEPS
