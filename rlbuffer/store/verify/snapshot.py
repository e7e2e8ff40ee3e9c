"""A run's control keys at one moment, decoded as far as they can be: what `verify` looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlbuffer.errors import PayloadError
from rlbuffer.records.step_header import StepHeader
from rlbuffer.store.keys import Keys
from rlbuffer.store.ledger import parse_ledger
from rlbuffer.store.part_rollouts import StepPart
from rlbuffer.store.pool import pool_entries, reused_groups
from rlbuffer.store.records import Ledger, Meta, PartRollout, PoolEntry, Reused, Unused, Violation
from rlbuffer.store.session import Entry, ranged, text
from rlbuffer.store.unused import unused_of
from rlbuffer.store.viewer import Viewer, header_of, parse_meta, part_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStep:
    """One step of the stream, decoded as far as it can be."""

    number: int
    header: StepHeader | None
    age_limits: Mapping[str, int | None]
    packed: Mapping[str, tuple[int, int]]
    """env -> rollouts, tokens, as COMMIT counted them."""
    parts: tuple[StepPart, ...]
    header_bytes: bytes
    part_bytes: tuple[bytes, ...]

    @property
    def members(self) -> list[PartRollout]:
        """The rollouts of all its parts."""
        return [member for part in self.parts for member in part.rollouts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The control keys of a run at one moment."""

    now_ms: int
    meta: Meta
    trained: int
    trained_digest: str
    oldest_kept: int
    ledger: Ledger
    pool: tuple[PoolEntry, ...]
    steps: tuple[LiveStep, ...]
    garbage: Mapping[str, int]
    """payload key -> the step after whose retirement it may go."""
    closed: frozenset[str]
    reused: tuple[Reused, ...]
    unused: tuple[Unused, ...]
    """Of the live steps."""
    unreadable: tuple[Violation, ...]


@dataclass(slots=True)
class Findings:
    """The findings so far."""

    found: list[Violation] = field(default_factory=list)

    def add(self, invariant: str, message: str) -> None:
        self.found.append(Violation(invariant=invariant, message=message))

    def unless(self, holds: bool, invariant: str, message: str) -> None:
        if not holds:
            self.add(invariant, message)


def take_snapshot(store: Viewer) -> Snapshot:
    """Reads every control key in one transaction."""
    keys = store.keys

    def ask(pipe: Any) -> None:
        pipe.time()
        for key in (keys.meta, keys.trainer, keys.ledger, keys.reuse):
            pipe.hgetall(key)
        pipe.xrange(keys.pool).xrange(keys.steps)
        pipe.zrange(keys.garbage, 0, -1, withscores=True).zrange(keys.closed, 0, -1).hgetall(keys.unused)

    (seconds, micros), *parts = store.piped(ask, at_once=True, lenient=True)
    # A key of another type counts as empty here; `verify` names it.
    meta, trainer, ledger, reuse, pool, steps, garbage, closed, unused = (part or {} for part in parts)
    unreadable = Findings()
    return Snapshot(
        now_ms=int(seconds) * 1000 + int(micros) // 1000,
        meta=parse_meta(meta),
        trained=int(trainer.get(b"trained", 0)),
        trained_digest=text(trainer.get(b"digest", b"")),
        oldest_kept=int(trainer.get(b"oldest_kept", 0)),
        ledger=parse_ledger(ledger),
        pool=tuple(pool_entries(keys, ranged(pool))),
        steps=_live_steps(ranged(steps), keys, unreadable),
        garbage={text(key): int(min(max(score, -1), 2**53)) for key, score in garbage},
        closed=frozenset(text(group_id) for group_id in closed),
        reused=tuple(reused_groups(keys, reuse)),
        unused=tuple(unused_of(unused).values()),
        unreadable=tuple(unreadable.found),
    )


def _live_steps(stream: list[Entry], keys: Keys, findings: Findings) -> tuple[LiveStep, ...]:
    by_step: dict[int, list[Entry]] = {}
    for entry_id, fields in stream:
        by_step.setdefault(int(entry_id.split("-")[0]), []).append((entry_id, fields))
    steps = []
    for number, stored in by_step.items():
        header: StepHeader | None = None
        limits: dict[str, Any] = {}
        packed: dict[str, tuple[int, int]] = {}
        header_bytes = b""
        parts, part_bytes = [], []
        for entry_id, fields in stored:
            try:
                if entry_id == f"{number}-0":
                    header_bytes = fields.get(b"header", b"")
                    packed = _totals(text(fields.get(b"packed", b"")))
                    header, limits = header_of(fields)
                else:
                    part_bytes.append(fields.get(b"part", b""))
                    parts.append(part_of(entry_id, fields, keys))
            except (PayloadError, ValueError) as error:
                findings.add("I4", f"step {number}: entry {entry_id} of the steps stream cannot be read: {error}")
        steps.append(
            LiveStep(
                number=number,
                header=header,
                age_limits=limits,
                packed=packed,
                parts=tuple(parts),
                header_bytes=header_bytes,
                part_bytes=tuple(part_bytes),
            )
        )
    return tuple(steps)


def _totals(words: str) -> dict[str, tuple[int, int]]:
    items = words.split(" ")
    return {items[i]: (int(items[i + 1]), int(items[i + 2])) for i in range(0, len(items) - 3, 4)}
