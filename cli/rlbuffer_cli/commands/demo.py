"""``rlbuffer demo``."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from importlib import resources
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from rlbuffer.process.logs import fields
from rlbuffer.state.text import amount, duration, plural
from rlbuffer_cli import options
from rlbuffer_cli.options import say
from rlbuffer_cli.starting import starting
from rlbuffer_cli.text import wrapped

if TYPE_CHECKING:
    from rlbuffer.config.loading import Loaded
    from rlbuffer.state.step_record import StepRecord
    from rlbuffer_cli.live import EndedRun

EDGE_STEPS = 10
"""Steps that the rewards `from` and `to` of the summary are means of; fewer in a short run."""


_log = logging.getLogger("rlbuffer.demo")


@options.command("demo")
@options.common_with(config="the demo's own", run="demo- and the time")
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Trained steps. [default: 150]")
@click.option("--seconds", type=click.FloatRange(1), metavar="S", help="Stop after this long, wherever it is.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Of everything.")
@click.option("--deterministic", is_flag=True, help="One env, one worker, on policy: the same bits in every run.")
@options.display
def command(
    given: options.RunFlags,
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
    display, settings = options.choose_display(display), loaded.settings
    stop, is_time_up = threading.Event(), threading.Event()
    starting("loading torch")
    from rlbuffer_cli.live import LiveRun, supervised
    from rlbuffer_cli.view import step_line

    def relay(name: str, line: str) -> None:
        if display in ("plain", "json") and name not in ("serve", "train"):
            # Their step lines would only repeat the steps; everything is in the log.
            say(f"{name:<14} {line}", err=True)

    def on_step(record: StepRecord) -> None:
        envs = "  ".join(f"{env} {r:.2f}" for env, r in record.rewards.items() if r is not None)
        text = step_line(record, settings.trainer.steps)
        _log.info("%s  %s", text, envs, extra={"fields": record.as_object()})

    def tick(watch: LiveRun) -> None:
        if seconds is not None and watch.seconds >= seconds:
            is_time_up.set()
            stop.set()

    with (
        stop_on_signals(stop),
        supervised(
            loaded, display, stop, relay, title="rlbuffer demo", clock=False, on_step=on_step, tick=tick
        ) as ended,
    ):
        code = ended.code
        if is_time_up.is_set():
            code = 0 if ended.watch.records else 5
        _summarize(loaded, ended, code, seed)
    return code


def _settings(given: options.RunFlags, steps: int | None, seed: int, deterministic: bool) -> Loaded:
    from rlbuffer.checks.check import EVERYTHING

    run = given.run or f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    workers = ["vcopy"] if deterministic else ["vcopy", "repeat"]
    with resources.as_file(resources.files("rlbuffer.run") / "demo.toml") as packaged:
        flags: dict[str, tuple[str, Any]] = {"trainer.steps": ("--steps", steps), "seed": ("--seed", seed)}
        if deterministic:
            one = {"vcopy": {"env": "vcopy", "group_size": 16, "groups_in_flight": 16}}
            instead = {"deterministic": True, "batcher.max_age": 0, "batcher.lookahead": 0, "batcher.budgets": {}}
            instead |= {"batcher.step_groups": 16, "worker": one, "trainer.reports.check_ranks": True}
            flags |= {name: ("--deterministic", value) for name, value in instead.items()}
        if given.config is None and steps is not None:
            # Steps up to the oldest checkpoint are retired: a short demo shall leave something to inspect, too.
            flags["trainer.checkpoint.every"] = ("--steps", max(1, min(10, steps // 4)))
        for worker in workers if given.config is None else ():
            flags[f"worker.{worker}.env_options.seed"] = ("--seed", seed)
        return replace(given, run=run, config=given.config or str(packaged)).load(flags, parts=EVERYTHING)


def _summarize(loaded: Loaded, ended: EndedRun, code: int, seed: int) -> None:
    """Says where reward began and ended, what was trained, whether it adds up, and what to type next."""
    from rlbuffer.config.fractions import budgets_at

    settings, watch, total = loaded.settings, ended.watch, ended.buffer.ledger().total()
    records, first = watch.records, watch.first_step_seconds
    rewards = [record.reward for record in records if record.reward is not None]
    edge = max(1, min(EDGE_STEPS, len(records) // 2))
    began, reached = (fmean(part) if part else None for part in (rewards[:edge], rewards[-edge:]))
    steps = records[-1].step if records else 0
    digest = next(iter(records[-1].parameters_sha256), None) if records else None
    tokens: Counter[str] = Counter()
    for record in records:
        tokens.update({env: n for env, n in record.tokens_by_env.items() if n})
    shares = {env: n / tokens.total() for env, n in sorted(tokens.items())}
    dropped = {reason: drops[0] for reason, drops in total.dropped.items()}
    rollouts = {"pending": total.pending[0], "packed": total.packed[0], "trained": total.trained[0]}
    balances = sum(rollouts.values()) + sum(dropped.values()) == total.pushed[0]
    numbers = {
        "run": settings.run,
        "steps": steps,
        "seconds": round(watch.seconds, 2),
        "first_step_seconds": None if first is None else round(first, 2),
        "reward_from": began,
        "reward_to": reached,
        "edge_steps": edge,
        "tokens": tokens.total(),
        "shares": shares,
        "ledger": {"pushed": total.pushed[0], **rollouts, "dropped": dropped, "balances": balances},
        "stored": str(settings.output_dir),
        "parameters_sha256": digest,
        "exit_code": code,
        "restarts": ended.supervisor.restarts,
        "seed": seed,
    }
    budgets = budgets_at(settings.batcher.budgets, settings.trainer.steps)
    trained = " · ".join(
        f"{env} {100 * share:.1f}%" + (f" (target {100 * budgets[env]:.0f}%)" if env in budgets else "")
        for env, share in shares.items()
    )
    drops = " ".join(f"{n:,} {reason}" for reason, n in dropped.items()) or "0"
    counts = " + ".join(f"{n:,} {name}" for name, n in rollouts.items())
    account = f"{plural(total.pushed[0], 'rollout')} pushed = {counts} + dropped {drops}"
    ends = {0: "done", options.EXIT_INTERRUPTED: "interrupted"}
    head = ends.get(code, f"ended early (exit code {code}, see {ended.supervisor.log.path})")
    when = "" if first is None else f", the first after {duration(first)}"
    reward = f"{began:.3f} -> {reached:.3f}  (means of {plural(edge, 'step')})" if rewards else "no step was trained"
    where = f"--run {settings.run}" + ("" if str(settings.home) == "~/.rlbuffer" else f" --home {settings.home}")
    lines = [
        "",
        f"{head}: {plural(steps, 'step')} in {duration(watch.seconds)}{when}",
        f"  reward   {reward}",
        f"  tokens   {amount(tokens.total())} trained   {trained}",
        *wrapped(f"  ledger   {'balances' if balances else 'DOES NOT BALANCE'}: {account}", indent=" " * 11),
        *([f"  digest   {digest} of the parameters"] if digest else []),
        f"  stored   {settings.output_dir}   (log: run.log)",
        f"  next     {options.program()} inspect {where}",
        f"           {options.program()} verify {where}",
    ]
    _log.info("%s", "\n".join(lines), extra=fields("summary", **numbers))
