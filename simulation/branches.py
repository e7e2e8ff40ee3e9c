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


def _places(script: str, text: str) -> list[tuple[Branch, int, str]]:
    """Branches, where their marks belong, and what must stand before them."""
    walk = _Walk(script, text)
    for token in tokens(text):
        walk.see(token, text.count("\n", 0, token.start) + 1)
    return walk.places


class _Walk:
    """The blocks that are open while the tokens of a file go by."""

    def __init__(self, script: str, text: str) -> None:
        self._script = script
        self._lines = text.splitlines()
        self.places: list[tuple[Branch, int, str]] = []
        self._blocks: list[str] = []
        """What the next `end`s close: ``if`` (no `else` yet), ``else``, ``for`` (no `do` yet), ``block``."""
        self._line_of_if: list[int] = []
        self._is_in_parameters = False

    def see(self, token: Token, line: int) -> None:
        """Takes in the next token."""
        if self._is_in_parameters and token.text == ")":
            self._is_in_parameters = False
            self._add("function", line, token.end)
        if token.kind != "name":
            return
        if token.text == "function":
            self._blocks.append("block")
            self._is_in_parameters = True
        elif token.text == "if":
            self._blocks.append("if")
            self._line_of_if.append(line)
        elif token.text == "then":
            self._add("then", line, token.end)
        elif token.text == "else":
            self._blocks[-1] = "else"
            self._add("else", line, token.end)
        elif token.text in ("for", "while"):
            self._blocks.append("for")
        elif token.text == "do":
            if self._blocks and self._blocks[-1] == "for":
                self._blocks[-1] = "block"
                self._add("loop", line, token.end)
            else:
                self._blocks.append("block")
        elif token.text == "repeat":
            self._blocks.append("block")
            self._add("loop", line, token.end)
        elif token.text in ("until", "end"):
            self._close(token)

    def _close(self, token: Token) -> None:
        block = self._blocks.pop()
        begun = self._line_of_if.pop() if block in ("if", "else") else 0
        if block == "if":
            self._add("no else", begun, token.start, " else")

    def _add(self, what: str, line: int, place: int, before: str = "") -> None:
        same = sum(branch.line == line and branch.what.partition(" #")[0] == what for branch, _, _ in self.places)
        name = f"{what} #{same + 1}" if same else what
        self.places.append((Branch(self._script, line, name, self._lines[line - 1].strip()), place, before))
