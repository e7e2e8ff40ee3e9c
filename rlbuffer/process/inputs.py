"""Files of records that people hand over, opened in one way: plain or compressed, also through a pipe.

What a file is decide its first bytes, never its name. Whoever reads records looks at them more than once (which format,
is all of it right, what is sent), so what cannot be read again, a pipe or a compressed file, is first copied into a
temporary file that has no name.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rlbuffer.errors import InvalidRollout

STDIN = "-"
"""Stands for standard input where a file is asked for."""
COMPRESSED: dict[bytes, tuple[str, Callable[[Any], Any]]] = {
    b"\x1f\x8b": ("gzip", gzip.open),
    b"BZh": ("bzip2", bz2.open),
    b"\xfd7zXZ\x00": ("xz", lzma.open),
}
"""First bytes -> what wrote them, and what reads them."""
UTF_16 = "in UTF-16, and JSON is read in UTF-8: iconv -f UTF-16 -t UTF-8 writes it so"
REFUSED = {
    b"\x28\xb5\x2f\xfd": "compressed with zstd, which is not read here: zstd -d unpacks it",
    b"\x04\x22\x4d\x18": "compressed with lz4, which is not read here: lz4 -d unpacks it",
    b"PK\x03\x04": "a zip archive, as torch.save and numpy.savez write: give the samples in it",
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
}
"""First bytes of what is no file of records -> what it is, and what to do."""
TAR, TAR_AT = b"ustar", 257
"""What a tar archive has at this byte."""
START_BYTES = 512
MAX_COPIED_BYTES = 16 * 2**30
"""Most that is copied of a pipe, or unpacked: one that never ends must not fill the disk."""
COPIED_AT_ONCE = 2**20
BROKEN = (EOFError, zlib.error, lzma.LZMAError, OSError)
"""What reading a compressed file raises where it is cut off or damaged."""


@dataclass(frozen=True, slots=True)
class Input:
    """A file of records that is open, unpacked, and can be read as often as one likes."""

    name: str
    """For messages: the path, or ``stdin``."""
    stream: IO[bytes]


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Input]:
    """The file, unpacked where it is compressed (gzip, bzip2, xz); ``-`` is standard input.

    Raises:
        InvalidRollout: it cannot be read, is cut off or damaged, or is something else than a file of records; one
            sentence that begins with its name.
    """
    name = "stdin" if os.fspath(path) == STDIN else os.fspath(path)
    with ExitStack() as stack:
        stream = stack.enter_context(_file(path, name))
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            try:
                stream = _copy(stream, stack.enter_context(_temporary(name)), name)
            except OSError as error:
                raise InvalidRollout(f"{name} cannot be read: {_reason(error)}") from None
        start = _start(stream)
        wrote, unpack = next((one for magic, one in COMPRESSED.items() if start.startswith(magic)), ("", None))
        if unpack is not None:
            try:
                stream = _copy(unpack(stream), stack.enter_context(_temporary(name)), name)
            except BROKEN as error:
                why = "is cut off" if isinstance(error, EOFError) else f"is damaged: {error}"
                raise InvalidRollout(f"{name}: it is compressed with {wrote}, and {why}") from None
            start = _start(stream)
        if other := _other(start):
            raise InvalidRollout(f"{name}: {other}")
        yield Input(name, stream)


def _file(path: str | os.PathLike[str], name: str) -> IO[bytes]:
    try:
        if os.fspath(path) == STDIN:
            return open(0, "rb", closefd=False)
        return Path(path).open("rb")
    except (OSError, ValueError) as error:  # a ValueError: a null byte in the name
        raise InvalidRollout(f"{name} cannot be read: {_reason(error)}") from None


def _temporary(name: str) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise InvalidRollout(f"{name}: there is no place for a copy of it: {_reason(error)}") from None


def _copy(source: IO[bytes], target: IO[bytes], name: str) -> IO[bytes]:
    """`target`, with all that `source` has. Raises what reading `source` raises."""
    copied = 0
    while data := source.read(COPIED_AT_ONCE):
        copied += len(data)
        if copied > MAX_COPIED_BYTES:
            most = f"more than {MAX_COPIED_BYTES // 2**30} GiB"
            raise InvalidRollout(f"{name}: {most} come of it, unpacked: give them in several files")
        try:
            target.write(data)
            target.flush()
        except OSError as error:
            folder = tempfile.gettempdir()
            why = f"{name}: the copy of it in {folder} cannot be written: {_reason(error)}; TMPDIR names another place"
            raise InvalidRollout(why) from None
    target.seek(0)
    return target


def _start(stream: IO[bytes]) -> bytes:
    stream.seek(0)
    start = stream.read(START_BYTES)
    stream.seek(0)
    return start


def _other(start: bytes) -> str:
    """What it is that begins so, where that is no file of records; "" else."""
    if wrote := next((wrote for magic, (wrote, _) in COMPRESSED.items() if start.startswith(magic)), ""):
        return f"it is compressed twice: unpack it with {wrote} once"
    if start[TAR_AT:].startswith(TAR):
        return "it is a tar archive: unpack it, and give a file of it"
    if len(start) > 1 and b"\0" in start[:2] and start[:2] != b"\0\0":  # ASCII in two bytes
        return f"it is {UTF_16}"
    return next((f"it is {what}" for magic, what in REFUSED.items() if start.startswith(magic)), "")


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
