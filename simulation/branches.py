"""Branches of the Lua files that the seeds have entered: every arm of an `if`, the missing `else` too, every loop and
function.

The text of a shipped file is given marks when it is loaded, on the lines that it has: ``then H[7]=1;``. A script that a
mutation has changed is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

MARKS = "__entered"
"""The global table of the marks."""
_TOKEN = re.compile(
    r"(?P<comment>--\[\[.*?\]\]|--[^\n]*)|(?P<string>'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\"|\[\[.*?\]\])"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<number>\d[\w.]*)|(?P<operator>\.\.\.|\.\.|==|~=|<=|>=|[^\s\w])",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    """A word of a Lua file; comments and white space are none."""

    kind: str
    """``string``, ``name``, ``number`` or ``operator``."""
    text: str
    start: int
    """Place in the file where it begins."""

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True, order=True)
class Branch:
    """A place of a Lua file."""

    script: str
    line: int
    what: str
    """``then``, ``else``, ``no else``, ``loop`` or ``function``."""
    text: str
    """The line."""

    def __str__(self) -> str:
        return f"{self.script}.lua:{self.line} ({self.what}): {self.text}"


def tokens(text: str) -> Iterator[Token]:
    """The words of a Lua file."""
    for match in _TOKEN.finditer(text):
        if match.lastgroup != "comment":
            yield Token(match.lastgroup or "", match[0], match.start())


@cache
def sources() -> Mapping[str, str]:
    """Script -> text, of all that are shipped."""
    folder = resources.files("rlbuffer.store") / "scripts"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".lua")), key=lambda file: file.name)
    return {file.name.removesuffix(".lua"): file.read_text(encoding="utf-8") for file in files}


@cache
def branches() -> tuple[Branch, ...]:
    """All of all scripts; a mark is a branch's place here."""
    return tuple(branch for script, text in sources().items() for branch, _, _ in _places(script, text))


def marked(text: str) -> str:
    """A shipped file with its marks; any other text as it is."""
    script = {source: name for name, source in sources().items()}.get(text)
    if script is None:
        return text
    numbers = {branch: number for number, branch in enumerate(branches())}
    out, at = [], 0
    for branch, place, before in sorted(_places(script, text), key=lambda item: item[1]):
        out += [text[at:place], f"{before} {MARKS}[{numbers[branch]}]=1; "]
        at = place
    return "".join([*out, text[at:]])


def around(script: str, line: int) -> int | None:
    """The mark of the innermost branch in which a line (from 1) of a shipped file begins; None: it is in none."""
    branch = _walked(script, sources()[script])[1].get(line)
    return None if branch is None else branches().index(branch)


def _places(script: str, text: str) -> list[tuple[Branch, int, str]]:
    """Branches, where their marks belong, and what must stand before them."""
    return _walked(script, text)[0]


def _walked(script: str, text: str) -> tuple[list[tuple[Branch, int, str]], dict[int, Branch]]:
    """The places, and the innermost branch in which each line begins."""
    lines = text.splitlines()
    made: list[tuple[Branch, int, str]] = []
    begins: dict[int, Branch | None] = {}
    open_blocks: list[str] = []
    """What the next `end`s close: ``if`` (no `else` yet), ``else``, ``for`` (no `do` yet), ``block``."""
    arms: list[Branch | None] = []
    """The branch of each that was entered; None before a `then`, `do` or `)`."""
    line_of_if: list[int] = []
    parameters = False

    def add(what: str, line: int, place: int, before: str = "") -> Branch:
        same = sum(branch.line == line and branch.what.partition(" #")[0] == what for branch, _, _ in made)
        name = f"{what} #{same + 1}" if same else what
        made.append((Branch(script, line, name, lines[line - 1].strip()), place, before))
        return made[-1][0]

    def begin(block: str) -> None:
        open_blocks.append(block)
        arms.append(None)

    for token in tokens(text):
        line = text.count("\n", 0, token.start) + 1
        if token.text in ("else", "elseif") and token.kind == "name":
            arms[-1] = None
        begins.setdefault(line, next((arm for arm in reversed(arms) if arm is not None), None))
        if parameters and token.text == ")":
            parameters = False
            arms[-1] = add("function", line, token.end)
        if token.kind != "name":
            continue
        if token.text == "function":
            begin("block")
            parameters = True
        elif token.text == "if":
            begin("if")
            line_of_if.append(line)
        elif token.text == "then":
            arms[-1] = add("then", line, token.end)
        elif token.text == "else":
            open_blocks[-1] = "else"
            arms[-1] = add("else", line, token.end)
        elif token.text in ("for", "while"):
            begin("for")
        elif token.text == "do":
            if open_blocks and open_blocks[-1] == "for":
                open_blocks[-1] = "block"
                arms[-1] = add("loop", line, token.end)
            else:
                begin("block")
        elif token.text == "repeat":
            begin("block")
            arms[-1] = add("loop", line, token.end)
        elif token.text == "until":
            open_blocks.pop()
            arms.pop()
        elif token.text == "end":
            block, _ = open_blocks.pop(), arms.pop()
            begun = line_of_if.pop() if block in ("if", "else") else 0
            if block == "if":
                add("no else", begun, token.start, " else")
    return made, {line: branch for line, branch in begins.items() if branch is not None}
