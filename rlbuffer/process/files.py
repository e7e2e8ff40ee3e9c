"""Files that are there whole or not at all, lines that are added whole, content that is really on the disk, and a proof
of what it is."""

from __future__ import annotations

import errno
import hashlib
import os
import pwd
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


def write_whole(path: Path, text: str | Iterable[str], *, is_private: bool = False) -> None:
    """Replaces a file's text: whoever reads it meanwhile sees all of the old one or all of the new one.

    Nothing is flushed: this is for what nobody needs after the power went, such as who runs here. `text` may come in
    pieces, of which only one is held. `is_private`: readable by its owner only.

    Raises:
        OSError: it cannot be written; then it is as it was.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_whole(Path(folder) / "who", "serve 17")
        ...     write_whole(Path(folder) / "who", "serve 23")
        ...     [path.name for path in Path(folder).iterdir()], (Path(folder) / "who").read_text()
        (['who'], 'serve 23')
    """
    with whole_file(path, is_private=is_private) as file:
        file.writelines(piece.encode() for piece in ([text] if isinstance(text, str) else text))


@contextmanager
def whole_file(path: Path, *, is_private: bool = False, is_flushed: bool = False) -> Iterator[IO[bytes]]:
    """A new file that gets the name `path` when the block is through, in the place of what has it, also of a link.

    It is written beside `path` under a name that nobody can know before, and never through a file or link that is
    there: others may write to the folder.

    Args:
        is_private: readable by its owner only; else the umask decides.
        is_flushed: it is on the disk before it has its name, and its name after the power went, too.

    Raises:
        OSError: it cannot be written, or `path` is a pipe or a device, whose reader would wait for ever once it were
            replaced. Then, as after any other error of the block, `path` is as it was.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # a folder is refused by the system, in its own words
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    name = os.fsdecode(os.fsencode(path.name)[:200])  # a name has 255 bytes at most
    part = path.with_name(f".{name}.{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(part, flags, 0o600 if is_private else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            if is_flushed:
                file.flush()
                os.fsync(file.fileno())
        if is_flushed:
            rename_for_good(part, path)
        else:
            part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def append_lines(path: Path, text: str) -> None:
    """Adds whole lines to a file, which is made where there is none. `text` ends with a line's end, or is "".

    What stands there may end in the middle of a line: the power went, or a disk was full. That line is ended first, so
    `text` begins a line of its own. Any number of processes may add to one file.

    Raises:
        OSError: the lines cannot be written. What was written of them is taken back.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "steps"
        ...     _ = file.write_text("step 1\\nste")
        ...     append_lines(file, "step 2\\n")
        ...     file.read_text().splitlines()
        ['step 1', 'ste', 'step 2']
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        end = os.fstat(descriptor).st_size
        is_torn = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
        rest = memoryview(b"\n" * is_torn + text.encode("utf-8", "backslashreplace"))
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, end)
            raise
    finally:
        os.close(descriptor)


def readable_as_others(path: Path) -> None:
    """Lets those read a file who may read its folder, by the umask: what makes the file may let its owner alone."""
    with suppress(OSError):  # a file system that knows no modes
        path.chmod(path.parent.stat().st_mode & 0o666)


def rename_for_good(temporary: Path, final: Path) -> None:
    """Gives a file or directory that was flushed its name, which is there after the power went, too.

    Raises:
        OSError: the filesystem refused.
    """
    temporary.rename(final)
    flush(final.parent)


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


def sha256_of(path: Path) -> str:
    """SHA-256 (hex) of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def owner_of(path: Path) -> str:
    """The owner of a path, or of the nearest folder that is there, and this process's user: part of a sentence."""
    there = next((place for place in (path, *path.parents) if os.access(place, os.F_OK)), Path("/"))
    return f"{there} belongs to {_user(there.stat().st_uid)}, this process to {_user(os.geteuid())}"


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
