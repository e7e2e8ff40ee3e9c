"""Rollouts that were trained and dropped, by env and length: long answers that go are seen here first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlbuffer.narration.numbers import amount
from rlbuffer_cli.options import echo, say
from rlbuffer_cli.render.text import show_table

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.store.records import EnvLedger

LENGTH_HEADER = ("env", "length", "packed", "trained", "trained tokens", "dropped", "dropped tokens", "dropped by")
LENGTH_NUMBERS = frozenset(LENGTH_HEADER[2:7])
LENGTH_LEGEND = "length: tokens of a rollout; the last line of an env is what the ledger has in all"
NO_DROP = frozenset({"packed", "trained"})


def show_lengths(buffer: Buffer, *, as_json: bool) -> int:
    """Prints a line per env and length, then what the ledger has of the env in all. -> exit code."""
    envs = buffer.store.ledger().envs
    if as_json:
        for env, account in envs.items():
            for record in length_records(env, account):
                echo(json.dumps(record))
        return 0
    rows = [row for env, account in envs.items() for row in length_rows(env, account)]
    if not rows:
        echo("nothing was packed, trained or dropped yet")
        return 0
    show_table(LENGTH_HEADER, rows, right=LENGTH_NUMBERS, optional=("packed", "dropped by"))
    say(LENGTH_LEGEND, indent="")
    return 0


def length_records(env: str, account: EnvLedger) -> Iterator[dict[str, Any]]:
    """``rlbuffer.length/1``: a line per fate and length; those of a fate add up to the ledger."""
    for fate, parts in account.lengths.items():
        for longest, (rollouts, tokens) in sorted(parts.items()):
            yield {
                "schema": "rlbuffer.length/1",
                "env": env,
                "fate": fate if fate in NO_DROP else "dropped",
                "reason": "" if fate in NO_DROP else fate,
                "shortest": longest // 2 + 1 if longest else None,
                "longest": longest or None,
                "rollouts": rollouts,
                "tokens": tokens,
            }


def length_rows(env: str, account: EnvLedger) -> Iterator[list[str]]:
    """Cells under :data:`LENGTH_HEADER`: a row per length, the shortest first, then the whole account."""
    lengths = sorted({longest for parts in account.lengths.values() for longest in parts})
    for longest in (*(n for n in lengths if n), *(n for n in lengths if not n)):
        parts = {fate: its.get(longest, (0, 0)) for fate, its in account.lengths.items()}
        dropped = {fate: part for fate, part in parts.items() if fate not in NO_DROP}
        name = f"{longest // 2 + 1}-{longest}" if longest > 2 else str(longest or "unknown")
        yield _row(env, name, parts.get("packed", (0, 0)), parts.get("trained", (0, 0)), dropped)
    if lengths:
        yield _row(env, "all", account.packed, account.trained, account.dropped)


def _row(env: str, length: str, packed: tuple[int, int], trained: tuple[int, int], dropped: Any) -> list[str]:
    why = " ".join(f"{rollouts:,} {reason}" for reason, (rollouts, _) in sorted(dropped.items()) if rollouts)
    rollouts, tokens = (sum(part[unit] for part in dropped.values()) for unit in (0, 1))
    return [
        env,
        length,
        f"{packed[0]:,}",
        f"{trained[0]:,}",
        amount(trained[1]),
        f"{rollouts:,}",
        amount(tokens),
        why,
    ]
