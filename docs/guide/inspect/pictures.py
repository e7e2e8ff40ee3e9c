"""Makes the pictures of docs/guide/inspect.md: `rlbuffer inspect` of a live demo, in a real terminal (tmux).

    python docs/guide/inspect/pictures.py

Needs tmux, pillow and the font DejaVu Sans Mono; takes about a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI

HERE = Path(__file__).parent
COLUMNS, LINES = 140, 40
WIDTH, HEIGHT, FONT_SIZE = 9, 18, 15
SOCKET = f"rlbuffer-pictures-{os.getpid()}"
DIFFERING = "env:vcopy step:20 reward>0.05 reward<0.24"
"""Groups whose rollouts differ: no group of equal rewards has such a mean."""
TOUR = (
    ("pool", (), ("newest first", "policy v")),
    ("", ("/",), ("age>=2",)),
    ("", (DIFFERING, "Enter"), (f"where {DIFFERING}",)),
    ("group", ("s", "s", "s", "Enter"), ("16 of 16 rollouts",)),
    ("", ("Enter",), ("LIFE", "1 plain")),
    ("rollout-logprob", ("G", "2"), ("2 logprob",)),
    ("", ("t",), ("closed by", "of capacity")),
    ("step", ("Enter",), ("rank 0:", "worst rollout")),
)
"""A picture's name, the keys before it, and the words that are on the screen then."""


def tmux(*words: str) -> str:
    """A command of tmux, with a server of its own."""
    command = ["tmux", "-L", SOCKET, "-f", "/dev/null", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def start(name: str, *words: str) -> None:
    """`rlbuffer` in a terminal of its own."""
    line = f"env -u NO_COLOR TERM=tmux-256color COLORTERM=truecolor {Path(sys.executable).with_name('rlbuffer')}"
    size = ("-x", str(COLUMNS), "-y", str(LINES))
    tmux("new-session", "-d", "-s", name, *size, f"{line} {' '.join(words)}; sleep 3600")


def wait(name: str, *words: str) -> None:
    """Waits until the words are on the screen."""
    deadline = time.monotonic() + 120
    while not all(word in (screen := tmux("capture-pane", "-p", "-t", name)) for word in words):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited for {words} on\n{screen}")
        time.sleep(0.2)


def at_rest(name: str) -> str:
    """The screen with its escapes, once it does not change any more."""
    before = ""
    while (now := tmux("capture-pane", "-e", "-p", "-t", name)) != before:
        before = now
        time.sleep(0.3)
    return now


def colours(style: Style) -> tuple[tuple[int, int, int], tuple[int, int, int] | None]:
    """Colour of the letters, and behind them; None for that of the terminal."""
    front = tuple(style.color.get_truecolor(DIMMED_MONOKAI)) if style.color else (214, 214, 214)
    back = tuple(style.bgcolor.get_truecolor(DIMMED_MONOKAI, foreground=False)) if style.bgcolor else None
    return (back or (18, 18, 18), front) if style.reverse else (front, back)


def draw(screen: str, file: Path) -> None:
    """Draws a captured screen, a cell of the terminal at a time."""
    from PIL import Image, ImageDraw, ImageFont

    plain, bold = (ImageFont.truetype(f"DejaVuSansMono{kind}.ttf", FONT_SIZE) for kind in ("", "-Bold"))
    image = Image.new("RGB", (COLUMNS * WIDTH, LINES * HEIGHT), (18, 18, 18))
    pen = ImageDraw.Draw(image)
    console = Console(width=COLUMNS, color_system="truecolor", force_terminal=True)
    for row, line in enumerate(AnsiDecoder().decode(screen)):
        cells = [(segment.style or Style.null(), letter) for segment in line.render(console) for letter in segment.text]
        for column, (style, letter) in enumerate(cells):
            (front, back), x, y = colours(style), column * WIDTH, row * HEIGHT
            if back is not None:
                pen.rectangle((x, y, x + WIDTH - 1, y + HEIGHT - 1), fill=back)
            pen.text((x, y), letter, fill=front, font=bold if style.bold else plain)
    image.quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)


def main() -> None:
    """A demo, and the tour through it."""
    with tempfile.TemporaryDirectory(prefix="rlb-") as home:
        start("demo", "demo", "--home", home, "--steps", "5000")
        try:
            metrics = "runs/*/metrics.jsonl"
            while sum(file.read_bytes().count(b"\n") for file in Path(home).glob(metrics)) < 45:
                time.sleep(0.5)
            start("looker", "inspect", "--home", home)
            for picture, keys, words in TOUR:
                for key in keys:
                    tmux("send-keys", "-t", "looker", key)
                    time.sleep(0.3)  # an escape that something follows at once is another key
                wait("looker", *words, *(["? help"] if picture else []))  # the keys come last
                if picture:
                    draw(at_rest("looker"), HERE / f"{picture}.png")
        finally:
            tmux("send-keys", "-t", "demo", "C-c")
            wait("demo", "interrupted")
            tmux("kill-server")


if __name__ == "__main__":
    main()
