"""`verify`: recomputes everything that can be seen of a run from outside, and names every invariant that does not hold.

The control keys are read in one transaction, so a run that is at work gives a consistent picture; single keys come
after it, and what went away in between is looked for again before it is called missing. Read-only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from rlbuffer.records.step_plan import version_trained
from rlbuffer.state.text import plural
from rlbuffer.store.records import EnvLedger, PartRollout, Report, Unused
from rlbuffer.store.step_format import step_digest
from rlbuffer.store.verify.keys import check_control_keys, check_payloads
from rlbuffer.store.verify.opened import check_open_rollouts
from rlbuffer.store.verify.snapshot import Findings, LiveStep, Snapshot, take_snapshot
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
    _check_reused(shot, findings)
    _check_counters(shot, findings)
    _check_tombstones(shot, store.tombstone_ms, store.tombstone_steps, findings)
    _check_garbage(shot, findings)
    check_control_keys(store, findings)
    payloads = check_payloads(store, shot, findings)
    opened = check_open_rollouts(store, findings)
    return Report(
        findings=tuple(findings.found),
        checked={
            "entries": len(shot.pool),
            "rollouts": sum(e.rollouts for e in shot.pool)
            + sum(m.sequence == 0 for step in shot.steps for m in step.members),
            "steps": len(shot.steps),
            **payloads,
            **opened,
        },
    )


Sums = dict[str, tuple[int, int]]
"""Env -> rollouts, tokens."""


def _sums(amounts: Iterable[tuple[str, int, int]]) -> Sums:
    sums: Sums = {}
    for env, rollouts, tokens in amounts:
        before = sums.get(env, (0, 0))
        sums[env] = before[0] + rollouts, before[1] + tokens
    return sums


def _counted(steps: Iterable[LiveStep]) -> Sums:
    """What the account has of these steps; what was packed and trained once is counted beside it."""
    return _sums(
        (member.env, int(member.sequence == 0), member.info.length)
        for step in steps
        for member in step.members
        if step.header is None or member.group_id not in step.header.uses
    )


# -- I10 ---------------------------------------------------------------------------------------------------------------
def _check_ledger(shot: Snapshot, findings: Findings) -> None:
    held = {
        "pending": _sums((entry.env, entry.rollouts, entry.tokens) for entry in shot.pool),
        "packed": _counted(step for step in shot.steps if step.number > shot.trained),
        "trained": _less(_counted(step for step in shot.steps if step.number <= shot.trained), shot.unused),
    }
    for env in sorted(shot.ledger.envs.keys() | {env for sums in held.values() for env in sums}):
        account = shot.ledger.envs.get(env, EnvLedger())
        for fate, sums in held.items():
            pairs = zip(("rollouts", "tokens"), getattr(account, fate), sums.get(env, (0, 0)), strict=True)
            for name, there, is_held in pairs:
                findings.unless(
                    there == is_held or (fate == "trained" and there > is_held),  # trained steps retire
                    "I10",
                    f"env {env}: the ledger has {there} {name} {fate}, the pool and the live steps hold {is_held}",
                )
        dropped = [(f"dropped({reason})", pair) for reason, pair in account.dropped.items()]
        for fate, pair in [("pushed", account.pushed), *((fate, getattr(account, fate)) for fate in held), *dropped]:
            findings.unless(min(pair) >= 0, "I10", f"env {env}: {fate} is negative: {pair}")


def _less(sums: Sums, unused: Iterable[Unused]) -> Sums:
    """The sums without what was given and not trained."""
    left = dict(sums)
    for one in unused:
        rollouts, tokens = left.get(one.env, (0, 0))
        left[one.env] = rollouts - one.rollouts, tokens - one.tokens
    return left


# -- I3, I4 ------------------------------------------------------------------------------------------------------------
def _check_chain(shot: Snapshot, findings: Findings) -> None:
    there = [step.number for step in shot.steps]
    expected = list(range(shot.meta.retired + 1, shot.meta.step + 1))
    findings.unless(
        there == expected,
        "I4",
        f"the steps stream must hold steps {shot.meta.retired + 1} to {shot.meta.step}, "
        f"but is missing, has too many of, or orders {sorted(set(there) ^ set(expected)) or there}",
    )
    previous = None
    for step in shot.steps:
        if step.header is None:
            previous = None
            continue
        where, header = f"step {step.number}", step.header
        digest = step_digest(header.previous_digest, step.header_bytes, step.part_bytes)
        findings.unless(digest == header.digest, "I4", f"{where}: its bytes do not give its digest: it was changed")
        findings.unless(header.step == step.number, "I4", f"{where}: its header says step {header.step}")
        findings.unless(
            previous in (None, header.previous_digest),
            "I4",
            f"{where}: its digest does not chain on that of step {step.number - 1}",
        )
        previous = header.digest
        findings.unless(
            step.number != shot.meta.step or previous == shot.meta.digest,
            "I4",
            f"the run's digest is not that of its last step {step.number}",
        )
        findings.unless(
            step.number != shot.trained or shot.trained_digest in ("", previous),
            "I3",
            f"the trainer trained another step {step.number} than is here",
        )


# -- I1, I5, I6 --------------------------------------------------------------------------------------------------------
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
        dealt = sorted(index for micro_step in part.rows for row in micro_step for index in row)
        findings.unless(
            dealt == list(range(len(part.rollouts))),
            "I4",
            f"{where}: the rows of rank {part.rank} do not hold each of its rollouts once",
        )
    header_counts = header.rollouts, header.tokens, header.normalizers.get("loss_tokens")
    loss_tokens = sum(m.info.loss_tokens for m in members if not header.masks(m.info))
    counted = sum(m.sequence == 0 for m in members), sum(m.info.length for m in members), loss_tokens
    findings.unless(
        header_counts == counted,
        "I4",
        f"{where}: the header counts {header_counts} rollouts, tokens and loss tokens, the parts hold {counted}",
    )
    packed = {env: pair for env, pair in step.packed.items() if pair != (0, 0)}
    findings.unless(
        packed == _counted([step]), "I10", f"{where}: the commit counted {packed}, the parts hold {_counted([step])}"
    )
    for member in members:
        rollout = f"{where}: rollout {member.info.rollout_id}"
        age = version_trained(header.adapters, member.adapter, step.number) - member.info.min_version
        limit = step.age_limits.get(member.env)
        findings.unless(
            age >= 0 and (limit is None or age <= limit),
            "I5",
            f"{rollout} has age {age}, max_age of {member.env} was {limit}",
        )
        findings.unless(
            member.group_id in header.group_ids,
            "I6",
            f"{rollout} is of group {member.group_id}, which the header does not name",
        )


def _check_uses(shot: Snapshot, findings: Findings) -> None:
    seen: dict[tuple[str, str], list[int]] = {}
    """Group and rollout -> steps that train it: rollouts of different groups may have the same id."""
    pending = {entry.payload_key: entry.entry_id for entry in shot.pool}
    for step in shot.steps:
        # By the rule of its own revision: a step from when more uses were allowed is not judged by a newer one.
        limit = step.header.max_uses if step.header is not None else 1
        uses = step.header.uses if step.header is not None else {}
        for member in step.members:
            if member.sequence:
                continue  # its rollout counts once
            rollout_id = member.info.rollout_id
            steps = seen.setdefault((member.group_id, rollout_id), [])
            before = max(len(steps), uses.get(member.group_id, 0))  # earlier steps may be retired
            if step.number in steps or before >= limit:
                times = f"was trained {plural(before, 'time')}, of {limit} allowed,"
                where = f"is in step {steps[-1]}" if steps else times
                findings.add("I1", f"rollout {rollout_id} of group {member.group_id} {where} and in step {step.number}")
            steps.append(step.number)
        for key in sorted(_payload_keys(step.members) & pending.keys()):
            findings.add("I1", f"push {pending[key]} is pending and also in step {step.number} ({key})")


def _check_reused(shot: Snapshot, findings: Findings) -> None:
    """I1 of what is trained again: the steps before are here, or retired. Nothing of a step that was taken back is."""
    headers = {step.number: step.header for step in shot.steps if step.header is not None}
    trained: Counter[str] = Counter()
    """Group -> live steps so far that train it."""
    for number, header in headers.items():
        for group_id, before in header.uses.items():
            findings.unless(
                before <= trained[group_id] + shot.meta.retired,
                "I1",
                f"step {number} trains group {group_id} after {plural(before, 'use')}, but earlier steps have "
                f"{trained[group_id]} of them: a step of it was taken back",
            )
        trained.update(header.group_ids)
    for group in shot.reused:
        last = headers.get(group.step)
        is_here = last is not None and group.group_id in last.group_ids
        uses = last.uses.get(group.group_id, 0) + 1 if last is not None and is_here else 0
        findings.unless(
            uses == group.uses or (last is None and group.step <= shot.meta.step),
            "I1",
            f"group {group.group_id} waits for another use after {plural(group.uses, 'use')}, the last in step "
            f"{group.step}, which {f'trains it for use {uses}' if uses else 'does not train it: it was taken back'}",
        )


def _payload_keys(members: Iterable[PartRollout]) -> set[str]:
    return {member.payload_key for member in members}


# -- I6, I8, I11, I13 --------------------------------------------------------------------------------------------------
def _check_counters(shot: Snapshot, findings: Findings) -> None:
    revisions = [(f"step {step.number}", step.header.revision) for step in shot.steps if step.header is not None]
    for (before, older), (after, newer) in pairwise([*revisions, ("the run", shot.meta.revision)]):
        findings.unless(
            older <= newer, "I8", f"{before} has revision {older} of the settings, {after} behind it {newer}"
        )
    retired, trained, step = shot.meta.retired, shot.trained, shot.meta.step
    findings.unless(trained <= step, "I8", f"the trainer has trained step {trained}, the run ends at step {step}")
    findings.unless(retired <= trained, "I8", f"steps up to {retired} are retired, only {trained} are trained")


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
    """No payload that is pending, or kept for another use, is garbage; each of a step is, from that step on."""
    kept = {entry.payload_key: group.group_id for group in shot.reused for entry in group.entries}
    needed = [(key, f"group {group_id} may be used again") for key, group_id in kept.items()]
    needed += [(entry.payload_key, f"push {entry.entry_id} is pending") for entry in shot.pool]
    for key, what in needed:
        findings.unless(key not in shot.garbage, "I11", f"{what}, but its payload is marked as garbage ({key})")
    for entry in shot.pool:
        findings.unless(
            not entry.error, "I13", f"push {entry.entry_id} cannot be read, and drops as invalid: {entry.error[:300]}"
        )
    for step in shot.steps:
        for key in sorted(_payload_keys(step.members) - kept.keys()):
            score = shot.garbage.get(key, -1)
            when = f"may be swept after step {score}" if score >= 0 else "is on no list of what to sweep"
            findings.unless(score >= step.number, "I11", f"step {step.number}: {key} {when}")
