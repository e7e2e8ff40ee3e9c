"""Restore: a backed up run comes onto a server, whole or not at all.

The file is read through and checked before the first write. Payloads go first, with a time to live; control keys are
built beside their places and renamed into them in one transaction, which fails when the run exists by then. A restore
that dies leaves nothing but keys that expire. One that finds at its end that the run began meanwhile leaves payloads to
which nothing refers; removing the run removes them, too.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import redis

from rlbuffer.errors import BackupError, RlbufferError
from rlbuffer.store.backup.backup import BackupReport
from rlbuffer.store.backup.format import ANOTHER, BACKUP_FORMAT, read_frames
from rlbuffer.store.keys import RUNS, SCHEMA
from rlbuffer.store.moves.push import WEEK_MS
from rlbuffer.store.session import text

if TYPE_CHECKING:
    from rlbuffer.store.redis_store import RedisStore

BUILDING_MS = 86_400_000
"""Milliseconds that the half of a run stays whose restore died."""
RESTORE_PAGE = 500
"""Keys whose time to live is set in one round trip."""
HEADER: Mapping[str, type] = MappingProxyType({"run": str, "epoch": int, "step": int})
KEY_TYPES = frozenset({"hash", "zset", "stream", "string"})


def check_backup(path: Path) -> dict[str, Any]:
    """Reads a backup through. -> its header, with the counts of its end.

    Raises:
        BackupError: it is no backup, damaged, cut off, or of another version; the message says where.
    """
    header: dict[str, Any] = {}
    counts = {"key": 0, "payload": 0}
    last: dict[str, Any] = {}
    for number, frame in enumerate(read_frames(path), 1):
        where = f"{path} is damaged in frame {number}"
        if number == 1:
            header = frame
            if frame.get("format") != BACKUP_FORMAT:
                raise BackupError(
                    f"{path} is a backup of format {frame.get('format')!r}, this version of rlbuffer reads format "
                    f"{BACKUP_FORMAT}: restore it with the version that wrote it"
                )
            if frame.get("schema") != SCHEMA:
                raise BackupError(
                    f"{path} is of a run of schema {frame.get('schema')}, this version of rlbuffer reads schema "
                    f"{SCHEMA}: restore it with the version that wrote it"
                )
            if not all(isinstance(frame.get(name), kind) for name, kind in HEADER.items()):
                raise BackupError(f"{where}: it does not say the {', '.join(HEADER)} of a backup. {ANOTHER}")
        elif not frame.get("end"):
            kind = "key" if "key" in frame else "payload"
            if not all(
                isinstance(frame.get(name), type_) for name, type_ in ((kind, str), ("items", list), ("ttl", int))
            ):
                raise BackupError(f"{where}: it is neither a control key nor a payload. {ANOTHER}")
            if kind == "key" and frame.get("type") not in KEY_TYPES:
                raise BackupError(f"{where}: a control key of type {frame.get('type')!r}. {ANOTHER}")
            counts[kind] += bool(frame.get("first"))
        last = frame
    if (counts["key"], counts["payload"]) != (last.get("control_keys"), last.get("payload_keys")):
        raise BackupError(
            f"{path} holds {counts['key']} control keys and {counts['payload']} payload keys, its end says "
            f"{last.get('control_keys')} and {last.get('payload_keys')}. {ANOTHER}"
        )
    return header | {name: last.get(name, 0) for name in ("control_keys", "payload_keys", "missing")}


def restore_backup(store: RedisStore, path: Path, tell: Callable[[str], None] = lambda line: None) -> BackupReport:
    """Puts the backup onto the store's server, under the store's run.

    Raises:
        BackupError: see :func:`check_backup`; nothing was written.
        RlbufferError: the run exists.
    """
    _refuse_existing(store)
    header = check_backup(path)
    tell(f"{path} is whole: step {header['step']} of run {header['run']!r}, {header['payload_keys']} payload keys")
    control = _write(store, path)
    for page in _payload_keys(store, path):

        def persist(client: Any, page: list[str] = page) -> None:
            with client.pipeline(transaction=False) as pipe:
                for key in page:
                    pipe.persist(key)
                pipe.execute()

        store.look(persist)
    tell(f"{header['payload_keys']} payload keys are on the server; the control keys are put in place now")
    _put_in_place(store, control)
    store.look(lambda client: client.zadd(RUNS, {store.run: store.now()}))
    return BackupReport(
        run=store.run,
        epoch=int(header["epoch"]),
        step=int(header["step"]),
        control_keys=len(control),
        payload_keys=int(header["payload_keys"]),
        bytes=path.stat().st_size,
        missing=int(header["missing"]),
    )


def _refuse_existing(store: RedisStore) -> None:
    if store.look(lambda client: client.exists(store.keys.meta)):
        raise RlbufferError(
            f"run {store.run!r} exists on {store.server()['address']}: `rlbuffer reset {store.run} --yes` removes it, "
            f"--run gives the restored one another name"
        )


def _write(store: RedisStore, path: Path) -> dict[str, tuple[str, int]]:
    """Returns control key -> its place for now, and its time to live."""
    keys, building = store.keys, f"{store.keys.tag}:restoring:{uuid.uuid4().hex}"
    control: dict[str, tuple[str, int]] = {}
    for frame in read_frames(path):
        if "payload" in frame:
            _put(store, keys.payload_prefix + frame["payload"], "hash", frame, frame["items"], WEEK_MS)
        elif "key" in frame:
            name, items = frame["key"], frame["items"]
            if name == "garbage":
                items = [[keys.payload_prefix + text(member), score] for member, score in items]
            # A producer in an older backup may have a time to live: it is remembered for good.
            ttl = -1 if name.startswith("producer:") else int(frame["ttl"])
            control[f"{keys.tag}:{name}"] = (f"{building}:{name}", ttl)
            _put(store, f"{building}:{name}", frame["type"], frame, items, BUILDING_MS)
    return control


def _put(store: RedisStore, key: str, kind: str, frame: dict[str, Any], items: list[Any], ttl: int) -> None:
    """Adds one frame's items to a key; the first frame of it begins it again."""

    def put(client: Any) -> None:
        with client.pipeline(transaction=True) as pipe:
            if frame["first"]:
                pipe.delete(key)
            for item in items:
                if kind == "hash":
                    pipe.hset(key, item[0], item[1])
                elif kind == "zset":
                    pipe.zadd(key, {item[0]: item[1]})
                elif kind == "stream":
                    pipe.execute_command("XADD", key, item[0], *item[1])
                else:
                    pipe.set(key, item[0])
            pipe.pexpire(key, ttl)
            pipe.execute()

    # Not repeated: an entry of a stream that is there already would be refused.
    store.connection.call(
        lambda: put(store.connection.client), patience_seconds=store.patience_seconds, repeat=kind != "stream"
    )


def _payload_keys(store: RedisStore, path: Path) -> Iterator[list[str]]:
    """Pages of payload keys: something refers to each of them."""
    page: list[str] = []
    for frame in read_frames(path):
        if "payload" in frame and frame["first"]:
            page.append(store.keys.payload_prefix + frame["payload"])
            if len(page) >= RESTORE_PAGE:
                yield page
                page = []
    if page:
        yield page


def _put_in_place(store: RedisStore, control: dict[str, tuple[str, int]]) -> None:
    meta = store.keys.meta

    def rename(client: Any) -> bool:
        with client.pipeline(transaction=True) as pipe:
            pipe.watch(meta)
            if pipe.exists(meta):
                return False
            pipe.multi()
            for key, (building, ttl) in control.items():
                pipe.rename(building, key)
                if ttl > 0:
                    pipe.pexpire(key, ttl)
                else:
                    pipe.persist(key)
            try:
                pipe.execute()
            except redis.WatchError:
                return False
            return True

    if not store.connection.call(
        lambda: rename(store.connection.client), patience_seconds=store.patience_seconds, repeat=False
    ):
        raise RlbufferError(
            f"run {store.run!r} began while it was being restored: nothing of it was changed. `rlbuffer reset "
            f"{store.run} --yes` removes it, --run gives the restored one another name"
        )
