"""``rlbuffer demo``."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
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
    workers = ["vcopy"] if deterministic else ["vcopy", "repeat"]
    with resources.as_file(resources.files("rlbuffer.run") / "demo.toml") as packaged:
        flags: dict[str, tuple[str, Any]] = {"trainer.steps": ("--steps", steps), "seed": ("--seed", seed)}
        if deterministic:
            one = {"vcopy": {"env": "vcopy", "group_size": 16, "groups_per_batch": 16}}
            instead = {"deterministic": True, "batcher.max_age": 0, "batcher.lookahead": 0, "batcher.budgets": {}}
            instead |= {"worker": one, "trainer.reports.proofs": True}
            flags |= {name: ("--deterministic", value) for name, value in instead.items()}
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
        """Says where reward began and ended, what was trained, whether it adds up, and what to type next."""
        from rlbuffer.config.fractions import budgets_at
        from rlbuffer.state.text import amount, duration, plural
        from rlbuffer_cli.text import wrapped

        settings, records, total = self._settings, watch.records, ledger.total()
        edge = max(1, min(EDGE_STEPS, len(records) // 2))
        began, ended = _mean_reward(records[:edge]), _mean_reward(records[-edge:])
        steps = records[-1].step if records else 0
        digest = next(iter(records[-1].parameters_sha256), None) if records else None
        seconds, first = watch.seconds, watch.first_step_seconds
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
            "seconds": round(seconds, 2),
            "first_step_seconds": None if first is None else round(first, 2),
            "reward_from": began,
            "reward_to": ended,
            "edge_steps": edge,
            "tokens": tokens.total(),
            "shares": shares,
            "ledger": {"pushed": total.pushed[0], **rollouts, "dropped": dropped, "balances": balances},
            "stored": str(settings.output_dir),
            "parameters_sha256": digest,
            "exit_code": code,
            "restarts": restarts,
            "seed": self._seed,
        }
        budgets = budgets_at(settings.batcher.budgets, settings.trainer.steps)
        trained = " · ".join(
            f"{env} {100 * share:.1f}%" + (f" (target {100 * budgets[env]:.0f}%)" if env in budgets else "")
            for env, share in shares.items()
        )
        drops = " ".join(f"{n:,} {reason}" for reason, n in dropped.items()) or "0"
        known = " + ".join(f"{n:,} {name}" for name, n in rollouts.items())
        account = f"{plural(total.pushed[0], 'rollout')} pushed = {known} + dropped {drops}"
        head = {0: "done", options.EXIT_INTERRUPTED: "interrupted"}.get(
            code, f"ended early (exit code {code}, see {log})"
        )
        when = "" if first is None else f", the first after {duration(first)}"
        reward = "no step was trained"
        if began is not None and ended is not None:
            reward = f"{began:.3f} -> {ended:.3f}  (means of {plural(edge, 'step')})"
        where = f"--run {settings.run}" + ("" if str(settings.home) == "~/.rlbuffer" else f" --home {settings.home}")
        lines = [
            "",
            f"{head}: {plural(steps, 'step')} in {duration(seconds)}{when}",
            f"  reward   {reward}",
            f"  tokens   {amount(tokens.total())} trained   {trained}",
            *wrapped(f"  ledger   {'balances' if balances else 'DOES NOT BALANCE'}: {account}", indent=" " * 11),
            *([f"  digest   {digest} of the parameters"] if digest else []),
            f"  stored   {settings.output_dir}   (log: run.log)",
            f"  next     {options.program()} inspect {where}",
            f"           {options.program()} verify {where}",
        ]
        _log.info("%s", "\n".join(lines), extra=fields("summary", **numbers))


def _mean_reward(records: Sequence[StepRecord]) -> float | None:
    rewards = [record.reward for record in records if record.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
