"""``rlbuffer serve``."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import datetime
from typing import TYPE_CHECKING

import click

from rlbuffer.state.text import plural
from rlbuffer_cli import options
from rlbuffer_cli.options import echo

if TYPE_CHECKING:
    from rlbuffer.config.loading import Loaded
    from rlbuffer.events.batcher import BatcherEvent, LeaderReady


@click.command("serve")
@options.common
@click.option("--resume", is_flag=True, help="Only go on with a run that is there.")
@click.option("--fresh", is_flag=True, help="Only begin a run: refused when it holds steps or pending groups.")
@click.option("--replace-config", is_flag=True, help="Go on with a run that was started with other batcher settings.")
@click.option("--archive", metavar="DIR", help="Keep every step and every drop in Parquet files there.")
@click.option(
    "--display",
    type=click.Choice(["auto", "rich", "plain", "json", "none"]),
    default="auto",
    help="rich: a line per step, and below what it waits for. plain: lines. json: an object per event. auto: rich on a "
    "terminal, else plain.",
)
def command(
    given: options.Given,
    resume: bool,
    fresh: bool,
    replace_config: bool,
    archive: str | None,
    display: str,
) -> int:
    """Run the batcher: decides what each step trains on.

    It reads what workers push, drops what is too old, gives every env its token budget and commits one step after
    the other for the trainer. One batcher leads a run; a second one stands by. Ctrl-C stops it; groups stay. SIGHUP
    makes it read its config file again and give the run what it says, as `rlbuffer config apply` does.

    \b
    Example:
      rlbuffer serve --run math
      rlbuffer worker --env vcopy --run math      (in a second terminal)
      rlbuffer train --world-size 2 --run math    (in a third)
    """
    from rlbuffer.events.batcher import LeaderReady
    from rlbuffer.events.batcher_narrator import ServeNarrator
    from rlbuffer.events.event import as_object
    from rlbuffer.process.environment import name_process
    from rlbuffer.process.signals import set_on_hangup, stop_on_signals
    from rlbuffer.run import members
    from rlbuffer_cli.render.foot import Foot
    from rlbuffer_cli.render.text import wrapped

    if resume and fresh:
        raise click.UsageError("--resume and --fresh exclude each other")
    loaded = given.load({"archive.dir": ("--archive", archive)}, parts=("serve",))
    settings = loaded.settings
    if resume or fresh:
        _check_run(loaded, resume=resume)
    name_process("serve")
    stop, hangup = threading.Event(), threading.Event()
    set_on_hangup(hangup, stop)
    shown = options.choose_display(display)
    status = _Status(settings.run)
    with stop_on_signals(stop), Foot(status.lines) if shown == "rich" else nullcontext() as foot:
        say = foot.say if foot is not None else echo
        narrator = ServeNarrator(
            lambda line: say(f"{datetime.now():%H:%M:%S} {line}"), None if foot is None else status.wait_for
        )

        def on_event(event: BatcherEvent) -> None:
            if shown == "json":
                echo(json.dumps(as_object(event), default=str))
            elif shown != "none":
                status.hear(event)
                if isinstance(event, LeaderReady):
                    lines = banner(loaded, event, time.monotonic() - status.began)
                    say("\n".join(row for line in lines for row in wrapped(line, indent=" " * 4)))
                narrator(event)

        members.serve(
            settings,
            stop,
            on_event,
            replace_config=replace_config,
            reread=lambda: given.load(parts=("serve",)).settings.batcher,
            hangup=hangup,
            origin=options.redis_origin(loaded),
        )
        narrator.close()
    if shown not in ("json", "none"):
        echo("stopped; groups and steps stay on the server.")
    return 0


class _Status:
    """The lines at the foot: the run's step, and what the batcher waits for."""

    def __init__(self, run: str) -> None:
        self._run = run
        self.step: int | None = None
        """None until the batcher is ready."""
        self.began = time.monotonic()
        """When it tried to lead, at first or again."""
        self._sentence = ""
        self._since = time.monotonic()

    def hear(self, event: BatcherEvent) -> None:
        """Takes in which step the run is at, and since when this batcher tries to lead it."""
        from rlbuffer.events.batcher import LeaderReady, LeadLost, StandingBy, StepCommitted

        if isinstance(event, LeaderReady):
            self.step = event.step
        elif isinstance(event, StepCommitted):
            self.step = event.header.step
        elif isinstance(event, LeadLost | StandingBy):
            self.began = time.monotonic()

    def wait_for(self, sentence: str) -> None:
        """Takes the sentence of what is waited for now, "" for nothing."""
        if not (self._sentence and sentence):
            self._since = time.monotonic()
        self._sentence = sentence

    def lines(self, width: int) -> list[str]:
        from rlbuffer.state.text import duration

        if self.step is None:
            return [f'run "{self._run}": connecting to the server ...']
        if not self._sentence:
            return [f"step {self.step} · at work"]
        seconds = int(time.monotonic() - self._since)
        lasting = f"{seconds} s" if seconds < 10 else duration(seconds)
        return [f"step {self.step} · waiting {lasting}: {self._sentence}"]


def _check_run(loaded: Loaded, *, resume: bool) -> None:
    """Raises NotFound when there is nothing to resume, RlbufferError when what shall be fresh is not."""
    from rlbuffer.client.buffer import connect
    from rlbuffer.errors import NotFound, RlbufferError, RunGone
    from rlbuffer_cli.session import check_home

    settings = loaded.settings
    if resume:
        check_home(loaded)
    with connect(
        settings.redis_url, run=settings.run, config=settings, name="serve", origin=options.redis_origin(loaded)
    ) as buffer:
        store = buffer.store
        try:
            step, pending = store.meta().step, buffer.ledger().total().pending[0]
        except RunGone:
            if not resume:
                return
            runs = ", ".join(sorted(store.runs())[:8])
            there = f" Runs there: {runs}." if runs else ""
            raise NotFound(
                f"there is no run {settings.run!r} to resume on {store.server()['address']}.{there} "
                f"Without --resume it is begun."
            ) from None
        if not resume and (step or pending):
            raise RlbufferError(
                f"run {settings.run!r} is not fresh: it holds {plural(step, 'step')} and "
                f"{plural(pending, 'pending rollout')}. "
                f"`rlbuffer runs reset {settings.run} --yes` removes it; or use another name (--run)."
            )


def banner(loaded: Loaded, ready: LeaderReady, seconds: float) -> list[str]:
    """The sentences of `serve` when it is ready: which server, and the settings that decide with where they came
    from."""
    from rlbuffer import __version__
    from rlbuffer.config.fractions import budgets_at
    from rlbuffer.state.text import percent

    batcher = loaded.settings.batcher
    server = ready.server
    where = "embedded" if server.get("embedded") else loaded.source("redis_url")
    per_rank = batcher.micro_batches_per_rank * batcher.rows_per_micro_batch
    if batcher.step_groups or batcher.step_rollouts:
        size = (
            plural(batcher.step_groups, "group")
            if batcher.step_groups
            else plural(batcher.step_rollouts or 0, "rollout")
        )
        size = f"{size}, rows of {batcher.row_tokens:,} tokens"
    else:
        size = f"{plural(per_rank, 'row')} of {batcher.row_tokens:,} tokens per rank"
    budgets = budgets_at(batcher.budgets, ready.step + 1)
    shares = " · ".join(f"{env} {percent(share)}" for env, share in budgets.items())
    memory = _bytes(server.get("used_memory", 0))
    if server.get("maxmemory"):
        memory += f" of {_bytes(server['maxmemory'])}"
    rows = [
        (
            "redis",
            f"{server['name']} {server['version']} ({where}), {memory}, {server.get('policy', 'noeviction')} ok",
        ),
        ("", str(server["address"])),
        ("step", f"{size}   ({_source(loaded, 'batcher.row_tokens')})"),
        (
            "age",
            f"at most {plural(batcher.max_age, 'version')}   ({_source(loaded, 'batcher.max_age')})",
        ),
        (
            "groups",
            (f"at least {plural(batcher.min_group_size, 'rollout')}   ({_source(loaded, 'batcher.min_group_size')})"),
        ),
        ("budgets", shares or f"{batcher.remainder} (none set)"),
        *([("archive", str(loaded.settings.archive.dir))] if loaded.settings.archive.dir else []),
        *_forecast(ready.forecast, loaded),
    ]
    lines = [f'rlbuffer {__version__} · serving run "{ready.run}" from step {ready.step}']
    lines += [f"  {name:<9} {text}" for name, text in rows]
    lines.append(f"  ready in {seconds:.1f} s.   look: {options.program()} inspect --run {ready.run}   stop: ctrl-c")
    return lines


def _forecast(forecast: Mapping[str, int], loaded: Loaded) -> list[tuple[str, str]]:
    """The share of the server's memory that the run's steps take; nothing where that is not known."""
    if not forecast:
        return []
    size, count = forecast["step_bytes"], forecast["steps"]
    steps = plural(forecast["measured"], "step")
    known = f"mean of {steps}" if forecast["measured"] else _source(loaded, "batcher.row_tokens")
    share = 100 * size * count / forecast["limit"]
    return [("memory", f"a step takes about {_bytes(size)}, {count} at once {share:.0f} % of the server's   ({known})")]


def _bytes(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"


def _source(loaded: Loaded, name: str) -> str:
    return loaded.source(name)
