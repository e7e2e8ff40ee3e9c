"""Lines at the foot of a terminal that are written again, and text that goes above them and stays.

A terminal that becomes narrower breaks lines that are longer than it is, those that were written before included. So
what is erased is counted in rows of the width that the terminal has now, and nothing of an old line is left behind.
"""

from __future__ import annotations

import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO

from rich.cells import cell_len

from rlbuffer.state.text import printable
from rlbuffer_cli.render.text import columns_of, cut
from rlbuffer_cli.starting import clear

MOST_FOOT_ROWS = 8
"""That one line may take."""
FOOT_LOOK_SECONDS = 0.25
"""Seconds between two looks whether the lines, or the terminal's width, are others."""


class Foot:
    """Draws `lines` (width -> lines) at the foot of the terminal from `start` until `close`.

    Args:
        lines: asked again and again, in a thread of its own.
        stream: a terminal.
    """

    def __init__(self, lines: Callable[[int], Sequence[str]], stream: IO[str] | None = None) -> None:
        self._lines = lines
        self._stream = stream or sys.stdout
        self._drawn: list[str] = []
        self._width = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="foot", daemon=True)

    def __enter__(self) -> Foot:
        clear()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Prints `text` above the lines."""
        with self._lock:
            self._write(f"{self._erased()}{printable(text, lines=True)}\n")
            self._draw()

    def close(self, *, keep: bool = False) -> None:
        """Takes the lines away, or leaves them where they are."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            if keep:
                self._draw()
                self._write("\n" if self._drawn else "")
            else:
                self._write(self._erased())
            self._drawn = []

    def _run(self) -> None:
        while not self._closed.wait(FOOT_LOOK_SECONDS):
            with self._lock:
                self._draw()

    def _draw(self) -> None:
        width = columns_of(self._stream)
        # One column stays free: a line that fills the last one would move what follows.
        lines = [row for line in self._lines(width - 1) for row in _rows(line, width - 1)]
        if (lines, width) == (self._drawn, self._width):
            return
        erased = self._erased()
        self._drawn, self._width = lines, width
        self._write(erased + "\n".join(lines))

    def _erased(self) -> str:
        """The sequence that clears the lines from the last row to the first, where the cursor stays. Row by row: tmux
        keeps a screen that is cleared as a whole among the lines that were scrolled away."""
        if not self._drawn:
            return ""
        width = columns_of(self._stream)
        rows = sum(max(1, -(-cell_len(line) // width)) for line in self._drawn)
        self._drawn = []
        return "\r\x1b[2K" + "\x1b[1A\x1b[2K" * (rows - 1)

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()


def _rows(line: str, width: int) -> list[str]:
    """The line on as many rows as it takes: what to do stands at the end of a sentence, and must not be cut off."""
    text = printable(line)
    if cell_len(text) <= width:
        return [text]
    rows = textwrap.wrap(text, width, max_lines=MOST_FOOT_ROWS, placeholder=" …", break_on_hyphens=False)
    return [cut(row, width) for row in rows]
