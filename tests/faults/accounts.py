"""The account of a run under faults when it has ended, computed again from what it left.

Nothing here asks the batcher or believes the ledger: pushes and steps come from the server's append-only file
(:mod:`aof`), what was trained from the trainer's ``metrics.jsonl``, what is pending from the pool. Each function gives
its findings as sentences; none means that it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aof import Steps, Written

from rlbuffer.client.buffer import Buffer
from rlbuffer.records.step_digest import digest_step
from rlbuffer.store.records import EnvLedger

Totals = dict[str, tuple[int, int]]
"""env -> rollouts, tokens."""


def check_metrics(metrics: Sequence[Mapping[str, Any]], planned: int) -> list[str]:
    """Every step was trained; whenever one was trained again, every rank had the same bytes."""
    findings = []
    there = sorted({record["step"] for record in metrics})
    if there != list(range(1, planned + 1)):
        findings.append(f"planned were steps 1 to {planned}, trained were {there[:3]} ... {there[-3:]}")
    first: dict[int, tuple[str, list[str]]] = {}
    for record in metrics:
        content = (record["digest"], record["batch_sha256"])
        if first.setdefault(record["step"], content) != content:
            findings.append(f"step {record['step']} was trained twice with different batches: {content}")
        if len(set(record["parameters_sha256"])) > 1:
            findings.append(f"step {record['step']}: the ranks' parameters differ")
    return findings


def check_trained(written: Written, metrics: Iterable[Mapping[str, Any]], *, max_uses: int) -> list[str]:
    """The trained steps are the committed ones, and no rollout was in more trained steps than `max_uses`."""
    findings = list(written.contradictions)
    trained = {record["step"]: record["digest"] for record in metrics}
    uses: Counter[str] = Counter()
    for number, digest in sorted(trained.items()):
        step = written.steps.get(number)
        if step is None or step.digest != digest:
            findings.append(f"step {number} was trained with digest {digest[:12]}, which was never committed")
            continue
        inside = [member.info.rollout_id for part in step.parts for member in part.rollouts]
        findings += [f"rollout {r} is {n} times in step {number}" for r, n in Counter(inside).items() if n > 1]
        uses.update(inside)
    findings += [f"rollout {r} was trained {n} times" for r, n in uses.items() if n > max_uses]
    if not uses:
        findings.append("nothing was trained")
    return findings


def check_uses(committed: Steps, metrics: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every trained step had been committed, and no rollout was in two trained steps; for servers that lose steps."""
    findings = []
    uses: Counter[str] = Counter()
    for number, digest in sorted({(record["step"], record["digest"]) for record in metrics}):
        rollouts = committed.get((number, digest))
        if rollouts is None:
            findings.append(f"step {number} was trained with digest {digest[:12]}, which was never committed")
            continue
        uses.update(rollouts)
    findings += [f"rollout {rollout} was trained {n} times" for rollout, n in uses.items() if n > 1]
    return findings or ([] if uses else ["nothing was trained"])


def check_ledger(buffer: Buffer, written: Written, trained_to: int) -> list[str]:
    """The ledger, per env in rollouts and tokens, against pushes, steps and pool. For runs with ``max_uses = 1``."""
    pool = {entry.entry_id for entry in buffer.store.read_pool(count=10**6)}
    taken: dict[str, tuple[int, int]] = {}
    trained: Totals = {}
    packed: Totals = {}
    for number, step in written.steps.items():
        for part in step.parts:
            for member in part.rollouts:
                length = member.info.length
                _add(trained if number <= trained_to else packed, member.env, 1, length)
                rollouts, tokens = taken.get(member.payload_key, (0, 0))
                taken[member.payload_key] = (rollouts + 1, tokens + length)
    pushed: Totals = {}
    pending: Totals = {}
    dropped: Totals = {}
    for entry_id, push in written.pushes.items():
        _add(pushed, push.env, push.rollouts, push.tokens)
        if entry_id in pool:
            _add(pending, push.env, push.rollouts, push.tokens)
            continue
        rollouts, tokens = taken.get(push.payload_key, (0, 0))
        _add(dropped, push.env, push.rollouts - rollouts, push.tokens - tokens)
    findings = [f"entry {name} is pending, but nobody pushed it" for name in pool - written.pushes.keys()]
    accounts = buffer.ledger().envs
    for env in sorted(pushed.keys() | accounts.keys()):
        account = accounts.get(env, EnvLedger())
        ours = {
            "pushed": (account.pushed, pushed),
            "pending": (account.pending, pending),
            "packed": (account.packed, packed),
            "trained": (account.trained, trained),
            "dropped": (_total(account.dropped.values()), dropped),
        }
        for fate, (there, computed) in ours.items():
            if there != computed.get(env, (0, 0)):
                findings.append(f"env {env}: the ledger has {there} {fate}, computed are {computed.get(env, (0, 0))}")
    return findings


def check_recorded(buffer: Buffer, metrics: Iterable[Mapping[str, Any]], world_size: int) -> list[str]:
    """A reader that saw nothing of the faults pulls the bytes that the ranks recorded, for every live step."""
    recorded = {record["step"]: record["batch_sha256"] for record in metrics}
    retired = buffer.store.meta().retired
    findings = []
    for rank in range(world_size):
        reader = buffer.reader(rank, world_size, timeout_seconds=60)
        reader.start(retired)
        for number in range(retired + 1, max(recorded) + 1):
            if digest_step(reader.pull(number)) != recorded[number][rank]:
                findings.append(f"step {number}: rank {rank} trained other bytes than are there")
        reader.close()
    return findings


def _add(totals: Totals, env: str, rollouts: int, tokens: int) -> None:
    before = totals.get(env, (0, 0))
    totals[env] = (before[0] + rollouts, before[1] + tokens)


def _total(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    listed = list(pairs)
    return sum(p[0] for p in listed), sum(p[1] for p in listed)
