"""``rlbuffer runs``."""

from __future__ import annotations

import json
import time

import click

from rlbuffer_cli import options
from rlbuffer_cli.options import echo

RUN_HEADER = ("run", "step", "trained", "pending rollouts", "opened")
RUN_NUMBERS = frozenset({"step", "trained", "pending rollouts"})


@click.command("runs")
@options.common
@click.option("--json", "as_json", is_flag=True, help="One object per run.")
def command(given: options.Given, as_json: bool) -> int:
    """List the runs that the server holds. Changes nothing.

    \b
    Example:
      rlbuffer runs --redis redis://host:6379
    """
    from rlbuffer.client.buffer import connect
    from rlbuffer.errors import RunDamaged, RunGone, SchemaMismatch
    from rlbuffer_cli.render.text import show_table
    from rlbuffer_cli.session import check_home

    loaded = given.load()
    check_home(loaded)
    url, origin = loaded.settings.redis_url, options.redis_origin(loaded)
    with connect(url, run=loaded.settings.run, config=loaded.settings, name="runs", origin=origin) as buffer:
        opened_at_of = {name: at for name, at in buffer.store.runs().items() if given.run in (None, name)}
        now = buffer.store.now()
        address = buffer.store.server()["address"]
    if not opened_at_of and not as_json:
        echo(f"no runs on {address}")
    rows: list[list[str]] = []
    unreadable: list[str] = []
    for name, opened in opened_at_of.items():
        with connect(url, run=name, config=loaded.settings, name="runs", origin=origin) as other:
            try:
                meta, trainer, total = other.store.meta(), other.store.trainer(), other.ledger().total()
            except SchemaMismatch as error:
                if as_json:
                    echo(json.dumps({"schema": "rlbuffer.run/1", "run": name, "schema_of_run": error.schema}))
                else:  # named, and keeps nobody from seeing the others
                    unreadable.append(f"{name} ! {str(error).partition(' was ')[2]}")
                continue
            except RunDamaged as error:
                if as_json:
                    echo(json.dumps({"schema": "rlbuffer.run/1", "run": name, "damaged": str(error)}))
                else:
                    unreadable.append(f"{name} ! {error}")
                continue
            except RunGone:
                continue  # deleted between the two looks
        record = {
            "schema": "rlbuffer.run/1",
            "run": name,
            "step": meta.step,
            "trained": trainer.trained,
            "epoch": meta.epoch,
            "pending_rollouts": total.pending[0],
            "trained_rollouts": total.trained[0],
            "opened_seconds_ago": round(max(0.0, now - opened), 1),
        }
        if as_json:
            echo(json.dumps(record))
            continue
        opened_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(opened))
        rows.append([name, str(meta.step), str(trainer.trained), f"{total.pending[0]:,}", opened_at])
    if rows:
        show_table(RUN_HEADER, rows, right=RUN_NUMBERS, optional=("opened", "pending rollouts"))
    for line in unreadable:
        echo(line)
    return 0
