"""What a page tells its reader to write and to type, and whether a command printed what the page shows.

A page says both by the words of its fences:

* ``console``: ``$ `` begins a command, the lines below it are what it prints. ``...`` stands for any lines where it is
  a line, else for anything within one. A command that ends with ``&`` stays at work, as in a terminal of its own.
* ``console terminal``: the same, drawn on a terminal; what stays on the screen is compared.
* ``python NAME``, ``toml NAME``: a file that the reader writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^( *)```(\w*) ?([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"\s{2,}#\s.*$")
ANY = "..."
OMITTED = re.compile(r"(?:\\ )?\\\.\\\.\\\.")
"""The same within a line that is escaped."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a page, and what the page shows of its output."""

    place: str
    """Page and line."""
    text: str
    stays: bool
    """It ends with ``&``: the page goes on while it works."""
    in_terminal: bool
    output: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class File:
    """A file that a page tells its reader to write."""

    name: str
    text: str


def blocks(page: Path) -> Iterator[Command | File]:
    """Everything that the reader does, in order."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        _, language, name, body = match.groups()
        if language == "console":
            line = text.count("\n", 0, match.start()) + 2
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                first, *output = part.splitlines()
                command = COMMENT.sub("", first)
                yield Command(
                    f"{page.name}:{line}",
                    command.removesuffix("&").strip(),
                    stays=command.endswith("&"),
                    in_terminal=name == "terminal",
                    output=tuple(output),
                )
                line += 1 + len(output)
        elif name:
            yield File(name, body)


BAR = "▁▂▃▄▅▆▇█▏▎▍▌▋▊▉╷╵│┃━─╸╺\u2800-\u28ff"
"""Cells of bars, and those of curves."""
MARKS = (
    (re.compile(r"\b(?:https?|unix|redis)://\S+"), "<address>"),
    (re.compile(r"(?<![\w.])(?:~|\.{1,2})?(?:/[\w.+-]+)+/?"), "<path>"),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b"), "<id>"),
    (re.compile(rf"[{BAR}·]*[{BAR}][{BAR}· ]*"), " <bar> "),
    (re.compile(r"[-+\u2212]?\d[\d,.:]*(?:e[-+]?\d+)?[kMG]?"), "#"),
    (re.compile(r"# ?(?:ms|s|min|h|d|B|KiB|MiB|GiB|%)(?!\w)"), "#"),
    (re.compile(r"# (\w+?)s?\b"), r"# \1"),
)
"""What differs from run to run, and what stands for it; a plural is the singular."""


def marked(line: str) -> str:
    """The line with marks in place of addresses, paths, ids, bars, and numbers with their units."""
    for pattern, mark in MARKS:
        line = pattern.sub(mark, line)
    return " ".join(line.split())


def shape(lines: Sequence[str]) -> list[str]:
    """The lines that are not empty, marked."""
    return list(filter(None, map(marked, lines)))


def prints(output: Sequence[str], shown: Sequence[str], *, may_go_on: bool = False) -> bool:
    """True when a command printed what its page shows: each line once or, equal but for its marks, several times in a
    row. Lines may follow where it `may_go_on`."""
    pattern = "".join(
        r"(?:.*\n)*" if line == ANY else f"(?:{re.sub(OMITTED, '.*', re.escape(line))}\\n)+"
        for line in [*shape(shown), *[ANY] * may_go_on]
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in shape(output))) is not None
