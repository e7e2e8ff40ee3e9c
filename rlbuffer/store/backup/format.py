"""The file of a backup: frames, each checked by itself, so that a damaged one is found with its place.

::

    magic "rlbuffer-backup 1\\n"
    frame   u64 length of the body · u32 crc32 of that length and the body · body, a msgpack map
      header   run, schema, epoch, step, when and where it was taken
      control  {"key": name without the run's tag, "type", "ttl", "items"}     several frames for a large key
      payload  {"payload": name without the run's prefix, "ttl", "items"}      likewise
      end      {"end": true, counts}: a file without it is cut off

It holds plain values, not what DUMP writes, which differs from one version of the server to another.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlbuffer.errors import BackupError, PayloadError
from rlbuffer.wire import payload
from rlbuffer.wire.checksum import crc32

MAGIC = b"rlbuffer-backup 1\n"
RECORD_HEAD = struct.Struct("<QI")
BACKUP_FORMAT = 1
"""Version of the format in the header; grows when the frames change."""
FRAME_BYTES = 2**20
"""Items of one frame add up to about this, unless a single one is larger."""
FRAME_ITEMS = 10_000
MAX_FRAME_BYTES = 600 * 2**20
"""A server's value has at most 512 MiB."""
ANOTHER = "Take another copy of the file, or an older backup"
"""Remedy for a file that cannot be read."""


class FrameWriter:
    """Writes frames one after the other."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.bytes = file.write(MAGIC)

    def write(self, record: Mapping[str, Any]) -> None:
        """One frame."""
        body = payload.dumps(dict(record))
        length = struct.pack("<Q", len(body))
        self.bytes += self._file.write(length + struct.pack("<I", crc32(body, crc32(length))))
        self.bytes += self._file.write(body)

    def write_key(self, head: Mapping[str, Any], items: Iterable[Sequence[Any]]) -> None:
        """A key in as many frames as it takes; the first one says so, and there is one though there are no items."""
        page: list[Sequence[Any]] = []
        page_bytes, is_first = 0, True
        for item in items:
            page.append(item)
            page_bytes += item_bytes(item)
            if page_bytes >= FRAME_BYTES or len(page) >= FRAME_ITEMS:
                self.write({**head, "first": is_first, "items": page})
                page, page_bytes, is_first = [], 0, False
        if page or is_first:
            self.write({**head, "first": is_first, "items": page})


def item_bytes(item: Sequence[Any]) -> int:
    """About how much memory an item takes."""
    return sum(len(x) if isinstance(x, bytes | str) else item_bytes(x) if isinstance(x, list) else 8 for x in item)


def read_frames(path: Path) -> Iterator[dict[str, Any]]:
    """The frames of a backup, in order, the end included.

    Raises:
        BackupError: it cannot be read, is no backup, is cut off, or a frame is damaged; the message says where.
    """
    try:
        with path.open("rb") as file:
            yield from _frames(path, file)
    except OSError as error:
        raise BackupError(f"cannot read {path}: {error.strerror}") from None


def _frames(path: Path, file: IO[bytes]) -> Iterator[dict[str, Any]]:
    if file.read(len(MAGIC)) != MAGIC:
        raise BackupError(f"{path} is not a backup of rlbuffer: it does not begin with {MAGIC.decode().strip()!r}")
    at, number = len(MAGIC), 0
    while True:
        number += 1
        where = f"{path} is damaged at byte {at} (frame {number})"
        head = file.read(RECORD_HEAD.size)
        if len(head) < RECORD_HEAD.size:
            raise BackupError(
                f"{path} is cut off at byte {at + len(head)}: it has {number - 1} frames and no end. {ANOTHER}"
            )
        length, checksum = RECORD_HEAD.unpack(head)
        if length > MAX_FRAME_BYTES:
            raise BackupError(f"{where}: a frame of {length} bytes, the most is {MAX_FRAME_BYTES}. {ANOTHER}")
        body = file.read(length)
        if len(body) < length:
            reached = at + RECORD_HEAD.size + len(body)
            raise BackupError(f"{path} is cut off at byte {reached}, inside of frame {number}. {ANOTHER}")
        if crc32(body, crc32(head[:8])) != checksum:
            raise BackupError(f"{where}: its checksum does not fit. {ANOTHER}")
        try:
            record = payload.loads(body, limit=MAX_FRAME_BYTES)
        except PayloadError as error:
            raise BackupError(f"{where}: {error}. {ANOTHER}") from None
        if not isinstance(record, dict):
            raise BackupError(f"{where}: it holds no map. {ANOTHER}")
        yield record
        at += RECORD_HEAD.size + length
        if record.get("end"):
            if file.read(1):
                raise BackupError(f"{path} goes on after its end, from byte {at}. {ANOTHER}")
            return
