"""Push and pull on one server and on clusters of one, two and three shards: how much more can they take, and who pays?

A server's core is the limit of what it takes and gives. So what a cluster can do, as a multiple of the single server,
is that server's CPU over the CPU of the busiest shard, for the same rollouts in the same round.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from every_role import EveryRole
from own_server import OwnServer
from shards import Cluster

from benchmarks.moves import (
    GROUP_SIZE,
    Arrays,
    arrays,
    commit,
    lengths_of,
    make_groups,
    pull_step,
    push_together,
    sizes,
)
from benchmarks.report import Report
from benchmarks.workloads import WORKLOADS
from rlbuffer.client.step_pull import StepPull
from rlbuffer.client.writer import Writer
from rlbuffer.config.settings import ServerSettings
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.payloads import Trainable
from rlbuffer.store.session import open_store

SHARDS = (1, 2, 3)
ROUNDS = 5
"""Timed rounds, after one that grows heaps and connections."""
ONE = "one server"
RANKS = 8
OPTIONS = {"appendfsync": "everysec"}
MOVES = ("push_many of ready groups", f"pull to tensors, {RANKS} ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU seconds, and wall seconds."""

    client: float
    servers: tuple[float, ...]
    """Of each server."""
    wall: float


def run(report: Report) -> None:
    """Measures two sizes of rollouts."""
    report.begin(
        "shards",
        measures=f"rollouts of 4 KB and 26 KB (workload a) in groups of {GROUP_SIZE}, pushed and pulled by one "
        f"process on one server and on clusters of {', '.join(map(str, SHARDS))}, in turns; medians of {ROUNDS} rounds",
        not_measured="the network (loopback here); shards on machines of their own: all share these cores, so what a "
        "cluster takes is computed from the CPU of its busiest shard; many clients; appendfsync always",
    )
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="rlb-bench-") as folder, ExitStack() as ends:
        places: dict[str, tuple[str, Sequence[OwnServer]]] = {}
        alone = ends.enter_context(OwnServer(Path(folder) / "one", options=OPTIONS))
        places[ONE] = (alone.url, [alone])
        for shards in SHARDS:
            cluster = ends.enter_context(Cluster(Path(folder) / str(shards), shards=shards, options=OPTIONS))
            places[f"{shards} shard{'s' * (shards > 1)}"] = (cluster.url, cluster.nodes)
        for title, lengths in {"4 KB": sizes()["4 KB"], "26 KB": WORKLOADS["a"].lengths}.items():
            sampled = [arrays(rng, int(n)) for n in lengths]
            rounds: list[dict[str, Mapping[str, Cost]]] = []
            for number in range(1 + ROUNDS):
                its = {}
                for place, (url, servers) in places.items():
                    its[place] = one_round(url, servers, sampled, run=f"{title.split()[0]}-{number}", home=Path(folder))
                rounds.append(its)
            show(report, title, rounds[1:], int(lengths.sum()) * 9.03 / 1e6)


def one_round(
    url: str, servers: Sequence[OwnServer], sampled: Sequence[Arrays], *, run: str, home: Path
) -> Mapping[str, Cost]:
    """Pushes, commits and pulls a step; -> the cost of push and pull. What it wrote is deleted."""
    store = open_store(EveryRole, url, run=run, home=home, server=ServerSettings())
    try:
        epoch = store.open_run().epoch
        attempt = store.attempt(uuid="bench", world_size=RANKS, resume_step=0).number
        store.announce(attempt, PolicyVersion(version=0))
        groups = make_groups("math", sampled)
        writer = Writer(store, "bench", epoch=epoch)
        costs = {MOVES[0]: timed(servers, lambda: push_together(writer, groups))}
        commit(store, len(groups), attempt, lengths_of(sampled))
        pulls = [StepPull(store, r, RANKS, Trainable(), pad_token_id=0, pad_to_multiple_of=1) for r in range(RANKS)]
        costs[MOVES[1]] = timed(servers, lambda: [pull_step(pull, store) for pull in pulls])
    finally:
        store.close()
    for server in servers:
        server.ask("FLUSHALL")
    return costs


def timed(servers: Sequence[OwnServer], work: Callable[[], object]) -> Cost:
    """What a piece of work costs."""
    before, client, wall = [cpu_of(server) for server in servers], time.process_time(), time.perf_counter()
    work()
    client, wall = time.process_time() - client, time.perf_counter() - wall
    after = [cpu_of(server) for server in servers]
    return Cost(client=client, servers=tuple(b - a for a, b in zip(before, after, strict=True)), wall=wall)


def cpu_of(server: OwnServer) -> float:
    facts: Any = server.ask("INFO", "cpu")
    return float(facts["used_cpu_user"]) + float(facts["used_cpu_sys"])


def show(report: Report, title: str, rounds: Sequence[Mapping[str, Mapping[str, Cost]]], megabytes: float) -> None:
    """A table for push and one for pull."""
    for move in MOVES:
        rows = []
        for place in rounds[0]:
            here = [one[place][move] for one in rounds]
            bare = [one[ONE][move] for one in rounds]
            pairs = list(zip(bare, here, strict=True))
            takes = statistics.median(max(b.servers) / max(h.servers) for b, h in pairs)
            client = statistics.median(h.client / b.client for b, h in pairs)
            spent = [
                f"{1e6 * statistics.median(values) / megabytes:,.0f}"
                for values in (
                    [max(h.servers) for h in here],
                    [sum(h.servers) for h in here],
                    [h.client for h in here],
                    [h.wall for h in here],
                )
            ]
            rows.append([place, *spent, f"{takes:.2f}", f"{client:.2f}"])
        report.line(f"\n{title}, {move}:")
        head = [
            "",
            "busiest us/MB",
            "all servers us/MB",
            "client us/MB",
            "wall us/MB",
            "takes, of one",
            "client, of one",
        ]
        report.table(head, rows)
