"""``rlbuffer restore``."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import click

from rlbuffer.narration.numbers import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import echo, say


@click.command("restore")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@options.common
@click.option("--json", "as_json", is_flag=True, help="One object when it is done.")
def command(file: Path, as_json: bool, given: options.Given) -> int:
    """Put a backed up run onto a server.

    Under its own name, or the one given with --run; refused when that run exists. The file is read through and checked
    first. Nobody leads the run and nothing is out afterwards: start `rlbuffer serve`, the trainer and the workers. A
    trainer that is ahead of the backup hands back what it has trained since, and none of it trains again.

    \b
    Examples:
      rlbuffer restore math.rlb --redis redis://new-host:6379
      rlbuffer restore math.rlb --run math-copy
    """
    from rlbuffer.client.buffer import connect
    from rlbuffer.errors import BackupError
    from rlbuffer.store.backup.restore import check_backup, restore_backup
    from rlbuffer.store.redis_store import RedisStore

    name = given.run or str(check_backup(file)["run"])
    loaded = replace(given, run=name).load()
    settings = loaded.settings
    with connect(
        settings.redis_url, run=name, config=settings, name="restore", origin=options.redis_origin(loaded)
    ) as buffer:
        if not isinstance(buffer.store, RedisStore):
            raise BackupError("a run can only be restored onto a server")
        report = restore_backup(buffer.store, file, lambda line: say(line, err=True))
        address = buffer.store.server()["address"]
    if as_json:
        echo(json.dumps({"schema": "rlbuffer.restore/1", "file": str(file), **asdict(report)}))
        return 0
    # The options that were typed here must be typed there: without it, verify looks at another server.
    typed = {"--redis": given.redis, "--home": given.home, "--config": given.config}
    where = "".join(f" {flag} {shlex.quote(value)}" for flag, value in typed.items() if value is not None)
    say(
        f'run "{report.run}" at step {report.step} is on {address}: {plural(report.control_keys, "control key")}, '
        f"{plural(report.payload_keys, 'payload key')}. Check it: rlbuffer verify --run {report.run}{where}"
    )
    return 0
