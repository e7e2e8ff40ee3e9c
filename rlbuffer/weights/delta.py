"""One version's file as a delta to another version's: the words of 16 bits that differ, by place and by step.

Both files are whole ``model.safetensors`` of one size. Their headers are compared like everything else, so a delta
knows no names, shapes or dtypes. Whoever rebuilds a file checks it by the sha256 of the whole, which the version was
announced with: a delta that is wrong in any way is only of no use.

    RLBDELTA | chunks of CHUNK_WORDS words of the file:
    u32 words that differ | u32 bytes | u32 bytes | zstd(gaps between their places, LEB128) | zstd(new - old, see below)

A step is the difference of two words modulo 65,536, nearest to zero, as zigzag (0, -1, 1, -2, ...); the low bytes of a
chunk's steps stand before their high bytes. After an optimizer's step at 1e-6 a trained model of bfloat16 weights
differs in 0.3 to 0.5 % of its words, a quarter of them by one unit in the last place. Measured beside other encodings
with a model of 135 M parameters: docs/log.md.

Imports numpy and zstandard: import this module lazily.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import zstandard

from rlbuffer.errors import WeightsError

MAGIC = b"RLBDELTA"
CHUNK_WORDS = 1 << 23
"""Words that are compared at a time: memory is about 40 MB, whatever the file's size."""
LEVEL = 1
"""zstd's; 3 and 9 take twice the time and under 1 % less room."""
MOST_SHARE = 0.5
"""A delta larger than this share of the whole file is not kept."""

Words = npt.NDArray[np.uint16]


def write_delta(old: Path, new: Path, out: Path) -> bool:
    """Writes the delta from `old` to `new`.

    Returns:
        False where none is worth it, and `out` is not there: files of other sizes or of an odd one, a large delta.

    Raises:
        OSError: the filesystem refused.
    """
    size = new.stat().st_size
    if old.stat().st_size != size or size % 2:
        return False
    compress = zstandard.ZstdCompressor(level=LEVEL).compress
    before, after = _words(old), _words(new)
    with out.open("wb") as file:
        file.write(MAGIC)
        for start in range(0, len(after), CHUNK_WORDS):
            x, y = before[start : start + CHUNK_WORDS], after[start : start + CHUNK_WORDS]
            places = np.flatnonzero(x != y)
            gaps = compress(_leb128(np.diff(places, prepend=0)).tobytes())
            steps = compress(_planes(y[places] - x[places]).tobytes())
            file.write(struct.pack("<III", len(places), len(gaps), len(steps)) + gaps + steps)
            if file.tell() > size * MOST_SHARE:
                break
        is_small = file.tell() <= size * MOST_SHARE
    if not is_small:
        out.unlink()
    return is_small


def apply_delta(old: Path, delta: Path, out: Path) -> str:
    """Writes the file that `delta` makes of `old`. Anybody may have written a delta.

    Returns:
        The file's sha256, for the caller to compare.

    Raises:
        WeightsError: `delta` is none, or not of a file of this size.
        OSError: the filesystem refused.
    """
    digest, before = hashlib.sha256(), _words(old)
    with delta.open("rb") as file, out.open("wb") as into:
        if file.read(len(MAGIC)) != MAGIC:
            raise WeightsError(f"{delta.name} is no delta of weights")
        for start in range(0, len(before), CHUNK_WORDS):
            words = np.array(before[start : start + CHUNK_WORDS])
            try:
                _change(words, file)
            except (struct.error, zstandard.ZstdError, ValueError, IndexError) as error:
                raise WeightsError(f"{delta.name} is damaged ({error})") from error
            data = words.tobytes()
            digest.update(data)
            into.write(data)
        if file.read(1):
            raise WeightsError(f"{delta.name} is of a longer file")
    return digest.hexdigest()


def _change(words: Words, delta: BinaryIO) -> None:
    """Makes the changes of a delta's next chunk in `words`."""
    count, gap_bytes, step_bytes = struct.unpack("<III", delta.read(12))
    if count > len(words):
        raise ValueError(f"{count} changes of {len(words)} words")
    places = np.cumsum(_from_leb128(_decompressed(delta.read(gap_bytes), at_most=4 * count)))
    steps = _from_planes(_decompressed(delta.read(step_bytes), at_most=2 * count))
    if not len(places) == len(steps) == count:
        raise ValueError(f"{len(places)} places and {len(steps)} steps of {count}")
    words[places] += steps


def _decompressed(data: bytes, *, at_most: int) -> npt.NDArray[np.uint8]:
    # A frame says its length, and zstd believes it: one that says more is refused before anything is allocated.
    if zstandard.frame_content_size(data) > at_most:
        raise ValueError(f"over {at_most} bytes")
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(data, max_output_size=at_most), np.uint8)


def _words(path: Path) -> Any:
    return np.memmap(path, "<u2", "r")


def _planes(steps: Words) -> npt.NDArray[np.uint8]:
    signed = steps.view(np.int16).astype(np.int32)
    zigzag = ((signed << 1) ^ (signed >> 31)).astype("<u2")
    return np.ascontiguousarray(zigzag.view(np.uint8).reshape(-1, 2).T)


def _from_planes(data: npt.NDArray[np.uint8]) -> Words:
    low, high = data.reshape(2, -1).astype(np.uint16)
    zigzag = low | high << 8
    return ((zigzag >> 1) ^ (0 - (zigzag & 1))).astype(np.uint16)


def _leb128(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Seven bits a byte, the lowest first; the eighth says that another one follows. Values below 2**28."""
    lengths = np.ones(len(values), np.int64)
    for k in (1, 2, 3):
        lengths += values >= 1 << 7 * k
    ends = np.cumsum(lengths)
    out = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    for k in range(4):
        has = lengths > k
        follows = (lengths[has] > k + 1).astype(np.int64) << 7
        out[(ends - lengths)[has] + k] = (values[has] >> 7 * k & 127) | follows
    return out


def _from_leb128(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    ends = np.flatnonzero(data < 128)
    if len(data) and (not len(ends) or ends[-1] != len(data) - 1):
        raise ValueError("the last gap is cut")
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64) if len(ends) else ends
    if len(ends) and (ends - starts).max() > 3:
        raise ValueError("a gap of over 4 bytes")
    values = np.zeros(len(ends), np.int64)
    for k in range(4):
        has = ends - starts >= k
        values[has] |= (data[starts[has] + k] & 127).astype(np.int64) << 7 * k
    return values
