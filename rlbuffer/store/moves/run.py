"""The run itself: its meta, its account, its history, and which runs the server holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlbuffer.errors import RunDamaged, RunGone, SchemaMismatch, ServerRefused, ServerUnsuitable
from rlbuffer.records.waiting import Waiting
from rlbuffer.store.keys import RUNS, SCHEMA
from rlbuffer.store.moves.lease import tombstone_ms, tombstone_steps
from rlbuffer.store.moves.ledger import parse_ledger
from rlbuffer.store.records import HistoryOf, Ledger, Meta
from rlbuffer.store.server.append_file import until_whole
from rlbuffer.store.session import Session, ranged, text
from rlbuffer.wire import payload

MAX_HISTORY_BYTES = 4 * 2**20
"""Largest history record or config that is decoded: a rewind names 5,000 groups, of up to 300 bytes each."""


class RunViews(Session):
    """Opening a run and looking at it."""

    def server(self) -> Mapping[str, Any]:
        return self.connection.describe()

    def until_whole(self) -> Waiting | None:
        if self.connection.is_memory:
            return None

        def look(_: Any) -> list[Waiting | None]:
            return [until_whole(server, self.connection.address) for server in self.connection.servers()]

        return next(filter(None, self.look(look)), None)

    def losses(self) -> int:
        return self.connection.losses

    def errors(self) -> Mapping[str, int]:
        return dict(self.connection.failures)

    def now(self) -> float:
        seconds, micros = self.look(lambda client: client.time())
        return int(seconds) + int(micros) / 1e6

    def open_run(self) -> Meta:
        try:
            meta = self.meta()  # who may not write, or on a server that takes no writes, goes on with a run
        except RunDamaged:
            raise
        except RunGone:
            reply = self.move("open", (self.keys.meta, *self._content()), (SCHEMA,))
            if text(reply[0]) == "LEFT":
                raise self._damaged([text(key) for key in reply[1:]]) from None
            meta = self.meta()
        now = self.now()
        # The list is for people: at the memory limit, and for who may not write it, it keeps the older time.
        with suppress(ServerRefused, ServerUnsuitable):
            self.look(lambda client: client.zadd(RUNS, {self.run: now}))
        return meta

    def meta(self) -> Meta:
        fields = self.look(lambda client: client.hgetall(self.keys.meta))
        if not fields:
            fields, *there = self.look(self._meta_and_content)  # at one moment: it may just be begun
            left = [key for key, is_there in zip(self._content(), there, strict=True) if is_there]
            if not fields and left:
                raise self._damaged(left)
        if not fields:
            raise RunGone(f"run {self.run!r} is not on the server ({self.keys.meta})")
        meta = parse_meta(fields)
        if meta.schema != SCHEMA:
            raise SchemaMismatch(
                f"run {self.run!r} was written with schema {meta.schema}, this version of rlbuffer reads schema "
                f"{SCHEMA}: use another run name, or the version that wrote it ({self.keys.meta})",
                schema=meta.schema,
            )
        self.tombstone_ms, self.tombstone_steps = tombstone_ms(meta.config), tombstone_steps(meta.config)
        return meta

    def has_ended(self) -> bool:

        def look(client: Any) -> list[Any]:
            with client.pipeline(transaction=True) as pipe:
                pipe.hexists(self.keys.meta, "ended")
                pipe.xlen(self.keys.pool)
                return list(pipe.execute())

        ended, pending = self.look(look)
        return bool(ended) and not pending

    def _content(self) -> tuple[str, ...]:
        """Keys that are written only while the run has a meta."""
        keys = self.keys
        run = keys.pool, keys.steps, keys.state, keys.closed, keys.trainer, keys.policy, keys.garbage, keys.reuse
        return *run, keys.restoring

    def _meta_and_content(self, client: Any) -> list[Any]:
        with client.pipeline(transaction=True) as pipe:
            pipe.hgetall(self.keys.meta)
            for key in self._content():
                pipe.exists(key)
            return list(pipe.execute())

    def _damaged(self, left: Sequence[str]) -> RunDamaged:
        return RunDamaged(
            f"run {self.run!r} has no meta ({self.keys.meta}), but {', '.join(left)} is there: it would begin anew at "
            f"step 0 beside that. With {self.keys.restoring} it is being restored, or its restore was stopped: "
            f"`rlbuffer runs restore FILE` again. Otherwise `rlbuffer runs reset {self.run} --yes` removes what is left"
        )

    def runs(self) -> Mapping[str, float]:
        reply = self.look(lambda client: client.zrange(RUNS, 0, -1, desc=True, withscores=True))
        return {text(run): float(seconds) for run, seconds in reply}

    def ledger(self) -> Ledger:
        return parse_ledger(self.look_at(lambda client: client.hgetall(self.keys.ledger), {}))

    def history(self, count: int = 1000, *, of: HistoryOf = "history") -> list[Mapping[str, Any]]:
        key = self.keys.history if of == "history" else self.keys.records
        reply = self.look(lambda client: client.xrevrange(key, count=count))
        return [
            {**payload.loads(fields[b"record"], limit=MAX_HISTORY_BYTES), "at": int(entry_id.split("-")[0]) / 1000}
            for entry_id, fields in ranged(reply)
        ]


def parse_meta(fields: Mapping[bytes, bytes]) -> Meta:
    """The meta hash as a record; what is missing is 0 or empty."""

    def number(name: bytes) -> int:
        return int(fields.get(name, 0))

    config = fields.get(b"config")
    return Meta(
        schema=number(b"schema"),
        epoch=number(b"epoch"),
        step=number(b"step"),
        digest=text(fields.get(b"digest", b"")),
        retired=number(b"retired"),
        config=payload.loads(config, limit=MAX_HISTORY_BYTES) if config else {},
        config_digest=text(fields.get(b"config_digest", b"")),
        error=text(fields.get(b"error", b"")),
        since=int(fields.get(b"since") or number(b"epoch")),
        checkpoint_now=b"checkpoint_now" in fields,
        revision=number(b"revision"),
        asked=number(b"asked"),
        wanted=payload.loads(fields[b"wanted"], limit=MAX_HISTORY_BYTES) if b"wanted" in fields else {},
        wanted_digest=text(fields.get(b"wanted_digest", b"")),
        refused=text(fields.get(b"refused", b"")),
        draining_ms=number(b"draining"),
        ended=number(b"ended") if b"ended" in fields else None,
        early=number(b"early"),
        early_ms=number(b"early_at"),
        created=number(b"created"),
    )
