"""``rlbuffer drain``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from rlbuffer.errors import BatchTimeout, RlbufferError
from rlbuffer_cli import options
from rlbuffer_cli.options import answer, say
from rlbuffer_cli.session import open_run

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer

DRAIN_POLL_SECONDS = 0.3


@options.command("drain")
@options.common_of_run
@click.option("--undo", is_flag=True, help="Give tickets again.")
@click.option("--timeout", type=click.FloatRange(0), metavar="S", help="Give up waiting after S seconds (exit code 5).")
@options.json_lines("One object when it is done.")
def command(undo: bool, timeout: float | None, given: options.RunFlags) -> int:
    """Let a run come to rest: no more tickets, until nothing is out and no further step can be made.

    Workers finish what they have tickets for and then wait; the batcher goes on making steps while it can. This
    command waits for that and says what is still out; ended early, the run goes on draining. What is left in the pool
    stays there. Workers that need no tickets are not held back.

    \b
    Examples:
      rlbuffer drain --run math --timeout 600
      rlbuffer drain --undo --run math
    """
    from rlbuffer.store.operator import OperatorStore

    with open_run(given) as buffer:
        if undo:
            was_draining = buffer.store.role(OperatorStore).ask_undrain()
            record = {"schema": "rlbuffer.undrain/1", "run": buffer.run, "drained": was_draining}
            text = "gives tickets again" if was_draining else "was not draining"
            answer(record, f'run "{buffer.run}" {text}')
            return 0
        buffer.store.role(OperatorStore).ask_drain()
        return _wait(buffer, timeout)


def _wait(buffer: Buffer, timeout: float | None) -> int:
    from rlbuffer.client.operations import Drain, pending_amounts
    from rlbuffer.client.run_state import read_run_state
    from rlbuffer_cli.commands.drop import amounts

    store, name = buffer.store, buffer.run
    drain, message = Drain(store), ""
    deadline = None if timeout is None else time.monotonic() + timeout
    while not (state := drain.look()).is_drained:
        if not state.is_asked:
            raise RlbufferError(f'the drain of run "{name}" was undone meanwhile: tickets are given again')
        if deadline is not None and time.monotonic() >= deadline:
            waiting = read_run_state(store).waiting
            raise BatchTimeout(
                f'run "{name}" is not drained within {timeout:g} s: {state}. It goes on draining; `rlbuffer drain '
                f"--undo` lets workers go on." + (f" {waiting}" if state.has_leader and waiting else "")
            )
        if str(state) != message:
            message = str(state)
            say(f"draining: {message}", err=True)
        time.sleep(DRAIN_POLL_SECONDS)
    step, trained = store.meta().step, store.trainer().trained
    groups, rollouts, tokens = pending_amounts(store)
    left = {"groups": groups, "rollouts": rollouts, "tokens": tokens}
    answer(
        {"schema": "rlbuffer.drain/1", "run": name, "step": step, "trained": trained, **left},
        f'run "{name}" is drained after step {step} ({trained} trained): {amounts(**left)} stay in the pool. '
        "Back: rlbuffer drain --undo",
    )
    return 0
