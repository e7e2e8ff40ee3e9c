"""Reading for the archive: steps as they stand, history from a place on, payloads of dropped groups. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlbuffer.errors import PayloadError
from rlbuffer.store.moves.run import MAX_HISTORY_BYTES
from rlbuffer.store.moves.step_reading import part_of
from rlbuffer.store.records import HistoryOf, HistoryPage, StepBytes
from rlbuffer.store.session import LAST_IN_STEP, Session, answers, number, raise_first, ranged, text
from rlbuffer.wire import payload

GARBAGE_PAGE = 2000
"""Members of the list of garbage per read."""


class ArchiveReads(Session):
    """Reads of the archive's thread."""

    def read_step_bytes(self, step: int) -> StepBytes | None:
        first, last = f"{step}-0", f"{step}-{LAST_IN_STEP}"
        entries = ranged(self.look(lambda client: client.xrange(self.keys.steps, first, last)))
        if not entries or entries[0][0] != first:
            return None
        fields = entries[0][1]
        return StepBytes(
            step=step,
            digest=text(fields.get(b"digest", b"")),
            committed_ms=number(fields.get(b"at")) or 0,
            header=fields.get(b"header", b""),
            parts=tuple(part.get(b"part", b"") for _, part in entries[1:]),
            decoded=tuple(part_of(entry_id, part, self.keys) for entry_id, part in entries[1:]),
        )

    def read_history(self, after: str, *, count: int = 1000, of: HistoryOf = "history") -> HistoryPage:
        key = self.keys.history if of == "history" else self.keys.records

        def read(client: Any) -> list[Any]:
            with client.pipeline(transaction=True) as pipe:
                pipe.xrange(key, f"({after}", "+", count=count)
                pipe.xrange(key, after, after)
                pipe.xinfo_stream(key)
                return list(pipe.execute(raise_on_error=False))

        reply, here, facts = self.look(read)
        raise_first([reply, here])  # of a history that never was there are no facts
        # The stream is trimmed at its front. Where it never was, nothing is lost, whatever is not there.
        is_trimmed = isinstance(facts, dict) and int(facts.get("entries-added", 0)) > int(facts.get("length", 0))
        records = []
        for entry_id, fields in ranged(reply):
            try:
                record = payload.loads(fields.get(b"record", b""), limit=MAX_HISTORY_BYTES)
            except PayloadError as error:
                record = {"detail": str(error)}
            records.append((entry_id, record if isinstance(record, dict) else {}))
        return HistoryPage(records=tuple(records), is_cut=is_trimmed and not here)

    def dropped_payloads(self, group_ids: Sequence[str]) -> dict[str, list[str]]:
        groups = frozenset(group_ids)
        keys: dict[str, list[str]] = {}
        prefix = self.keys.payload_prefix
        at = 0
        while members := self._garbage(at) if groups else []:
            for key in members:
                group_id = key.removeprefix(prefix).rpartition(":")[0]
                if group_id in groups and key.startswith(prefix):
                    keys.setdefault(group_id, []).append(key)
            at += len(members)
        return keys

    def _garbage(self, start: int) -> list[str]:
        last = start + GARBAGE_PAGE - 1
        return [text(key) for key in self.look(lambda client: client.zrange(self.keys.garbage, start, last))]

    def read_push_payload(self, payload_key: str) -> Mapping[str, bytes]:
        def read(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                pipe.hgetall(payload_key)
                return answers(pipe)

        (fields,) = self.look(read)
        return {text(name): value for name, value in (fields or {}).items()}
