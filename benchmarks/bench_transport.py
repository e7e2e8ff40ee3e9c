"""The cost of moving rollouts through the store, against the same bytes as bare HSET and HMGET.

Push and pull are timed in the same process, on the same server, round by round beside the bare commands, so that what
else the machine does hits both alike. Shares are medians over rounds; absolute numbers are this machine's, today's.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import redis

from benchmarks.report import Report
from rlbuffer.config.settings import ServerSettings
from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import VersionSpan
from rlbuffer.store.records import PartRollout
from rlbuffer.store.redis_store import RedisStore, open_store
from rlbuffer.wire import payload

GROUP_BYTES = 512 * 1024
"""Payload of one group, about: 16 rollouts of 3,640 tokens at 9 bytes each."""
GROUP_SIZE = 16
BYTES_PER_TOKEN = 9
"""Tokens int32, logprobs float32, loss mask bool."""
GROUPS = 64
"""Groups per round: 32 MiB."""
ROUNDS = 7
"""Timed rounds, after one that grows heaps and connections."""
INDICES = [str(i) for i in range(GROUP_SIZE)]
Cost = tuple[float, float]
"""Wall seconds, CPU seconds of this process."""


def run(report: Report) -> None:
    """Times push and pull and the bare commands beside them."""
    report.begin(
        "transport",
        measures=f"{GROUPS} groups of {GROUP_SIZE} rollouts, 512 KiB each, through push and pull and through bare HSET "
        f"and HMGET; medians of {ROUNDS} rounds; CPU is this process's",
        not_measured="the network (unix socket here), the server's own CPU, many producers at once, a full server, "
        "appendfsync always, groups far from 512 KiB",
    )
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    store = open_store(None, run="bench", home=home, server=ServerSettings(appendfsync="everysec"))
    try:
        groups = [make_group(i) for i in range(GROUPS)]
        rounds = [one_round(store, groups, number) for number in range(1 + ROUNDS)][1:]
        facts = store.server()
    finally:
        store.close()
        shutil.rmtree(home, ignore_errors=True)
    size = sum(len(raw) for group in groups for raw in payload.encode_push(group).payloads)
    show(report, rounds, gigabytes=size / 1e9)
    report.line(f"\nServer: {facts['name']} {facts['version']}, append-only file synced every second.")
    report.line("of raw: speed as a share of the bare command's for the same bytes in the same round.")


def one_round(store: RedisStore, groups: Sequence[Group], number: int) -> dict[str, Cost]:
    """Pushes and pulls every group once, and the same bytes by bare commands."""
    client = store.connection.client
    epoch = store.open_run().epoch
    names = [f"raw:{number}:{i}" for i in range(len(groups))]
    pushes = [payload.encode_push(group) for group in groups]
    fields = [dict(zip(INDICES, push.payloads, strict=True)) for push in pushes]
    last = store.read_pool(count=1_000_000)
    spent = {
        "raw HSET": timed(partial(hset, client, names, fields)),
        "push": timed(partial(push_all, store, groups, number, epoch)),
        "encoding alone": timed(lambda: [payload.encode_push(group) for group in groups]),
    }
    (push_wall, push_cpu), (own_wall, own_cpu) = spent["push"], spent["encoding alone"]
    spent["push without encoding"] = max(push_wall - own_wall, 1e-9), max(push_cpu - own_cpu, 1e-9)
    refs = references(store, last[-1].entry_id if last else "0-0", len(groups))
    spent["raw HMGET"] = timed(partial(hmget, client, names))
    spent["pull"] = timed(partial(store.read_payloads, refs))
    spent["pull and decode"] = timed(partial(pull_and_decode, store, refs))
    for key in {ref.payload_key for ref in refs} | set(names):
        client.unlink(key)
    return spent


def show(report: Report, rounds: Sequence[dict[str, Cost]], *, gigabytes: float) -> None:
    """Prints the table: speed, CPU, and each as a share of the bare command's."""
    raw = {"push": "raw HSET", "push without encoding": "raw HSET", "pull": "raw HMGET", "pull and decode": "raw HMGET"}
    rows = []
    for name in rounds[0]:
        wall, cpu = (statistics.median(spent[name][i] for spent in rounds) for i in (0, 1))
        shares = ["", ""]
        if name in raw:
            # Round by round, so that a busy moment of the machine is in both halves.
            shares = [f"{statistics.median(s[raw[name]][i] / s[name][i] for s in rounds):.0%}" for i in (0, 1)]
        rows.append([name, f"{gigabytes / wall:.2f}", f"{cpu / gigabytes:.2f}", *shares])
    report.table(["", "wall GB/s", "CPU s/GB", "of raw, wall", "of raw, CPU"], rows)


def make_group(seed: int) -> Group:
    """One group of about :data:`GROUP_BYTES`."""
    rng = np.random.default_rng(seed)
    length = GROUP_BYTES // GROUP_SIZE // BYTES_PER_TOKEN
    mask = np.arange(length) >= length // 8
    rollouts = tuple(
        Rollout(
            tokens=rng.integers(0, 150_000, length, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
            reward=float(i % 2),
            version_spans=(VersionSpan(0, length // 8, length),),
        )
        for i in range(GROUP_SIZE)
    )
    return Group(group_id=f"a.{seed}", env="a", prompt_id=str(seed), planned_size=GROUP_SIZE, rollouts=rollouts)


def push_all(store: RedisStore, groups: Sequence[Group], number: int, epoch: int) -> None:
    for i, group in enumerate(groups):
        store.push(group, producer="bench", incarnation=f"round{number}", sequence=i + 1, epoch=epoch)


def hset(client: redis.Redis, names: Sequence[str], fields: Sequence[dict[str, bytes]]) -> None:
    for name, mapping in zip(names, fields, strict=True):
        client.hset(name, mapping=mapping)  # type: ignore[arg-type]


def hmget(client: redis.Redis, names: Sequence[str]) -> list[object]:
    # Kept until the end, as a pull keeps a step: fresh memory is a good part of the cost.
    return [client.hmget(name, INDICES) for name in names]


def references(store: RedisStore, after: str, groups: int) -> list[PartRollout]:
    refs = [
        PartRollout(
            payload_key=entry.payload_key,
            index=i,
            info=info,
            group_id=entry.group_id,
            env=entry.env,
            adapter="",
            advantage=0.0,
        )
        for entry in store.read_pool(after, count=groups)
        if entry.info is not None
        for i, info in enumerate(entry.info.rollouts)
    ]
    if len(refs) != groups * GROUP_SIZE:
        raise RuntimeError(f"{groups * GROUP_SIZE} rollouts were pushed, {len(refs)} are there")
    return refs


def pull_and_decode(store: RedisStore, refs: Sequence[PartRollout]) -> None:
    for ref, data in zip(refs, store.read_payloads(refs), strict=True):
        if data is None:
            raise RuntimeError(f"payload {ref.index} of {ref.payload_key} is missing")
        payload.decode_rollout(data, expected=ref.info)


def timed(work: Callable[[], object]) -> Cost:
    """Runs `work` once."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu
