"""``rlbuffer backup``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from rlbuffer.narration.numbers import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import echo, say


@click.command("backup")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@options.common
@click.option("--force", is_flag=True, help="Although FILE exists.")
@click.option("--json", "as_json", is_flag=True, help="One object when it is done.")
def command(file: Path, force: bool, as_json: bool, given: options.Given) -> int:
    """Write everything that the server holds of a run into a file, also while it runs.

    Pool, steps, ledger, history and payloads, as of one moment; checkpoints and weights on the disk are not in it. The
    file appears under its name when it is whole. While it is written, payloads of retired steps stay in the server's
    memory. `rlbuffer restore` reads it, on any version of Redis or Valkey.

    \b
    Example:
      rlbuffer backup math.rlb --run math
    """
    from rlbuffer.errors import BackupError
    from rlbuffer.store.backup.backup import write_backup
    from rlbuffer.store.redis_store import RedisStore
    from rlbuffer_cli.session import open_existing

    if file.exists() and not force:
        raise BackupError(f"{file} exists: use another name, or --force")
    with open_existing(given.load(), run_given=given.run is not None) as buffer:
        if not isinstance(buffer.store, RedisStore):
            raise BackupError("only a run on a server can be backed up")
        report = write_backup(buffer.store, file, lambda line: say(line, err=True))
    if as_json:
        echo(json.dumps({"schema": "rlbuffer.backup/1", "file": str(file), **asdict(report)}))
        return 0
    missing = f"; {plural(report.missing, 'payload')} missing already" if report.missing else ""
    say(
        f'run "{report.run}" at step {report.step} is in {file}: {report.bytes / 2**20:.1f} MiB, '
        f"{plural(report.payload_keys, 'payload key')}{missing}",
        err=True,
    )
    return 0
