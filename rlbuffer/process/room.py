"""Disks that take nothing for now: full, beyond a quota, read-only or away. Whoever writes there waits for room."""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from rlbuffer.errors import ServerUnreachable, causes

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
CURABLE = FULL | {errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT}
"""Errors that pass when somebody has freed space or mended the disk, while whoever writes has done nothing wrong."""


def lack_of_room(error: BaseException | None) -> int:
    """The number of the first error below `error` that a disk has raised for want of room; 0 where there is none.

    Libraries in Rust name it in words: ``I/O error: No space left on device (os error 28)``.

    Example:
        >>> lack_of_room(OSError(errno.ENOSPC, "No space left on device")), lack_of_room(ValueError("os error 2"))
        (28, 0)
    """
    if isinstance(error, ServerUnreachable):
        return 0  # its ETIMEDOUT is the network's
    for cause in causes(error):
        words = re.search(r"\(os error (\d+)\)", str(cause))
        number = cause.errno if isinstance(cause, OSError) and cause.errno else int(words[1]) if words else 0
        if number in CURABLE:
            return number
    return 0


def state_of(path: Path, number: int) -> str:
    """A disk that has refused with this error, as the beginning of a sentence: which it is, and how much is free."""
    if number not in FULL:
        return f"{path} cannot be written to ({os.strerror(number)})"
    there = next((folder for folder in (path, *path.parents) if os.access(folder, os.F_OK)), Path("/"))
    free = ""
    with suppress(OSError):
        usage = shutil.disk_usage(there)
        free = f": {usage.free / 2**20:,.0f} of {usage.total / 2**20:,.0f} MiB free"
        if usage.free and number == errno.ENOSPC and not os.statvfs(there).f_favail:
            free += ", and no file can be added"
    what = "the disk" if number == errno.ENOSPC else "the quota"
    return f"{what} of {path} is full ({os.strerror(number)}{free})"
