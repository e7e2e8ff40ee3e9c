"""``rlbuffer serve``."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import click

from rlbuffer.errors import RlbufferError, RunGone
from rlbuffer.state.text import plural
from rlbuffer_cli import options
from rlbuffer_cli.session import connected, of_run, open_existing, warn_of_server
from rlbuffer_cli.text import wrapped

if TYPE_CHECKING:
    from rlbuffer.config.loading import Loaded


_log = logging.getLogger("rlbuffer.serve")
DECIDING = (
    *("batcher.row_tokens", "batcher.rows_per_micro_batch", "batcher.micro_batches_per_rank", "batcher.step_"),
    *("batcher.max_age", "batcher.min_group_size", "batcher.budgets", "archive.dir"),
)
"""Settings that the first lines of `serve` show, by the beginnings of their names."""


@options.command("serve")
@options.common
@click.option("--resume", is_flag=True, help="Only go on with a run that is there.")
@click.option("--fresh", is_flag=True, help="Only begin a run: refused when it holds steps or pending groups.")
@click.option("--replace-config", is_flag=True, help="Go on with a run that was started with other batcher settings.")
@options.setting(
    "archive.dir", "Keep every step and every drop in Parquet files there.", flag="--archive", metavar="DIR"
)
@options.display
def command(given: options.RunFlags, resume: bool, fresh: bool, replace_config: bool, display: str) -> int:
    """Run the batcher: decides what each step trains on.

    It reads what workers push, drops what is too old, gives every env its token budget and commits one step after
    the other for the trainer. One batcher leads a run; a second one stands by. Ctrl-C stops it; groups stay.

    \b
    Example:
      rlbuffer serve --run math
      rlbuffer worker --env vcopy --run math      (in a second terminal)
      rlbuffer train --world-size 2 --run math    (in a third)
    """
    from rlbuffer.process.environment import name_process
    from rlbuffer.process.logs import ROOT, heard
    from rlbuffer.process.signals import stop_on_signals
    from rlbuffer.run import members

    if resume and fresh:
        raise click.UsageError("--resume and --fresh exclude each other")
    loaded = given.load(parts=("serve",))
    settings = loaded.settings
    warn_of_server(loaded)
    if resume or fresh:
        _check_run(loaded, resume=resume)
    name_process("serve")
    stop = threading.Event()
    shown = options.choose_display(display)
    began = [time.monotonic()]
    with stop_on_signals(stop), ExitStack() as views:
        write, ready = None, threading.Event()
        if shown == "rich":
            from rlbuffer_cli import live

            opening = f'run "{settings.run}": connecting to the server ...'
            watch = live.LiveRun(settings, title="rlbuffer serve", opening=opening, asks=None, from_end=True)
            ready = watch.may_ask
            views.enter_context(live.shown(watch))
            views.enter_context(watch)
            write = watch.say
        views.enter_context(options.writing(shown, write))
        if shown in ("rich", "plain"):
            views.enter_context(heard(ROOT.name, functools.partial(_take, loaded, began, ready), logging.INFO))
        members.serve(
            settings,
            stop,
            replace_config=replace_config,
            origin=options.redis_origin(loaded),
        )
        _log.info("stopped; groups and steps stay on the server.")
    return 0


def _take(loaded: Loaded, began: list[float], ready: threading.Event, line: Mapping[str, Any]) -> None:
    """Says with which settings this batcher leads when it does; `began`: when it tried to, at first or again."""
    if line["event"] == "leader":
        began[0] = time.monotonic()
    elif line["event"] == "ready":
        rows = banner(loaded, line, time.monotonic() - began[0])
        _log.info("%s", "\n".join(row for text in rows for row in wrapped(text, indent=" " * 4)))
        ready.set()


def _check_run(loaded: Loaded, *, resume: bool) -> None:
    """Raises NotFound when there is nothing to resume, RlbufferError when what shall be fresh is not."""
    if resume:
        open_existing(of_run(loaded, loaded.settings.run)).close()
        return
    with connected(loaded, "serve") as buffer, suppress(RunGone):
        step, pending = buffer.store.meta().step, buffer.ledger().total().pending[0]
        if step or pending:
            raise RlbufferError(
                f"run {buffer.run!r} is not fresh: it holds {plural(step, 'step')} and "
                f"{plural(pending, 'pending rollout')}. `rlbuffer runs reset {buffer.run} --yes` removes it; or use "
                "another name (--run)."
            )


def banner(loaded: Loaded, ready: Mapping[str, Any], seconds: float) -> list[str]:
    """Which server `serve` works with, and the settings that decide with where they came from; `ready` is the line that
    says so."""
    from rlbuffer import __version__
    from rlbuffer_cli.explanation import as_toml

    server = ready["server"]
    where = "embedded" if server.get("embedded") else loaded.place("redis_url")
    limit = f" of {_bytes(server['maxmemory'])}" if server.get("maxmemory") else ""
    memory = f"{_bytes(server.get('used_memory', 0))}{limit}, {server.get('policy', 'noeviction')} ok"
    shown = [
        f"{name} = {as_toml(value)}   ({loaded.place(name)})"
        for name, value in loaded.values()
        if value is not None and name.startswith(DECIDING)
    ]
    return [
        f"rlbuffer {__version__}",
        f"  {server['name']} {server['version']} at {server['address']} ({where}), {memory}",
        *(f"  {line}" for line in (*shown, _memory_needs(server, loaded)) if line),
        f"  ready in {seconds:.1f} s.   look: {options.program()} inspect --run {ready['run']}   stop: ctrl-c",
    ]


def _memory_needs(server: Mapping[str, Any], loaded: Loaded) -> str:
    """The share of the server's memory that the run's steps take, at most where they close at a number of groups;
    "" where that is not known."""
    from rlbuffer.config.memory_needs import forecast_of, mib

    limit = server.get("maxmemory", 0)
    forecast = forecast_of(loaded.settings, limit) if limit else None
    if forecast is None:
        return ""
    word, share = "up to" if forecast.is_most else "about", 100 * forecast.needed / limit
    takes = f"a step takes {word} {mib(forecast.step_bytes)}, {forecast.steps} at once {share:.0f} % of the server's"
    return f"{takes}   ({loaded.place('batcher.row_tokens')})"


def _bytes(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"
