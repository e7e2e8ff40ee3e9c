"""``rlbuffer score``."""

from __future__ import annotations

import click

from rlbuffer_cli import options, sections

HOW = "--model PATH or --reward package.module:function"


@options.command("score")
@click.argument("name", required=False)
@options.common
@options.setting(".model", "Add ref_logprobs of this model; `initial`: the run's own.", metavar="PATH", is_handed=True)
@options.setting(
    ".reward", "Add rewards of package.module:function(rollout, group).", metavar="FUNCTION", is_handed=True
)
@options.setting(".envs", "Only groups of this env; may be repeated.", flag="--env", multiple=True, metavar="ENV")
@options.setting(".gives", "What --reward adds: reward (the default), rewards.NAME.", multiple=True, metavar="NEED")
@options.setting(".device", "Of the model.", type=click.Choice(["auto", "cpu", "cuda"]))
@click.option("--replica", type=int, default=0, metavar="I", help="Number of this process among equal ones.")
@click.option("--display", type=click.Choice(["auto", "plain", "json", "none"]), default="auto", help="What to print.")
def command(
    name: str | None, given: options.RunFlags, model: str | None, reward: str | None, replica: int, display: str
) -> int:
    """Add what groups need before they train: reference logprobs, slow rewards.

    NAME is a [score.NAME] section of the config; without one, --model or --reward is enough. A group needs what its
    worker's `needs` says; it is scored once, however many scorers run, and those of a scorer that dies are taken over
    within seconds.

    \b
    Examples:
      rlbuffer score --model ~/models/qwen3-0.6b --run math
      rlbuffer score --reward my_judge.api:reward --env essays
      rlbuffer score ref          (the section [score.ref] of rlbuffer.toml)
    """
    from rlbuffer.checks.loading import load

    # Without a name: one of the flags alone, or the only section there is.
    key = name or ("ref" if model else "reward" if reward else sections.only("score", load(given.config).settings, HOW))
    loaded = given.load(parts=(f"score.{key}",))
    return sections.run_alone("score", key, replica, loaded, display, HOW)
