"""The way of rollouts through the buffer, push to tensors, against the same bytes as bare HSET and HMGET.

A round pushes a step's groups, has the real daemon decide and commit it, and pulls it for every rank, on one server.
The bare commands move as many bytes in the same round, so that whatever else the machine does hits both alike. They go
through redis-py as it comes, with large reads. Bare commands, pushes and ranks have a process each: none pays for what
another one keeps or has freed. Each of the writing rows finds as much freed memory in the server as it will take; fresh
memory costs a server twice as much. Shares are medians over rounds; absolute numbers are this machine's, today's.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import redis
from every_role import EveryRole
from numpy.typing import NDArray

from benchmarks.apart import Apart
from benchmarks.moves import (
    CALL_GROUPS,
    GROUP_SIZE,
    Arrays,
    Clock,
    Cost,
    arrays,
    commit,
    hmget,
    hset,
    make_groups,
    pull_step,
    pulls_of,
    push_arrays,
    push_together,
    sizes,
)
from benchmarks.report import Report
from rlbuffer.client.step_pull import StepPull
from rlbuffer.client.writer import Writer
from rlbuffer.config.settings import ServerSettings
from rlbuffer.records.group import Group
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.server.connection import SOCKET_READ_BYTES
from rlbuffer.store.session import open_store
from rlbuffer.wire import payload

ROUNDS = 5
"""Timed rounds, after one that grows heaps and connections."""
MOST_MEMORY = 1.15
"""Memory that the server may hold, as a multiple of the payloads' bytes."""
WORLD_SIZES = (8, 1)
"""8 ranks ask for one or two fields of a group in a command, one rank for all sixteen."""
LATER = ", later steps"
COLUMNS = ("client", "server", "wall")


def run(report: Report) -> None:
    """Measures each size of rollouts."""
    report.begin(
        "data path",
        measures=f"rollouts of 4, 26 (workload a), 256 and 512 KB in groups of {GROUP_SIZE}, from a sampler's arrays "
        f"to micro-batches with header, part and answers; medians of {ROUNDS} rounds; shares of bare commands for the "
        "same bytes in the same round, in a process of their own: HSET of a group's fields, HMGET of a rank's fields "
        "in one pipeline; a later step of a rank finds the memory of the one before, and so do the later HMGETs",
        not_measured="the network (unix socket here), many producers at once, a full server, appendfsync always, "
        "further columns, copies to a device",
    )
    for title, lengths in sizes().items():
        rounds = measure(lengths)
        tokens = int(lengths.sum())
        report.line(f"{title}: {len(lengths):,} rollouts, {tokens:,} tokens, {rounds[0].bytes_per_token:.2f} B a token")
        show(report, [one.costs for one in rounds], tokens * rounds[0].bytes_per_token / 1e6)
        first, later = (
            tokens / 1e6 / statistics.median(end_to_end(one.costs, which) for one in rounds) for which in ("", LATER)
        )
        report.line(
            f"push_many from arrays, batch and pull for 8 ranks: {first:.1f} Mtok per CPU second, client, server and "
            f"leader counted; {later:.1f} with a later step's pull"
        )
        memory = statistics.median(one.memory for one in rounds)
        target = f"server memory, {title}: {memory:.3f} of the payloads' bytes, at most {MOST_MEMORY:g}"
        report.line(f"{target}: {report.target(target, memory <= MOST_MEMORY)}\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The costs of a round by name."""

    costs: Mapping[str, Cost]
    bytes_per_token: float
    memory: float
    """Memory by which the server grows with a push, as a multiple of the payloads' bytes."""


def measure(lengths: NDArray[np.int64]) -> list[Round]:
    """Every timed round."""
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    server = ServerSettings(appendfsync="everysec")
    keeper = open_store(EveryRole, None, run="keeper", home=home, server=server)
    rng = np.random.default_rng(0)
    sampled = [arrays(rng, int(n)) for n in lengths]
    payload_sizes = [[len(raw) for raw in payload.encode_push(group).payloads] for group in make_groups("any", sampled)]
    path = str(keeper.connection.client.connection_pool.connection_kwargs["path"])
    pushes = Apart(Pushes, home, server, sampled, payload_sizes)
    others = Apart(Bare, path, payload_sizes), pushes, Apart(Ranks, home, server)
    rounds = []
    try:
        for number in range(1 + ROUNDS):
            store = open_store(EveryRole, None, run=f"round{number}", home=home, server=server)
            try:
                rounds.append(one_round(store, lengths, payload_sizes, *others))
            finally:
                store.close()
            keeper.connection.client.flushall()
    finally:
        for other in others:
            other.close()
        keeper.close()
        shutil.rmtree(home, ignore_errors=True)
    return rounds[1:]


def one_round(
    store: EveryRole,
    lengths: NDArray[np.int64],
    sizes: Sequence[Sequence[int]],
    bare: Apart,
    pushes: Apart,
    ranks: Apart,
) -> Round:
    """Pushes, commits and pulls a step, and moves as many bytes by bare commands."""
    client, clock = store.connection.client, Clock(store)
    store.open_run()
    attempt = store.attempt(uuid="bench", world_size=max(WORLD_SIZES), resume_step=0).number
    store.announce(attempt, PolicyVersion(version=0))
    size = sum(map(sum, sizes))
    pushes("open", store.run)
    bare("hset")  # memory for all that follow
    delete_payloads(client)
    costs = {"raw HSET": clock.apart(bare, "hset")}
    delete_payloads(client)
    costs["raw HSET, our connection"] = clock.apart(pushes, "hset")
    for name, method in {"push": "push_all", "push_many": "push_together"}.items():
        delete_payloads(client)
        pushes("make", name)
        before = used_memory(client)
        costs[f"{name} of ready groups"] = clock.apart(pushes, method)
        memory = (used_memory(client) - before) / size
    for name, env, together in (("push_many", "other", CALL_GROUPS), ("push", "math", 1)):
        delete_payloads(client)
        costs[f"{name} from arrays"] = clock.apart(pushes, "push_arrays", env, together)
    longest = int(lengths.max())
    costs["leader: decide, pin, commit"] = clock(lambda: commit(store, len(sizes), attempt, longest))
    ranks("open", store.run)
    for world_size in WORLD_SIZES:
        ranked = f"{world_size} rank{'s' * (world_size > 1)}"
        requests = [fields_of(pull, store) for pull in pulls_of(store, world_size)]
        for which in ("", LATER):
            costs[f"raw HMGET, {ranked}{which}"] = clock.apart(bare, "hmget", requests)
            costs[f"pull to tensors, {ranked}{which}"] = clock.apart(ranks, "pull", world_size)
    pushes("close")
    ranks("close")
    return Round(costs=costs, bytes_per_token=size / int(lengths.sum()), memory=memory)


class Bare:
    """redis-py's own connection, and payloads of these sizes."""

    def __init__(self, path: str, sizes: Sequence[Sequence[int]]) -> None:
        self._client = redis.Redis(unix_socket_path=path, protocol=3, socket_read_size=SOCKET_READ_BYTES)
        self._fields = payloads_of(sizes)

    def hset(self) -> None:
        """A command for each group."""
        hset(self._client, self._fields)

    def hmget(self, requests: Sequence[Mapping[str, list[str]]]) -> list[Any]:
        """A pipeline for each rank. The replies are kept until the end, as a pull keeps a step."""
        return [hmget(self._client, fields) for fields in requests]


class Pushes:
    """A writer of these rollouts, and of payloads of these sizes."""

    def __init__(
        self, home: Path, server: ServerSettings, sampled: Sequence[Arrays], sizes: Sequence[Sequence[int]]
    ) -> None:
        self._home, self._server, self._sampled, self._fields = home, server, sampled, payloads_of(sizes)
        self._groups: list[Group] = []

    def open(self, run: str) -> None:
        """Goes to another run."""
        self._store = open_store(EveryRole, None, run=run, home=self._home, server=self._server)
        self._writer = Writer(self._store, "bench", epoch=self._store.meta().epoch)

    def hset(self) -> None:
        """A bare command for each group, through the writer's connection."""
        hset(self._store.connection.client, self._fields)

    def make(self, env: str) -> None:
        """Makes the groups ready that the next call pushes."""
        self._groups = make_groups(env, self._sampled)

    def push_all(self) -> None:
        """Pushes them one by one."""
        for group in self._groups:
            self._writer.push(group)
        self._groups = []

    def push_together(self) -> None:
        """Pushes several of them a round trip."""
        push_together(self._writer, self._groups)
        self._groups = []

    def push_arrays(self, env: str, call_groups: int) -> None:
        """Makes groups and pushes them, so many a round trip."""
        push_arrays(self._writer, self._sampled, env, call_groups=call_groups)

    def close(self) -> None:
        """Leaves the run."""
        self._store.close()


class Ranks:
    """The pulls of all ranks, for each world size."""

    def __init__(self, home: Path, server: ServerSettings) -> None:
        self._home, self._server = home, server

    def open(self, run: str) -> None:
        """Goes to another run: its ranks begin there."""
        self._store = open_store(EveryRole, None, run=run, home=self._home, server=self._server)
        self._pulls = {world_size: pulls_of(self._store, world_size) for world_size in WORLD_SIZES}

    def pull(self, world_size: int) -> list[object]:
        """Step 1 of every rank."""
        return [pull_step(pull, self._store) for pull in self._pulls[world_size]]

    def close(self) -> None:
        """Leaves the run."""
        self._store.close()


def show(report: Report, rounds: Sequence[Mapping[str, Cost]], megabytes: float) -> None:
    """Prints the table: CPU and time a megabyte, and each as a share of the bare command's."""
    rows = []
    for name in rounds[0]:
        here, bare = [costs[name] for costs in rounds], bare_of(name)
        spent = [f"{1e6 * statistics.median(getattr(c, what) for c in here) / megabytes:,.0f}" for what in COLUMNS]
        # Round by round, so that a busy moment of the machine is in both halves.
        pairs = [] if bare is None else [(costs[bare], costs[name]) for costs in rounds]
        shares = [f"{share(pairs, what):.0%}" if pairs else "" for what in ("client", "both", "wall")]
        rows.append([name, *spent, *shares])
    report.table(["", "client us/MB", "server us/MB", "wall us/MB", "of raw: client", "client + server", "wall"], rows)


def share(pairs: Sequence[tuple[Cost, Cost]], what: str) -> float:
    """The median speed as a share of the bare command's."""
    ratios: list[float] = [getattr(bare, what) / getattr(here, what) for bare, here in pairs]
    return statistics.median(ratios)


def bare_of(name: str) -> str | None:
    """The bare command that a line is held against."""
    if name.startswith(("push", "raw HSET, ")):
        return "raw HSET"
    return name.replace("pull to tensors", "raw HMGET") if name.startswith("pull") else None


def end_to_end(costs: Mapping[str, Cost], which: str) -> float:
    """CPU seconds of all processes from a sampler's arrays to the tensors of all ranks."""
    parts = ("push_many from arrays", "leader: decide, pin, commit", f"pull to tensors, 8 ranks{which}")
    return sum(costs[name].both for name in parts)


def used_memory(client: redis.Redis) -> int:
    """Bytes that the server holds."""
    facts: Any = client.info("memory")
    return int(facts["used_memory"])


def fields_of(pull: StepPull, store: EveryRole) -> dict[str, list[str]]:
    """Payload key -> fields, of one rank's part."""
    fields: dict[str, list[str]] = {}
    header = store.wait_step(1, block_seconds=0.0)
    if header is None:
        raise RuntimeError("step 1 is not there")
    for ref in pull.part(header).rollouts:
        fields.setdefault(ref.payload_key, []).append(str(ref.index))
    return fields


def payloads_of(sizes: Sequence[Sequence[int]]) -> list[dict[str, bytes]]:
    """Random fields of these sizes for each group."""
    rng = np.random.default_rng(0)
    return [{str(i): rng.bytes(size) for i, size in enumerate(of_group)} for of_group in sizes]


def delete_payloads(client: redis.Redis) -> None:
    """Deletes those of bare commands and of pushes."""
    for pattern in ("raw:*", "rlb:*:g:*"):
        for key in client.scan_iter(match=pattern, count=1000):
            client.delete(key)
