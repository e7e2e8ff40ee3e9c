"""Reads the source for every error text that it can raise, and the tests for every text that they name.

A text is what an exception is made with: a string, an f-string, or a name or a function of the same module that stands
for one. Its values are holes. It is covered when one string of the tests (their f-strings have holes, too) holds all
its words in order, with anything in the holes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

HOLE = "\0"
"""Stands for a value inside a text."""
_WORDS = re.compile(r"[A-Za-z]{2,}")
_BUILT_IN = ("ValueError", "TypeError", "AttributeError", "KeyError", "OSError", "RuntimeError", "LookupError")
_CLICK = ("UsageError", "BadParameter", "ClickException", "BadOptionUsage", "BadArgumentUsage")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ErrorText:
    """One text that an exception may carry."""

    file: str
    line: int
    text: str
    """With HOLE for every value."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Texts between the holes that have words of their own."""
        return tuple(part.strip(" :;,.()[]\n") for part in self.text.split(HOLE) if _WORDS.search(part))

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.text.replace(HOLE, '{}')}"


def error_names(errors: Path) -> frozenset[str]:
    """The exception classes of `errors` and those of Python and click that the source raises."""
    tree = ast.parse(errors.read_text(encoding="utf-8"))
    return frozenset({node.name for node in tree.body if isinstance(node, ast.ClassDef)} | {*_BUILT_IN, *_CLICK})


def texts_of(path: Path, name: str, errors: Iterable[str]) -> list[ErrorText]:
    """Every error text of a module, in the order of its lines."""
    found = _Module(ast.parse(path.read_text(encoding="utf-8")), frozenset(errors)).texts()
    return sorted({ErrorText(file=name, line=line, text=text) for line, text in found})


def named_in(paths: Iterable[Path]) -> str:
    """All strings of the test files, a line feed between two; f-strings have HOLE for every value."""
    strings: list[str] = []
    for path in paths:
        for node in _outermost(ast.parse(path.read_text(encoding="utf-8"))):
            text = _literal(node, {})
            strings.append(text.replace("\n", " "))
            if "\\" in text:  # a pattern for `match`
                strings.append(re.sub(r"\\(.)", r"\1", text).replace("\n", " "))
    return "\n".join(strings)


def is_covered(text: ErrorText, strings: str) -> bool:
    """True when one line of `strings` holds every part of the text, in order."""
    pattern = "[^\n]*?".join(re.escape(part.replace("\n", " ")) for part in text.parts)
    return re.search(pattern, strings) is not None


def _outermost(tree: ast.AST) -> Iterator[ast.expr]:
    """Strings and f-strings that are no part of another one."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str)):
            yield child
        else:
            yield from _outermost(child)


def _literal(node: ast.expr | None, names: Mapping[str, ast.expr]) -> str:
    """The text of an expression: HOLE for whatever is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else HOLE
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _literal(node.value, names) if isinstance(node.value, ast.Name) else HOLE
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _literal(node.left, names) + _literal(node.right, names)
    if isinstance(node, ast.Name) and node.id in names:
        return _literal(names[node.id], {})
    return HOLE


class _Module:
    """One module's functions and constants, and the texts that its exceptions are made with."""

    def __init__(self, tree: ast.Module, errors: frozenset[str]) -> None:
        self._tree = tree
        self._errors = errors
        self._functions: dict[str, Function] = {}
        for node in ast.walk(tree):
            if isinstance(node, Function):
                self._functions.setdefault(node.name, node)
        self._constants = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }

    def texts(self) -> Iterator[tuple[int, str]]:
        yield from self._in(self._tree, None)

    def _in(self, node: ast.AST, function: Function | None) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield from self._in(child, child)
                continue
            if isinstance(child, ast.Call):
                yield from self._made_by(child, function)
            yield from self._in(child, function)

    def _made_by(self, call: ast.Call, function: Function | None) -> Iterator[tuple[int, str]]:
        name = _called(call)
        if name in self._errors and call.args:
            yield from self._says(call.args[0], function)
        elif name in self._functions and self._refuses(self._functions[name]):
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                if _is_sentence(argument):
                    yield from self._says(argument, function)

    def _refuses(self, function: Function) -> bool:
        """True when the function makes an exception whose text has one of its arguments in it."""
        given = {argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]}
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and _called(node) in self._errors and node.args:
                used = {inner.id for inner in ast.walk(node.args[0]) if isinstance(inner, ast.Name)}
                if used & given:
                    return True
        return False

    def _says(self, message: ast.expr, function: Function | None) -> Iterator[tuple[int, str]]:
        if isinstance(message, ast.IfExp):
            yield from self._says(message.body, function)
            yield from self._says(message.orelse, function)
        elif isinstance(message, ast.Call) and _called(message) in self._functions:
            made_by = self._functions[_called(message)]
            for node in ast.walk(made_by):
                if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Call):
                    yield from self._says(node.value, made_by)
        elif isinstance(message, ast.Name) and message.id in (local := _assigned(function)):
            for value in local[message.id]:
                if not (isinstance(value, ast.Name) and value.id == message.id):
                    yield message.lineno, _literal(value, self._constants)
        else:
            yield message.lineno, _literal(message, self._constants)


def _called(call: ast.Call) -> str:
    target = call.func
    return target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""


def _assigned(function: Function | None) -> dict[str, list[ast.expr]]:
    """Name -> everything that is assigned to it in the function."""
    out: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            out.setdefault(node.targets[0].id, []).append(node.value)
    return out


def _is_sentence(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant | ast.JoinedStr) and " " in _literal(node, {})
