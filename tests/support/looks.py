"""Looks at a run that only tests take."""

from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType

from rlbuffer.client.run_state import read_run_state
from rlbuffer.store.session import text
from rlbuffer.store.viewer import Viewer
from rlbuffer_cli.look import UNCUT, themed


def allowances(store: Viewer) -> dict[str, int]:
    """Tickets that may be out, by env."""
    reply = store.look(lambda client: client.hgetall(store.keys.allowance))
    return {text(env): int(n) for env, n in reply.items()}


def tickets_out(store: Viewer) -> dict[str, int]:
    """Tickets that are out, by env; only envs that have some."""
    return {env.name: env.tickets for env in read_run_state(store).envs if env.tickets}


def evaluations(store: Viewer) -> list[dict[str, Any]]:
    """The results that stand, by env and version."""
    return [dict(result) for result in read_run_state(store).evaluations]


def lines_of(view: RenderableType, width: int = UNCUT) -> list[str]:
    """What a screen shows, as plain lines."""
    plain = Console(width=width, color_system=None, theme=themed("printed"), highlight=False, markup=False, emoji=False)
    with plain.capture() as captured:
        plain.print(view)
    return [line.rstrip() for line in captured.get().rstrip("\n").split("\n")]
