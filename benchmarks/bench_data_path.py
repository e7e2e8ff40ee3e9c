"""The way of rollouts through the buffer, push to tensors, against the same bytes as bare HSET and HMGET.

A round pushes a step's groups, has the real daemon decide and commit it, and pulls it for every rank, on one server.
The bare commands move as many bytes in the same round, so that whatever else the machine does hits both alike. They go
through redis-py as it comes, with large reads, in a process of their own, and so do the ranks, which push nothing. The
row "kept memory" has the HSETs of another process, which keeps the memory that it frees, as one that pushes does
(:mod:`benchmarks.apart`): what is above it is the allocator's part. Shares are medians over rounds; absolute numbers
are this machine's, today's.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import redis
from numpy.typing import NDArray

from benchmarks.apart import Apart
from benchmarks.report import Report
from benchmarks.workloads import WORKLOADS
from rlbuffer.client.buffer import Buffer
from rlbuffer.client.producer import keep_freed_memory
from rlbuffer.client.step_pull import StepPull
from rlbuffer.client.writer import Writer
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.settings import RunSettings, ServerSettings
from rlbuffer.daemon import Daemon
from rlbuffer.events.batcher import BatcherEvent, LeaderReady, StepCommitted, StepWaits
from rlbuffer.records.group import Group
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import VersionSpan
from rlbuffer.store.payloads import Trainable
from rlbuffer.store.redis_store import RedisStore, open_store
from rlbuffer.store.server.connection import SOCKET_READ_BYTES
from rlbuffer.wire import payload

GROUP_SIZE = 16
CALL_GROUPS = 8
"""Groups of one `push_many`."""
ROUND_TOKENS = 2_000_000
"""Tokens of a round, about: 18 MB."""
ROUNDS = 5
"""Timed rounds, after one that grows heaps and connections."""
MOST_HELD = 1.15
"""Memory that the server may hold, as a multiple of the payloads' bytes."""
WORLD_SIZES = (8, 1)
"""8 ranks ask for one or two fields of a group in a command, one rank for all sixteen."""
LATER = ", later steps"
COLUMNS = ("client", "server", "wall")
Arrays = tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32], int]
"""Tokens, loss mask, logprobs, number of prompt tokens: what a sampler has of a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds: by the clock, CPU of this process, CPU of the server."""

    wall: float
    client: float
    server: float

    @property
    def both(self) -> float:
        """CPU seconds of client and server."""
        return self.client + self.server


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
        held = statistics.median(one.held for one in rounds)
        target = f"server memory, {title}: {held:.3f} of the payloads' bytes, at most {MOST_HELD:g}"
        report.line(f"{target}: {report.target(target, held <= MOST_HELD)}\n")


def sizes() -> dict[str, NDArray[np.int64]]:
    """Title -> [n] tokens, whole groups of about :data:`ROUND_TOKENS` in all."""
    drawn = {
        "4 KB": np.full(10_000, 450),
        "26 KB": WORKLOADS["a"].lengths,
        "256 KB": np.full(1_000, 28_900),
        "512 KB": np.full(1_000, 57_800),
    }
    whole = {}
    for title, lengths in drawn.items():
        count = int(np.searchsorted(np.cumsum(lengths), ROUND_TOKENS)) // GROUP_SIZE * GROUP_SIZE
        whole[title] = lengths[: max(count, GROUP_SIZE)]
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The costs of a round by name."""

    costs: Mapping[str, Cost]
    bytes_per_token: float
    held: float
    """Memory by which the server grows with a push, as a multiple of the payloads' bytes."""


def measure(lengths: NDArray[np.int64]) -> list[Round]:
    """Every timed round."""
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    server = ServerSettings(appendfsync="everysec")
    keeper = open_store(None, run="keeper", home=home, server=server)
    rng = np.random.default_rng(0)
    sampled = [arrays(rng, int(n)) for n in lengths]
    groups = make_groups("other", sampled)
    sizes = [[len(raw) for raw in payload.encode_push(group).payloads] for group in groups]
    path = str(keeper.connection.client.connection_pool.connection_kwargs["path"])
    others = [Apart(Bare, path, sizes), Apart(Bare, path, sizes, True), Apart(Ranks, home, server)]
    rounds = []
    try:
        for number in range(1 + ROUNDS):
            store = open_store(None, run=f"round{number}", home=home, server=server)
            try:
                rounds.append(one_round(store, sampled, groups, *others))
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
    store: RedisStore, sampled: Sequence[Arrays], groups: Sequence[Group], bare: Apart, kept: Apart, ranks: Apart
) -> Round:
    """Pushes, commits and pulls a step, and moves as many bytes by bare commands."""
    client, clock = store.connection.client, Clock(store)
    epoch = store.open_run().epoch
    attempt = store.attempt(uuid="bench", world_size=max(WORLD_SIZES), resume_step=0).number
    store.announce(attempt, PolicyVersion(version=0))
    pushes = [payload.encode_push(group) for group in groups]
    fields = [{str(i): raw for i, raw in enumerate(push.payloads)} for push in pushes]
    size = sum(len(raw) for push in pushes for raw in push.payloads)
    costs = {"raw HSET": clock.apart(bare, "hset"), "raw HSET, kept memory": clock.apart(kept, "hset")}
    writer = Writer(store, "bench", epoch=epoch)
    costs["raw HSET, our connection"] = clock(lambda: hset(client, fields))
    before = used_memory(client)
    costs["push of ready groups"] = clock(lambda: push_all(writer, groups))
    held = (used_memory(client) - before) / size
    costs["push from arrays"] = clock(lambda: push_arrays(writer, sampled, "math", call_groups=1))
    many = make_groups("many", sampled)
    costs["push_many of ready groups"] = clock(lambda: push_together(writer, many))
    costs["push_many from arrays"] = clock(lambda: push_arrays(writer, sampled, "arrays"))
    costs["leader: decide, pin, commit"] = clock(lambda: commit(store, len(groups), attempt, int(lengths_of(sampled))))
    ranks("open", store.run)
    for world_size in WORLD_SIZES:
        ranked = f"{world_size} rank{'s' * (world_size > 1)}"
        requests = [fields_of(pull, store) for pull in pulls_of(store, world_size)]
        for which in ("", LATER):
            costs[f"raw HMGET, {ranked}{which}"] = clock.apart(bare, "hmget", requests)
            costs[f"pull to tensors, {ranked}{which}"] = clock.apart(ranks, "pull", world_size)
    ranks("close")
    tokens = sum(len(tokens) for tokens, *_ in sampled)
    return Round(costs=costs, bytes_per_token=size / tokens, held=held)


class Bare:
    """redis-py's own connection, and payloads of these sizes. `keeps`: the memory that the process frees."""

    def __init__(self, path: str, sizes: Sequence[Sequence[int]], keeps: bool = False) -> None:
        if keeps:
            keep_freed_memory()
        rng = np.random.default_rng(0)
        self._client = redis.Redis(unix_socket_path=path, protocol=3, socket_read_size=SOCKET_READ_BYTES)
        self._fields = [{str(i): rng.bytes(size) for i, size in enumerate(of_group)} for of_group in sizes]

    def hset(self) -> None:
        """A command for each group."""
        hset(self._client, self._fields)

    def hmget(self, requests: Sequence[Mapping[str, list[str]]]) -> list[Any]:
        """A pipeline for each rank. The replies are kept until the end, as a pull keeps a step."""
        return [hmget(self._client, fields) for fields in requests]


class Ranks:
    """The pulls of all ranks, for each world size."""

    def __init__(self, home: Path, server: ServerSettings) -> None:
        self._home, self._server = home, server

    def open(self, run: str) -> None:
        """Goes to another run: its ranks begin there."""
        self._store = open_store(None, run=run, home=self._home, server=self._server)
        self._pulls = {world_size: pulls_of(self._store, world_size) for world_size in WORLD_SIZES}

    def pull(self, world_size: int) -> list[object]:
        """Step 1 of every rank."""
        return [pull_step(pull, self._store) for pull in self._pulls[world_size]]

    def close(self) -> None:
        """Leaves the run."""
        self._store.close()


def pulls_of(store: RedisStore, world_size: int) -> list[StepPull]:
    """A pull for each rank."""
    return [
        StepPull(store, rank, world_size, Trainable(), pad_token_id=0, pad_to_multiple_of=1)
        for rank in range(world_size)
    ]


class Clock:
    """Times one piece of work."""

    def __init__(self, store: RedisStore) -> None:
        self._client = store.connection.client

    def __call__(self, work: Callable[[], object]) -> Cost:
        server, wall, client = self._server(), time.perf_counter(), time.process_time()
        work()
        client, wall = time.process_time() - client, time.perf_counter() - wall
        return Cost(wall=wall, client=client, server=self._server() - server)

    def apart(self, other: Apart, method: str, *args: Any) -> Cost:
        """Times one call in another process."""
        server = self._server()
        wall, client = other(method, *args)
        return Cost(wall=wall, client=client, server=self._server() - server)

    def _server(self) -> float:
        facts: Any = self._client.info("cpu")
        return float(facts["used_cpu_user"]) + float(facts["used_cpu_sys"])


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


# -- what a round does -------------------------------------------------------------------------------------------------
def arrays(rng: np.random.Generator, length: int) -> Arrays:
    """One rollout as a sampler has it: a quarter is the prompt."""
    prompt = max(1, length // 4)
    mask = np.arange(length) >= prompt
    logprobs = np.where(mask, -rng.random(length), 0).astype(np.float32)
    return rng.integers(0, 150_000, length, dtype=np.int32), mask, logprobs, prompt


def make_groups(env: str, sampled: Sequence[Arrays], *, first: int = 0, version: int = 0) -> list[Group]:
    """Records of the arrays; groups are numbered from `first` on."""
    groups = []
    for start in range(0, len(sampled), GROUP_SIZE):
        rollouts = tuple(
            Rollout(
                tokens=tokens,
                loss_mask=mask,
                logprobs=logprobs,
                reward=float(i % 2),
                version_spans=(VersionSpan(version, prompt, len(tokens)),),
            )
            for i, (tokens, mask, logprobs, prompt) in enumerate(sampled[start : start + GROUP_SIZE])
        )
        number = first + start // GROUP_SIZE
        name = f"{env}.{number}"
        groups.append(
            Group(name, env=env, prompt_id=str(number), rollouts=rollouts, planned_size=GROUP_SIZE, answer="42")
        )
    return groups


def lengths_of(sampled: Sequence[Arrays]) -> int:
    """Tokens of the longest rollout."""
    return max(len(tokens) for tokens, *_ in sampled)


def push_all(writer: Writer, groups: Sequence[Group]) -> None:
    for group in groups:
        writer.push(group)


def push_together(writer: Writer, groups: Sequence[Group]) -> None:
    for start in range(0, len(groups), CALL_GROUPS):
        writer.push_many(groups[start : start + CALL_GROUPS])


def push_arrays(
    writer: Writer, sampled: Sequence[Arrays], env: str, *, call_groups: int = CALL_GROUPS, step: int = 1
) -> None:
    """Builds the groups of a step, numbered behind those of the steps before, and pushes so many as soon as they are
    built."""
    together, first = call_groups * GROUP_SIZE, (step - 1) * len(sampled)
    for start in range(0, len(sampled), together):
        number = (first + start) // GROUP_SIZE
        writer.push_many(make_groups(env, sampled[start : start + together], first=number, version=step - 1))


def commit(
    store: RedisStore, groups: int, attempt: int, longest: int, *, env: str = "math", step: int = 1, digest: str = ""
) -> None:
    """The real daemon, from its start until `step` of `env`'s groups is committed; `digest`: of the step before."""
    config = BatcherConfig(row_tokens=max(16_384, longest), step_groups=groups, lookahead=1, budgets={env: 1.0})
    stop = threading.Event()

    def hear(event: BatcherEvent) -> None:
        if isinstance(event, LeaderReady):
            # The trainer's word, so that the leader need not wait for it.
            store.report(attempt, epoch=store.meta().epoch, trained=step - 1, digest=digest, oldest_kept=step - 1)
        elif isinstance(event, StepCommitted):
            stop.set()
        elif isinstance(event, StepWaits):
            raise RuntimeError(f"the benchmark's pool makes no step: {event.sentence}")

    Daemon(Buffer(store, settings=RunSettings()), config, on_event=hear).run(stop)


def used_memory(client: redis.Redis) -> int:
    """Bytes that the server holds."""
    facts: Any = client.info("memory")
    return int(facts["used_memory"])


def plain_client(client: redis.Redis) -> redis.Redis:
    """redis-py's own connection to the same server and database, reading as much at a time."""
    options = client.connection_pool.connection_kwargs
    return redis.Redis(
        unix_socket_path=options["path"], db=options["db"], protocol=3, socket_read_size=SOCKET_READ_BYTES
    )


def hset(client: redis.Redis, fields: Sequence[dict[str, bytes]]) -> None:
    for number, mapping in enumerate(fields):
        client.hset(f"raw:{number}", mapping=mapping)  # type: ignore[arg-type]


def fields_of(pull: StepPull, store: RedisStore) -> dict[str, list[str]]:
    """Payload key -> fields, of one rank's part."""
    fields: dict[str, list[str]] = {}
    header = store.wait_step(1, block_seconds=0.0)
    if header is None:
        raise RuntimeError("step 1 is not there")
    for ref in pull.part(header).rollouts:
        fields.setdefault(ref.payload_key, []).append(str(ref.index))
    return fields


def hmget(client: redis.Redis, fields: Mapping[str, list[str]]) -> list[Any]:
    with client.pipeline(transaction=False) as pipe:
        for key, names in fields.items():
            pipe.hmget(key, names)
        return pipe.execute()


def pull_step(pull: StepPull, store: RedisStore, number: int = 1) -> Step:
    header = store.wait_step(number, block_seconds=0.0)
    if header is None:
        raise RuntimeError(f"step {number} is not there")
    step, damaged = pull.step(header, pull.part(header))
    if damaged:
        raise RuntimeError(f"{len(damaged)} rollouts are damaged: {damaged[0][1]}")
    return step
