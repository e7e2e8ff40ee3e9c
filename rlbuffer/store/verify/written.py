"""The part of `verify` that looks at what workers and scorers may write by hand (I13).

Each key is of its type, and what is in it is what a script of rlbuffer would have put there. The other processes pass
over what is not; here it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from rlbuffer.records.info import ENV_NAME
from rlbuffer.store.moves.evaluations import evaluation_of
from rlbuffer.store.moves.ledger import foreign_fields
from rlbuffer.store.moves.pool import AHEAD_MS
from rlbuffer.store.moves.telemetry import heartbeat_of
from rlbuffer.store.moves.tickets import LONGEST_TICKET_SECONDS
from rlbuffer.store.session import answers, number, ranged, text
from rlbuffer.store.verify.snapshot import Findings, Verified

TYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("meta", "lease", "ledger", "producer", "visits", "reuse", "allowance", "numbers", "ends", "room", "taken"),
            "hash",
        ),
        **dict.fromkeys(("policy", "trainer", "workers", "scorers", "ranks", "batchers", "waiting"), "hash"),
        **dict.fromkeys(("closed", "damaged", "tickets", "paused", "garbage", "holds"), "zset"),
        **dict.fromkeys(("pool", "steps", "history", "summary", "records", "eval"), "stream"),
        **dict.fromkeys(("state", "scoring", "evaluating"), "string"),
    }
)
"""First word of a control key -> its type."""
LONGEST_TICKET_MS = round(1000 * LONGEST_TICKET_SECONDS)
"""A ticket that is out for longer than this was not given by TICKET."""
SHOWN_NAMES = 5
"""Values of one key that are named, when there are more."""


def check_written(store: Verified, now_ms: int, findings: Findings) -> None:
    """I13."""
    tag = f"{store.keys.tag}:"
    names = sorted(text(key) for key in store.look(lambda client: list(client.scan_iter(match=f"{tag}*", count=1000))))
    kinds = [text(kind) for kind in _asked(store, names, lambda pipe, key: pipe.type(key))]
    sound: dict[str, list[str]] = {}
    for key, kind in zip(names, kinds, strict=True):
        word = key.removeprefix(tag).partition(":")[0]
        if word == "restoring" or kind == "none":
            continue
        if word not in TYPES:
            findings.add("I13", f"{key} is no key of a run")
        elif kind != TYPES[word]:
            findings.add("I13", f"{key} holds a {kind}, not a {TYPES[word]}: remove it (DEL)")
        else:
            sound.setdefault(word, []).append(key)
    for word, (read, wrong) in _LOOKS.items():
        keys = sound.get(word, [])
        for key, content in zip(keys, _asked(store, keys, read), strict=True):
            odd = [] if content is None else sorted(wrong(content, now_ms))
            if odd:
                more = f" and {len(odd) - SHOWN_NAMES} more" if len(odd) > SHOWN_NAMES else ""
                findings.add("I13", f"{key} holds what rlbuffer does not write: {', '.join(odd[:SHOWN_NAMES])}{more}")


def _asked(store: Verified, keys: list[str], ask: Callable[[Any, str], Any]) -> list[Any]:
    def read(client: Any) -> list[Any]:
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                ask(pipe, key)
            return answers(pipe)

    return store.look(read) if keys else []


def _shown(name: Any, value: Any) -> str:
    return f"{text(name)[:60]!r} = {text(value)[:40]!r}"


def _beats(fields: Mapping[bytes, bytes], now_ms: int) -> list[str]:
    return [_shown(name, value) for name, value in fields.items() if heartbeat_of(value) is None]


def _numbers(fields: Mapping[bytes, bytes], now_ms: int) -> list[str]:
    """Names and values that TICKET does not count on."""
    return [
        _shown(env, value)
        for env, value in fields.items()
        if not ENV_NAME.match(text(env)) or number(value) is None or len(value) > 14
    ]


def _producer(fields: Mapping[bytes, bytes], now_ms: int) -> list[str]:
    value = fields.get(b"sequence")
    odd = [] if value is None or number(value) is not None else [_shown(b"sequence", value)]
    return odd + [_shown(name, fields[name]) for name in fields.keys() - {b"sequence", b"id"}]


def _tickets(members: list[tuple[bytes, float]], now_ms: int) -> list[str]:
    return [
        _shown(member, expiry)
        for member, expiry in members
        if number(member) is None or not 0 <= expiry <= now_ms + LONGEST_TICKET_MS
    ]


def _results(stream: Any, now_ms: int) -> list[str]:
    return [
        f"entry {entry_id}"
        for entry_id, fields in ranged(stream)
        if evaluation_of(entry_id, fields) is None or int(entry_id.partition("-")[0]) > now_ms + AHEAD_MS
    ]


def _ids(stream: Any, now_ms: int) -> list[str]:
    return [
        f"entry {entry_id}" for entry_id, _ in ranged(stream) if int(entry_id.partition("-")[0]) > now_ms + AHEAD_MS
    ]


def _hash(pipe: Any, key: str) -> Any:
    return pipe.hgetall(key)


_LOOKS: Mapping[str, tuple[Callable[[Any, str], Any], Callable[[Any, int], list[str]]]] = MappingProxyType(
    {
        "ledger": (_hash, lambda fields, now_ms: foreign_fields(fields)),
        "workers": (_hash, _beats),
        "scorers": (_hash, _beats),
        "numbers": (_hash, _numbers),
        "producer": (_hash, _producer),
        "tickets": (lambda pipe, key: pipe.zrange(key, 0, -1, withscores=True), _tickets),
        "eval": (lambda pipe, key: pipe.xrange(key), _results),
        "pool": (lambda pipe, key: pipe.xrange(key), _ids),
    }
)
"""First word of a control key -> how it is read, and what in it is not as it should be."""
