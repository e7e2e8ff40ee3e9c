"""The needs of weights and checkpoints on a disk: content that is really there, and a proof of what it is."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sha256_of(path: Path) -> str:
    """SHA-256 (hex) of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Forces a file's or directory's content to the disk: a rename may otherwise outlive what it renamed.

    Raises:
        OSError: the filesystem refused.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
