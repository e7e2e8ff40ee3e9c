"""Backup: everything that the server holds of a run, as of one moment, while the run goes on.

Control keys are read in one transaction, payloads after it. A *hold* keeps RETIRE from sweeping payloads meanwhile:
what had been retired before the snapshot is needed by nothing in it, what is retired later stays until the hold is let
go or runs out by itself. Control keys are in memory at once, payloads a window at a time.

Leases, tickets and heartbeats are claims of processes: they are left out, or written as run out.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbuffer.errors import BackupError, RlbufferError, RunGone
from rlbuffer.process.files import rename_for_good
from rlbuffer.store.backup.format import BACKUP_FORMAT, FrameWriter
from rlbuffer.store.keys import HEARTBEATS
from rlbuffer.store.moves.run import parse_meta
from rlbuffer.store.moves.steps import HOLD_SECONDS, LONGEST_HOLD_MS
from rlbuffer.store.session import answers, ranged, text

if TYPE_CHECKING:
    from rlbuffer.store.redis_store import RedisStore

WINDOW_BYTES = 32 * 2**20
"""Payloads read at a time."""
BACKUP_PAGE = 200
"""Payload keys asked about in one round trip."""
BACKUP_TRIES = 10
"""Times that the names of the control keys are read again when a process began in between."""
LEFT_OUT = frozenset({"lease", "allowance", "room", "taken", "waiting", "holds", *HEARTBEATS.values()})
"""Control keys that are claims of processes at work. The lease's token is kept: it never goes back."""

Read = tuple[str, int, list[Any]]
"""Type, time to live in ms (-1: none), items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupReport:
    """The counts of a backup that was written, or restored."""

    run: str
    epoch: int
    step: int
    control_keys: int
    payload_keys: int
    bytes: int
    """Size of the file."""
    missing: int = 0
    """Payloads that something refers to and that were not there; `verify` of the run says the same."""


def write_backup(store: RedisStore, path: Path, tell: Callable[[str], None] = lambda line: None) -> BackupReport:
    """Writes the run into `path`, which appears only when it is whole.

    Raises:
        BackupError: the file cannot be written, or the backup was stopped for so long that its hold ran out.
        RunGone: there is no such run, or it was deleted meanwhile.
    """
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.absolute().parent, prefix=f".{path.name}.", suffix=".part", delete=False
        ) as file:
            temporary = file.name
            with _Hold(store) as hold:
                report = _write(store, FrameWriter(file), hold, tell)
            file.flush()
            os.fsync(file.fileno())
        rename_for_good(Path(temporary), path.absolute())
    except RlbufferError:
        raise
    except OSError as error:
        raise BackupError(f"cannot write {path}: {error.strerror}") from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
    return report


class _Hold:
    """Keeps payloads from being swept, as long as it is renewed."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._name = uuid.uuid4().hex

    def __enter__(self) -> _Hold:
        self._created = self._read_created()
        self._set(self._store.now())
        return self

    def __exit__(self, *error: object) -> None:
        # Without the server it runs out by itself.
        with suppress(RlbufferError):
            self._store.look(lambda client: client.zrem(self._store.keys.holds, self._name))

    def renew(self) -> None:
        """Raises BackupError when it had run out: something may have been swept. RunGone: everything was."""
        now = self._store.now()
        until = self._store.look(lambda client: client.zscore(self._store.keys.holds, self._name))
        if until is None or not 0 < float(until) - 1000 * now <= LONGEST_HOLD_MS:
            self.check_run()  # what deletes a run deletes its holds
            raise BackupError(
                f"the backup of run {self._store.run!r} stood still for over {HOLD_SECONDS:g} s, and its payloads were "
                f"released meanwhile ({self._store.keys.holds}): no file was written, begin again"
            )
        self._set(now)

    def check_run(self) -> None:
        """Raises RunGone when the run is not the one any more that it was at first."""
        if self._created is None or self._read_created() != self._created:
            run, meta = self._store.run, self._store.keys.meta
            raise RunGone(f"run {run!r} was deleted while it was backed up ({meta}): no file was written")

    def _read_created(self) -> bytes | None:
        value: bytes | None = self._store.look(lambda client: client.hget(self._store.keys.meta, "created"))
        return value

    def _set(self, now: float) -> None:
        key, until = self._store.keys.holds, round(1000 * (now + HOLD_SECONDS))

        def hold(client: Any) -> None:
            with client.pipeline(transaction=True) as pipe:
                pipe.zadd(key, {self._name: until})
                pipe.pexpire(key, LONGEST_HOLD_MS)
                pipe.execute()

        self._store.look(hold)


def _write(store: RedisStore, frames: FrameWriter, hold: _Hold, tell: Callable[[str], None]) -> BackupReport:
    keys = store.keys
    store.meta()  # refuses a run of another schema
    control = _control_keys(store)
    if "meta" not in control:
        raise RunGone(f"run {store.run!r} is not on the server ({keys.meta})")
    meta = parse_meta(dict(control["meta"][2]))
    server = store.server()
    frames.write(
        {
            "format": BACKUP_FORMAT,
            "run": store.run,
            "schema": meta.schema,
            "epoch": meta.epoch,
            "step": meta.step,
            "taken": store.now(),
            "server": f"{server['name']} {server['version']}".strip(),
        }
    )
    payloads = _payload_names(store, control, meta.retired)
    written = 0
    for name, (kind, ttl, items) in sorted(control.items()):
        kept = _as_of_no_process(name, items, keys.payload_prefix)
        if kept is not None:
            frames.write_key({"key": name, "type": kind, "ttl": ttl}, kept)
            written += 1
    missing = 0
    for start in range(0, len(payloads), BACKUP_PAGE):
        hold.renew()
        page = payloads[start : start + BACKUP_PAGE]
        missing += _write_payloads(store, frames, hold, page)
        tell(f"{start + len(page)} of {len(payloads)} payload keys, {frames.bytes / 2**20:.0f} MiB")
    hold.renew()
    hold.check_run()
    frames.write({"end": True, "control_keys": written, "payload_keys": len(payloads) - missing, "missing": missing})
    return BackupReport(
        run=store.run,
        epoch=meta.epoch,
        step=meta.step,
        control_keys=written,
        payload_keys=len(payloads) - missing,
        bytes=frames.bytes,
        missing=missing,
    )


# -- control keys ------------------------------------------------------------------------------------------------------
def _control_keys(store: RedisStore) -> dict[str, Read]:
    """name without the tag -> content, all of one moment."""
    names, new = _names(store), set[str]()
    for _ in range(BACKUP_TRIES):
        contents = _read_at_once(store, names)
        again = _names(store)
        if again <= names:
            return contents
        new, names = again - names, again
    raise BackupError(
        f"the control keys of run {store.run!r} do not stand still: new ones came during each of {BACKUP_TRIES} reads, "
        f"the last was {min(new)}. A process begins again and again: stop it, then back up again"
    )


def _names(store: RedisStore) -> set[str]:
    tag = f"{store.keys.tag}:"
    keys = store.look(lambda client: list(client.scan_iter(match=f"{tag}*", count=1000)))
    names = {text(key).removeprefix(tag) for key in keys}
    return {name for name in names if name == "lease" or (name not in LEFT_OUT and not name.startswith("restoring:"))}


def _read_at_once(store: RedisStore, names: set[str]) -> dict[str, Read]:
    order = sorted(names)
    full = [f"{store.keys.tag}:{name}" for name in order]

    def kinds_of(client: Any) -> list[Any]:
        with client.pipeline(transaction=False) as pipe:
            for key in full:
                pipe.type(key)
            return list(pipe.execute())

    kinds = [text(kind) for kind in store.look(kinds_of)]

    def read(client: Any) -> list[Any]:
        with client.pipeline(transaction=True) as pipe:
            for key, kind in zip(full, kinds, strict=True):
                pipe.pttl(key)
                if kind == "hash":
                    pipe.hgetall(key)
                elif kind == "zset":
                    pipe.zrange(key, 0, -1, withscores=True)
                elif kind == "stream":
                    pipe.xrange(key)
                else:
                    pipe.get(key)
            return list(pipe.execute())

    replies = store.look(read)
    contents = {}
    for index, (name, kind) in enumerate(zip(order, kinds, strict=True)):
        ttl, content = replies[2 * index], replies[2 * index + 1]
        if content:  # what is empty is as if it were not there
            contents[name] = (kind, int(ttl), _items(kind, content))
    return contents


def _items(kind: str, content: Any) -> list[Any]:
    if kind == "hash":
        return [list(item) for item in content.items()]
    if kind == "zset":
        return [[member, float(score)] for member, score in content]
    if kind == "stream":
        return [[entry_id, [x for pair in fields.items() for x in pair]] for entry_id, fields in ranged(content)]
    return [[content]]


def _as_of_no_process(name: str, items: list[Any], prefix: str) -> list[Any] | None:
    """The content of a key once every process is gone; None when nothing of it is kept."""
    if name == "lease":
        return [item for item in items if item[0] == b"token"] or None
    if name == "trainer":
        return [item for item in items if item[0] != b"seen"]
    if name.startswith("tickets:"):
        return [[number, 0.0] for number, _ in items]  # expired: their prompts are the first to be taken again
    if name == "garbage":
        return [[key.removeprefix(prefix.encode()), score] for key, score in items]
    return items


# -- payloads ----------------------------------------------------------------------------------------------------------
def _payload_names(store: RedisStore, control: dict[str, Read], retired: int) -> list[str]:
    """Payload keys, without the run's prefix, of all that is pending, in a live step, or still to be looked at."""
    prefix = store.keys.payload_prefix
    names: dict[str, None] = {}
    for _, fields in control.get("pool", ("", 0, []))[2]:
        entry = dict(zip(fields[::2], fields[1::2], strict=True))
        names[f"{text(entry.get(b'group', b''))}:{text(entry.get(b'key', b''))}"] = None
    for field, value in control.get("reuse", ("", 0, []))[2]:
        group, _, entry_id = text(field).partition(" ")
        if entry_id:
            names[f"{group}:{text(value.split(b' ', 2)[1])}"] = None
    for key, score in control.get("garbage", ("", 0, []))[2]:
        if score > retired:  # the rest is being swept
            names[text(key).removeprefix(prefix)] = None
    return list(names)


def _write_payloads(store: RedisStore, frames: FrameWriter, hold: _Hold, names: Sequence[str]) -> int:
    """Returns the number of payloads that are not there."""
    keys = [store.keys.payload_prefix + name for name in names]

    def look(client: Any) -> list[Any]:
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.pttl(key)
                pipe.hkeys(key)
            return answers(pipe)

    replies = store.look(look)
    missing = 0
    for index, name in enumerate(names):
        ttl, fields = int(replies[2 * index]), replies[2 * index + 1]
        if not fields:
            missing += 1
            continue
        frames.write_key({"payload": name, "ttl": ttl}, _fields(store, hold, keys[index], fields))
    return missing


def _fields(store: RedisStore, hold: _Hold, key: str, fields: Sequence[bytes]) -> Iterator[list[Any]]:
    """Field and value, read a window at a time."""

    def lengths(client: Any) -> list[Any]:
        with client.pipeline(transaction=False) as pipe:
            for field in fields:
                pipe.hstrlen(key, field)
            return list(pipe.execute())

    def values(client: Any, window: Sequence[bytes]) -> list[Any]:
        return list(client.hmget(key, list(window)))

    window: list[bytes] = []
    window_bytes = 0
    for position, (field, size) in enumerate(zip(fields, store.look(lengths), strict=True)):
        window.append(field)
        window_bytes += size
        if window_bytes >= WINDOW_BYTES or position == len(fields) - 1:
            window_values = store.look(partial(values, window=tuple(window)))
            yield from ([name, value] for name, value in zip(window, window_values, strict=True) if value is not None)
            window, window_bytes = [], 0
            if position < len(fields) - 1:
                hold.renew()
