"""Small defects, made mechanically: each changes one line of a Lua file or of Python code.

==========  ==========================================================================================
compare     a comparison is flipped at its border or turned round: ``<`` to ``<=``, ``==`` to ``~=``
one         a number is one more or one less, a truth value the other one
drop        a statement is left out: a call, an assignment to something that stays, a jump
negate      a condition is turned round
join        ``and`` for ``or``, and the other way; a ``not`` is left out
swap        the first two arguments of a call change places; in Lua the last two; not of ``min`` and ``max``
add         ``+`` for ``-`` and the other way; ``min`` for ``max``
word        in Lua: a string is another one
==========  ==========================================================================================

What only forms a message (an error that is raised, an f-string) is left alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from simulation.branches import Token, tokens


@dataclass(frozen=True, slots=True, order=True)
class Mutant:
    """One line, changed."""

    path: str
    """Path of the file, from the root of the repository."""
    line: int
    operator: str
    old: str
    """The whole line, as it is."""
    new: str
    """The whole line, changed."""

    def applied(self, text: str) -> str:
        """The file with the changed line. Raises ValueError when the line is another one by now."""
        lines = text.split("\n")
        if lines[self.line - 1] != self.old:
            raise ValueError(f"{self.path}:{self.line} is another line by now")
        lines[self.line - 1] = self.new
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.path}:{self.line} ({self.operator})\n    - {self.old.strip()}\n    + {self.new.strip()}"


COMPARISONS = {"==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">"}
OPPOSITES = {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
LUA_COMPARISONS = {"==": "~=", "~=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">"}
JOINS = {"and": "or", "or": "and"}


# -- Lua ---------------------------------------------------------------------------------------------------------------
def lua_mutants(path: str, text: str) -> list[Mutant]:
    """All of a Lua file."""
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    by_line: dict[int, list[Token]] = {}
    for token in tokens(text):
        by_line.setdefault(text.count("\n", 0, token.start), []).append(token)
    made = []
    for number, words in by_line.items():
        line = lines[number]
        at = [(word.start - starts[number], word.end - starts[number], word) for word in words]
        for operator, begin, end, new in _of_lua(line, at):
            made.append(Mutant(path, number + 1, operator, line, line[:begin] + new + line[end:]))
    return sorted({mutant for mutant in made if mutant.new != mutant.old})


def _of_lua(line: str, words: list[tuple[int, int, Token]]) -> Iterator[tuple[str, int, int, str]]:
    """Yields operator, from where, to where, and the text that stands there instead."""
    for i, (begin, end, word) in enumerate(words):
        text = word.text
        if text in LUA_COMPARISONS:
            yield "compare", begin, end, LUA_COMPARISONS[text]
        elif word.kind == "number" and text.isdigit():
            yield "one", begin, end, str(int(text) + 1)
            if int(text) > 0:
                yield "one", begin, end, str(int(text) - 1)
        elif text in JOINS:
            yield "join", begin, end, JOINS[text]
        elif text == "not":
            yield "join", begin, end, ""
        elif text in ("true", "false"):
            yield "one", begin, end, "false" if text == "true" else "true"
        elif text in ("+", "-") and i and words[i - 1][2].kind in ("name", "number"):
            yield "add", begin, end, "-" if text == "+" else "+"
        elif text in ("min", "max"):
            yield "add", begin, end, "max" if text == "min" else "min"
        elif word.kind == "string" and re.fullmatch(r"'[a-z_:]+'", text):
            yield "word", begin, end, f"{text[:-1]}x'"
        elif text in ("if", "elseif"):
            then = next((k for k in range(i, len(words)) if words[k][2].text == "then"), None)
            if then is not None:
                condition = line[end : words[then][0]].strip()
                yield "negate", end, words[then][0], f" not ({condition}) "
        if text == "(" and i and words[i - 1][2].kind == "name":
            yield from _swapped(line, words, i)
    stripped = line.strip()
    if re.match(r"redis\.call\(|table\.|[\w.]+(\[.*\])? = |[\w.\[\]]+, [\w.\[\]]+ = ", stripped) and _is_whole(words):
        begin = line.index(stripped)
        yield "drop", begin, len(line.rstrip()), "do end"


def _is_whole(words: list[tuple[int, int, Token]]) -> bool:
    """True when the brackets of the line are closed on it, and it goes on nowhere else."""
    depth = sum((w.text in ("(", "{", "[")) - (w.text in (")", "}", "]")) for _, _, w in words)
    keywords = {"then", "else", "end", "do", "function", "return", "if", "for"}
    return depth == 0 and not any(w.text in keywords for _, _, w in words)


def _swapped(line: str, words: list[tuple[int, int, Token]], opening: int) -> Iterator[tuple[str, int, int, str]]:
    depth, commas, closing = 0, [], None
    for i in range(opening, len(words)):
        text = words[i][2].text
        depth += (text in ("(", "{", "[")) - (text in (")", "}", "]"))
        if text == "," and depth == 1:
            commas.append(i)
        if depth == 0:
            closing = i
            break
    if closing is None or not commas or words[opening - 1][2].text in ("min", "max"):
        return
    begin = words[commas[-2]][1] if len(commas) > 1 else words[opening][1]
    first, second = line[begin : words[commas[-1]][0]], line[words[commas[-1]][1] : words[closing][0]]
    yield "swap", begin, words[closing][0], f"{second if len(commas) > 1 else second.lstrip()}, {first.strip()}"


# -- Python ------------------------------------------------------------------------------------------------------------
def python_mutants(path: str, text: str, lines: Collection[int]) -> list[Mutant]:
    """All of the given lines of a Python file."""
    made: set[Mutant] = set()
    raw = [line.encode() for line in text.split("\n")]
    for node in _worth(ast.parse(text)):
        for operator, (line, begin), end, new in _of_python(raw, node):
            if line in lines:
                old = raw[line - 1]
                changed = old[:begin] + new.encode() + old[end:]
                made.add(Mutant(path, line, operator, old.decode(), changed.decode()))
    return sorted(mutant for mutant in made if mutant.new != mutant.old)


def _worth(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that decide something."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.AnnAssign) and not (
            isinstance(node, ast.AnnAssign) and node.value is not None
        ):
            continue
        yield node
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield node.value
                yield from _worth(node.value)
        elif isinstance(node, ast.FunctionDef):
            for statement in node.body:
                yield statement
                yield from _worth(statement)
        else:
            yield from _worth(node)


def _of_python(raw: list[bytes], node: ast.AST) -> Iterator[tuple[str, tuple[int, int], int, str]]:
    """Yields operator, (line, column), end column, and the text that stands there instead; columns in bytes."""
    if not isinstance(node, ast.expr | ast.stmt) or node.lineno != node.end_lineno or node.end_col_offset is None:
        if isinstance(node, ast.If | ast.While) and node.test.lineno == node.test.end_lineno:
            yield _negated(raw, node.test)
        return
    place, end = (node.lineno, node.col_offset), node.end_col_offset
    line = raw[node.lineno - 1]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        begin, stop = _end(node.left), node.comparators[0].col_offset
        operator = line[begin:stop].decode()
        bare = operator.strip("() ")
        if new := {**COMPARISONS, **OPPOSITES}.get(bare):
            yield "compare", (node.lineno, begin), stop, operator.replace(bare, new)
    elif isinstance(node, ast.BoolOp):
        begin, stop = _end(node.values[0]), node.values[1].col_offset
        word = line[begin:stop].decode()
        old = "and" if isinstance(node.op, ast.And) else "or"
        yield "join", (node.lineno, begin), stop, word.replace(old, JOINS[old])
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        begin, stop = _end(node.left), node.right.col_offset
        word = line[begin:stop].decode()
        yield "add", (node.lineno, begin), stop, word.translate({43: 45, 45: 43})
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        if type(node.value) is bool:
            yield "one", place, end, str(not node.value)
        else:
            yield "one", place, end, str(int(node.value) + 1)
            if node.value:
                yield "one", place, end, str(int(node.value) - 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "join", place, node.operand.col_offset, ""
    elif isinstance(node, ast.IfExp):
        yield _negated(raw, node.test)
    elif isinstance(node, ast.Call):
        first_two = [arg for arg in node.args[:2] if not isinstance(arg, ast.Starred)]
        if len(first_two) == 2 and not (isinstance(node.func, ast.Name) and node.func.id in ("min", "max")):
            one, two = (line[arg.col_offset : _end(arg)].decode() for arg in first_two)
            between = line[_end(first_two[0]) : first_two[1].col_offset].decode()
            yield "swap", (node.lineno, first_two[0].col_offset), _end(first_two[1]), f"{two}{between}{one}"
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            yield "add", place, _end(node.func), "max" if node.func.id == "min" else "min"
    elif isinstance(node, ast.If | ast.While):
        yield _negated(raw, node.test)
    elif (
        isinstance(node, ast.AugAssign | ast.Continue | ast.Break | ast.Delete)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        or (isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple))
    ):
        yield "drop", place, end, "pass"


def _negated(raw: list[bytes], test: ast.expr) -> tuple[str, tuple[int, int], int, str]:
    text = raw[test.lineno - 1][test.col_offset : _end(test)].decode()
    return "negate", (test.lineno, test.col_offset), _end(test), f"not ({text})"


def _end(node: ast.expr) -> int:
    if node.end_col_offset is None:
        raise ValueError("a node of a parsed file has an end")
    return node.end_col_offset
