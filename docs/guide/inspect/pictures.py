"""Makes the pictures of docs/guide/inspect.md: `rlbuffer inspect` of a live demo, in a real terminal (tmux).

    python docs/guide/inspect/pictures.py

Needs tmux, pillow and the font DejaVu Sans Mono. It takes about a minute. What is on a picture is
what `tmux capture-pane -e` gave, cell by cell.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI

HERE = Path(__file__).parent
SIZE = (140, 40)
CELL = (9, 18)
FONT_SIZE = 15
COLOURS_OF_A_FILE = 128
PATIENCE_SECONDS = 120.0
STEPS_BEFORE = 45
"""Steps that the demo trains before anybody looks."""
KEPT = ("pool", "group", "rollout-logprob", "step")
"""Pictures of the page; the tour passes further screens."""
NICE = 10
SOCKET = f"rlbuffer-pictures-{os.getpid()}"


@dataclass(frozen=True)
class Terminal:
    """A window of tmux of its own."""

    name: str

    def press(self, *keys: str) -> None:
        """Types keys by tmux' names."""
        for key in keys:
            tmux("send-keys", "-t", self.name, key)
            time.sleep(0.3)  # an escape that something follows at once is another key

    def type(self, text: str) -> None:
        """Types a text and enter."""
        tmux("send-keys", "-t", self.name, "-l", text)
        self.press("Enter")

    def text(self) -> str:
        """The screen without colours."""
        return tmux("capture-pane", "-p", "-t", self.name)

    def until(self, *words: str) -> str:
        """Waits until the words are on the screen. -> the screen."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(word in self.text() for word in words):
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited for {words} on\n{self.text()}")
            time.sleep(0.2)
        return self.text()

    def shown(self) -> str:
        """The screen with its escapes, at rest."""
        before = ""
        while (now := tmux("capture-pane", "-e", "-p", "-t", self.name)) != before:
            before = now
            time.sleep(0.3)
        return now


def tmux(*words: str) -> str:
    """A command of tmux, with a server of its own."""
    return subprocess.run(
        ["tmux", "-L", SOCKET, "-f", "/dev/null", *words], check=True, capture_output=True, text=True
    ).stdout


@contextmanager
def terminal(name: str, *command: str) -> Iterator[Terminal]:
    """A command in a terminal of its own, until it is left."""
    columns, lines = (str(n) for n in SIZE)
    variables = ("env", "-u", "NO_COLOR", "TERM=tmux-256color", "COLORTERM=truecolor")
    line = shlex.join([*variables, *command])
    tmux("new-session", "-d", "-s", name, "-x", columns, "-y", lines, f"{line}; sleep 3600")
    try:
        yield Terminal(name)
    finally:
        tmux("kill-session", "-t", name)


# -- the tour ----------------------------------------------------------------------------------------------------------
Keep = Callable[[str, Terminal], None]
"""Takes the name of a picture, and the terminal that shows it."""


DIFFERING = "env:vcopy step:20 reward>0.05 reward<0.24"
"""Groups whose rollouts differ: none of them can have such a mean of rewards that are all the same."""


def tour(window: Terminal, keep: Keep) -> None:
    """Every screen by the documented keys, from the pool and back to it."""
    window.until("newest first", "policy v")
    keep("pool", window)
    window.press("/")
    window.until("age>=2")
    window.type(DIFFERING)
    window.until(f"where {DIFFERING}")
    window.press("s", "s", "s", "Enter")
    window.until("16 of 16 rollouts")
    keep("group", window)
    window.press("b")
    window.until("they part at token")
    keep("compare", window)
    window.press("Escape")
    window.until("group vcopy.")
    window.press("Enter")
    window.until("LIFE", "1 plain")
    window.press("G", "2")
    window.until("2 logprob")
    keep("rollout-logprob", window)
    window.press("3")
    window.until("3 advantage")
    keep("rollout-advantage", window)
    window.press("t")
    window.until("closed by", "of capacity")
    keep("steps", window)
    window.press("Enter")
    window.until("rank 0:", "worst rollout")
    keep("step", window)
    window.press("Escape")
    window.until("of capacity")
    window.press("w")
    window.until("worker vcopy", "batcher ")
    keep("workers", window)
    window.press("Escape", "Escape", "Escape", "Escape")


# -- the run -----------------------------------------------------------------------------------------------------------
@contextmanager
def demo(home: str) -> Iterator[Terminal]:
    """A demo at work, its first steps trained."""
    rlbuffer = Path(sys.executable).with_name("rlbuffer")
    with terminal("demo", str(rlbuffer), "demo", "--home", home, "--steps", "5000") as window:
        try:
            window.until("policy v")
            while trained(home) < STEPS_BEFORE:
                time.sleep(0.5)
            make_room(home)
            yield window
        finally:
            window.press("C-c")
            window.until("interrupted")


def make_room(home: str) -> None:
    """Has ranks and workers take what the looking leaves of the machine: nobody waits for screens then."""
    (run,) = Path(home).glob("runs/*")
    for name, pid in json.loads((run / "pids.json").read_text()).items():
        if name.startswith(("rank", "worker")):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), NICE)


def trained(home: str) -> int:
    """Steps that the demo has trained."""
    files = list(Path(home).glob("runs/*/metrics.jsonl"))
    return files[0].read_bytes().count(b"\n") if files else 0


# -- pictures ----------------------------------------------------------------------------------------------------------
def draw(screen: str, file: Path) -> None:
    """Draws a captured screen, a cell of the terminal at a time."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype("DejaVuSansMono.ttf", FONT_SIZE)
    bold = ImageFont.truetype("DejaVuSansMono-Bold.ttf", FONT_SIZE)
    image = Image.new("RGB", (SIZE[0] * CELL[0], SIZE[1] * CELL[1]), (18, 18, 18))
    pen = ImageDraw.Draw(image)
    console = Console(width=SIZE[0], color_system="truecolor", force_terminal=True)
    for row, line in enumerate(AnsiDecoder().decode(screen)):
        column = 0
        for segment in line.render(console):
            front, back = colours(segment.style or Style.null())
            for character in segment.text:
                x, y = column * CELL[0], row * CELL[1]
                if back is not None:
                    pen.rectangle((x, y, x + CELL[0] - 1, y + CELL[1] - 1), fill=back)
                pen.text((x, y), character, fill=front, font=bold if segment.style and segment.style.bold else font)
                column += 1
    image.quantize(COLOURS_OF_A_FILE, dither=Image.Dither.NONE).save(file, optimize=True)


def colours(style: Style) -> tuple[tuple[int, int, int], tuple[int, int, int] | None]:
    """Colour of the letters, and behind them; None for that of the terminal."""
    theme = DIMMED_MONOKAI
    front = tuple(style.color.get_truecolor(theme)) if style.color else (214, 214, 214)
    back = tuple(style.bgcolor.get_truecolor(theme, foreground=False)) if style.bgcolor else None
    return (back or (18, 18, 18), front) if style.reverse else (front, back)


def main() -> None:
    """Makes all pictures."""

    def keep(name: str, window: Terminal) -> None:
        if name in KEPT:
            draw(window.shown(), HERE / f"{name}.png")

    rlbuffer = str(Path(sys.executable).with_name("rlbuffer"))
    with (
        tempfile.TemporaryDirectory(prefix="rlb-") as home,
        demo(home),
        terminal("looker", rlbuffer, "inspect", "--home", home) as window,
    ):
        tour(window, keep)


if __name__ == "__main__":
    main()
