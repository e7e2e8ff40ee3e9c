"""``rlbuffer train``."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

import click

from rlbuffer_cli import options
from rlbuffer_cli.options import say
from rlbuffer_cli.session import connected
from rlbuffer_cli.starting import starting


@options.command("train")
@options.common
@options.setting("trainer.world_size", "Data-parallel ranks. [default: trainer.world_size, 1]", type=int, metavar="W")
@options.setting("trainer.steps", "Stop after this many steps. [default: trainer.steps]", type=int, metavar="N")
@options.setting("trainer.output", "Checkpoints, weights and metrics go here. [default: HOME/runs/RUN]", metavar="DIR")
@click.option("--fake-data", is_flag=True, help="Train on made-up steps: no server, no workers.")
@click.option(
    "--debug-samples",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Check N rollouts of the first step, and keep what `inspect` shows of their tokens.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    metavar="N",
    help="Times in a row that ranks are started again after a failure.",
)
@options.display
def command(given: options.RunFlags, fake_data: bool, debug_samples: int, max_restarts: int, display: str) -> int:
    """Train on the batches, with one or more data-parallel ranks.

    Starts W processes on this machine, pulls one step after the other, and publishes every new policy version for
    the workers. Started again, it goes on from its last checkpoint with the same batches. Under torchrun use
    `torchrun ... -m rlbuffer.trainer` instead.

    \b
    Example:
      rlbuffer train --world-size 2 --config rlbuffer.toml
    """
    loaded = given.load(parts=("train",))
    settings = loaded.settings
    if fake_data:  # a real run never goes on from made-up steps, nor are its checkpoints replaced by theirs
        trainer = settings.trainer.model_copy(update={"output": settings.output_dir / "fake-data"})
        settings = settings.model_copy(update={"trainer": trainer})
    # Ranks that cannot connect would be started again and again: whether there is a server is asked first.
    with nullcontext() if fake_data else connected(loaded, "train"), ExitStack() as views:
        starting("train: loading torch and the model")
        from rlbuffer.process.environment import name_process
        from rlbuffer.trainer.fake import FakeRun
        from rlbuffer.trainer.launch.launcher import launch

        name_process("train")
        # A live view would draw over them.
        shown = "plain" if display == "auto" and debug_samples else options.choose_display(display)
        tell: dict[str, Any] = {"display": shown}
        if shown == "rich":  # what rank 0 writes to the metrics; lines come from rank 0 itself
            from rlbuffer_cli import live

            first = "the steps are made up" if fake_data else "the first step comes once the batcher has committed it"
            opening = f"starting the ranks; {first}"
            watch = live.LiveRun(settings, title="rlbuffer train", opening=opening, asks=not fake_data, from_end=True)
            views.enter_context(live.shown(watch))
            views.enter_context(watch)

            def say_last(text: str) -> None:
                views.close()
                say(text, err=True)

            tell = {"display": "none", "say": watch.say, "say_last": say_last}
        code = launch(
            settings,
            world_size=settings.trainer.world_size,
            source=FakeRun if fake_data else None,
            max_restarts=max_restarts,
            debug_samples=debug_samples,
            **tell,
        )
    if code == options.EXIT_INTERRUPTED:
        say(f"Interrupted. Started again, it goes on from its last checkpoint in {settings.output_dir}.", err=True)
    return code
