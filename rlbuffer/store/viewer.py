"""All that can be seen of a run: its account, its pool, its steps, their payloads, and who works for it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import repeat
from typing import Any

from rlbuffer.config.batcher import remembered_steps
from rlbuffer.errors import (
    NotFound,
    PayloadError,
    RlbufferError,
    RunDamaged,
    SchemaMismatch,
    StepRetired,
    clause,
)
from rlbuffer.records.checks import MAX_COUNT
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.step_header import StepHeader
from rlbuffer.store.keys import RUNS, SCHEMA, Keys
from rlbuffer.store.ledger import parse_ledger
from rlbuffer.store.part_rollouts import StepBytes, StepPart
from rlbuffer.store.pool import pool_entries
from rlbuffer.store.records import (
    Attempt,
    HistoryOf,
    HistoryPage,
    Ledger,
    Meta,
    PartRollout,
    PoolEntry,
    Sources,
    TakenTicket,
    Unused,
    policy_of,
)
from rlbuffer.store.session import (
    BLOCK_SECONDS,
    LAST_IN_STEP,
    MINIMUM_TOMBSTONE_MS,
    Fields,
    Session,
    number,
    raise_first,
    ranged,
    text,
)
from rlbuffer.store.step_format import decode_header, decode_part
from rlbuffer.store.step_in_hand import StepInHand
from rlbuffer.store.unused import unused_of
from rlbuffer.wire import payload

FieldRequest = Mapping[str, Mapping[str, int]]
"""Payload key -> field -> bytes that its push announced."""
FETCH_BYTES = 64 * 2**20
"""Payload bytes asked for at once: a server with a client-output-buffer-limit must hold as many for a client."""
GROUP_FIELD = "group"
"""Field of a push's payload with the group's answer and metadata."""
MAX_HISTORY_BYTES = 4 * 2**20
"""Largest history record or config that is decoded: a rewind names 5,000 groups, of up to 300 bytes each."""
MAX_STATE_BYTES = 64 * 2**20
"""Largest state of the batcher that is decoded."""
HEADERS_PER_READ = 64
"""Headers per read."""
GARBAGE_PAGE = 2000
"""Members of the list of garbage per read."""
MAX_EVALUATION_BYTES = 2**20
"""Largest result that is decoded."""
MAX_HEARTBEAT_BYTES = 2**20
"""Largest heartbeat that is decoded."""
_END = re.compile(r"=?([0-9]{1,15})\Z")
"""Number of tickets of an env: as its workers say, or with ``=`` as an operator said."""


class Viewer(Session):
    """A run as it is seen: any process may call all of it at any time, and nothing in it writes.

    The steps stream has ``<s>-0``, the header of step s, and ``<s>-<r+1>``, the part of planned rank r.
    """

    _meta_read: tuple[Fields, Meta] | None = None
    """The meta that was read last: as the server has it, and as a record."""

    # -- the run ---------------------------------------------------------------------------------------------------

    def server(self) -> Mapping[str, Any]:
        """Facts, as Connection.describe says: name, version, address, embedded, sizes in bytes, unfreed, policy."""
        return self.connection.describe()

    def replies(self, ask: Callable[[Any, Keys], object]) -> tuple[Mapping[str, Any], list[Any]]:
        """Looks at the run in one round trip. `ask` puts commands that only read into a pipeline.

        Returns the facts of :meth:`server`, of a cluster those of the shard with the control keys; and the replies,
        None for a key of another type than its command is for.
        """
        is_memory = self.connection.is_memory

        def commands(pipe: Any) -> None:
            ask(pipe, self.keys)
            if not is_memory:
                pipe.info("server", "memory")

        replies = self.piped(commands, lenient=True)
        return self.connection.facts({} if is_memory else replies.pop()), replies

    def losses(self) -> int:
        """Times that this process lost the server; it may have come back without its newest writes."""
        return self.connection.losses

    def errors(self) -> Mapping[str, int]:
        """Kind of call -> attempts of this process that the server did not answer, or refused, since it connected."""
        return dict(self.connection.failures)

    def now(self) -> float:
        """The server's clock, Unix seconds."""
        return seconds_of(self.look(lambda client: client.time()))

    def meta(self) -> Meta:
        """The run's meta. Raises RunGone; RunDamaged when other keys of it are there without it; SchemaMismatch."""
        return self._meta_of(self.look(lambda client: client.hgetall(self.keys.meta)))

    def _meta_of(self, fields: Fields) -> Meta:
        if not fields:
            keys = self._content()

            def content(pipe: Any) -> None:
                pipe.hgetall(self.keys.meta)
                for key in keys:
                    pipe.exists(key)

            fields, *there = self.piped(content, at_once=True)  # at one moment: it may just be begun
            left = [key for key, is_there in zip(keys, there, strict=True) if is_there]
            if not fields and left:
                raise self._damaged(left)
        if not fields:
            raise self.no_run()
        # As it nearly always is: a leader asks fifty times a second.
        read = self._meta_read
        if read is not None and fields == read[0]:
            return read[1]
        meta = parse_meta(fields)
        if meta.schema != SCHEMA:
            raise SchemaMismatch(
                f"run {self.run!r} was written with schema {meta.schema}, this version of rlbuffer reads schema "
                f"{SCHEMA}: use another run name, or the version that wrote it ({self.keys.meta})",
                schema=meta.schema,
            )
        self.tombstone_ms, self.tombstone_steps = tombstone_ms(meta.config), tombstone_steps(meta.config)
        self._meta_read = fields, meta
        return meta

    def has_ended(self) -> bool:
        """True when every env is done, everything is trained, and nothing was pushed since: a cheap look."""
        keys = self.keys
        ended, pending = self.piped(lambda pipe: pipe.hexists(keys.meta, "ended").xlen(keys.pool), at_once=True)
        return bool(ended) and not pending

    def _content(self) -> tuple[str, ...]:
        """Keys that are written only while the run has a meta."""
        keys = self.keys
        run = keys.pool, keys.steps, keys.state, keys.closed, keys.trainer, keys.policy, keys.garbage, keys.reuse
        opened = keys.open, keys.open_ended, keys.open_pushed, keys.open_keys
        return *run, *opened

    def _damaged(self, left: Sequence[str]) -> RunDamaged:
        return RunDamaged(
            f"run {self.run!r} has no meta ({self.keys.meta}), but {', '.join(left)} is there: it would begin anew at "
            f"step 0 beside that. `rlbuffer runs reset {self.run} --yes` removes what is left"
        )

    def runs(self) -> Mapping[str, float]:
        """Run -> Unix seconds when it was last opened; the most recent first."""
        reply = self.look(lambda client: client.zrange(RUNS, 0, -1, desc=True, withscores=True))
        return {text(run): float(seconds) for run, seconds in reply}

    def ledger(self) -> Ledger:
        """The whole account."""
        (fields,) = self.piped(lambda pipe: pipe.hgetall(self.keys.ledger), lenient=True)
        return parse_ledger(fields or {})

    def history(self, count: int = 1000, *, of: HistoryOf = "history") -> list[Mapping[str, Any]]:
        """Newest first: a record per dropped group (``event: drop``) and per committed step (``event: step``); or what
        the trainer measured in its steps (:meth:`~rlbuffer.store.trainer.TrainerStore.add_record`)."""
        key = self.keys.history if of == "history" else self.keys.records
        reply = self.look(lambda client: client.xrevrange(key, count=count))
        return [{**_record_or_why(fields), "at": _seconds(entry_id)} for entry_id, fields in ranged(reply)]

    def is_led(self) -> bool:
        """True when a batcher holds the lease."""
        until, now = self.piped(lambda pipe: pipe.hget(self.keys.lease, "until").time(), at_once=True)
        return int(until or 0) > 1000 * seconds_of(now)

    def sources(self) -> Sources:
        """The sources that may still send something. A field that is not rlbuffer's counts as an env without an end."""
        keys = self.keys
        written, taken = self.piped(lambda pipe: pipe.hgetall(keys.ends).hgetall(keys.numbers), at_once=True)
        over = ends_of(written, taken)[3]
        out = self.paged(over, lambda pipe, env: pipe.zcard(keys.tickets(env)), lenient=False)
        return sources_of(written, taken, dict(zip(over, out, strict=True)))

    def paused(self) -> frozenset[str]:
        """Envs that an operator has paused."""
        return frozenset(text(env) for env in self.look(lambda client: client.zrange(self.keys.paused, 0, -1)))

    # -- the pool and what belongs to it ------------------------------------------------------------------------------

    def read_pool(self, after: str = "0-0", *, count: int = 1000, block_seconds: float = 0.0) -> list[PoolEntry]:
        """Entries after the cursor, each once, in the order of their pushes. Blocks at most `block_seconds` on a
        connection of its own."""
        return pool_entries(self.keys, self.stream(self.keys.pool, after, count=count, block_seconds=block_seconds))

    def load_state(self) -> Mapping[str, Any] | None:
        """The batcher's state as after the last step; None before the first."""
        data = self.look(lambda client: client.get(self.keys.state))
        if data is None:
            return None
        state: Mapping[str, Any] = payload.loads(data, limit=MAX_STATE_BYTES)
        return state

    # -- steps -----------------------------------------------------------------------------------------------------

    def headers(
        self, first: int | None = None, last: int | None = None, *, problems: list[RlbufferError] | None = None
    ) -> Iterator[StepHeader]:
        """Headers of the live steps in [first, last], oldest first; what is retired meanwhile is left out.

        One that cannot be read is added to `problems`; None: PayloadError.
        """
        retired, newest = self._bounds()
        low, high = max(first or 1, retired + 1), newest if last is None else min(last, newest)
        for start in range(low, high + 1, HEADERS_PER_READ):
            steps = range(start, min(start + HEADERS_PER_READ, high + 1))
            replies = self.paged(
                steps, lambda pipe, step: pipe.xrange(self.keys.steps, f"{step}-0", f"{step}-0"), lenient=False
            )
            for reply in replies:
                for entry_id, fields in ranged(reply):
                    try:
                        with self._reading(int(entry_id.split("-")[0])):
                            header = header_of(fields)[0]
                    except PayloadError as error:
                        if problems is None:
                            raise
                        problems.append(error)
                        continue
                    yield header

    def wait_step(self, step: int, *, block_seconds: float) -> StepHeader | None:
        """Header of `step`, or None after blocking. Raises StepRetired; PayloadError when it cannot be read."""
        if not 1 <= step <= MAX_COUNT:
            raise NotFound(f"steps go from 1 to {MAX_COUNT}, there is no step {step}")
        deadline = time.monotonic() + block_seconds
        after = f"{step - 1}-{LAST_IN_STEP}"
        left = 0.0
        while True:
            entries = self.stream(self.keys.steps, after, count=1, block_seconds=min(left, BLOCK_SECONDS))
            if entries:
                entry_id, fields = entries[0]
                if entry_id == f"{step}-0":
                    with self._reading(step):
                        return header_of(fields)[0]
                raise self._retired(step)
            if left == 0.0 and step <= self._retired_step():
                raise self._retired(step)
            left = deadline - time.monotonic()
            if left <= 0:
                return None

    def taken_tickets(self) -> list[TakenTicket]:
        """The tickets that are out, by env and number; but for those that were taken before a version was announced."""
        keys = self.keys
        envs = sorted(map(text, self.look(lambda client: client.hkeys(keys.numbers))))

        def ask(pipe: Any) -> None:
            pipe.time()
            for env in envs:
                pipe.zrange(keys.tickets(env), 0, -1, withscores=True)
                pipe.hgetall(keys.taken(env))

        time, *replies = self.piped(ask)
        now_ms = round(1000 * seconds_of(time))
        return [
            ticket
            for env, out, taken in zip(envs, replies[::2], replies[1::2], strict=True)
            for ticket in living_tickets(env, out, taken, now_ms)
        ]

    def read_parts(self, step: int, ranks: Sequence[int] | None = None) -> list[StepPart]:
        """Parts of the given planned ranks, or all, in their order. Raises StepRetired, NotFound, PayloadError."""
        places = [(1, LAST_IN_STEP)] if ranks is None else [(rank + 1, rank + 1) for rank in ranks]
        replies = self.piped(
            lambda pipe: [pipe.xrange(self.keys.steps, f"{step}-{low}", f"{step}-{high}") for low, high in places]
        )
        ranges = [ranged(reply) for reply in replies]
        if any(not entries for entries in ranges):
            if step <= self._retired_step():
                raise self._retired(step)
            which = f"step {step}" if ranks is None else f"one of the ranks {list(ranks)} in step {step}"
            raise NotFound(f"run {self.run!r} has no {which}")
        with self._reading(step):
            return [part_of(entry_id, fields, self.keys) for entries in ranges for entry_id, fields in entries]

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Says of a step that cannot be read what to do: nobody can train it, now or later."""
        try:
            yield
        except PayloadError as error:
            raise PayloadError(
                f"step {step} of run {self.run!r} cannot be read: {clause(error)}. Take it back, and what follows it, "
                f"with `rlbuffer runs rewind {step - 1} --keep-pending`"
            ) from None

    def _bounds(self) -> tuple[int, int]:
        retired, step = self.look(lambda client: client.hmget(self.keys.meta, ["retired", "step"]))
        return int(retired or 0), int(step or 0)

    def _retired_step(self) -> int:
        return self._bounds()[0]

    def _retired(self, step: int) -> StepRetired:
        return StepRetired(
            f"step {step} of run {self.run!r} was trained and retired: steps up to {self._retired_step()} are gone, "
            "resume from a newer checkpoint"
        )

    # -- payloads --------------------------------------------------------------------------------------------------

    def read_payloads(self, refs: Sequence[PartRollout]) -> list[bytes | None]:
        """The encoded rollouts, None where missing. Not verified: `wire.decode_rollout` does that."""
        values = self.read_fields(_sizes(refs))
        return [values[ref.payload_key, str(ref.index)] for ref in refs]

    def read_group_payloads(self, payload_keys: Sequence[str]) -> list[bytes | None]:
        """The encoded group part (answer, metadata) of each push, None where there is none."""
        values = self.read_fields({key: {GROUP_FIELD: 0} for key in payload_keys})
        return [values[key, GROUP_FIELD] for key in payload_keys]

    def read_fields(self, request: FieldRequest) -> dict[tuple[str, str], bytes | None]:
        """The values of fields by payload key and field, :data:`FETCH_BYTES` of them at once. None where there is
        none."""
        fields = [(key, *field) for key, names in request.items() for field in names.items()]
        values: dict[tuple[str, str], bytes | None] = {}
        for chunk in chunks([size for _, _, size in fields], FETCH_BYTES):
            part: dict[str, list[str]] = {}
            for key, field, _ in fields[chunk.start : chunk.stop]:
                part.setdefault(key, []).append(field)
            replies = self.paged([*part.items()], lambda pipe, item: pipe.hmget(*item), size=len(part))
            for (key, names), reply in zip(part.items(), replies, strict=True):
                values |= zip(zip(repeat(key), names), reply or repeat(None), strict=False)
        return values

    # -- the trainer and other processes -----------------------------------------------------------------------------

    def trainer(self) -> Attempt:
        """The registered attempt (number 0 before the first), the announced versions, and the server's time."""
        keys = self.keys
        fields, versions, time = self.piped(lambda pipe: pipe.hgetall(keys.trainer).hgetall(keys.policy).time())
        return self._attempt_of(fields, versions, seconds_of(time))

    def _attempt_of(self, fields: Fields, versions: Fields, now: float) -> Attempt:
        if not fields:
            return Attempt(number=0, announced=versions)

        def whole(name: bytes) -> int:
            value = number(fields.get(name, b"0"))
            if value is None:
                raise RunDamaged(
                    f"{self.keys.trainer} of run {self.run!r} holds {text(fields[name][:64])!r} as {text(name)}, "
                    "which is no whole number: start the trainer again, which writes a new one"
                )
            return value

        return Attempt(
            number=whole(b"number"),
            world_size=whole(b"world_size"),
            resume_step=whole(b"resume"),
            epoch=whole(b"epoch"),
            trained=whole(b"trained"),
            digest=text(fields.get(b"digest", b"")),
            oldest_kept=whole(b"oldest_kept"),
            at=whole(b"at"),
            checkpoint=whole(b"checkpoint"),
            seen_ms=whole(b"seen"),
            claim=fields.get(b"claim", b""),
            server=text(fields.get(b"server", b"")),
            hand=StepInHand.of(fields.get(b"hand", b"")),
            is_finished=fields.get(b"finished", b"") == fields.get(b"number"),
            seen_seconds_ago=abs(now - whole(b"seen") / 1000),  # later than now: before the clock was set back
            announced=versions,
        )

    def policy(self, adapter: str = "") -> PolicyVersion:
        """The current version; version -1 when none was announced."""
        return policy_of(adapter, self.look(lambda client: client.hget(self.keys.policy, adapter)))

    def unused(self) -> dict[int, Unused]:
        """Step of a stream -> what the trainer was given in it and has not trained; of live steps alone."""
        return unused_of(self.look(lambda client: client.hgetall(self.keys.unused)))

    def heartbeats(self, kind: str) -> Mapping[str, Mapping[str, Any]]:
        """Name -> its last record, with ``seconds_ago`` added by the server's clock; anything else is left out.

        Any process of the kind writes there: no field of a record is certain to be there, nor of a type.
        """
        fields, time = self.piped(lambda pipe: pipe.hgetall(self.keys.heartbeats(kind)).time(), lenient=True)
        return heartbeats_of(fields, seconds_of(time))

    def _line(self) -> int:
        """The epoch in which version numbers began to mean what they mean now."""
        line, since = self.look(lambda client: client.hmget(self.keys.meta, "line", "since"))
        return int(line or since or 0)

    # -- archive ---------------------------------------------------------------------------------------------------

    def read_step_bytes(self, step: int) -> StepBytes | None:
        """A live step as it stands; None when it was retired, taken back, or never committed. Raises PayloadError."""
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
        """Records of the history, or of the trainer, behind the id `after` ("0-0": from the first that is there), the
        oldest first."""
        key = self.keys.history if of == "history" else self.keys.records

        def read(client: Any) -> list[Any]:
            with client.pipeline(transaction=True) as pipe:
                pipe.xrange(key, f"({after}", "+", count=count).xrange(key, after, after).xinfo_stream(key)
                return list(pipe.execute(raise_on_error=False))

        reply, here, facts = self.look(read)
        raise_first([reply, here])  # of a history that never was there are no facts
        # The stream is trimmed at its front. Where it never was, nothing is lost, whatever is not there.
        is_trimmed = isinstance(facts, dict) and int(facts.get("entries-added", 0)) > int(facts.get("length", 0))
        records = [(entry_id, _record_or_why(fields)) for entry_id, fields in ranged(reply)]
        return HistoryPage(records=tuple(records), is_cut=is_trimmed and not here)

    def left_out(self, header: StepHeader | None, refs: Sequence[PartRollout]) -> list[tuple[PartRollout, str]]:
        """Stand-ins for the sequences that a step leaves out of the groups of `refs`, each with the reason, push by
        push; none of a step that is not there (None). Of a push of which the step trains nothing the group alone is
        known."""
        pushes, groups = {ref.payload_key: ref for ref in refs}, {ref.group_id: ref for ref in refs}
        found: list[tuple[PartRollout, str]] = []
        for name, rejected in header.left_out.items() if header is not None else ():
            key, ref = self.keys.payload_prefix + name, groups.get(name.rpartition(":")[0])
            if ref is not None:
                source = pushes.get(key) or replace(ref, worker="", pushed_ms=0, entry_id="", seconds=None)
                unread = replace(source, payload_key=key, info=source.info.changed(size=0), advantage=0.0)
                found += [(replace(unread, index=index), reason) for index, reason in rejected]
        return found

    def dropped_payloads(self, group_ids: Sequence[str]) -> dict[str, list[str]]:
        """Group id -> payload keys of its pushes that left the pool, are in no live step, and were not swept yet."""
        groups = frozenset(group_ids)
        found: dict[str, float] = {}
        prefix = self.keys.payload_prefix

        def scan(client: Any) -> None:
            # By a cursor, not by places: what comes or goes meanwhile moves those of all others, and a key would be
            # there twice, or not at all.
            for name, step in client.zscan_iter(self.keys.garbage, count=GARBAGE_PAGE):
                key = text(name)
                if key.startswith(prefix) and key.removeprefix(prefix).rpartition(":")[0] in groups:
                    found[key] = step

        if groups:
            self.look(scan)
        keys: dict[str, list[str]] = {}
        dropped = found.keys() - self._in_steps(groups) if found else ()
        for key in sorted(dropped, key=lambda key: (found[key], key)):
            keys.setdefault(key.removeprefix(prefix).rpartition(":")[0], []).append(key)
        return keys

    def _in_steps(self, groups: Set[str]) -> set[str]:
        """Payload keys of the pushes that live steps in which one of these groups is train or leave out, as far as they
        can be read."""
        held: set[str] = set()
        problems: list[RlbufferError] = []
        for header in self.headers(problems=problems):
            if not groups.isdisjoint(header.group_ids):
                held |= {self.keys.payload_prefix + name for name in header.left_out}
                with suppress(PayloadError):
                    stored = self.read_step_bytes(header.step)
                    held |= {ref.payload_key for part in (stored.decoded if stored else ()) for ref in part.rollouts}
        return held

    def read_push_payload(self, payload_key: str) -> Mapping[str, bytes]:
        """Every field of a push's payload: rollout i is ``str(i)``, answer and metadata ``group``. Empty when gone."""
        (fields,) = self.piped(lambda pipe: pipe.hgetall(payload_key), lenient=True)
        return {text(name): value for name, value in (fields or {}).items()}


def record_of(entry_id: str, fields: Fields) -> Mapping[str, Any]:
    """The record in an entry of a history, with ``at``, Unix seconds. Raises PayloadError."""
    return {**_record_in(fields), "at": _seconds(entry_id)}


def _record_or_why(fields: Fields) -> Mapping[str, Any]:
    """The record, or why it cannot be read, as ``detail``: it must not end who reads those beside it."""
    try:
        return _record_in(fields)
    except PayloadError as error:
        return {"detail": str(error)}


def _record_in(fields: Fields) -> dict[str, Any]:
    record = payload.loads(fields.get(b"record", b""), limit=MAX_HISTORY_BYTES)
    if not isinstance(record, dict):
        raise PayloadError(f"a {type(record).__name__}, not a record")
    return record


def _seconds(entry_id: str) -> float:
    return int(entry_id.split("-")[0]) / 1000


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
        finished=text(fields.get(b"finished", b"")),
        early=number(b"early"),
        early_ms=number(b"early_at"),
        created=number(b"created"),
    )


def tombstone_ms(config: Mapping[str, Any]) -> int:
    """The time that tombstones are kept: late parts of a group can come for as long as the group could have waited."""
    timeout = config.get("group_timeout_seconds")
    milliseconds = 2000 * timeout if isinstance(timeout, int | float) else 0
    return max(MINIMUM_TOMBSTONE_MS, round(min(milliseconds, MAX_COUNT)))


def tombstone_steps(config: Mapping[str, Any]) -> int:
    """Number of steps that tombstones are kept for: as many as could train what was sampled before."""
    ages = [config.get("max_age"), *(env.get("max_age") for env in dict(config.get("envs") or {}).values())]
    return remembered_steps(max((age for age in ages if isinstance(age, int)), default=0))


def header_of(fields: Fields) -> tuple[StepHeader, dict[str, Any]]:
    """A header entry decoded, and the age limits it was committed under. Raises PayloadError."""
    at = fields.get(b"at", b"0")
    return decode_header(
        fields.get(b"header", b""), digest=text(fields.get(b"digest", b"")), committed_ms=int(at) if at.isdigit() else 0
    )


def part_of(entry_id: str, fields: Fields, keys: Keys) -> StepPart:
    """A part entry decoded. Raises PayloadError, also when it is another part than its id says."""
    part = decode_part(fields.get(b"part", b""), prefix=keys.payload_prefix)
    if entry_id != f"{part.step}-{part.rank + 1}":
        raise PayloadError(f"step part {entry_id} says that it is rank {part.rank} of step {part.step}")
    return part


def place_in(meta: Mapping[bytes, bytes | None]) -> tuple[int, int]:
    """The line of versions, and the run's last step, in its meta."""
    return int(meta.get(b"line") or meta.get(b"since") or 0), int(meta.get(b"step") or 0)


def standing(newest: Any, now: int, step: int) -> list[dict[str, Any]]:
    """The results among entries, the newest first, that stand while the line of versions is `now` and the run is at
    `step`; the oldest first, one for each env and version.

    A line's results take the place of those that earlier lines have from its first version on; above the run's last
    step there are none of earlier lines.
    """
    entries: list[tuple[int, dict[str, Any]]] = []
    firsts: dict[str, dict[int, int]] = {}
    """Env -> line -> its first version."""
    for entry_id, fields in reversed(ranged(newest)):
        result = evaluation_of(entry_id, fields)
        line = number(fields.get(b"line")) or 0
        # Of a line that a rewind ended: before anything is evaluated again, this alone tells what was taken back.
        if result is not None and (line >= now or result["version"] <= step):
            entries.append((line, result))
            lines = firsts.setdefault(result["env"], {})
            lines[line] = min(lines.get(line, result["version"]), result["version"])
    results: dict[tuple[str, int], dict[str, Any]] = {}
    for line, result in entries:
        env, version = result["env"], result["version"]
        if not any(later > line and first <= version for later, first in firsts[env].items()):
            results.setdefault((env, version), result)
    return list(results.values())


def evaluation_of(entry_id: str, fields: Fields) -> dict[str, Any] | None:
    """A result as it was added; None when it did not come through `WorkerStore.add_evaluation`."""
    env, version = text(fields.get(b"env", b"")), number(fields.get(b"version"))
    try:
        record = payload.loads(fields.get(b"record", b""), limit=MAX_EVALUATION_BYTES)
    except PayloadError:
        return None
    if not env or version is None or not isinstance(record, dict):
        return None
    return {**record, "env": env, "version": version, "at": int(entry_id.partition("-")[0]) / 1000}


def seconds_of(time: tuple[int, int]) -> float:
    """The reply of TIME as Unix seconds."""
    return int(time[0]) + int(time[1]) / 1e6


def sources_of(written: Fields, taken: Fields, out: Mapping[str, int]) -> Sources:
    """The sources by the hashes of ends and of numbers, and then `out`, env -> tickets that are out.

    Numbers are given before they are out, and none is given any more: that order makes it certain that an env is done.
    One that `out` does not name is not known to be.
    """
    given, numbers, ends, over = ends_of(written, taken)
    done = frozenset(env for env in over if out.get(env) == 0)
    env_names = {env for env in (*given, *numbers) if not env.startswith("[")}
    return Sources(
        done=done,
        declared=frozenset(env for env in done if given[env].startswith("=")),
        open=frozenset(env_names - done),
        expected=frozenset(name[8:-1] for name in given if name.startswith("[worker.")),
        ends=ends,
        written=written,
    )


def heartbeats_of(fields: Fields | None, now: float) -> dict[str, dict[str, Any]]:
    """Name -> its last record, with ``seconds_ago``; what is no record is left out."""
    out = {}
    for name, value in sorted((fields or {}).items()):
        beat = heartbeat_of(value)
        if beat is not None:
            at, record = beat
            out[text(name)] = {**record, "seconds_ago": abs(now - at / 1000)}
    return out


def heartbeat_of(value: bytes) -> tuple[int, dict[str, Any]] | None:
    """Server ms and the record of a heartbeat; None when it is none."""
    at, _, data = value.partition(b" ")
    milliseconds = number(at)
    try:
        record = payload.loads(data, limit=MAX_HEARTBEAT_BYTES)
    except PayloadError:
        return None
    if milliseconds is None or not isinstance(record, dict):
        return None
    return milliseconds, record


def ends_of(
    written: Mapping[bytes, bytes], taken: Mapping[bytes, bytes]
) -> tuple[dict[str, str], dict[str, str], dict[str, int], list[str]]:
    """The hashes of ends and numbers as text; env -> how many tickets it has; the envs of which all were given."""
    given, numbers = ({text(k): text(v) for k, v in fields.items()} for fields in (written, taken))
    ends = {env: int(match[1]) for env, end in given.items() if (match := _END.match(end))}
    return given, numbers, ends, [env for env, end in ends.items() if _number(numbers.get(env, "0")) >= end]


def _sizes(refs: Sequence[PartRollout]) -> FieldRequest:
    """The fields of these rollouts, as their pushes announced them."""
    sizes: dict[str, dict[str, int]] = {}
    for ref in refs:
        sizes.setdefault(ref.payload_key, {})[str(ref.index)] = ref.info.size
    return sizes


def chunks(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Consecutive runs of at most `most` bytes, so that no reply holds a whole step in the server's memory."""
    start, size = 0, 0
    for i, rollout_bytes in enumerate(sizes):
        if size and size + rollout_bytes > most:
            yield range(start, i)
            start, size = i, 0
        size += rollout_bytes
    if start < len(sizes):
        yield range(start, len(sizes))


def _number(value: str) -> float:
    """A ticket number; what is none is below every end."""
    return int(value) if value.isdecimal() else float("-inf")


def living_tickets(
    env: str, out: Sequence[tuple[bytes, float]], taken: Mapping[bytes, bytes], now_ms: int
) -> list[TakenTicket]:
    """The tickets of an env that are out, by number. Workers write both: what is no number is no ticket."""
    found: list[TakenTicket] = []
    for ticket, until in out:
        version, _, taken_ms = taken.get(ticket, b"").partition(b" ")
        of_version, at, n = number(version), number(taken_ms), number(ticket)
        if until > now_ms and n is not None and of_version is not None and at is not None:
            seconds = max(0.0, (now_ms - at) / 1000)
            found.append(TakenTicket(env=env, number=n, version=of_version, seconds=seconds))
    return sorted(found, key=lambda ticket: ticket.number)
