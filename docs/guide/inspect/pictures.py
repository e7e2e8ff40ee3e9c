"""Makes the pictures of docs/guide/inspect.md: `rlbuffer inspect` in a real terminal (tmux), and its pages in Chromium.

    python docs/guide/inspect/pictures.py                           # a live demo
    python docs/guide/inspect/pictures.py rlbuffer.toml capitals.8  # a run that is kept, by its file, and a group of it

Needs tmux, pillow and the font DejaVu Sans Mono, of a run that is kept Chromium, too; takes about a minute.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI

HERE = Path(__file__).parent
SIZE = (140, 40)
"""Columns and lines of a terminal."""
SMALL = (80, 24)
WINDOWS = (400, 1280)
"""Widths of a web browser's window."""
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
WORDS_TOUR = (
    ("group", (), ("advantage", "prompt ")),
    ("compare", ("b",), ("≠ first",)),
    ("", ("Escape",), ("advantage", "prompt ")),
    ("", ("Enter",), ("1 plain",)),
    ("rollout", ("2",), ("2 logprob",)),
)
"""The same of one group whose rollouts are words."""


def tmux(*words: str) -> str:
    """A command of tmux, with a server of its own."""
    command = ["tmux", "-L", SOCKET, "-f", "/dev/null", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def start(name: str, *words: str, size: tuple[int, int] = SIZE) -> None:
    """`rlbuffer` in a terminal of its own."""
    line = f"env -u NO_COLOR TERM=tmux-256color COLORTERM=truecolor {Path(sys.executable).with_name('rlbuffer')}"
    across = ("-x", str(size[0]), "-y", str(size[1]))
    tmux("new-session", "-d", "-s", name, *across, f"{line} {' '.join(words)}; sleep 3600")


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
    while (now := tmux("capture-pane", "-N", "-e", "-p", "-t", name)) != before:
        before = now
        time.sleep(0.3)
    return now


def colours(style: Style) -> tuple[tuple[int, int, int], tuple[int, int, int] | None]:
    """Colour of the letters, and behind them; None for that of the terminal."""
    front = tuple(style.color.get_truecolor(DIMMED_MONOKAI)) if style.color else (214, 214, 214)
    back = tuple(style.bgcolor.get_truecolor(DIMMED_MONOKAI, foreground=False)) if style.bgcolor else None
    return (back or (18, 18, 18), front) if style.reverse else (front, back)


def draw(screen: str, file: Path, size: tuple[int, int] = SIZE) -> None:
    """Draws a captured screen, a cell of the terminal at a time."""
    from PIL import Image, ImageDraw, ImageFont

    plain, bold = (ImageFont.truetype(f"DejaVuSansMono{kind}.ttf", FONT_SIZE) for kind in ("", "-Bold"))
    image = Image.new("RGB", (size[0] * WIDTH, size[1] * HEIGHT), (18, 18, 18))
    pen = ImageDraw.Draw(image)
    console = Console(width=size[0], color_system="truecolor", force_terminal=True)
    for row, line in enumerate(AnsiDecoder().decode(screen)):
        cells = [(segment.style or Style.null(), letter) for segment in line.render(console) for letter in segment.text]
        for column, (style, letter) in enumerate(cells):
            (front, back), x, y = colours(style), column * WIDTH, row * HEIGHT
            if back is not None:
                pen.rectangle((x, y, x + WIDTH - 1, y + HEIGHT - 1), fill=back)
            pen.text((x, y), letter, fill=front, font=bold if style.bold else plain)
    image.quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)


def demo() -> None:
    """A demo, and the tour through it."""
    with tempfile.TemporaryDirectory(prefix="rlb-") as home:
        start("demo", "demo", "--home", home, "--steps", "5000")
        try:
            metrics = "runs/*/metrics.jsonl"
            while sum(file.read_bytes().count(b"\n") for file in Path(home).glob(metrics)) < 45:
                time.sleep(0.5)
            start("looker", "inspect", "--home", home)
            walk("looker", TOUR)
        finally:
            tmux("send-keys", "-t", "demo", "C-c")
            wait("demo", "interrupted")
            tmux("kill-server")


def walk(name: str, tour: Sequence[tuple[str, Sequence[str], Sequence[str]]], size: tuple[int, int] = SIZE) -> None:
    """Presses the keys of a tour, and draws its pictures."""
    kind = "" if tour is TOUR else f"-{size[0]}"
    for picture, keys, words in tour:
        for key in keys:
            tmux("send-keys", "-t", name, key)
            time.sleep(0.3)  # an escape that something follows at once is another key
        wait(name, *words, *(["? help"] if picture else []))  # the keys come last
        if picture:
            draw(at_rest(name), HERE / f"{picture}{kind}.png", size)


def kept(config: str, group: str) -> None:
    """The screens and the pages of one group of a run that is kept."""
    try:
        for size in (SIZE, SMALL):
            start(f"looker{size[0]}", "inspect", group, "--config", config, size=size)
            walk(f"looker{size[0]}", WORDS_TOUR, size)
    finally:
        tmux("kill-server")
    command = [Path(sys.executable).with_name("rlbuffer"), "inspect", "--web", "--config", config]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            page = urlopen(f"{url}group?id={group}").read().decode()
            pair = unescape(re.findall(r'href="(compare[^"]+)"', page)[0])
            best = parse_qs(urlsplit(pair).query)["one"][0]
            paths = {"group": f"group?id={group}", "rollout": f"rollout?id={group}&rollout={best}", "compare": pair}
            for name, path in paths.items():
                for width in WINDOWS:
                    photograph(url + path, HERE / f"web-{name}-{width}.png", width)
        finally:
            server.terminate()


def photograph(url: str, file: Path, width: int) -> None:
    """A page as Chromium shows it. A window is at least 500 pixels wide there: a narrower page is a frame of it."""
    with tempfile.TemporaryDirectory(prefix="rlb-") as folder:
        copy, frame = Path(folder, "page.html"), Path(folder, "frame.html")
        copy.write_bytes(urlopen(url).read())
        frame.write_text(
            f'<body style="margin:0"><iframe src="page.html" style="border:0;width:{width}px;height:1000px"></iframe>'
        )
        window = f"--window-size={max(width, 500)},1000"
        options = ("--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu", window)
        shot = Path(folder, "shot.png")
        subprocess.run(
            ["chromium", *options, f"--user-data-dir={folder}/profile", f"--screenshot={shot}", frame.as_uri()],
            check=True,
            capture_output=True,
        )
        from PIL import Image

        image = Image.open(shot).convert("RGB").crop((0, 0, width, 1000))
        image.quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)


if __name__ == "__main__":
    kept(*sys.argv[1:]) if sys.argv[1:] else demo()
