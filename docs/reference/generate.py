"""Writes the pages of this folder that come from the code: settings, errors, records, the command line.

    python docs/reference/generate.py

A test compares what stands here with what this makes, so a page cannot drift from the code.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import click
from pydantic import BaseModel

from rlbuffer import errors, records
from rlbuffer.config.settings import RunSettings
from rlbuffer.metrics.registry import METRIC_PREFIX, METRICS
from rlbuffer_cli.main import COMMANDS

HERE = Path(__file__).parent
NOTE = "<!-- Made by docs/reference/generate.py from the code: change it there. -->\n"
SETTINGS = f"""{NOTE}
# Settings

Values come from `rlbuffer.toml`, then from `RLBUFFER_*` variables, then from flags; the last wins. A variable has two
underscores between table and name: `RLBUFFER_BATCHER__MAX_AGE=2`. A setting that does not exist is an error with a
suggestion.

- `rlbuffer config example` prints a file with every setting and a comment.
- `rlbuffer config show --sources` prints every value and where it came from.
- `rlbuffer config check` says everything that cannot work, models, modules and packages on this host included. `run`,
  `serve`, `train`, `worker` and `score` begin with the same checks.
- `rlbuffer config apply` changes `[batcher]` of a run at work; [operate](../guide/operate.md#change-settings) says
  what a change does to what is there.
- Modules of yours may lie beside the file.

Ten settings matter first:

| setting | default | meaning |
|---|---|---|"""
ERRORS = f"""{NOTE}
# Errors

Every exception of rlbuffer is an `RlbufferError` (`from rlbuffer import errors`). Its message says what happened with
its values, where, and what to do; the table has what each kind means. A command that ends with one prints the message
in one line, the traceback with `--debug`, and has its exit code.

| exit code | meaning |
|---|---|
| 0 | everything was done |
| 1 | failure |
| 2 | usage: an argument or an option that cannot be |
| 3 | settings |
| 4 | the server cannot be reached, or refuses |
| 5 | timed out |
| 130 | interrupted by ctrl-C |

| exception | means | is also | exit code |
|---|---|---|---|"""
RECORD_HEAD = f"""{NOTE}
# Records

What a worker makes, what the batcher decides about, and what a trainer gets: frozen dataclasses over numpy arrays,
checked when they are made. `T` is a number of tokens, `N` of rollouts. All of them are in `rlbuffer.records`, most in
`rlbuffer` itself."""
CLI = f"""{NOTE}
# Command line

Results are on stdout, what a command says while it works on stderr. [Errors](errors.md) has the exit codes,
[operate](../guide/operate.md) what to type when. Nearly every command takes:

| option | meaning |
|---|---|"""
METRICS_HEAD = f"""{NOTE}
# Prometheus and JSON

`[metrics] listen = "127.0.0.1:9464"` lets `serve`, every worker and the trainer's rank 0 answer over HTTP:

```text
curl -s http://127.0.0.1:9464/metrics     # Prometheus's text format
curl -s http://127.0.0.1:9464/status      # the same numbers as JSON
```

The first process of a host takes that port, the next ones those after it, and each says which (`metrics: http://...`).
An address without a host is this machine only; there is no password, so let others in through what you trust. A process
that cannot listen says so and works on. Figures are made when somebody asks, beside the work.

Every sample has the label `run`; a worker's has `worker`, too. Ratios are 0-1. Ids of groups, rollouts and prompts are
nowhere a label; the first 64 envs and 16 named rewards of each have a label of their own, what comes after them is
`_other`. Counters and histograms start with the process, those by the ledger with the run. A metric without a value yet
is left out.

[Operate](../guide/operate.md#prometheus-and-grafana) has a configuration of Prometheus with alert rules and a
dashboard for Grafana. [Metrics](metrics.md) has what `metrics.jsonl`, TensorBoard and W&B get."""
TITLES = {"serve": "`rlbuffer serve`", "worker": "`rlbuffer worker`", "train": "`rlbuffer train`"}
FIRST = (
    ("batcher", "row_tokens"),
    ("batcher", "micro_batches_per_rank"),
    ("batcher", "max_age"),
    ("batcher", "lookahead"),
    ("batcher", "budgets"),
    ("batcher", "advantage"),
    ("trainer", "world_size"),
    ("trainer.loss", "name"),
    ("trainer.optimizer", "learning_rate"),
    ("trainer.checkpoint", "every"),
)
"""Table and name of the settings to look at before the others."""
RECORDS = (
    *("Rollout", "VersionSpan", "Turn", "Group", "Ticket", "Pushed", "PolicyVersion"),
    *("Step", "MicroBatch", "Sample", "Padded", "Normalizers", "AdapterProgress"),
)
"""Records that a worker or a trainer of the user's own has in its hands; the batcher's follow."""
COMMON = ("--config", "--redis", "--run", "--home", "--debug")
"""Options that nearly every command has."""


class Setting(NamedTuple):
    """One value of ``rlbuffer.toml``."""

    name: str
    default: str
    values: str
    meaning: str


class Table(NamedTuple):
    """One table of ``rlbuffer.toml``, with the settings that stand right in it."""

    path: str
    meaning: str
    settings: list[Setting]


# -- settings ------------------------------------------------------------------------------------------------------
def tables(cls: type, path: str = "", given: Any = None) -> Iterator[Table]:
    """A table and those inside it, in the order of the code; `given` is an instance that holds the defaults."""
    own, inner = [], []
    for name, annotation, default, meaning in _fields(cls):
        below, is_named = _section(annotation)
        default = default if given is None else getattr(given, name)
        if below is None:
            own.append(Setting(name, _value(default), _values(annotation), meaning))
        else:
            inner.append((below, f"{path}.{name}".lstrip(".") + ".NAME" * is_named, None if is_named else default))
    yield Table(path, _summary(cls), own)
    for below, place, held_by in inner:
        yield from tables(below, place, held_by)


def _fields(cls: type) -> Iterator[tuple[str, Any, Any, str]]:
    """(name, annotation, default, meaning) of a section's fields."""
    if issubclass(cls, BaseModel):
        for name, field in cls.model_fields.items():
            default = field.get_default(call_default_factory=True)
            annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            yield name, annotation, (... if field.is_required() else default), field.description or ""
        return
    hints, meanings = get_type_hints(cls, include_extras=True), field_docs(cls)
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        yield item.name, hints[item.name], default, meanings.get(item.name, "")


def field_docs(cls: type) -> dict[str, str]:
    """Field, or member -> the docstring below it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    out = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        targets = [before.target] if isinstance(before, ast.AnnAssign) else getattr(before, "targets", [])
        if targets and isinstance(name := targets[0], ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            out[name.id] = _prose(inspect.cleandoc(str(text)))
    return out


def _section(annotation: Any) -> tuple[type | None, bool]:
    """The section that an annotation is, or holds under the user's names, and which of the two; None: a value."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)):
        return annotation, False
    if get_origin(annotation) is not None and _is(annotation, Mapping):
        inner = _section(get_args(annotation)[1])[0]
        return inner, inner is not None
    return None, False


def _is(annotation: Any, kind: type) -> bool:
    origin = get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, kind)


def _values(annotation: Any) -> str:
    """An annotation in words: ``integer, from 1``."""
    bounds = []
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        limits = {key: getattr(m, key) for m in metadata for key in ("ge", "gt", "le", "lt") if hasattr(m, key)}
        words = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
        bounds = [f"{words[key]} {_number(limit)}" for key, limit in limits.items() if abs(limit) < 2**62]
        if _is(annotation, tuple) and not bounds:
            return "list"
    if get_origin(annotation) in (Union, types.UnionType):
        arms = dict.fromkeys(_values(arm) for arm in get_args(annotation) if arm is not type(None))
        return ", ".join([" or ".join(arms), *bounds])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    kinds = ((bool, "true or false"), (int, "integer"), (float, "number"), (str, "text"), (Path, "path"))
    word = next((word for kind, word in kinds if _is(annotation, kind)), "")
    return ", ".join([word or ("list" if _is(annotation, tuple) else "table"), *bounds])


def _number(value: float) -> str:
    return f"{value:g}"


def _value(value: Any) -> str:
    """A default as TOML has it."""
    if value is ... or value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Mapping):
        return "`{}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(_value(item).strip("`") for item in value) + "]`"
    return f'`"{value}"`' if isinstance(value, str | Path) else f"`{value}`"


def settings() -> str:
    """The page of all settings."""
    found = list(tables(RunSettings))
    page = [SETTINGS]
    for section, name in FIRST:
        [(path, setting)] = [
            (table.path, setting)
            for table in found
            for setting in table.settings
            if (table.path, setting.name) == (section, name)
        ]
        page.append(f"| `{path}.{name}` | {setting.default} | {_cell(setting.meaning)} |")
    for table in found:
        page += [f"\n## `[{table.path}]`\n" if table.path else "\n## At the top of the file\n"]
        if table.path:
            page += [f"{table.meaning}\n"]
        page += ["| setting | values | default | meaning |", "|---|---|---|---|"]
        page += [f"| `{s.name}` | {_cell(s.values)} | {s.default} | {_cell(s.meaning)} |" for s in table.settings]
    return "\n".join(page) + "\n"


# -- errors --------------------------------------------------------------------------------------------------------
def error_page() -> str:
    """The page of all exceptions."""
    page = [ERRORS]
    for name, cls in vars(errors).items():
        if isinstance(cls, type) and issubclass(cls, errors.RlbufferError) and cls.__module__ == errors.__name__:
            bases = [f"`{base.__name__}`" for base in cls.__bases__ if base not in (errors.RlbufferError, Exception)]
            meaning = _cell(_prose(inspect.getdoc(cls) or ""))
            page.append(f"| `{name}` | {meaning} | {', '.join(bases)} | {cls.exit_code} |")
    return "\n".join(page) + "\n"


# -- records -------------------------------------------------------------------------------------------------------
def record_page() -> str:
    """The page of the records that a worker makes and a trainer gets."""
    page = [RECORD_HEAD]
    for name in dict.fromkeys((*RECORDS, *records.__all__)):
        cls = getattr(records, name)
        if isinstance(cls, type):
            heads, rows = _words(cls) if issubclass(cls, StrEnum) else _record(cls)
            if rows:
                page += [f"\n## {name}\n", *_paragraphs(inspect.getdoc(cls) or ""), *_table(heads, rows)]
    return "\n".join(page) + "\n"


def _words(cls: type[StrEnum]) -> tuple[list[str], list[list[str]]]:
    """(column heads, rows) of an enum's members."""
    return ["word", "meaning"], [[f"`{cls[member]}`", text] for member, text in field_docs(cls).items()]


def _record(cls: type) -> tuple[list[str], list[list[str]]]:
    """(column heads, rows) of the fields of a dataclass or a named tuple; no rows for another class."""
    is_record = dataclasses.is_dataclass(cls)
    fields = [field.name for field in dataclasses.fields(cls)] if is_record else getattr(cls, "_fields", ())
    meanings = field_docs(cls) if fields else {}
    shown = [field for field in fields if not field.startswith("_")]
    return ["field", "type", "meaning"], [[f"`{f}`", f"`{_annotation(cls, f)}`", meanings.get(f, "")] for f in shown]


def _table(heads: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    yield from (f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)


def _annotation(cls: type, field: str) -> str:
    """The type of a field, as the code has it."""
    annotation = inspect.get_annotations(cls)[field]
    text = annotation if isinstance(annotation, str) else str(annotation.__forward_arg__)
    return re.sub(r"NDArray\[np\.(\w+?)_?\]", r"\1 array", text).replace("NDArray[Any]", "array")


def _paragraphs(doc: str) -> Iterator[str]:
    """The text of a docstring, and what it raises; its examples stay in the code."""
    for part in re.split(r"\n\s*\n", doc):
        first = part.strip().splitlines()[0] if part.strip() else ""
        if first.startswith("Raises"):
            yield "Raises " + _prose(" ".join(line.strip() for line in part.strip().splitlines()[1:])) + "\n"
        elif first.endswith(":") and len(first.split()) == 1:
            continue
        elif ">>>" not in part and first:
            is_drawn = part.startswith("    ") or "->" in first
            yield f"```text\n{part.rstrip()}\n```\n" if is_drawn else _prose(part) + "\n"


# -- the command line ----------------------------------------------------------------------------------------------
def cli_page() -> str:
    """The page of all commands."""
    page = [CLI]
    commands = {name: importlib.import_module(f"rlbuffer_cli.commands.{name}").command for name in COMMANDS}
    shared = {p.opts[0]: p for p in commands["serve"].params if p.opts[0] in COMMON}
    page += [_option(shared[option]) for option in COMMON]
    for name, command in commands.items():
        page += _command(f"rlbuffer {name}", command, "##")
    return "\n".join(page) + "\n"


def _command(path: str, command: click.Command, level: str) -> Iterator[str]:
    yield f"\n{level} {path}\n"
    if not isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        yield f"```text\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```\n"
    for part in re.split(r"\n\s*\n", inspect.cleandoc(command.help or "")):
        if not part.startswith("\b"):
            yield _prose(part) + "\n"
            continue
        title, *lines = part.strip("\b\n").splitlines()
        drawn = inspect.cleandoc("\n" + "\n".join(lines))
        yield f"{title}\n\n```text\n{drawn}\n```\n" if lines else title
    options = [p for p in command.params if isinstance(p, click.Option) and p.opts[0] not in COMMON]
    if options:
        yield from ("| option | meaning |", "|---|---|")
        yield from map(_option, options)
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from _command(f"{path} {name}", inner, level + "#")


def _option(option: click.Parameter) -> str:
    assert isinstance(option, click.Option)
    names = ", ".join([*option.opts, *option.secondary_opts])
    choices = "|".join(option.type.choices) if isinstance(option.type, click.Choice) else ""
    value = "" if option.is_flag else " " + (choices or option.metavar or option.type.name.upper())
    default = f" Default: {option.default}." if option.show_default and option.default not in (None, False) else ""
    required = " Required." if option.required else ""
    return f"| `{_cell(names + value)}` | {_cell((option.help or '') + default + required)} |"


# -- text ----------------------------------------------------------------------------------------------------------
def _prose(text: str) -> str:
    """A docstring's text in one line, with Markdown's marks."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _summary(cls: type) -> str:
    """The docstring of a section, without the name of the table before it."""
    first = _prose((inspect.getdoc(cls) or "").split("\n\n")[0])
    text = re.sub(r"^`\[[\w.]+\]`: ", "", first)
    return text[:1].upper() + text[1:]


# -- metrics -------------------------------------------------------------------------------------------------------
def metrics_page() -> str:
    """The page of all that the metrics endpoints answer."""
    page = [METRICS_HEAD]
    for process, metrics in METRICS.items():
        page.append(f"\n## {TITLES[process]}\n")
        rows = [
            [f"`{METRIC_PREFIX}{m.name}`", m.kind, m.unit, ", ".join(f"`{n}`" for n in m.labels), m.meaning, m.record]
            for m in metrics
        ]
        heads = ["metric", "kind", "unit", "labels", "meaning"]
        is_train = process == "train"
        rows = [row[:5] + [f"`{row[5]}`" if row[5] else ""] * is_train for row in rows]
        page += _table(heads + ["in metrics.jsonl"] * is_train, rows)
    return "\n".join(page) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings,
    "errors.md": error_page,
    "records.md": record_page,
    "cli.md": cli_page,
    "prometheus.md": metrics_page,
}
"""File -> what makes its text."""

if __name__ == "__main__":
    for file, make in PAGES.items():
        (HERE / file).write_text(make(), encoding="utf-8")
        print(HERE / file)
