"""How far a command is that may take minutes, on stderr: nobody shall wonder whether it hangs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rlbuffer.state.text import duration, percent
from rlbuffer_cli.options import say
from rlbuffer_cli.starting import clear, is_drawable

LINE_SECONDS = 10.0
"""Between two lines where no terminal can be drawn on; what takes less says nothing there."""
Tell = Callable[[str, float], None]
"""Takes what is done now, and how much of the whole is done, 0-1."""


@contextmanager
def showing(what: str) -> Iterator[Tell]:
    """Shows how far the block is: as a bar on a terminal, elsewhere as a line now and then. `what` it does first."""
    if not is_drawable(sys.stderr):
        yield _lines()
        return
    clear()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda what, share: progress.update(task, description=what, total=1.0, completed=share)


def _lines() -> Tell:
    began = told = time.monotonic()

    def tell(what: str, share: float) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= LINE_SECONDS:
            told = now
            say(f"{what} ({percent(share)} after {duration(now - began)})", err=True)

    return tell
