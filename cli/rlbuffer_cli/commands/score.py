"""``rlbuffer score``."""

from __future__ import annotations

import json
import threading
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from rlbuffer_cli import options

if TYPE_CHECKING:
    from rlbuffer.settings import RunSettings

SHARING = 2
"""Processes that share this machine's cores, the scorer included; a set OMP_NUM_THREADS counts instead."""


@click.command("score")
@click.argument("name", required=False)
@options.common
@click.option("--model", metavar="PATH", help="Add ref_logprobs of this model; `initial`: the run's own.")
@click.option("--reward", metavar="FUNCTION", help="Add rewards of package.module:function(rollout, group).")
@click.option("--env", "envs", multiple=True, metavar="ENV", help="Only groups of this env; may be repeated.")
@click.option("--gives", multiple=True, metavar="NEED", help="What --reward adds: reward (the default), rewards.NAME.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Of the model.")
@click.option("--replica", type=int, default=0, metavar="I", help="Number of this process among equal ones.")
@click.option("--display", type=click.Choice(["auto", "plain", "json", "none"]), default="auto", help="What to print.")
def command(
    name: str | None,
    config: str | None,
    redis: str | None,
    run: str | None,
    home: str | None,
    model: str | None,
    reward: str | None,
    envs: tuple[str, ...],
    gives: tuple[str, ...],
    device: str | None,
    replica: int,
    display: str,
) -> int:
    """Add what groups need before they train: reference logprobs, slow rewards.

    NAME is a [score.NAME] section of the config; without one, --model or --reward is enough. A group needs what its
    worker's `needs` says; it is scored once, however many scorers run, and those of a scorer that dies are taken over
    within seconds.

    \b
    Examples:
      rlbuffer score --model ~/models/qwen3-0.6b --run math
      rlbuffer score --reward my_judge.api:reward --env essays
      rlbuffer score ref                          the section [score.ref] of rlbuffer.toml
    """
    key = name or _only_scorer(config, model, reward)
    flags = {
        "model": ("--model", model),
        "reward": ("--reward", reward),
        "envs": ("--env", list(envs) or None),
        "gives": ("--gives", list(gives) or None),
        "device": ("--device", device),
    }
    loaded = options.load(config, redis, run, home, {f"score.{key}.{k}": v for k, v in flags.items()})
    settings = _known(loaded.settings, key)

    from rlbuffer import processes
    from rlbuffer.lines import ScoreNarrator

    title = f"{key}-{replica}" if replica or settings.score[key].replicas > 1 else key
    processes.name_process(f"score {title}")
    processes.share_cores(SHARING)
    stop = threading.Event()
    processes.stop_on_signals(stop)
    narrator = ScoreNarrator(lambda line: click.echo(f"{datetime.now():%H:%M:%S} {line}"))

    def on_event(event: dict[str, Any]) -> None:
        if display == "json":
            click.echo(json.dumps(event, default=str))
        elif display != "none":
            narrator(event)

    return processes.score(settings, key, replica, title, stop, on_event)


def _only_scorer(config: str | None, model: str | None, reward: str | None) -> str:
    """Which section is meant when no NAME is given: one of the flags alone, or the only one there is."""
    from rlbuffer.errors import ConfigError

    if model is not None or reward is not None:
        return "ref" if model is not None else "reward"
    from rlbuffer.loading import load

    known = list(load(config).settings.score)
    if len(known) == 1:
        return known[0]
    if known:
        raise click.UsageError(f"which scorer? The config has {', '.join(known)}: rlbuffer score {known[0]}")
    raise ConfigError(
        "what shall be added? Give --model PATH, --reward package.module:function, or a [score.NAME] section."
    )


def _known(settings: RunSettings, key: str) -> RunSettings:
    from rlbuffer.errors import ConfigError
    from rlbuffer.filters import nearest

    if key not in settings.score:
        hint = nearest(key, list(settings.score)) or " Give --model or --reward, or add the section."
        raise ConfigError(f"the config has no [score.{key}] section.{hint}", setting=f"score.{key}")
    return settings
