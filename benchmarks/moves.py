"""Moves that several benchmarks make: rollouts as a sampler has them, pushes, a step, pulls, and what they cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import redis
from every_role import EveryRole
from numpy.typing import NDArray

from benchmarks.apart import Apart
from benchmarks.workloads import WORKLOADS
from rlbuffer.client.buffer import Buffer
from rlbuffer.client.step_pull import StepPull
from rlbuffer.client.writer import Writer
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon import Daemon
from rlbuffer.process.logs import heard
from rlbuffer.records.group import Group
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import VersionSpan
from rlbuffer.store.payloads import Trainable
from rlbuffer.store.server.connection import SOCKET_READ_BYTES

GROUP_SIZE = 16
CALL_GROUPS = 8
"""Groups of one `push_many`."""
ROUND_TOKENS = 2_000_000
"""Tokens of a round, about: 18 MB."""
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


class Clock:
    """Times one piece of work."""

    def __init__(self, store: EveryRole) -> None:
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


def commit(store: EveryRole, groups: int, attempt: int, longest: int) -> None:
    """The real daemon, from its start until a step of the groups of env math is committed."""
    config = BatcherConfig(row_tokens=max(16_384, longest), step_groups=groups, lookahead=1, budgets={"math": 1.0})
    stop = threading.Event()

    def hear(line: dict[str, Any]) -> None:
        if line["event"] == "ready":
            # The trainer's word, so that the leader need not wait for it.
            store.report(attempt, epoch=store.meta().epoch, trained=0, digest="", oldest_kept=0)
        elif line["event"] == "step":
            stop.set()
        elif line["event"] == "waiting":
            raise RuntimeError(f"the benchmark's pool makes no step: {line['text']}")

    with heard("rlbuffer.daemon", hear):
        Daemon(Buffer(store, settings=RunSettings()), config).run(stop)


def plain_client(client: redis.Redis) -> redis.Redis:
    """redis-py's own connection to the same server and database, reading as much at a time."""
    options = client.connection_pool.connection_kwargs
    return redis.Redis(
        unix_socket_path=options["path"], db=options["db"], protocol=3, socket_read_size=SOCKET_READ_BYTES
    )


def hset(client: redis.Redis, fields: Sequence[dict[str, bytes]]) -> None:
    for number, mapping in enumerate(fields):
        client.hset(f"raw:{number}", mapping=mapping)  # type: ignore[arg-type]


def hmget(client: redis.Redis, fields: Mapping[str, list[str]]) -> list[Any]:
    with client.pipeline(transaction=False) as pipe:
        for key, names in fields.items():
            pipe.hmget(key, names)
        return pipe.execute()


def pull_step(pull: StepPull, store: EveryRole, number: int = 1) -> Step:
    header = store.wait_step(number, block_seconds=0.0)
    if header is None:
        raise RuntimeError(f"step {number} is not there")
    step, damaged = pull.step(header, pull.part(header))
    if damaged:
        raise RuntimeError(f"{len(damaged)} rollouts are damaged: {damaged[0][1]}")
    return step


def pulls_of(store: EveryRole, world_size: int) -> list[StepPull]:
    """A pull for each rank."""
    return [
        StepPull(store, rank, world_size, Trainable(), pad_token_id=0, pad_to_multiple_of=1)
        for rank in range(world_size)
    ]
