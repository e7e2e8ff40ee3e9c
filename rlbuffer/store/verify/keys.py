"""The part of `verify` that looks at single keys: their types, numbers and times to live, and every payload.

What a run at work may have moved since the snapshot is looked for once more before it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rlbuffer.errors import PayloadError
from rlbuffer.store.keys import SUFFIX
from rlbuffer.store.ledger import amount_of
from rlbuffer.store.session import number, text
from rlbuffer.store.verify.snapshot import Findings, Snapshot, take_snapshot
from rlbuffer.store.viewer import Viewer, chunks
from rlbuffer.wire import payload

PAYLOAD_BYTES = 32 * 2**20
"""Payloads decoded at a time."""
TYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "meta",
                "lease",
                "ledger",
                "producer",
                "visits",
                "reuse",
                "allowance",
                "numbers",
                "ends",
                "prompts",
                "unused",
            ),
            "hash",
        ),
        **dict.fromkeys(("policy", "trainer", "workers", "scorers", "ranks", "batchers", "gateways"), "hash"),
        **dict.fromkeys(("open_group", "open_rollout", "open_keys", "open_counts"), "hash"),
        "taken": "hash",
        **dict.fromkeys(("closed", "damaged", "tickets", "paused", "garbage"), "zset"),
        **dict.fromkeys(("open", "open_ended", "open_pushed"), "zset"),
        **dict.fromkeys(("pool", "steps", "history", "summary", "records", "eval"), "stream"),
        **dict.fromkeys(("state", "scoring", "evaluating", "loading"), "string"),
    }
)
"""First word of a control key -> its type."""
EXPIRING = ("scoring", "evaluating", "loading")
"""First words of control keys that expire by themselves."""
COUNTED: Mapping[str, Callable[[Any], int | None]] = MappingProxyType(
    {"ledger": amount_of, "numbers": number, "open_counts": number}
)
"""First word of a hash that counts -> how one of its values is read."""


def check_control_keys(store: Viewer, findings: Findings) -> None:
    """I13, and I11 of what does not expire. The other processes pass over a wrong type and what is no number."""
    tag = f"{store.keys.tag}:"
    names = [name for name in _names(store, f"{tag}*") if name.removeprefix(tag).partition(":")[0] in TYPES]
    words = [name.removeprefix(tag).partition(":")[0] for name in names]
    kinds = map(text, store.paged(names, lambda pipe, key: pipe.type(key)))
    for key, word, kind, left in zip(names, words, kinds, _lifetimes(store, names), strict=True):
        expected = TYPES[word]
        findings.unless(kind in (expected, "none"), "I13", f"{key} holds a {kind}, not a {expected}: remove it (DEL)")
        findings.unless(left < 0 or word in EXPIRING, "I11", f"{key} expires in {left / 1000:.0f} s")
    hashes = store.paged([*COUNTED], lambda pipe, word: pipe.hgetall(f"{tag}{word}"))
    for (word, read), fields in zip(COUNTED.items(), hashes, strict=True):
        for name, value in (fields or {}).items():
            findings.unless(
                read(value) is not None,
                "I13",
                f"{tag}{word} holds no number: {text(name)[:60]!r} = {text(value)[:40]!r}",
            )


def check_payloads(store: Viewer, shot: Snapshot, findings: Findings) -> Mapping[str, int]:
    """I2 and I11. -> what was looked at."""
    references = _references(shot)
    used, names = _in_use(shot), [*filter(_is_payload, _names(store, f"{store.keys.payload_prefix}*"))]
    odd = []
    sizes = store.paged(references, lambda pipe, item: pipe.hstrlen(item[0], str(item[1])))
    for (key, index, size, who), there in zip(references, sizes, strict=True):
        if there != size:
            state = f"has {there} bytes, announced were {size}" if there else "is missing"
            odd.append((key, f"{who}: payload {index} of {key} {state}"))
    # In a cluster what is pending has a time to live until a leader has read it.
    permanent = sorted(used - {entry.payload_key for entry in shot.pool if store.connection.is_cluster})
    for key, left in zip(permanent, _lifetimes(store, permanent), strict=True):
        if left >= 0:
            odd.append((key, f"payload {key} is in use, but expires in {left / 1000:.0f} s"))
    # What a producer that died between its two phases leaves has a time to live.
    unnamed = [key for key in names if key not in used and key not in shot.garbage]
    stray = [key for key, left in zip(unnamed, _lifetimes(store, unnamed), strict=True) if left == -1]
    if odd or stray:
        now = take_snapshot(store)
        used = _in_use(now)
        for key, message in odd:
            findings.unless(key not in used, "I11", message)
        stray = [key for key in stray if key not in used and key not in now.garbage]
        for key, left in zip(stray, _lifetimes(store, stray), strict=True):
            findings.unless(left != -1, "I11", f"payload {key} belongs to nothing and would stay for ever")
    decoded = _check_untrained(store, shot, findings)
    return {"payloads": len(references), "payloads_decoded": decoded, "payload_keys_unreferenced": len(unnamed)}


def _names(store: Viewer, pattern: str) -> list[str]:
    """A run's name may hold no character that a pattern gives a meaning, so its own keys match only."""
    return sorted(map(text, store.look(lambda client: list(client.scan_iter(match=pattern, count=1000)))))


def _is_payload(name: str) -> bool:
    """True for a name that a push can have given: what another program keeps behind this prefix is not the run's."""
    return SUFFIX.match(name.removesuffix("}").rpartition(":")[2].encode()) is not None


def _lifetimes(store: Viewer, keys: Sequence[str]) -> list[int]:
    """Milliseconds that each key has yet to live; -1: for ever, -2: it is gone."""
    return store.paged(keys, lambda pipe, key: pipe.pttl(key))


def _references(shot: Snapshot) -> list[tuple[str, int, int, str]]:
    """Payload key, index, announced size, and by whom, of all that the pool, other uses and live steps refer to."""
    entries = [(entry, f"pending push {entry.entry_id}") for entry in shot.pool]
    entries += [
        (entry, f"group {group.group_id}, kept for another use") for group in shot.reused for entry in group.entries
    ]
    pushed = [
        (entry.payload_key, i, info.size, who)
        for entry, who in entries
        for i, info in enumerate(entry.info.sequences if entry.info else ())
    ]
    packed = [(m.payload_key, m.index, m.info.size, f"step {step.number}") for step in shot.steps for m in step.members]
    return pushed + packed


def _in_use(shot: Snapshot) -> set[str]:
    """Payload keys that the pool, a live step or a group that may be used again names."""
    keys = {entry.payload_key for entry in shot.pool}
    keys |= {entry.payload_key for group in shot.reused for entry in group.entries}
    return keys | {member.payload_key for step in shot.steps for member in step.members}


def _check_untrained(store: Viewer, shot: Snapshot, findings: Findings) -> int:
    """Every untrained rollout decodes, with its checksum, and agrees with what the step says about it.

    In trained steps only sizes are checked: all ranks treated damage there alike, and counted it.
    """
    decoded = 0
    for step in shot.steps:
        members = step.members if step.number > shot.trained else []
        for chunk in chunks([member.info.size for member in members], PAYLOAD_BYTES):
            page = members[chunk.start : chunk.stop]
            for member, data in zip(page, store.read_payloads(page), strict=True):
                if data is None:
                    continue  # reported by its size
                decoded += 1
                try:
                    read = payload.decode(data, member.info)
                    read.record()
                    if (read.details.number, read.details.sequences) != (member.sequence, member.sequences):
                        raise PayloadError(f"sequence {read.details.number} of {read.details.sequences} by its payload")
                except PayloadError as error:
                    findings.add(
                        "I2", f"step {step.number}: rollout {member.info.rollout_id} in {member.payload_key}: {error}"
                    )
    return decoded
