"""The part of `verify` that looks at types and numbers (I13).

Each control key is of its type, and what is counted is a number. The other processes pass over what is not; here it is
named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from rlbuffer.store.ledger import amount_of
from rlbuffer.store.session import number, text
from rlbuffer.store.verify.snapshot import Findings
from rlbuffer.store.viewer import Viewer

TYPES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("meta", "lease", "ledger", "producer", "visits", "reuse", "allowance", "numbers", "ends"),
            "hash",
        ),
        **dict.fromkeys(("policy", "trainer", "workers", "scorers", "ranks", "batchers"), "hash"),
        **dict.fromkeys(("closed", "damaged", "tickets", "paused", "garbage"), "zset"),
        **dict.fromkeys(("pool", "steps", "history", "summary", "records", "eval"), "stream"),
        **dict.fromkeys(("state", "scoring", "evaluating"), "string"),
    }
)
"""First word of a control key -> its type."""
COUNTED: Mapping[str, Callable[[Any], int | None]] = MappingProxyType({"ledger": amount_of, "numbers": number})
"""First word of a hash that counts -> how one of its values is read."""


def check_written(store: Viewer, findings: Findings) -> None:
    """I13."""
    tag = f"{store.keys.tag}:"
    names = sorted(text(key) for key in store.look(lambda client: list(client.scan_iter(match=f"{tag}*", count=1000))))
    kinds = map(text, store.paged(names, lambda pipe, key: pipe.type(key)))
    for key, kind in zip(names, kinds, strict=True):
        expected = TYPES.get(key.removeprefix(tag).partition(":")[0], kind)
        findings.unless(kind in (expected, "none"), "I13", f"{key} holds a {kind}, not a {expected}: remove it (DEL)")
    for (word, read), fields in zip(
        COUNTED.items(), store.paged([*COUNTED], lambda pipe, word: pipe.hgetall(f"{tag}{word}")), strict=True
    ):
        for name, value in (fields or {}).items():
            findings.unless(
                read(value) is not None,
                "I13",
                f"{tag}{word} holds no number: {text(name)[:60]!r} = {text(value)[:40]!r}",
            )
