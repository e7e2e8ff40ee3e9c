"""``rlbuffer config``."""

from __future__ import annotations

import json
from typing import Any

import click

from rlbuffer_cli import options


@click.group("config")
def command() -> None:
    """Check the settings, or show them with where each came from.

    Settings come from rlbuffer.toml, then from RLBUFFER_* variables (RLBUFFER_BATCHER__MAX_AGE is batcher.max_age),
    then from flags; the last one wins.
    """


@command.command("check")
@options.common
def check(config: str | None, redis: str | None, run: str | None, home: str | None) -> int:
    """Load the settings and say whether they can work. Exit code 3 when not.

    \b
    Example:
      rlbuffer config check --config rlbuffer.toml
    """
    loaded = options.load(config, redis, run, home)
    where = str(loaded.file) if loaded.file else "no config file (all defaults)"
    given, warnings = len(loaded.sources), len(loaded.warnings)
    click.echo(f"ok: {where}, {given} setting{'s' * (given != 1)} given, {warnings} warning{'s' * (warnings != 1)}")
    return 0


@command.command("show")
@options.common
@click.option("--sources", is_flag=True, help="Also say where each value came from.")
@click.option("--json", "as_json", is_flag=True, help="One object per setting.")
def show(config: str | None, redis: str | None, run: str | None, home: str | None, sources: bool, as_json: bool) -> int:
    """Print every setting as it counts.

    \b
    Example:
      RLBUFFER_BATCHER__MAX_AGE=2 rlbuffer config show --sources
    """
    loaded = options.load(config, redis, run, home)
    rows = [(name, value, loaded.source(name)) for name, value in loaded.values()]
    if as_json:
        for name, value, source in rows:
            record = {"schema": "rlbuffer.setting/1", "name": name, "value": value, "source": source}
            click.echo(json.dumps(record, default=_plain))
        return 0
    width = max(len(name) for name, _, _ in rows)
    texts = [json.dumps(value, default=_plain) if value is not None else "(not set)" for _, value, _ in rows]
    column = min(max(len(text) for text in texts), 40)
    for (name, _, source), text in zip(rows, texts, strict=True):
        click.echo(f"{name:<{width}} = {text:<{column}}  {source}" if sources else f"{name:<{width}} = {text}")
    return 0


def _plain(value: Any) -> Any:
    if hasattr(value, "items"):
        return dict(value)
    return str(value)
