"""Dump and restore: a run that nobody leads, as one file, and back.

A key is in the file as the server's DUMP gives it, so it comes back on a server that reads that: of the same kind, in
the same version or a newer one. The file is a magic line and chunks: head, name of a key, data, CRC-32. The checksum
of a chunk goes on from that of the chunk before, so none can be damaged, missing, doubled or elsewhere. The first chunk
says what the file is, the last one how many keys it has.

RESTORE marks the run (`restoring`) until its last write, which puts `meta` in place and takes the mark away at once.
Nothing begins, leads or reads a run with that mark; the next restore removes what a killed one left.
"""

from __future__ import annotations

import json
import os
import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import redis

from rlbuffer.errors import (
    ConfigError,
    DumpError,
    RlbufferError,
    RunDamaged,
    RunGone,
    ServerRefused,
    ServerUnreachable,
)
from rlbuffer.process.files import whole_file
from rlbuffer.store.keys import RUNS, SCHEMA, Keys, check_new_run
from rlbuffer.store.session import text
from rlbuffer.wire.checksum import crc32

if TYPE_CHECKING:
    from rlbuffer.store.operator import OperatorStore

MAGIC = b"rlbuffer-dump 1\n"
HEAD = struct.Struct("<IqQ")
"""Bytes of the name, time to live in ms (-1: none), bytes of the data."""
CHECKSUM = struct.Struct("<I")
HEADER, END = b"header", b"end"
UNREADABLE = ("DUMP payload", "Bad data format")
"""Words of a server that cannot read another server's DUMP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dumped:
    """What a file holds."""

    run: str
    schema: int
    step: int
    server: str
    """Kind and version of the server that wrote it."""
    keys: int = 0


def dump(store: OperatorStore, path: Path, tell: Callable[[int], None] = lambda keys: None) -> Dumped:
    """Writes the run into `path`, which appears only when it is whole. `tell` hears how many keys are written.

    Raises:
        DumpError: somebody leads the run, or changed it meanwhile; or the file cannot be written.
        RunGone: there is no such run.
    """
    if store.connection.is_memory:
        raise DumpError(f"run {store.run!r} is in the memory of a process: only a run on a server can be dumped")
    about = Dumped(run=store.run, schema=SCHEMA, step=store.meta().step, server=_server(store))
    try:
        with whole_file(path.absolute(), is_private=True, is_flushed=True) as file:
            keys = store.connection.call(
                lambda: _write(store, file, about, tell), patience_seconds=store.patience_seconds, repeat=False
            )
    except ServerUnreachable:
        raise
    except OSError as error:
        raise DumpError(f"cannot write {path}: {error.strerror}") from None
    return replace(about, keys=keys)


def _write(store: OperatorStore, file: IO[bytes], about: Dumped, tell: Callable[[int], None]) -> int:
    client, keys, largest = store.client, store.keys, store.connection.limits().value
    with client.pipeline(transaction=True) as watched:
        watched.watch(keys.lease, keys.meta, keys.pool, keys.ledger, keys.trainer)
        owner, until = client.hmget(keys.lease, "owner", "until")
        seconds, micros = client.time()
        if int(until or 0) > 1000 * seconds + micros // 1000:
            raise DumpError(f"{text(owner)} leads run {store.run!r} ({keys.lease}): stop it, then dump again")
        patterns = f"{keys.tag}:*", f"{keys.payload_prefix}*"
        names = {name for pattern in patterns for name in client.scan_iter(match=pattern, count=1000)}
        control = {name for name in names if name.startswith(keys.tag.encode())}
        watched.watch(*(name for name in control if client.pttl(name) < 0))  # claims expire by themselves
        file.write(MAGIC)
        count, checksum = 0, _put(file, HEADER, -1, json.dumps(asdict(about)).encode(), 0)
        for name in sorted(names):
            with client.pipeline(transaction=False) as pipe:
                ttl, data = pipe.pttl(name).dump(name).execute()
            if data is None:
                continue
            if len(data) > largest:
                raise DumpError(f"{text(name)} takes {len(data)} bytes, a server takes {largest} at most at once")
            count, checksum = count + 1, _put(file, name, ttl, data, checksum)
            tell(count)
        watched.multi()
        try:
            watched.execute()
        except redis.WatchError:
            raise DumpError(
                f"run {store.run!r} changed while it was dumped: stop its workers, scorers and trainer, then dump again"
            ) from None
    _put(file, END, -1, b"%d" % count, checksum)
    return count


def _put(file: IO[bytes], name: bytes, ttl: int, data: bytes, before: int) -> int:
    """Writes one chunk. -> its checksum, which goes on from that of the chunk before."""
    head = HEAD.pack(len(name), ttl, len(data))
    checksum = crc32(data, crc32(head + name, before))
    file.writelines((head, name, data, CHECKSUM.pack(checksum)))
    return checksum


def _server(store: OperatorStore) -> str:
    server = store.server()
    return f"{server['name']} {server['version']}".strip()


# -- restore -----------------------------------------------------------------------------------------------------------
def read(path: Path) -> Dumped:
    """Reads a file through: what it holds.

    Raises:
        DumpError: it is no dump, damaged, cut off, of a run that this version of rlbuffer does not read, or it holds
            anything but the keys of the run that it names.
    """
    about, names, count = b"", set[bytes](), b""
    for place, (name, _, data) in enumerate(_chunks(path)):
        if place == 0 and name == HEADER:
            about = data
        elif name == END:
            count = data
        elif name in names:
            raise DumpError(f"{path} was not written by `rlbuffer runs dump`: it holds {_shown(name)} twice")
        else:
            names.add(name)
    try:
        dumped = msgspec.json.decode(about, type=Dumped)
        keys = Keys(dumped.run)
        check_new_run(dumped.run)
    except (msgspec.MsgspecError, ValueError, RecursionError, ConfigError) as error:
        raise DumpError(f"{path} was not written by `rlbuffer runs dump`: {error}") from None
    if dumped.schema != SCHEMA:
        raise DumpError(
            f"{path} is of a run of schema {dumped.schema}, this version of rlbuffer reads schema {SCHEMA}: restore "
            "it with the version that wrote it"
        )
    foreign = sorted(name for name in names if not keys.owns(name) or name == keys.restoring.encode())
    if foreign:
        raise DumpError(
            f"{path} is of run {dumped.run!r}, but holds {_shown(foreign[0])}, which is no key of that run: nothing "
            "was restored. Only what `rlbuffer runs dump` has written can be"
        )
    if count != b"%d" % len(names):
        raise DumpError(
            f"{path} was not written by `rlbuffer runs dump`: it holds {len(names)} keys, {_shown(count)} by its end"
        )
    return replace(dumped, keys=len(names))


def _shown(name: bytes) -> str:
    return repr(name[:100].decode(errors="replace"))


def _chunks(path: Path) -> Iterator[tuple[bytes, int, bytes]]:
    """Every chunk of a file, each checked; the file is whole when the last one has come."""
    try:
        with path.open("rb") as file:
            if (magic := file.read(len(MAGIC))) != MAGIC:
                raise DumpError(f"{path} is no dump that this version of rlbuffer reads: it begins with {magic!r}")
            name, checksum, left = HEADER, 0, os.fstat(file.fileno()).st_size - len(MAGIC)
            while name != END:
                where = f"{path} is damaged or cut off at byte {file.tell()}: take another copy"
                head = file.read(HEAD.size)
                length, ttl, size = HEAD.unpack(head) if len(head) == HEAD.size else (0, 0, left)
                left -= HEAD.size + length + size + CHECKSUM.size
                if left < 0:
                    raise DumpError(where)
                name, data = file.read(length), file.read(size)
                checksum = crc32(data, crc32(head + name, checksum))
                if file.read(CHECKSUM.size) != CHECKSUM.pack(checksum) or (left and name == END):
                    raise DumpError(where)
                yield name, ttl, data
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror}") from None


def restore(store: OperatorStore, path: Path, tell: Callable[[int], None] = lambda keys: None) -> Dumped:
    """Puts the run of a file onto the store's server: the store must be of that run (:func:`read` says which).

    Raises:
        DumpError: the file is refused by :func:`read`, or the server cannot read what is in it; nothing is left of it.
        RlbufferError: the run exists, or it was removed meanwhile.
    """
    about, mark, meta = read(path), uuid.uuid4().bytes, b""
    if about.run != store.run:
        raise DumpError(f"{path} holds run {about.run!r}, not {store.run!r}: a run keeps its name")
    _begin(store, mark)
    try:
        for count, (name, ttl, data) in enumerate(_chunks(path)):
            if name == store.keys.meta.encode():
                meta = data
            elif name not in (HEADER, END):
                _restore_key(store, name, ttl, data, about)
                tell(count)
        if not meta:
            raise DumpError(f"{path} was not written by `rlbuffer runs dump`: it lacks {store.keys.meta}")
        _finish(store, mark, meta, about)
    except (DumpError, ServerRefused):
        with suppress(RlbufferError):
            store.delete_run()
        raise
    return about


def _begin(store: OperatorStore, mark: bytes) -> None:
    keys = store.keys
    exists = f"run {store.run!r} exists ({keys.meta}): `rlbuffer runs reset {store.run} --yes` removes it"
    try:
        store.meta()
        raise RlbufferError(exists)
    except RunDamaged:
        if not store.look(lambda client: client.exists(keys.restoring)):
            raise
        store.delete_run()  # what a restore left that was killed
    except RunGone:
        pass

    def begin(client: Any) -> None:
        client.set(keys.restoring, mark)
        if client.exists(keys.meta):  # somebody was faster; with the mark nobody is
            client.delete(keys.restoring)
            raise RlbufferError(exists)
        client.zadd(RUNS, {store.run: store.now()})

    store.look(begin)


def _restore_key(store: OperatorStore, name: bytes, ttl: int, data: bytes, about: Dumped) -> None:
    def put() -> None:
        with store.connection.sender(len(data)).pipeline(transaction=False) as pipe:
            pipe.restore(name, max(ttl, 0), data, replace=True)
            _check(store, pipe.execute(raise_on_error=False), about)

    store.connection.call(put, patience_seconds=store.patience_seconds)


def _finish(store: OperatorStore, mark: bytes, meta: bytes, about: Dumped) -> None:
    """Puts `meta` in place and takes the mark away, both or neither."""
    keys = store.keys

    def finish() -> None:
        with store.client.pipeline(transaction=True) as pipe:
            pipe.watch(keys.restoring)
            if pipe.get(keys.restoring) != mark:
                raise RlbufferError(f"run {store.run!r} was removed, or is restored by somebody else: restore it again")
            pipe.multi()
            _check(store, pipe.restore(keys.meta, 0, meta).delete(keys.restoring).execute(raise_on_error=False), about)

    store.connection.call(finish, patience_seconds=store.patience_seconds, repeat=False)


def _check(store: OperatorStore, replies: Sequence[Any], about: Dumped) -> None:
    for error in filter(lambda reply: isinstance(reply, Exception), replies):
        if any(words in str(error) for words in UNREADABLE):
            raise DumpError(
                f"the file was written by {about.server}, this is {_server(store)} ({store.connection.address}), which "
                f"cannot read it: restore it on {about.server} or a newer version of that"
            )
        raise error
