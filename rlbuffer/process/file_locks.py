"""Advisory locks on files. The kernel drops them when their holder dies, so none is ever left behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rlbuffer.errors import ServerUnreachable

LOCK_POLL_SECONDS = 0.01
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a filesystem answers that has no such locks."""


@contextlib.contextmanager
def exclusive(path: Path, deadline: float) -> Iterator[None]:
    """Holds the file's lock; waits for it until `deadline` (monotonic seconds), then raises ServerUnreachable."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise ServerUnreachable(f"another process has been starting or stopping the embedded server: {path}")
            time.sleep(LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int) -> bool:
    """Takes the lock (``fcntl.LOCK_EX`` or ``LOCK_SH``) if it is free."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lacks_locks(folder: Path) -> bool:
    """The filesystem of the folder has no locks. Changes nothing."""
    try:
        is_held(folder)
    except OSError as error:  # NFS locks files only, and says something else of a folder
        return error.errno in NO_LOCKS
    return False


def is_held(path: Path) -> bool:
    """Somebody holds the lock exclusively. Looks without creating the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)
