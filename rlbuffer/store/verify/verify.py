"""`verify`: recomputes everything that can be seen of a run from outside, and names every invariant that does not hold.

The control keys are read in one transaction, so a run that is at work gives a consistent picture; payloads come after
it, and what went away in between is looked for again before it is called missing. Read-only.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from rlbuffer.records.step_plan import version_trained
from rlbuffer.state.text import plural
from rlbuffer.store.records import EnvLedger, Report
from rlbuffer.store.step_format import step_digest
from rlbuffer.store.verify.payloads import check_payloads
from rlbuffer.store.verify.snapshot import Findings, LiveStep, Snapshot, take_snapshot
from rlbuffer.store.verify.written import check_written
from rlbuffer.store.viewer import Viewer


def verify(store: Viewer) -> Report:
    """Checks the invariants of docs/explain/protocol.md that are visible on the server."""
    shot = take_snapshot(store)
    findings = Findings(list(shot.unreadable))
    _check_ledger(shot, findings)
    _check_chain(shot, findings)
    for step in shot.steps:
        _check_step(step, findings)
    _check_uses(shot, findings)
    _check_counters(shot, findings)
    _check_tombstones(shot, store.tombstone_ms, store.tombstone_steps, findings)
    _check_garbage(shot, findings)
    check_written(store, findings)
    payloads = check_payloads(store, shot, findings)
    memory = _check_memory(store, shot, findings)
    return Report(
        findings=tuple(findings.found),
        checked={
            "entries": len(shot.pool),
            "rollouts": sum(e.rollouts for e in shot.pool) + sum(len(step.members) for step in shot.steps),
            "steps": len(shot.steps),
            **payloads,
            **memory,
        },
    )


# -- I10 ---------------------------------------------------------------------------------------------------------------
def _check_ledger(shot: Snapshot, findings: Findings) -> None:
    pool: dict[str, Counter[str]] = {}
    for entry in shot.pool:
        pool.setdefault(entry.env, Counter()).update(rollouts=entry.rollouts, tokens=entry.tokens)
    packed, trained = _by_env(shot, trained=False), _by_env(shot, trained=True)
    for env in sorted(shot.ledger.envs.keys() | pool.keys() | packed.keys() | trained.keys()):
        account = shot.ledger.envs.get(env, EnvLedger())
        pending = pool.get(env, Counter())
        for unit, name in enumerate(("rollouts", "tokens")):
            findings.unless(
                account.pending[unit] == pending[name],
                "I10",
                f"env {env}: the ledger leaves {account.pending[unit]} {name} pending, the pool holds {pending[name]}",
            )
            there = packed.get(env, Counter())[name]
            findings.unless(
                account.packed[unit] == there,
                "I10",
                f"env {env}: the ledger has {account.packed[unit]} {name} packed, the untrained steps hold {there}",
            )
            there = trained.get(env, Counter())[name]
            findings.unless(
                account.trained[unit] >= there,
                "I10",
                f"env {env}: the ledger has {account.trained[unit]} {name} trained, live trained steps hold {there}",
            )
            negative = [fate for fate, pair in _fates(account) if pair[unit] < 0]
            findings.unless(not negative, "I10", f"env {env}: {', '.join(negative)} {name} are negative")


def _fates(account: EnvLedger) -> list[tuple[str, tuple[int, int]]]:
    dropped = [(f"dropped({reason})", pair) for reason, pair in account.dropped.items()]
    return [("pushed", account.pushed), ("packed", account.packed), ("trained", account.trained), *dropped]


def _by_env(shot: Snapshot, *, trained: bool) -> dict[str, Counter[str]]:
    sums: dict[str, Counter[str]] = {}
    for step in shot.steps:
        if (step.number <= shot.trained) is trained:
            for member in step.members:
                if step.header is not None and member.group_id in step.header.uses:
                    continue  # packed and trained once; this is counted beside the ledger
                sums.setdefault(member.env, Counter()).update(rollouts=1, tokens=member.info.length)
    return sums


# -- I3, I4 ------------------------------------------------------------------------------------------------------------
def _check_chain(shot: Snapshot, findings: Findings) -> None:
    there = [step.number for step in shot.steps]
    expected = list(range(shot.meta.retired + 1, shot.meta.step + 1))
    if there != expected:
        odd = sorted(set(there) ^ set(expected))
        findings.add(
            "I4",
            f"the steps stream must hold steps {shot.meta.retired + 1} to {shot.meta.step}, "
            f"but {'is missing or has too many of' if odd else 'orders'} {odd or there}",
        )
    previous = None
    for step in shot.steps:
        if step.header is None:
            previous = None
            continue
        digest = step_digest(step.header.previous_digest, step.header_bytes, step.part_bytes)
        findings.unless(
            digest == step.header.digest, "I4", f"step {step.number}: its bytes do not give its digest: it was changed"
        )
        findings.unless(
            step.header.step == step.number, "I4", f"step {step.number}: its header says step {step.header.step}"
        )
        if previous is not None:
            findings.unless(
                step.header.previous_digest == previous,
                "I4",
                f"step {step.number}: its digest does not chain on that of step {step.number - 1}",
            )
        previous = step.header.digest
        if step.number == shot.meta.step:
            findings.unless(
                previous == shot.meta.digest, "I4", f"the run's digest is not that of its last step {step.number}"
            )
        if step.number == shot.trained and shot.trained_digest:
            findings.unless(
                previous == shot.trained_digest, "I3", f"the trainer trained another step {step.number} than is here"
            )


# -- I9 ----------------------------------------------------------------------------------------------------------------
def _check_memory(store: Viewer, shot: Snapshot, findings: Findings) -> dict[str, int]:
    """Returns percent of the server's memory in use; nothing where there is no limit.

    The server looks at its limit before a command, so that one push may end above it.
    """
    facts = store.server()
    used, limit = int(facts["used_memory"]) - int(facts["buffers"]), int(facts["maxmemory"])
    if not limit:
        return {}
    pushes: Counter[str] = Counter()
    for entry in shot.pool:
        pushes[entry.payload_key] = sum(info.size for info in entry.info.rollouts) if entry.info else 0
    for step in shot.steps:
        for member in step.members:
            pushes[member.payload_key] += member.info.size
    largest = max(pushes.values(), default=0)
    findings.unless(
        used <= limit + largest,
        "I9",
        f"the server uses {used} bytes without its clients' buffers, above its limit of {limit} (maxmemory)",
    )
    return {"percent_of_memory": round(100 * used / limit)}


# -- I1, I2, I5 --------------------------------------------------------------------------------------------------------
def _check_step(step: LiveStep, findings: Findings) -> None:
    header = step.header
    where = f"step {step.number}"
    if header is None:
        findings.unless(bool(step.header_bytes), "I4", f"{where}: has no header")
        return
    members = step.members
    ranks = [part.rank for part in step.parts]
    findings.unless(
        ranks == list(range(header.world_size)),
        "I4",
        f"{where}: has parts of ranks {ranks}, planned for world size {header.world_size}",
    )
    for part in step.parts:
        dealt = Counter(index for micro_step in part.rows for row in micro_step for index in row)
        findings.unless(
            dealt == Counter(range(len(part.rollouts))),
            "I4",
            f"{where}: the rows of rank {part.rank} do not hold each of its rollouts once",
        )
    totals = {"rollouts": len(members), "tokens": sum(m.info.length for m in members)}
    for name, total in totals.items():
        findings.unless(
            total == getattr(header, name),
            "I4",
            f"{where}: the header counts {getattr(header, name)} {name}, the parts hold {total}",
        )
    loss_tokens = sum(m.info.loss_tokens for m in members if not header.masks(m.info))
    findings.unless(
        header.normalizers.get("loss_tokens") == loss_tokens,
        "I4",
        f"{where}: normalised by {header.normalizers.get('loss_tokens')} loss tokens, the parts hold {loss_tokens}",
    )
    counted: dict[str, tuple[int, int]] = {}
    for member in members:
        if member.group_id not in header.uses:
            rollouts, tokens = counted.get(member.env, (0, 0))
            counted[member.env] = (rollouts + 1, tokens + member.info.length)
        age = version_trained(header.adapters, member.adapter, step.number) - member.info.min_version
        limit = step.age_limits.get(member.env)
        findings.unless(
            age >= 0 and (limit is None or age <= limit),
            "I5",
            f"{where}: rollout {member.info.rollout_id} has age {age}, max_age of {member.env} was {limit}",
        )
        findings.unless(
            member.group_id in header.group_ids,
            "I6",
            f"{where}: rollout {member.info.rollout_id} is of group {member.group_id}, which the header does not name",
        )
    findings.unless(
        {env: pair for env, pair in step.packed.items() if pair != (0, 0)} == counted,
        "I10",
        f"{where}: the commit counted {dict(step.packed)}, the parts hold {counted}",
    )


def _check_uses(shot: Snapshot, findings: Findings) -> None:
    seen: dict[tuple[str, str], list[int]] = {}
    """Group and rollout -> steps that train it: rollouts of different groups may have the same id."""
    pending = {entry.payload_key: entry.entry_id for entry in shot.pool}
    for step in shot.steps:
        keys = set()
        # By the rule of its own revision: a step from when more uses were allowed is not judged by a newer one.
        limit = step.header.max_uses if step.header is not None else 1
        uses = step.header.uses if step.header is not None else {}
        for member in step.members:
            rollout_id = member.info.rollout_id
            steps = seen.setdefault((member.group_id, rollout_id), [])
            before = max(len(steps), uses.get(member.group_id, 0))  # earlier steps may be retired
            if step.number in steps or before >= limit:
                times = f"was trained {plural(before, 'time')}, of {limit} allowed,"
                where = f"is in step {steps[-1]}" if steps else times
                findings.add("I1", f"rollout {rollout_id} of group {member.group_id} {where} and in step {step.number}")
            steps.append(step.number)
            keys.add(member.payload_key)
        for key in sorted(keys & pending.keys()):
            findings.add("I1", f"push {pending[key]} is pending and also in step {step.number} ({key})")


# -- I6, I8, I11 -------------------------------------------------------------------------------------------------------
def _check_counters(shot: Snapshot, findings: Findings) -> None:
    revisions = [(step.number, step.header.revision) for step in shot.steps if step.header is not None]
    for (before, older), (number, newer) in pairwise([*revisions, (shot.meta.step, shot.meta.revision)]):
        findings.unless(
            older <= newer,
            "I8",
            f"step {before} was made with revision {older} of the settings, but "
            + (f"step {number} with {newer}" if number != before else f"the run is at {newer}"),
        )
    findings.unless(
        shot.trained <= shot.meta.step,
        "I8",
        f"the trainer has trained step {shot.trained}, the run ends at step {shot.meta.step}",
    )
    findings.unless(
        shot.meta.retired <= shot.trained,
        "I8",
        f"steps up to {shot.meta.retired} are retired, only {shot.trained} are trained",
    )


def _check_tombstones(shot: Snapshot, tombstone_ms: int, steps: int, findings: Findings) -> None:
    for step in shot.steps:
        if step.header is None:
            continue
        if step.header.committed_ms < shot.now_ms - tombstone_ms and step.number <= shot.meta.step - steps:
            continue
        for group_id in step.header.group_ids:
            findings.unless(
                group_id in shot.closed, "I6", f"group {group_id} of step {step.number} has no tombstone for late parts"
            )


def _check_garbage(shot: Snapshot, findings: Findings) -> None:
    kept = {entry.payload_key: group.group_id for group in shot.reused for entry in group.entries}
    for key in sorted(kept.keys() & shot.garbage.keys()):
        findings.add("I11", f"group {kept[key]} may be used again, but its payload is marked as garbage ({key})")
    for entry in shot.pool:
        if entry.error:
            findings.add("I13", f"push {entry.entry_id} cannot be read, and drops as invalid: {entry.error[:300]}")
        findings.unless(
            entry.payload_key not in shot.garbage,
            "I11",
            f"push {entry.entry_id} is pending, but its payload is marked as garbage ({entry.payload_key})",
        )
    for step in shot.steps:
        for key in sorted({member.payload_key for member in step.members}):
            if key in kept:
                continue
            score = shot.garbage.get(key)
            findings.unless(
                score is not None and score >= step.number,
                "I11",
                f"step {step.number}: {key} may be swept after step {score}"
                if score is not None
                else f"step {step.number}: {key} is on no list of what to sweep: it would stay for ever",
            )
