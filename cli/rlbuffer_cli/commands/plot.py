"""``rlbuffer plot``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlbuffer_cli import options
from rlbuffer_cli.options import echo, say, show_json
from rlbuffer_cli.session import of_run, open_existing
from rlbuffer_cli.starting import clear
from rlbuffer_cli.text import columns_of

if TYPE_CHECKING:
    from rlbuffer.config.loading import Loaded
    from rlbuffer.config.settings import RunSettings


@options.command("plot")
@click.argument("field", metavar="WHAT")
@click.argument("runs", metavar="[RUN|FILE|DIR]...", nargs=-1)
@options.common_of_run
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write .png or .svg instead of drawing."
)
@options.json_lines("One object per point.")
def command(field: str, runs: tuple[str, ...], given: options.RunFlags, output: Path | None) -> int:
    """Draw reward, loss, age, fill, drops or any other figure over the steps. Changes nothing.

    WHAT is a field of metrics.jsonl (reward, loss, entropy, kl, age, wait, tokens_per_second), with a dot for one entry
    of a table (rewards.math); a table is a line per entry: rewards, ages, tokens_by_env, seconds. `fill` and `drops`
    come from the server's history, and so does the rest where metrics.jsonl cannot be read from here. Several runs,
    metrics files or archives, are laid over each other. A folder of an archive, named with a slash, needs no server.

    \b
    Examples:
      rlbuffer plot reward
      rlbuffer plot rewards math math-2 -o rewards.svg
      rlbuffer plot entropy /data/math
    """
    from rlbuffer_cli.plots import FILES, Curve, chart, curves_of, write_chart

    if output is not None and output.suffix not in FILES:
        raise click.UsageError(f"-o {output}: write a name that ends in {' or '.join(FILES)}")
    loaded = given.load()
    curves: list[Curve] = []
    for name in runs or ("",):
        curves += curves_of(_records(name, field, loaded), field, name if len(runs) > 1 else "")
    clear()
    if options.is_json():
        for curve in curves:
            for step, value in curve.points:
                show_json({"schema": "rlbuffer.point/1", "curve": curve.name, "step": step, "value": value})
    if output is not None:
        write_chart(curves, " ".join([field, *runs]), output)
        say(f"wrote {output}", err=True)
    elif not options.is_json():
        is_ascii = "utf" not in (sys.stdout.encoding or "").lower()
        for line in chart(curves, width=columns_of(sys.stdout), is_ascii=is_ascii):
            echo(line)
    return 0


def _records(name: str, field: str, loaded: Loaded) -> Sequence[dict[str, Any]]:
    """The steps of a run, of a metrics file or the folder that it is in, or of an archive; "" for the settings' run."""
    from rlbuffer_cli.plots import (
        FROM_HISTORY,
        HISTORY_RECORDS,
        METRICS_FILE,
        archive_of,
        history_of,
        metrics_of,
    )

    is_of_history = field.partition(".")[0] in FROM_HISTORY
    path = Path(name) if "/" in name or name.endswith(".jsonl") else None
    if path is not None:
        if any(path.glob("steps-*.parquet")):
            return archive_of(path)
        return metrics_of(path / METRICS_FILE if path.is_dir() else path)
    loaded = of_run(loaded, name) if name else loaded

    def trained(settings: RunSettings) -> list[dict[str, Any]] | None:
        file = settings.output_dir / METRICS_FILE
        return metrics_of(file) if not is_of_history and file.is_file() else None

    records = trained(loaded.settings) if loaded.place("run") != "default" else None  # without asking a server
    if records is not None:
        return records
    with open_existing(loaded) as buffer:
        return trained(buffer.settings) or history_of(buffer.store.history(HISTORY_RECORDS))
