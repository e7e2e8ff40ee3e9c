"""Reading what was committed: headers, parts and payloads of steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import redis

from rlbuffer.errors import NotFound, PayloadError, RlbufferError, ServerUnsuitable, StepRetired
from rlbuffer.packing.arena import Arena
from rlbuffer.records.step_header import StepHeader
from rlbuffer.store.keys import Keys
from rlbuffer.store.moves.step_format import decode_header, decode_part
from rlbuffer.store.payloads import FETCH_BYTES
from rlbuffer.store.received import Checksum, FieldMemory, FieldReply, FieldRequest, InPlace, Received
from rlbuffer.store.records import PartRollout, StepPart
from rlbuffer.store.server.receiving import receive_fields
from rlbuffer.store.session import BLOCK_SECONDS, LAST_IN_STEP, Fields, Session, answers, ranged, sound, text

HEADERS_PER_READ = 64
"""Headers per read."""
LEAST_WINDOW_BYTES = 2**20
"""Payload bytes asked for at once where the server holds no more: it must hold as many."""
MOST_CUTS = 3
"""Times in a row that a connection breaks in the same answer of the same server before that is its limit."""
_log = logging.getLogger(__name__)


class _Cut(Exception):
    """The connection broke in the middle of an answer, and the server is the same."""


class StepReads(Session):
    """The steps stream: ``<s>-0`` is the header of step s, ``<s>-<r+1>`` the part of planned rank r."""

    _arena: Arena
    """Memory that payloads are received into."""
    _window: int = FETCH_BYTES
    """Payload bytes asked for at once; it never grows."""

    # -- pull ------------------------------------------------------------------------------------------------------
    def wait_step(self, step: int, *, block_seconds: float) -> StepHeader | None:
        if step < 1:
            raise NotFound(f"steps start at 1, there is no step {step}")
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

    def read_parts(self, step: int, ranks: Sequence[int] | None = None) -> list[StepPart]:

        def read(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                if ranks is None:
                    pipe.xrange(self.keys.steps, f"{step}-1", f"{step}-{LAST_IN_STEP}")
                else:
                    for rank in ranks:
                        pipe.xrange(self.keys.steps, f"{step}-{rank + 1}", f"{step}-{rank + 1}")
                return list(pipe.execute())

        replies = self.look(read)
        ranges = [ranged(reply) for reply in replies]
        if any(not entries for entries in ranges):
            if step <= self._retired_step():
                raise self._retired(step)
            which = f"step {step}" if ranks is None else f"one of the ranks {list(ranks)} in step {step}"
            raise NotFound(f"run {self.run!r} has no {which}")
        with self._reading(step):
            return [part_of(entry_id, fields, self.keys) for entries in ranges for entry_id, fields in entries]

    def read_payloads(self, refs: Sequence[PartRollout]) -> list[bytes | None]:
        values: dict[tuple[str, str], bytes | None] = {}
        sizes = _sizes(refs).items()
        request = {key: [(field, size, ()) for field, size in its.items()] for key, its in sizes}
        for part, replies in self._in_windows(request, _asked):
            for (key, its), reply in zip(part.items(), replies, strict=True):
                names = [(key, field) for field, _, _ in its]
                values |= zip(names, reply or [None] * len(names), strict=True)
        return [values[ref.payload_key, str(ref.index)] for ref in refs]

    def read_pushed(self, refs: Sequence[PartRollout]) -> list[tuple[bytes | memoryview | None, bytes | None]]:
        sizes = _sizes(refs)
        total = sum(size for fields in sizes.values() for size in fields.values())
        block, at = self._arena.block(total)((total,), np.uint8).data, 0
        request: dict[str, list[FieldMemory]] = {key: [] for key in sizes}
        for key, fields in sizes.items():
            for field, size in fields.items():
                request[key].append((field, size, [block[at : at + size]]))
                at += size
        received, groups = self.receive_pushed(request, len)  # whoever decodes them computes their checksums
        values: dict[tuple[str, str], bytes | memoryview | None] = {}
        for key, its in request.items():
            arrived = received[key]
            for n, (field, _, (memory,)) in enumerate(its):
                values[key, field] = memory.toreadonly() if isinstance(arrived, InPlace) else arrived[n]
        return [(values[ref.payload_key, str(ref.index)], groups[ref.payload_key]) for ref in refs]

    def receive_pushed(self, request: FieldRequest, checksum: Checksum) -> FieldReply:

        def read(client: Any, part: FieldRequest) -> list[Any]:
            if self.connection.is_memory or not isinstance(client, redis.Redis):  # a model has no socket
                return _asked(client, part, "group")
            return sound(receive_fields(client, part, "group", checksum))

        values: dict[str, Received] = {}
        groups: dict[str, bytes | None] = {}
        for part, replies in self._in_windows(request, read):
            for (key, its), reply in zip(part.items(), replies, strict=False):
                arrived = reply or [None] * len(its)
                values[key] = _joined(values[key], arrived, request[key]) if key in values else arrived
            groups |= zip(part, replies[len(part) :], strict=True)
        return values, groups

    def _in_windows(
        self, request: FieldRequest, read: Callable[[Any, FieldRequest], list[Any]]
    ) -> Iterator[tuple[FieldRequest, list[Any]]]:
        """Reads fields, as many bytes at once as the server holds for a client. -> parts of the request, with replies.

        A server closes the connection of a client for which it holds more than its ``client-output-buffer-limit``. So
        where a connection breaks in the middle of an answer, and the same process answers again, half as much is asked
        for at once, from then on.

        Raises:
            ServerUnsuitable: it breaks again and again where less cannot be asked for.
        """
        left, breaks = [(key, field) for key, its in request.items() for field in its], 0
        while left:
            part, count, size = _first(left, self._window)
            try:
                replies = self._uncut(read, part)
            except _Cut:
                if count > 1 and size > LEAST_WINDOW_BYTES:
                    self._window = max(size // 2, LEAST_WINDOW_BYTES)
                    _log.warning(
                        "the server at %s closed the connection while it sent %d bytes: at most %d are asked for at "
                        "once from now on. Its client-output-buffer-limit may be too low",
                        *(self.connection.address, size, self._window),
                    )
                    continue
                breaks += 1
                if breaks < MOST_CUTS:
                    continue
                raise ServerUnsuitable(
                    f"the server at {self.connection.address} closes the connection each time that it sends "
                    f"{'rollout' if count == 1 else f'{count} rollouts,'} {left[0][1][0]} of {left[0][0]} "
                    f"({size} bytes), and less cannot be asked for. Its client-output-buffer-limit for normal clients "
                    f"is too low: it must be well above {size} bytes, as with `CONFIG SET client-output-buffer-limit "
                    '"normal 0 0 0"`, which is the default'
                ) from None
            yield part, replies
            left, breaks = left[count:], 0

    def _uncut(self, read: Callable[[Any, FieldRequest], list[Any]], part: FieldRequest) -> list[Any]:
        """Reads a part. Raises _Cut where the connection broke, and the same process answers again."""
        server, is_cut = self.server_id(), False

        def ask(client: Any) -> list[Any]:
            nonlocal server, is_cut
            before, server = server, self.server_id()
            if is_cut and server == before:
                raise _Cut
            try:
                return read(client, part)
            except redis.ConnectionError:
                is_cut = True
                raise

        return self.look(ask)

    def read_group_payloads(self, payload_keys: Sequence[str]) -> list[bytes | None]:

        def read(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                for key in payload_keys:
                    pipe.hget(key, "group")
                return answers(pipe)

        return self.look(read) if payload_keys else []

    # -- look ------------------------------------------------------------------------------------------------------
    def headers(
        self, first: int | None = None, last: int | None = None, *, problems: list[RlbufferError] | None = None
    ) -> Iterator[StepHeader]:
        retired, newest = self._bounds()
        low, high = max(first or 1, retired + 1), newest if last is None else min(last, newest)
        for start in range(low, high + 1, HEADERS_PER_READ):
            steps = range(start, min(start + HEADERS_PER_READ, high + 1))

            def read(client: Any, steps: range = steps) -> list[Any]:
                with client.pipeline(transaction=False) as pipe:
                    for step in steps:
                        pipe.xrange(self.keys.steps, f"{step}-0", f"{step}-0")
                    return list(pipe.execute())

            for reply in self.look(read):
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

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Says of a step that cannot be read what to do: nobody can train it, now or later."""
        try:
            yield
        except PayloadError as error:
            raise PayloadError(
                f"step {step} of run {self.run!r} cannot be read: {error}. Take it back, and what follows it, "
                f"with `rlbuffer runs void {step}`"
            ) from None

    def _bounds(self) -> tuple[int, int]:
        retired, step = self.look(lambda client: client.hmget(self.keys.meta, ["retired", "step"]))
        return int(retired or 0), int(step or 0)

    def _retired_step(self) -> int:
        return self._bounds()[0]

    def _retired(self, step: int) -> StepRetired:
        retired = self._retired_step()
        reason = self.early_reason(step)
        why = f"trained and retired early ({reason})" if reason else "trained, checkpointed and retired"
        return StepRetired(
            f"step {step} of run {self.run!r} was {why}: steps up to {retired} are gone, resume from a newer checkpoint"
        )


def _sizes(refs: Sequence[PartRollout]) -> dict[str, dict[str, int]]:
    """Payload key -> field -> bytes that its push announced."""
    sizes: dict[str, dict[str, int]] = {}
    for ref in refs:
        sizes.setdefault(ref.payload_key, {})[str(ref.index)] = ref.info.size
    return sizes


def _asked(client: Any, asked: FieldRequest, *further: str) -> list[Any]:
    """The replies to an HMGET for each key, and then to an HGET of each further field."""
    with client.pipeline(transaction=False) as pipe:
        for key, its in asked.items():
            pipe.hmget(key, [field for field, _, _ in its])
        for field in further:
            for key in asked:
                pipe.hget(key, field)
        return answers(pipe)


def _first(fields: Sequence[tuple[str, FieldMemory]], window: int) -> tuple[FieldRequest, int, int]:
    """As many of these as fit into `window` bytes, at least one. -> a request for them, their number, their bytes."""
    part: dict[str, list[FieldMemory]] = {}
    count = size = 0
    for key, field in fields:
        if count and size + field[1] > window:
            break
        part.setdefault(key, []).append(field)
        count, size = count + 1, size + field[1]
    return part, count, size


def _joined(first: Received, then: Received, fields: Sequence[FieldMemory]) -> Received:
    """The first of these fields of a hash, and those that came in the answer behind them."""
    if isinstance(first, InPlace) and isinstance(then, InPlace):
        return InPlace([*first.checksums, *then.checksums])
    had = len(first.checksums if isinstance(first, InPlace) else first)
    return [*_copied(first, fields), *_copied(then, fields[had:])]


def _copied(arrived: Received, fields: Sequence[FieldMemory]) -> Sequence[bytes | None]:
    if not isinstance(arrived, InPlace):
        return arrived
    return [b"".join(memory) for (_, _, memory), _ in zip(fields, arrived.checksums, strict=False)]


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
