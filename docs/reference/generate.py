"""Writes what stands below the mark of a reference page, from the code: metrics, commands, the API.

    python docs/reference/generate.py

A test compares what stands there with what this makes, so a page cannot drift from the code.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import click

import rlbuffer
from rlbuffer.state.prometheus import METRIC_PREFIX, all_metrics
from rlbuffer.state.run_state import EnvState
from rlbuffer_cli.main import cli

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


ORDER = ("connect", "Buffer", "Writer", "Ticket", "Rollout", "TokenSequence", "Turn", "VersionSpan", "Failure", "Group")
"""Public names in the order of use: the door and the worker's side. The trainer's side follows, then the rest."""
TRAINER = ("Reader", "Step", "MicroBatch", "Policy", "PolicyVersion", "BatcherConfig", "RlbufferError")


def api() -> Iterator[str]:
    """Every public name, from its source: docstrings of attributes are in no object."""
    public = [name for name in rlbuffer.__all__ if not name.startswith("_")]
    order = [*ORDER, *TRAINER]
    for name in sorted(public, key=lambda name: (order.index(name) if name in order else len(order), name)):
        value = getattr(rlbuffer, name)
        module = importlib.import_module(value.__module__)
        node = _definitions(module)[name]
        yield f"\n## {name}\n"
        if isinstance(node, ast.FunctionDef):
            yield from _function(node)
        else:
            yield from _class(node)


def _definitions(module: ModuleType) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    tree = ast.parse(inspect.getsource(module))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def _class(node: ast.ClassDef) -> Iterator[str]:
    yield from prose(ast.get_docstring(node) or "")
    bases = [f"[{base}](#{base.lower()})" for base in map(ast.unparse, node.bases) if base in rlbuffer.__all__]
    yield from (f"It has what {base} has, too." for base in bases)
    functions = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
    made = [inner for function in functions if function.name == "__init__" for inner in function.body]
    rows = [*_attributes(node.body), *_attributes(made), *(row for f in functions for row in _property(f))]
    if rows:
        yield ""
        yield from table(["attribute", "type", ""], rows)
    for function in functions:
        if not function.name.startswith("_") and not _is_property(function):
            yield f"\n### {node.name}.{function.name}\n"
            yield from _function(function)


def _attributes(body: Sequence[ast.stmt]) -> Iterator[list[str]]:
    """Attributes that have a docstring below them."""
    for statement, below in pairwise(body):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        name = target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else "_"
        if name.startswith("_") or not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
            continue
        kind = f"`{ast.unparse(statement.annotation)}`" if isinstance(statement, ast.AnnAssign) else ""
        yield [f"`{name}`", kind, _one_line(str(below.value.value))]


def _is_property(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(mark) in ("property", "cached_property") for mark in function.decorator_list)


def _property(function: ast.FunctionDef) -> Iterator[list[str]]:
    if _is_property(function) and not function.name.startswith("_"):
        kind = f"`{ast.unparse(function.returns)}`" if function.returns else ""
        yield [f"`{function.name}`", kind, _one_line(ast.get_docstring(function) or "")]


def _function(node: ast.FunctionDef) -> Iterator[str]:
    taken = ast.unparse(node.args)
    taken = re.sub(r"^(self|cls)(, )?", "", taken).replace("=", " = ")
    yield f"`{node.name}({taken})" + (f" -> {ast.unparse(node.returns)}`" if node.returns else "`")
    yield ""
    yield from prose(ast.get_docstring(node) or "")


def _one_line(text: str) -> str:
    return plain(" ".join(text.split()))


def plain(text: str) -> str:
    """Marks of docstrings as those of a page."""
    text = re.sub(r":\w+:`~?(?:[\w.]+?\.)?((?:[A-Z]\w*\.)?\w+)`", r"`\1`", text)
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
    "metrics.md": lambda: page("metrics.md", metrics),
}
"""File -> what makes its text."""

if __name__ == "__main__":
    for file, make in PAGES.items():
        (HERE / file).write_text(make(), encoding="utf-8")
        print(HERE / file)
