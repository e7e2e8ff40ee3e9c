"""Opening a run that is there already: looking must not start fresh state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rlbuffer.client import Buffer
    from rlbuffer.loading import Loaded


def open_existing(loaded: Loaded, *, run_given: bool) -> Buffer:
    """Connects to an existing run: the one named, else the configured one, else the one opened last.

    Raises:
        NotFound: there is no server data, or no such run on the server.
    """
    from rlbuffer.client import connect
    from rlbuffer.errors import NotFound
    from rlbuffer_cli.options import redis_origin

    settings = loaded.settings
    if settings.redis_url is None and not (settings.home.expanduser() / "server").is_dir():
        raise NotFound(
            f"nothing was ever stored under {settings.home} ({loaded.source('home')}): no embedded server has run "
            f"there. Start one with `rlbuffer demo`, or say where the run is: --redis URL or --home DIR."
        )
    buffer = connect(settings.redis_url, run=settings.run, config=settings, name="inspect", origin=redis_origin(loaded))
    try:
        runs = buffer.store.runs()
        if settings.run in runs:
            return buffer
        if run_given or loaded.source("run") == "RLBUFFER_RUN" or not runs:
            address = buffer.store.server()["address"]
            there = f" Runs there: {', '.join(sorted(runs, key=lambda r: -runs[r])[:8])}." if runs else ""
            raise NotFound(f"there is no run {settings.run!r} on {address}.{there}")
        latest = max(runs, key=lambda name: runs[name])
    except BaseException:
        buffer.close()
        raise
    buffer.close()
    click.echo(f'showing run "{latest}", the one opened last (--run chooses another)', err=True)
    return connect(settings.redis_url, run=latest, config=settings, name="inspect", origin=redis_origin(loaded))
