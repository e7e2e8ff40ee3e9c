"""``rlbuffer demo``."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING, Any

import click

from rlbuffer.process.logs import fields
from rlbuffer_cli import options
from rlbuffer_cli.options import say
from rlbuffer_cli.starting import starting

if TYPE_CHECKING:
    from rlbuffer.config.loading import Loaded
    from rlbuffer.state.step_record import StepRecord
    from rlbuffer.store.records import Ledger
    from rlbuffer_cli.live import Watch

EDGE_STEPS = 10
"""Steps that the rewards `from` and `to` of the summary are means of; fewer in a short run."""


_log = logging.getLogger("rlbuffer.demo")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A whole run: where reward began and ended, what was trained, whether it adds up."""

    run: str
    steps: int
    seconds: float
    first_step_seconds: float | None
    reward_from: float | None
    """Mean over the first `edge_steps`."""
    reward_to: float | None
    """Mean over the last ones."""
    edge_steps: int
    tokens: int
    """Trained."""
    shares: Mapping[str, float]
    """env -> its fraction of the tokens."""
    ledger: Mapping[str, Any]
    """Rollouts: ``pushed``, ``pending``, ``packed``, ``trained``, ``dropped`` (by reason), and if it `balances`."""
    stored: str
    """Folder."""
    parameters_sha256: str | None
    exit_code: int
    restarts: int
    seed: int


@click.command("demo")
@options.common_with(config="the demo's own", run="demo- and the time")
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Trained steps. [default: 150]")
@click.option("--seconds", type=click.FloatRange(1), metavar="S", help="Stop after this long, wherever it is.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Of everything.")
@click.option("--deterministic", is_flag=True, help="One env, one worker, on policy: the same bits in every run.")
@options.display
def command(
    given: options.Given,
    steps: int | None,
    seconds: float | None,
    seed: int,
    deterministic: bool,
    display: str,
) -> int:
    """Watch a tiny model learn: everything on this machine, nothing to set up.

    Starts the embedded server, the batcher, two workers (one per env, sharing every step 70 to 30) and a trainer
    with two ranks, all real processes, and shows what they do. Exit code 0 when the run ended as planned.

    \b
    Examples:
      rlbuffer demo
      rlbuffer demo --steps 300 --seed 1
      rlbuffer demo --deterministic    (twice: the same digest of the parameters)
      rlbuffer inspect            (in another terminal, meanwhile)
      RLBUFFER_METRICS__LISTEN=127.0.0.1:9464 rlbuffer demo    (for curl)
    """
    from rlbuffer.process.signals import stop_on_signals

    if deterministic and given.config is not None:
        raise click.UsageError("--deterministic is the demo's own config: in yours set deterministic = true")
    loaded = _settings(given, steps, seed, deterministic)
    stop = threading.Event()
    with stop_on_signals(stop):
        starting("connecting to the server, loading torch")
        return _Demo(loaded, options.choose_display(display), seconds, seed).run(stop)


def _settings(
    given: options.Given,
    steps: int | None,
    seed: int,
    deterministic: bool,
) -> Loaded:
    from rlbuffer.checks.check import EVERYTHING

    run = given.run or f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    name, workers = ("demo_deterministic.toml", ["vcopy"]) if deterministic else ("demo.toml", ["vcopy", "repeat"])
    with resources.as_file(resources.files("rlbuffer.run") / name) as packaged:
        flags: dict[str, tuple[str, Any]] = {"trainer.steps": ("--steps", steps), "seed": ("--seed", seed)}
        if given.config is None and steps is not None:
            # Steps up to the oldest checkpoint are retired: a short demo shall leave something to inspect, too.
            flags["trainer.checkpoint.every"] = ("--steps", max(1, min(10, steps // 4)))
        for worker in workers if given.config is None else ():
            flags[f"worker.{worker}.env_options.seed"] = ("--seed", seed)
        return replace(given, run=run, config=given.config or str(packaged)).load(flags, parts=EVERYTHING)


class _Demo:
    def __init__(self, loaded: Loaded, shown: str, seconds: float | None, seed: int) -> None:
        self._loaded = loaded
        self._settings = loaded.settings
        self._shown = shown
        self._seconds = seconds
        self._seed = seed
        self._is_time_up = False

    def run(self, stop: threading.Event) -> int:
        from rlbuffer.client.buffer import connect
        from rlbuffer.run.supervisor import Supervisor
        from rlbuffer_cli.live import Watch, shown
        from rlbuffer_cli.session import say_ended

        settings, origin, is_drawn = self._settings, options.redis_origin(self._loaded), self._shown == "rich"
        title = f'rlbuffer demo · run "{settings.run}"'
        on_step = (lambda record: None) if is_drawn else self._on_step  # a view shows the steps
        with (
            connect(settings.redis_url, run=settings.run, config=settings, name="demo", origin=origin) as buffer,
            options.writing(self._shown, clock=False),
        ):
            watch = Watch(settings, title=title, opening="starting the processes ...", asks=is_drawn, on_step=on_step)
            watch.may_ask.set()
            supervisor = Supervisor(settings, say=watch.log if is_drawn else self._relay, origin=origin)
            with shown(watch, is_whole=True) if is_drawn else nullcontext(), watch:
                code = supervisor.run(stop, lambda: self._tick(watch, stop))
                say_ended(buffer, settings, code)
            if self._is_time_up and watch.records:
                code = 0
            elif self._is_time_up:
                say(f"Error: no step was trained within {self._seconds:g} s. See {supervisor.log.path}", err=True)
                code = 5
            self._summarize(watch, buffer.ledger(), code, supervisor.restarts, str(supervisor.log.path))
        return code

    def _tick(self, watch: Watch, stop: threading.Event) -> None:
        if self._seconds is not None and watch.seconds >= self._seconds:
            self._is_time_up = True
            stop.set()

    # -- telling -----------------------------------------------------------------------------------------------------
    def _relay(self, name: str, line: str) -> None:
        if self._shown in ("plain", "json") and name not in ("serve", "train"):
            # Their step lines would only repeat the steps; everything is in the log.
            say(f"{name:<14} {line}", err=True)

    def _on_step(self, record: StepRecord) -> None:
        from rlbuffer_cli.view import step_line

        envs = "  ".join(f"{env} {r:.2f}" for env, r in record.rewards.items() if r is not None)
        text = step_line(record, self._settings.trainer.steps)
        _log.info("%s  %s", text, envs, extra={"fields": record.as_object()})

    def _summarize(self, watch: Watch, ledger: Ledger, code: int, restarts: int, log: str) -> None:
        from rlbuffer.config.fractions import budgets_at

        summary = summary_of(
            watch,
            ledger,
            self._settings.run,
            str(self._settings.output_dir),
            code=code,
            restarts=restarts,
            seed=self._seed,
        )
        budgets = budgets_at(self._settings.batcher.budgets, self._settings.trainer.steps)
        lines = summary_lines(summary, budgets, log, str(self._settings.home))
        _log.info("%s", "\n".join(lines), extra=fields("summary", summary))


def summary_of(
    watch: Watch, ledger: Ledger, run: str, folder: str, *, code: int, restarts: int, seed: int
) -> RunSummary:
    """The summary of a run that has ended with `code`."""
    records = watch.records
    edge = max(1, min(EDGE_STEPS, len(records) // 2))
    tokens: Counter[str] = Counter()
    for record in records:
        tokens.update({env: n for env, n in record.tokens_by_env.items() if n})
    total = ledger.total()
    dropped = sum(d[0] for d in total.dropped.values())
    accounted = total.pending[0] + total.packed[0] + total.trained[0] + dropped
    return RunSummary(
        run=run,
        steps=records[-1].step if records else 0,
        seconds=round(watch.seconds, 2),
        first_step_seconds=None if watch.first_step_seconds is None else round(watch.first_step_seconds, 2),
        reward_from=_mean_reward(records[:edge]),
        reward_to=_mean_reward(records[-edge:]),
        edge_steps=edge,
        tokens=tokens.total(),
        shares={env: n / tokens.total() for env, n in sorted(tokens.items())},
        ledger={
            "pushed": total.pushed[0],
            "pending": total.pending[0],
            "packed": total.packed[0],
            "trained": total.trained[0],
            "dropped": {reason: d[0] for reason, d in total.dropped.items()},
            "balances": accounted == total.pushed[0],
        },
        stored=folder,
        parameters_sha256=next(iter(records[-1].parameters_sha256), None) if records else None,
        exit_code=code,
        restarts=restarts,
        seed=seed,
    )


def _mean_reward(records: Sequence[StepRecord]) -> float | None:
    rewards = [record.reward for record in records if record.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def summary_lines(summary: RunSummary, budgets: Mapping[str, float], log: str, home: str) -> list[str]:
    """The summary for people, with what to type next."""
    from rlbuffer.state.text import amount, duration, plural
    from rlbuffer_cli.text import wrapped

    ledger = summary.ledger
    shares = " · ".join(
        f"{env} {100 * share:.1f}%" + (f" (target {100 * budgets[env]:.0f}%)" if env in budgets else "")
        for env, share in summary.shares.items()
    )
    drops = " ".join(f"{n:,} {reason}" for reason, n in ledger["dropped"].items()) or "0"
    where = "" if home == "~/.rlbuffer" else f" --home {home}"
    how = {0: "done", options.EXIT_INTERRUPTED: "interrupted"}
    head = how.get(summary.exit_code, f"ended early (exit code {summary.exit_code}, see {log})")
    first = summary.first_step_seconds
    when = "" if first is None else f", the first after {duration(first)}"
    if summary.reward_from is None or summary.reward_to is None:
        reward = "no step was trained"
    else:
        reward = (
            f"{summary.reward_from:.3f} -> {summary.reward_to:.3f}  (means of {plural(summary.edge_steps, 'step')})"
        )
    account = (
        f"{plural(ledger['pushed'], 'rollout')} pushed = {ledger['pending']:,} pending + {ledger['packed']:,} packed "
        f"+ {ledger['trained']:,} trained + dropped {drops}"
    )
    return [
        "",
        f"{head}: {plural(summary.steps, 'step')} in {duration(summary.seconds)}{when}",
        f"  reward   {reward}",
        f"  tokens   {amount(summary.tokens)} trained   {shares}",
        *wrapped(f"  ledger   {'balances' if ledger['balances'] else 'DOES NOT BALANCE'}: {account}", indent=" " * 11),
        *([f"  digest   {summary.parameters_sha256} of the parameters"] if summary.parameters_sha256 else []),
        f"  stored   {summary.stored}   (log: run.log)",
        f"  next     {options.program()} inspect --run {summary.run}{where}",
        f"           {options.program()} verify --run {summary.run}{where}",
    ]
