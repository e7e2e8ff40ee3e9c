"""The line of each key of a TOML file: dotted name -> line.

`tomllib` reads values but keeps no positions. This scanner walks the same text and keeps only the positions; it may
assume that the text is valid, because it runs after `tomllib` has read it.
"""

from __future__ import annotations

import tomllib
from typing import Final

_BARE: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Path of each table and key of `text` -> its line, from 1. Elements of arrays count as their array's key."""
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n") + "\n"
        self.at = 0
        self.lines: dict[tuple[str, ...], int] = {}

    def scan(self) -> dict[tuple[str, ...], int]:
        table: tuple[str, ...] = ()
        while self._blank():
            if self._peek() == "[":
                while self._peek() == "[":
                    self.at += 1
                line = self._line()
                table = self._key()
                self._note(table, line)
                while self._peek() == "]":
                    self.at += 1
            else:
                self._pair(table)
        return self.lines

    def _pair(self, table: tuple[str, ...]) -> None:
        line = self._line()
        path = table + self._key()
        self._note(path, line)
        self._space()
        self.at += 1  # the equals sign
        self._value(path)

    def _value(self, path: tuple[str, ...]) -> None:
        self._space()
        first = self._peek()
        if first in "\"'":
            self._string()
        elif first == "{":
            self.at += 1
            while self._blank() and self._peek() != "}":
                self._pair(path)
                self._skip_comma()
            self.at += 1
        elif first == "[":
            self.at += 1
            while self._blank() and self._peek() != "]":
                self._value(path)
                self._skip_comma()
            self.at += 1
        else:
            while self._peek() not in ",]}#\n":
                self.at += 1

    def _key(self) -> tuple[str, ...]:
        parts = []
        while True:
            self._space()
            start = self.at
            if self._peek() in "\"'":
                self._string()
                parts.append(str(tomllib.loads(f"v = {self.text[start : self.at]}")["v"]))
            else:
                while self._peek() in _BARE:
                    self.at += 1
                parts.append(self.text[start : self.at])
            self._space()
            if self._peek() != ".":
                return tuple(parts)
            self.at += 1

    def _string(self) -> None:
        quote = self._peek()
        mark = quote * 3 if self.text.startswith(quote * 3, self.at) else quote
        self.at += len(mark)
        while not self.text.startswith(mark, self.at):
            self.at += 2 if quote == '"' and self._peek() == "\\" else 1
        self.at += len(mark)
        while len(mark) == 3 and self._peek() == quote:  # up to two quotes may end the text itself
            self.at += 1

    def _blank(self) -> bool:
        """Skips blanks, newlines and comments; False at the end of the text."""
        while self.at < len(self.text):
            if self._peek() == "#":
                self.at = self.text.index("\n", self.at)
            elif self._peek() in " \t\n":
                self.at += 1
            else:
                return True
        return False

    def _skip_comma(self) -> None:
        if self._blank() and self._peek() == ",":
            self.at += 1

    def _space(self) -> None:
        while self._peek() in " \t":
            self.at += 1

    def _peek(self) -> str:
        return self.text[self.at]

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _note(self, path: tuple[str, ...], line: int) -> None:
        for depth in range(1, len(path)):
            self.lines.setdefault(path[:depth], line)
        self.lines.setdefault(path, line)
