"""The output of a process, when nobody reads it any more.

`rlbuffer run | tee run.txt`: ctrl-C reaches `tee`, too, which is gone before the run has drained. A process that works
for a run goes on, and what it prints from then on goes nowhere.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any


def outlive_readers() -> None:
    """Lets this process go on when whoever reads its output leaves: a pipe is closed, a terminal is gone.

    For the streams that the process was started with; one that somebody has put in their place is left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__") or isinstance(_below(stream), _Outliving):
            continue
        stream.flush()
        raw = _Outliving(stream.fileno(), "w", closefd=False)
        wrapped = io.TextIOWrapper(
            raw if stream.write_through else io.BufferedWriter(raw),  # through: PYTHONUNBUFFERED
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, wrapped)
        setattr(sys, f"__{name}__", wrapped)


def open_closed() -> None:
    """Gives the streams that were closed at the start (``>&-``) a place: else the next file or socket that is opened
    gets the number, and with it what others print there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115 - for good
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class _Outliving(io.FileIO):
    """Drops what cannot be written."""

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):  # EPIPE; EIO of a terminal that is gone; a full disk
            return super().write(data)
        return memoryview(data).nbytes


def _below(stream: Any) -> Any:
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)
