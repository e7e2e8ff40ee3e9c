"""Files of settings to begin with: a few lines for a run of one's own, and every setting with its default."""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from importlib import resources

from rlbuffer.config.explain import ExplainedTable, tables
from rlbuffer_cli.explanation import as_toml

WIDTH = 118
"""Columns of a comment."""
RATE_OF_A_MODEL = "1e-5"
"""Learning rate for a model that has learnt to speak; what suits a fresh one would make it forget that."""


def beginning(envs: Sequence[str], model: str | None) -> str:
    """A file for a run of these envs: what nearly everybody changes first, and nothing that has a good default.

    Args:
        envs: built-in ones, or ``package.module:factory``.
        model: a Hugging Face model's directory; None: a fresh model of the demo's size and tokens.
    """
    sections: dict[str, str] = {}
    for env in envs:
        key = re.sub(r"[^a-z0-9_]", "_", env.rpartition(":")[2].lower()) or "env"
        sections[f"{key}_{len(sections) + 1}" if key in sections else key] = env
    demo = tomllib.loads((resources.files("rlbuffer.run") / "demo.toml").read_text(encoding="utf-8"))
    fresh = [f"{key} = {as_toml(value)}" for key, value in demo["model"]["config"].items()]
    rate = RATE_OF_A_MODEL if model else demo["trainer"]["optimizer"]["learning_rate"]
    parts = [
        [
            "# Every other setting, with its default: rlbuffer config init --all -",
            f"run = {as_toml(next(iter(sections)))}",
        ],
        ["[model]", f"path = {as_toml(model)}"] if model else ["[model.config]", *fresh],
        ["[batcher]", "step_groups = 8"],
        ["[trainer]", "steps = 200", f"optimizer.learning_rate = {rate}"],
        *([f"[worker.{key}]", f"env = {as_toml(env)}", "group_size = 8"] for key, env in sections.items()),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def reference() -> str:
    """Every setting with its default, what it may be and what it means. The file says what no file says, too."""
    head = (
        "Every setting of rlbuffer with its default. A file needs only what differs from it; a setting that does not "
        "exist is an error. Variables override a file (RLBUFFER_BATCHER__MAX_AGE is batcher.max_age), flags override "
        "variables. Tables whose NAME you choose are comments here."
    )
    return "\n\n".join(["\n".join(_comment(head)), *("\n".join(_lines(table)) for table in tables())]) + "\n"


def _lines(table: ExplainedTable) -> Iterator[str]:
    """A table that has a NAME is a comment: there is none before somebody chooses one."""
    mark = "# " if "NAME" in table.name else ""
    if table.name:
        yield from _comment(table.meaning)
        yield f"{mark}[{table.name}]"
    for setting in table.settings:
        key = setting.name.rpartition(".")[2]
        default = setting.default.strip("`")
        is_given = default not in ("not set", "required")
        yield from _comment(f"{setting.meaning} ({setting.values.replace('`', '')})")
        yield f"{mark}{key} = {default}" if is_given else f"# {key} = ({default})"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")
