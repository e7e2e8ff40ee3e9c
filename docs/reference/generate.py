"""Writes what stands below the mark of a reference page, from the code: metrics, commands, the API, filters.

    python docs/reference/generate.py

A test compares what stands there with what this makes, so a page cannot drift from the code.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click

import rlbuffer
from rlbuffer.client.filters import ALLOWED, FIELDS, Field
from rlbuffer.state.prometheus import METRIC_PREFIX, all_metrics
from rlbuffer.state.run_state import EnvState
from rlbuffer_cli.main import cli
from rlbuffer_cli.tables import VIEWS

HERE = Path(__file__).parent
MARK = "<!-- Made by docs/reference/generate.py from the code: change it there. -->\n"
TITLES = {
    "run": "The run and its server",
    "server": "The run and its server",
    "env": "Envs",
    "process": "Workers, gateways, scorers and ranks",
}
SAID = {part.name for part in fields(EnvState) if part.metadata.get("is_said")}
"""Fields of an env that the leader says, and the trainer puts into its record."""


def metrics() -> Iterator[str]:
    """A table for each part of the run; metrics that differ in what they count share a row."""
    rows: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
    for title, field, m in all_metrics():
        if title not in TITLES:
            continue  # the record of a step says them itself
        recorded = f"`buffer/{field}`" if title == "env" and field in SAID else ""
        labels = ", ".join(f"`{name}`" for name in m.labels)
        names, fields_of = rows.setdefault((title, m.kind, labels, m.meaning), ([], []))
        names.append(f"`{METRIC_PREFIX}{m.name}`")
        fields_of += [recorded] if recorded and recorded not in fields_of else []
    for heading in dict.fromkeys(TITLES.values()):
        its = [[", ".join(a), *key[1:], ", ".join(b)] for key, (a, b) in rows.items() if TITLES[key[0]] == heading]
        heads, has = ["metric", "kind", "labels", "meaning"], any(row[4] for row in its)
        yield f"\n### {heading}\n"
        yield from table(heads + ["in metrics.jsonl"] * has, [row[: 4 + has] for row in its])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    yield from (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


COLUMNS = 100
"""Width of a help text."""


def commands() -> Iterator[str]:
    """Every command's help, as it is printed."""
    yield from _helps(cli, click.Context(cli, info_name="rlbuffer", **_WIDTH))


_WIDTH = {"terminal_width": COLUMNS, "max_content_width": COLUMNS}


def _helps(command: click.Command, ctx: click.Context) -> Iterator[str]:
    yield f"\n## {ctx.command_path}\n"
    yield from ("```text", command.get_help(ctx).rstrip(), "```")
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            if found is not None and not found.hidden:
                yield from _helps(found, click.Context(found, parent=ctx, info_name=name, **_WIDTH))


def filters() -> Iterator[str]:
    """What groups, and their rollouts, are filtered by, then the fields of other tables."""
    for heading, is_of_rollout in (("Of a group", False), ("Of one of its rollouts", True)):
        yield f"\n## {heading}\n"
        rows = [_compared(name, field) for name, field in FIELDS.items() if field.is_of_rollout == is_of_rollout]
        yield from table(["field", "compared as", "is"], rows)
    yield "\n## Of other tables\n"
    others = [view for view in VIEWS.values() if view.fields]
    heads = ["table", "fields", "a word alone"]
    yield from table(
        heads, [[view.name, _coded(view.fields), "a part of the name" * bool(view.words)] for view in others]
    )


def _coded(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _compared(name: str, field: Field) -> list[str]:
    values = f": {_coded(ALLOWED[name])}" if name in ALLOWED else ""
    return [f"`{name}`", "number" if field.is_number else "text", f"{field.about}{values}"]


ORDER = ("connect", "Buffer", "Writer", "Ticket", "Rollout", "TokenSequence", "Turn", "VersionSpan", "Failure", "Group")
"""Public names in the order of use: the door and the worker's side. The trainer's side follows, then the rest."""
TRAINER = ("Reader", "Step", "MicroBatch", "Policy", "PolicyVersion", "BatcherConfig", "RlbufferError")


RETURNED = (
    *(("client", name) for name in ("Taken", "GroupView", "GroupDetail", "StepView", "Ledger", "Report")),
    *(("records", name) for name in ("Pushed", "StepHeader", "Normalizers", "Padded", "Sample", "WholeSample")),
)
"""Records that calls return, and nobody makes."""
KNOWN = {*rlbuffer.__all__, *(name for _, name in RETURNED)}
INTERNAL = {
    "Buffer": {"store"},
    "Writer": {"ask"},
    "Reader": {"acknowledge", "given", "holds", "is_closed", "still_there", "waits", "warns"},
    "Stream": {"reader"},
}
"""What rlbuffer's own commands and doors use of an object, and no program of a user."""


def api() -> Iterator[str]:
    """Every public name, from its source: docstrings of attributes are in no object."""
    public = [name for name in rlbuffer.__all__ if not name.startswith("_")]
    order = [*ORDER, *TRAINER]
    for name in sorted(public, key=lambda name: (order.index(name) if name in order else len(order), name)):
        yield f"\n## {name}\n"
        yield from _defined(getattr(rlbuffer, name))
    yield "\n## What calls return\n"
    for room, name in RETURNED:
        yield f"\n### {name}\n\nOf `rlbuffer.{room}`.\n"
        yield from _defined(getattr(importlib.import_module(f"rlbuffer.{room}"), name), level="####")


def _defined(value: Any, level: str = "###") -> Iterator[str]:
    names = Names(importlib.import_module(value.__module__))
    node = names.definitions[value.__name__]
    return _function(node, names) if isinstance(node, ast.FunctionDef) else _class(node, names, level)


class Names:
    """The names of a module: what they are bound to."""

    def __init__(self, module: ModuleType) -> None:
        body = ast.parse(inspect.getsource(module)).body
        self.definitions = {node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        self._module = module

    def kind(self, annotation: ast.expr) -> str:
        """A type without the checks that are tied to it."""
        names = self

        class Bare(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.AST:
                meant = getattr(names._module, node.id, None)
                return ast.parse(_bare(meant), mode="eval").body if get_origin(meant) in TYPES else node

            def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
                if ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
                    return self.visit(node.slice.elts[0])
                return self.generic_visit(node)

        return ast.unparse(Bare().visit(copy.deepcopy(annotation)))

    def default(self, value: ast.expr) -> str:
        """A default as one would type it."""
        if isinstance(value, ast.Name):
            return repr(getattr(self._module, value.id))
        if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
            return ast.unparse(value)
        given = {word.arg: word.value for word in value.keywords}
        if factory := given.get("default_factory"):
            return {"dict": "{}", "tuple": "()", "list": "[]"}.get(ast.unparse(factory), "")
        return self.default(given["default"]) if "default" in given else ""


TYPES = (Annotated, Union, UnionType, Literal)


def _bare(kind: Any) -> str:
    """A type as it is written, without the checks that are tied to it."""
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        return _bare(parts[0])
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(_bare, parts))
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(map(repr, parts))}]"
    if parts:
        return f"{get_origin(kind).__name__}[{', '.join(map(_bare, parts))}]"
    if kind is Ellipsis:
        return "..."
    return "None" if kind is NoneType else getattr(kind, "__name__", str(kind))


def _class(node: ast.ClassDef, names: Names, level: str) -> Iterator[str]:
    yield from prose(ast.get_docstring(node) or "")
    bases = [f"[{base}](#{base.lower()})" for base in map(ast.unparse, node.bases) if base in KNOWN]
    yield from (f"It has what {base} has, too." for base in bases)
    functions = [inner for inner in node.body if isinstance(inner, ast.FunctionDef) and not _is_overload(inner)]
    hidden = INTERNAL.get(node.name, set())
    made = [inner for function in functions if function.name == "__init__" for inner in function.body]
    unlisted = [base for base in map(ast.unparse, node.bases) if base in names.definitions and base not in KNOWN]
    found = [
        *(row for base in unlisted for row in _attributes(names.definitions[base].body, names)),
        *_attributes(node.body, names),
        *_attributes(made, names),
        *(row for f in functions for row in _property(f)),
    ]
    rows = [row for row in found if row[0].strip("`") not in hidden]
    if rows:
        yield ""
        has = any(row[2] for row in rows)
        heads = ["attribute", "type", *["default"] * has, ""]
        yield from table(heads, [row if has else [*row[:2], row[3]] for row in rows])
    for function in functions:
        if not function.name.startswith("_") and not _is_property(function) and function.name not in hidden:
            yield f"\n{level} {node.name}.{function.name}\n"
            yield from _function(function, names)


def _attributes(body: Sequence[ast.stmt], names: Names) -> Iterator[list[str]]:
    """Fields of a record, and attributes that have a docstring below them: name, type, default, meaning."""
    for statement, below in pairwise([*body, ast.Pass()]):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        name = target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else "_"
        meaning = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
        is_field = isinstance(statement, ast.AnnAssign) and isinstance(target, ast.Name)
        if name.startswith("_") or not (is_field or isinstance(meaning, str)):
            continue
        kind = default = ""
        if isinstance(statement, ast.AnnAssign):
            kind = f"`{names.kind(statement.annotation)}`"
            if isinstance(target, ast.Name) and statement.value is not None and "ClassVar" not in kind:
                default = names.default(statement.value)
        yield [f"`{name}`", kind, f"`{default}`" if default else "", _one_line(str(meaning or ""))]


def _is_property(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(mark) in ("property", "cached_property") for mark in function.decorator_list)


def _is_overload(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(mark) == "overload" for mark in function.decorator_list)


def _property(function: ast.FunctionDef) -> Iterator[list[str]]:
    if _is_property(function) and not function.name.startswith("_"):
        kind = f"`{ast.unparse(function.returns)}`" if function.returns else ""
        yield [f"`{function.name}`", kind, "", _one_line(ast.get_docstring(function) or "")]


def _function(node: ast.FunctionDef, names: Names) -> Iterator[str]:
    arguments = copy.deepcopy(node.args)
    for values in (arguments.defaults, arguments.kw_defaults):
        values[:] = [value and ast.parse(names.default(value), mode="eval").body for value in values]
    taken = re.sub(r"^(self|cls)(, )?", "", ast.unparse(arguments)).replace("=", " = ")
    yield f"`{node.name}({taken})" + (f" -> {ast.unparse(node.returns)}`" if node.returns else "`")
    yield ""
    yield from prose(ast.get_docstring(node) or "")


def _one_line(text: str) -> str:
    return plain(" ".join(text.split()))


def plain(text: str) -> str:
    """Marks of docstrings as those of a page."""
    text = re.sub(r":\w+:`~?(?:[\w.]+?\.)??((?:[A-Z]\w*\.)?\w+)`", r"`\1`", text)
    return re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)


def prose(docstring: str) -> Iterator[str]:
    """A docstring's paragraphs; its sections (`Raises:`) have a bold head, a list, or code."""
    for block in docstring.split("\n\n"):
        first, _, rest = block.partition("\n")
        if re.fullmatch(r"[A-Z][a-z]+:", first) and rest:
            yield f"**{first[:-1]}**\n"
            block = textwrap.dedent(rest)
        if re.search(r"^ *>>> ", block, re.MULTILINE):
            yield from ("```pycon", textwrap.dedent(block), "```")
        elif block.startswith("    "):
            yield from ("```text", textwrap.dedent(block), "```")
        elif re.match(r"\w[\w., ]*: ", block) and first.endswith(":") and rest:
            items = re.sub(r"\n +", " ", block).splitlines()
            yield from (re.sub(r"^([^:]+): ", r"- `\1`: ", plain(item)) for item in items)
        else:
            yield plain(re.sub(r"(?<=\w)::$", ":", block))
        yield ""


def page(file: str, lines: Callable[[], Iterator[str]]) -> str:
    """A page with what comes from the code made anew; what stands above the mark stays."""
    above = (HERE / file).read_text(encoding="utf-8").partition(MARK)[0]
    return above + MARK + re.sub(r"\n{3,}", "\n\n", "\n".join(lines())).rstrip() + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "api.md": lambda: page("api.md", api),
    "commands.md": lambda: page("commands.md", commands),
    "filter.md": lambda: page("filter.md", filters),
    "metrics.md": lambda: page("metrics.md", metrics),
}
"""File -> what makes its text."""

if __name__ == "__main__":
    for file, make in PAGES.items():
        (HERE / file).write_text(make(), encoding="utf-8")
        print(HERE / file)
