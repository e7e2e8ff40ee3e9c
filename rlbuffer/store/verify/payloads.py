"""The payload part of `verify`: what is referenced is there and is what it says, what is not goes away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlbuffer.errors import PayloadError
from rlbuffer.store.records import PartRollout
from rlbuffer.store.session import text
from rlbuffer.store.verify.snapshot import Findings, Snapshot, take_snapshot
from rlbuffer.store.viewer import Viewer
from rlbuffer.wire import payload

PAYLOAD_BYTES = 32 * 2**20
"""Payloads decoded at a time."""


def check_payloads(store: Viewer, shot: Snapshot, findings: Findings) -> Mapping[str, int]:
    """I2 and I11. -> what was looked at."""
    sizes = _check_sizes(store, shot, findings)
    _check_permanent(store, shot, findings)
    decoded = _check_untrained(store, shot, findings)
    orphans = _check_orphans(store, shot, findings)
    return {"payloads": sizes, "payloads_decoded": decoded, "payload_keys_unreferenced": orphans}


def _check_sizes(store: Viewer, shot: Snapshot, findings: Findings) -> int:
    """Every reference of the pool and of the live steps leads to a field of the announced size."""
    entries = [(entry, f"pending push {entry.entry_id}") for entry in shot.pool]
    entries += [
        (entry, f"group {group.group_id}, kept for another use") for group in shot.reused for entry in group.entries
    ]
    references = [
        (entry.payload_key, i, info.size, who)
        for entry, who in entries
        for i, info in enumerate(entry.info.rollouts if entry.info else ())
    ]
    references += [
        (member.payload_key, member.index, member.info.size, f"step {step.number}")
        for step in shot.steps
        for member in step.members
    ]
    sizes = store.paged(references, lambda pipe, item: pipe.hstrlen(item[0], str(item[1])))
    wrong = [(*item, size) for item, size in zip(references, sizes, strict=True) if size != item[2]]
    if wrong:
        # A run at work may have dropped or retired them since the snapshot: then they are gone rightly.
        still = _in_use(take_snapshot(store))
        for key, index, size, who, there in wrong:
            if key in still:
                state = f"has {there} bytes, announced were {size}" if there else "is missing"
                findings.add("I11", f"{who}: payload {index} of {key} {state}")
    return len(references)


def _check_permanent(store: Viewer, shot: Snapshot, findings: Findings) -> None:
    """Nothing that the pool, a live step, another use or a producer refers to has a time to live.

    In a cluster what is pending has one until a leader has read it.
    """
    keys = store.keys
    pending = {entry.payload_key for entry in shot.pool if store.connection.is_cluster}
    names = {key: f"payload {key} is in use, but" for key in _in_use(shot) - pending}
    control = store.look(lambda client: list(client.scan_iter(match=f"{keys.tag}:*", count=1000)))
    lapsing = tuple(f"{keys.tag}:{kind}:" for kind in ("scoring", "evaluating"))
    names |= {key: f"{key}" for key in map(text, control) if not key.startswith(lapsing)}
    expiring = {key: left for key, left in _lifetimes(store, sorted(names)).items() if left >= 0}
    if expiring:
        still = _in_use(take_snapshot(store))
        for key, left in expiring.items():
            if key in still or key.startswith(keys.tag):
                findings.add("I11", f"{names[key]} lapses in {left / 1000:.0f} s")


def _lifetimes(store: Viewer, keys: Sequence[str]) -> dict[str, int]:
    """Key -> milliseconds that it has yet to live; -1: for ever."""
    return dict(zip(keys, store.paged(keys, lambda pipe, key: pipe.pttl(key)), strict=True))


def _check_untrained(store: Viewer, shot: Snapshot, findings: Findings) -> int:
    """Every untrained rollout decodes, with its checksum, and agrees with what the step says about it.

    In trained steps only sizes are checked: all ranks treated damage there alike, and counted it.
    """
    decoded = 0
    for step in shot.steps:
        if step.number <= shot.trained:
            continue
        for page in _pages(step.members):
            for member, data in zip(page, store.read_payloads(page), strict=True):
                if data is None:
                    continue  # reported by its size
                decoded += 1
                try:
                    payload.decode_rollout(data, expected=member.info)
                except PayloadError as error:
                    findings.add(
                        "I2", f"step {step.number}: rollout {member.info.rollout_id} in {member.payload_key}: {error}"
                    )
    return decoded


def _pages(members: Sequence[PartRollout]) -> Iterator[list[PartRollout]]:
    page: list[PartRollout] = []
    page_bytes = 0
    for member in members:
        if page and page_bytes + member.info.size > PAYLOAD_BYTES:
            yield page
            page, page_bytes = [], 0
        page.append(member)
        page_bytes += member.info.size
    if page:
        yield page


def _check_orphans(store: Viewer, shot: Snapshot, findings: Findings) -> int:
    """A payload that nothing names has a time to live: what a producer that died between its two phases leaves."""
    known = _referenced(shot)
    # A run's name may hold no character that a pattern gives a meaning, so the prefix matches itself only.
    pattern = store.keys.payload_prefix + "*"
    keys = [text(key) for key in store.look(lambda client: list(client.scan_iter(match=pattern, count=1000)))]
    unnamed = [key for key in keys if key not in known]
    permanent = [key for key, left in _lifetimes(store, unnamed).items() if left == -1]
    if permanent:
        known = _referenced(take_snapshot(store))
        for key, left in _lifetimes(store, [key for key in permanent if key not in known]).items():
            if left == -1:
                findings.add("I11", f"payload {key} belongs to nothing and would stay for ever")
    return len(unnamed)


def _referenced(shot: Snapshot) -> set[str]:
    """Payload keys that the pool, a live step or the list of garbage names."""
    return _in_use(shot) | shot.garbage.keys()


def _in_use(shot: Snapshot) -> set[str]:
    """Payload keys that the pool, a live step or a group that may be used again names."""
    keys = {entry.payload_key for entry in shot.pool}
    keys |= {entry.payload_key for group in shot.reused for entry in group.entries}
    return keys | {member.payload_key for step in shot.steps for member in step.members}
