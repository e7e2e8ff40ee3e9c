"""``rlbuffer runs``: the runs of a server, each as a whole: listed, taken back, removed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from rlbuffer.errors import RlbufferError, RunDamaged, RunGone, SchemaMismatch
from rlbuffer.state.text import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import echo, say, show_json
from rlbuffer_cli.session import at_work, check_home, connected, later_checkpoints, open_existing, open_run, resume_hint

if TYPE_CHECKING:
    from rlbuffer.config.loading import Loaded
    from rlbuffer.config.settings import RunSettings
    from rlbuffer.store.operator import OperatorStore

RUN_HEADER = ("run", "step", "trained", "pending rollouts", "opened")
RUN_NUMBERS = frozenset({"step", "trained", "pending rollouts"})


@options.group("runs")
def command() -> None:
    """List, take back and remove whole runs.

    \b
    Example:
      rlbuffer runs list --redis redis://host:6379
    """


command.renamed = {
    "void": "`rlbuffer runs rewind N --keep-pending`, with N the last step that stays",
    "dump": "`redis-cli --rdb FILE`, which copies the server (docs/guide/operate/back_up.md)",
    "restore": "`redis-server --dbfilename FILE`, which begins with a server's copy (docs/guide/operate/back_up.md)",
}


@command.command("list")
@options.common
@options.json_lines("One object per run.")
def list_runs(given: options.RunFlags) -> int:
    """List the runs that the server holds. Changes nothing.

    \b
    Example:
      rlbuffer runs list --redis redis://host:6379
    """
    from rlbuffer_cli import look
    from rlbuffer_cli.table import Printed, of_tuples

    loaded = given.load()
    check_home(loaded)
    with connected(loaded, "runs") as buffer:
        opened_at = {name: at for name, at in buffer.store.runs().items() if given.run in (None, name)}
        now, address = buffer.store.now(), buffer.store.server()["address"]
    records = [record for name, at in opened_at.items() if (record := _record(loaded, name, max(0.0, now - at)))]
    if options.is_json():
        for record in records:
            show_json(record)
        return 0
    rows = [
        (
            *(r["run"], str(r["step"]), str(r["trained"]), f"{r['pending_rollouts']:,}"),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(opened_at[r["run"]])),
        )
        for r in records
        if "step" in r
    ]
    if rows:
        look.show(Printed(of_tuples("runs", RUN_HEADER, RUN_NUMBERS), rows))
    elif not records:
        echo(f"no runs on {address}")
    for record in records:
        if "step" not in record:
            echo(f"{record['run']} ! {record['problem']}")
    return 0


def _record(loaded: Loaded, name: str, opened_seconds_ago: float) -> dict[str, Any] | None:
    """``rlbuffer.run/1``; of a run that cannot be read the reason why: it keeps nobody from seeing the others. None of
    one that was deleted between the two looks."""
    record = {"schema": "rlbuffer.run/1", "run": name}
    with connected(loaded, "runs", name) as buffer:
        try:
            meta, trainer, total = buffer.store.meta(), buffer.store.trainer(), buffer.ledger().total()
        except SchemaMismatch as error:
            return {**record, "schema_of_run": error.schema, "problem": str(error)}
        except RunDamaged as error:
            return {**record, "damaged": str(error), "problem": str(error)}
        except RunGone:
            return None
    return {
        **record,
        "step": meta.step,
        "trained": trainer.trained,
        "epoch": meta.epoch,
        "pending_rollouts": total.pending[0],
        "trained_rollouts": total.trained[0],
        "opened_seconds_ago": round(opened_seconds_ago, 1),
    }


@command.command("rewind")
@click.argument("number", metavar="N", type=click.IntRange(min=0))
@options.common_of_run
@click.option("--keep-pending", is_flag=True, help="Pending groups stay; else they drop with the steps.")
@options.yes
@click.option("--force", is_flag=True, help="Although a trainer is at work (it ends), or step N was retired.")
def rewind(number: int, keep_pending: bool, yes: bool, force: bool, given: options.RunFlags) -> int:
    """Take a run back to step N.

    The steps after N and all pending groups drop as void, unless an earlier step has trained them, too, and none of
    them trains again; policy versions above N are taken back. With --keep-pending only the steps go. The command says
    first how much that is, and asks. The run goes on from step N in a new epoch. The trainer takes its newest
    checkpoint, so those of later steps must be moved away first. With --force and all that is pending N may also be a
    step that was retired: steps up to the retired one stay counted as trained.

    \b
    Examples:
      rlbuffer runs rewind 100 --run math --yes
      rlbuffer runs rewind 119 --keep-pending    (step 120 and what follows it, and nothing else)
    """

    def ask(store: OperatorStore) -> Mapping[str, Any]:
        return store.void_from(number + 1, force=force) if keep_pending else store.rewind(number, force=force)

    return _take_back(given, number, ask, with_pool=not keep_pending, yes=yes, force=force)


def _take_back(
    given: options.RunFlags,
    step: int,
    ask: Callable[[OperatorStore], Mapping[str, Any]],
    *,
    with_pool: bool,
    yes: bool,
    force: bool,
) -> int:
    from rlbuffer.store.operator import OperatorStore

    with open_run(given) as buffer:
        store = buffer.store.role(OperatorStore)
        lost = "" if yes else _lost(store, buffer.settings, step, with_pool=with_pool, force=force)
        if lost and not options.is_wanted(lost, yes=yes):
            return 1
        outcome, hint = ask(store), resume_hint(buffer.settings, step)
    void = f"{plural(outcome['steps'], 'step')}, {plural(outcome['entries'], 'pending push', 'pending pushes')}"
    say(f'run "{buffer.run}" goes on from step {step} in epoch {outcome["epoch"]}; void: {void}. {hint}')
    return 0


def _lost(store: OperatorStore, settings: RunSettings, step: int, *, with_pool: bool, force: bool) -> str:
    """What goes when the run is taken back to `step`; "" for nothing, or where that will be refused."""
    meta, groups = store.meta(), store.leaving(step, with_pool=with_pool)
    last = meta.step
    if step > last or (step == last and not groups) or (step < meta.retired and not force):
        return ""
    rollouts = sum(rollouts for _, _, rollouts, *_ in groups)
    checkpoints = len(later_checkpoints(settings, step))
    parts = [f"{plural(len(groups), 'group')} ({plural(rollouts, 'rollout')})", plural(last - step, "step")]
    if checkpoints:
        parts.append(f"the use of {plural(checkpoints, 'checkpoint')} of later steps")
    pending = ", with all that is pending," if with_pool else ""
    return (
        f'takes run "{store.run}" back from step {last} to step {step}{pending} for good: it loses {", ".join(parts)}'
    )


@command.command("reset")
@click.argument("name", metavar="RUN")
@options.common
@options.yes
@click.option("--force", is_flag=True, help="Although processes of the run are at work.")
def reset(name: str, yes: bool, force: bool, given: options.RunFlags) -> int:
    """Remove a run from the server, with everything in it.

    Pool, steps, payloads, ledger and history; checkpoints and weights on the disk stay. Refused while processes of the
    run are at work, unless --force: a batcher or worker that is still there begins the run anew.

    \b
    Example:
      rlbuffer runs reset math --yes
    """
    if given.run not in (None, name):
        raise click.UsageError(f"the run is named twice: {name!r} and --run {given.run!r}")
    from rlbuffer.store.operator import OperatorStore

    with open_existing(replace(given, run=name).load(), even_damaged=True) as buffer:
        try:
            step = plural(buffer.store.meta().step, "step")
        except RunDamaged:
            step = "without its meta"
        content = f"{step}, {plural(buffer.ledger().total().pending[0], 'pending rollout')}"
        processes = [] if force else at_work(buffer)
        if processes:
            raise RlbufferError(
                f"processes of run {name!r} are at work, or were a few seconds ago: {', '.join(processes)}. Stop them "
                "first: what is still there begins the run anew. --force removes it all the same"
            )
        if not options.is_wanted(f'removes run "{name}" ({content}) for good', yes=yes):
            return 1
        keys = buffer.store.role(OperatorStore).delete_run()
    say(f'run "{name}" ({content}) is gone: {plural(keys, "key")} removed')
    return 0
