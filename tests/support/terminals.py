"""Commands in a real terminal of 80 columns, or others, and 24 lines: what they draw there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ANSI = re.compile(rb"\x1b\[[0-9;?<>=]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]")
TERMINAL_SECONDS = 120.0


def typed(
    arguments: list[str],
    folder: Path,
    *,
    until: bytes,
    keys: bytes,
    columns: int = 80,
    code: int = 0,
    program: Sequence[str] = (sys.executable,),
    first: tuple[re.Pattern[bytes], Callable[[], object]] | None = None,
    seconds: float = TERMINAL_SECONDS,
    **variables: str,
) -> bytes:
    """Runs `rlbuffer` in a terminal, types `keys` once `until` is on the screen. -> what was drawn.

    It must end with the exit code `code`. `program`: Python, or its stand-in where nothing is typed; `first`: what is
    done before, once something that matches is on the screen; `seconds`: what is drawn later is not read.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [*program, "-m", "rlbuffer_cli", *arguments]
    environment = {**os.environ, "TERM": "xterm-256color", **variables}
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # ctrl-C is a signal on its own terminal alone
    )
    os.close(theirs)
    drawn, is_typed, deadline = b"", False, time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    drawn += os.read(ours, 65536)
                except OSError:
                    break  # the last who had the terminal has left
            shown = ANSI.sub(b"", drawn)
            if first is not None and first[0].search(shown):
                first[1]()
                first = None
            if not is_typed and first is None and until in shown:
                is_typed = True
                os.write(ours, keys)
        assert is_typed, drawn[-8000:]
        assert process.wait(timeout=TERMINAL_SECONDS) == code, drawn[-8000:]
    finally:
        os.close(ours)
        process.kill()
        process.wait()
    return drawn
