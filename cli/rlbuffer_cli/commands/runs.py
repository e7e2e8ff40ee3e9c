"""``rlbuffer runs``: the runs of a server, each as a whole: listed, dumped, restored, taken back, removed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlbuffer.state.text import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import echo, say
from rlbuffer_cli.starting import starting

if TYPE_CHECKING:
    from rlbuffer.store.operator import OperatorStore

RUN_HEADER = ("run", "step", "trained", "pending rollouts", "opened")
RUN_NUMBERS = frozenset({"step", "trained", "pending rollouts"})

FILE = click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))


@click.group("runs")
def command() -> None:
    """List, dump, restore, take back and remove whole runs.

    \b
    Example:
      rlbuffer runs list --redis redis://host:6379
    """


@command.command("list")
@options.common
@click.option("--json", "as_json", is_flag=True, help="One object per run.")
def list_runs(given: options.Given, as_json: bool) -> int:
    """List the runs that the server holds. Changes nothing.

    \b
    Example:
      rlbuffer runs list --redis redis://host:6379
    """
    from rlbuffer.client.buffer import connect
    from rlbuffer.errors import RunDamaged, RunGone, SchemaMismatch
    from rlbuffer_cli import look
    from rlbuffer_cli.session import check_home
    from rlbuffer_cli.table import Printed, of_tuples

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
        look.show(Printed(of_tuples("runs", RUN_HEADER, RUN_NUMBERS), rows))
    for line in unreadable:
        echo(line)
    return 0


@command.command("dump")
@FILE
@options.common
@click.option("--force", is_flag=True, help="Although FILE exists.")
@click.option("--json", "as_json", is_flag=True, help="One object when it is done.")
def dump_run(file: Path, force: bool, as_json: bool, given: options.Given) -> int:
    """Write everything that the server holds of a run into a file, while nobody works for it.

    Pool, steps, ledger, history and payloads; checkpoints and weights on the disk are not in it. Refused while a
    batcher leads the run, or when anybody changes it meanwhile. The file appears under its name when it is whole. A
    server of the same kind reads it, in the same version or a newer one.

    \b
    Example:
      rlbuffer runs dump math.dump --run math
    """
    from rlbuffer.errors import DumpError
    from rlbuffer.store.dump import dump
    from rlbuffer.store.operator import OperatorStore
    from rlbuffer_cli.session import open_existing

    if file.exists() and not force:
        raise DumpError(f"{file} exists: use another name, or --force")
    with open_existing(given.load(), run_given=given.run is not None) as buffer:
        dumped = dump(buffer.role(OperatorStore), file, lambda keys: starting(f"{keys} keys"))
    if as_json:
        echo(json.dumps({"schema": "rlbuffer.dump/1", "file": str(file), **asdict(dumped)}))
        return 0
    size = file.stat().st_size / 2**20
    say(f'run "{dumped.run}" at step {dumped.step} is in {file}: {plural(dumped.keys, "key")}, {size:.1f} MiB')
    return 0


@command.command("restore")
@FILE
@options.common
@click.option("--json", "as_json", is_flag=True, help="One object when it is done.")
def restore_run(file: Path, as_json: bool, given: options.Given) -> int:
    """Put a dumped run onto a server, under its name.

    Refused when that run exists. The file is read through and checked first. Start `rlbuffer serve`, the trainer and
    the workers afterwards. A trainer that is ahead of the dump hands back what it has trained since, and none of it
    trains again. What a restore left that was killed is no run; the same command begins it again.

    \b
    Example:
      rlbuffer runs restore math.dump --redis redis://new-host:6379
    """
    from rlbuffer.client.buffer import connect
    from rlbuffer.store.dump import read, restore
    from rlbuffer.store.operator import OperatorStore

    name = read(file).run
    if given.run not in (None, name):
        raise click.UsageError(f"{file} holds run {name!r}, and --run is {given.run!r}: a run keeps its name")
    loaded = replace(given, run=name).load()
    url, origin = loaded.settings.redis_url, options.redis_origin(loaded)
    with connect(url, run=name, config=loaded.settings, name="restore", origin=origin) as buffer:
        restored = restore(buffer.role(OperatorStore), file, lambda keys: starting(f"{keys} keys"))
        address = buffer.store.server()["address"]
    if as_json:
        echo(json.dumps({"schema": "rlbuffer.restore/1", "file": str(file), **asdict(restored)}))
        return 0
    # The options that were typed here must be typed there: without them, verify looks at another server.
    verify = f"rlbuffer verify {given.again(name)}"
    say(f'run "{name}" at step {restored.step} is on {address}: {plural(restored.keys, "key")}. Check it: {verify}')
    return 0


@command.command("void")
@click.argument("number", metavar="N", type=click.IntRange(min=1))
@options.common
@click.option("--force", is_flag=True, help="Although a trainer is at work; it ends.")
def void(number: int, force: bool, given: options.Given) -> int:
    """Take step N and what follows it out of the run.

    Their rollouts drop as void and are not trained again; what is pending stays. The run goes on from the step before
    in a new epoch. The trainer takes its newest checkpoint, so those of later steps must be moved away first.

    \b
    Example:
      rlbuffer runs void 120 --run math
    """
    return _take_back(given, number - 1, lambda store: store.void_from(number, force=force))


@command.command("rewind")
@click.argument("number", metavar="N", type=click.IntRange(min=0))
@options.common
@click.option("--force", is_flag=True, help="Although a trainer is at work (it ends), or step N was retired.")
def rewind(number: int, force: bool, given: options.Given) -> int:
    """Take a run back to step N, and drop everything that is pending.

    The steps after N and all pending groups drop as void; policy versions above N are taken back. The run goes on from
    step N in a new epoch. The trainer takes its newest checkpoint, so those of later steps must be moved away first.
    With --force N may also be a step that was retired: steps up to the retired one stay counted as trained.

    \b
    Example:
      rlbuffer runs rewind 100 --run math
    """
    return _take_back(given, number, lambda store: store.rewind(number, force=force))


def _take_back(given: options.Given, step: int, ask: Callable[[OperatorStore], Mapping[str, Any]]) -> int:
    from rlbuffer.store.operator import OperatorStore
    from rlbuffer_cli.session import open_existing, resume_hint

    loaded = given.load()
    with open_existing(loaded, run_given=given.run is not None) as buffer:
        outcome, name = ask(buffer.role(OperatorStore)), buffer.run
    void = f"{plural(outcome['steps'], 'step')}, {plural(outcome['entries'], 'pending push', 'pending pushes')}"
    say(
        f'run "{name}" goes on from step {step} in epoch {outcome["epoch"]}; void: {void}. '
        f"{resume_hint(loaded.settings, name, step)}"
    )
    return 0


@command.command("reset")
@click.argument("name", metavar="RUN")
@options.common
@click.option("--yes", is_flag=True, help="Do it; without, it is only said what would go.")
@click.option("--force", is_flag=True, help="Although processes of the run are at work.")
def reset(name: str, yes: bool, force: bool, given: options.Given) -> int:
    """Remove a run from the server, with everything in it.

    Pool, steps, payloads, ledger and history; checkpoints and weights on the disk stay. Refused while processes of the
    run are at work, unless --force: a batcher or worker that is still there begins the run anew.

    \b
    Example:
      rlbuffer runs reset math --yes
    """
    if given.run not in (None, name):
        raise click.UsageError(f"the run is named twice: {name!r} and --run {given.run!r}")
    from rlbuffer.errors import RlbufferError, RunDamaged
    from rlbuffer.store.operator import OperatorStore
    from rlbuffer_cli.session import at_work, open_existing

    with open_existing(replace(given, run=name).load(), run_given=True, even_damaged=True) as buffer:
        try:
            step = plural(buffer.store.meta().step, "step")
        except RunDamaged:
            step = "without its meta"
        content = f"{step}, {plural(buffer.ledger().total().pending[0], 'pending rollout')}"
        if not yes:
            raise click.UsageError(f'this removes run "{name}" ({content}) for good: say so with --yes')
        processes = [] if force else at_work(buffer)
        if processes:
            raise RlbufferError(
                f"processes of run {name!r} are at work, or were a few seconds ago: {', '.join(processes)}. Stop them "
                "first: what is still there begins the run anew. --force removes it all the same"
            )
        keys = buffer.role(OperatorStore).delete_run()
    say(f'run "{name}" ({content}) is gone: {plural(keys, "key")} removed')
    return 0
