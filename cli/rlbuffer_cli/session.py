"""Opening a run that is there already: looking must not start fresh state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlbuffer_cli.options import EXIT_INTERRUPTED, say
from rlbuffer_cli.starting import starting

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.config.loading import Loaded
    from rlbuffer.config.settings import RunSettings


def check_home(loaded: Loaded) -> None:
    """Raises NotFound when the embedded server of the settings was never started: looking must not start one."""
    from rlbuffer.errors import NotFound

    settings = loaded.settings
    if settings.redis_url is None and not (settings.home_dir / "server").is_dir():
        raise NotFound(
            f"nothing was ever stored under {settings.home} ({loaded.place('home')}): no embedded server has run "
            f"there. Start one with `rlbuffer demo`, or say where the run is: --redis URL or --home DIR."
        )


def open_existing(loaded: Loaded, *, run_given: bool, even_damaged: bool = False) -> Buffer:
    """Connects to an existing run: the one named by flag, variable or file, else the one opened last.

    A file's run that was never opened on this server does not count: the example file has one. `even_damaged`: also one
    that has lost its meta.

    Raises:
        NotFound: there is no server data, or no such run on the server.
    """
    from rlbuffer.client.buffer import connect
    from rlbuffer.config.loading import meant_run
    from rlbuffer.errors import NotFound
    from rlbuffer_cli.options import redis_origin

    settings = loaded.settings
    check_home(loaded)
    starting("connecting to the server")
    buffer = connect(settings.redis_url, run=settings.run, config=settings, name="inspect", origin=redis_origin(loaded))
    try:
        runs = buffer.store.runs()
        source = loaded.place("run")
        is_named = run_given or source == "RLBUFFER_RUN"
        latest = max(runs, key=lambda name: runs[name], default="")
        run = meant_run(loaded, runs, is_named=is_named)
        if run in runs and run == settings.run:
            if not is_named and run != latest:
                say(f'showing run "{run}" ({source}); "{latest}" was opened later (--run chooses)', err=True)
            return _readable(buffer, even_damaged)
        if run not in runs:
            address = buffer.store.server()["address"]
            there = f" Runs there: {', '.join(sorted(runs, key=lambda r: -runs[r])[:8])}." if runs else ""
            raise NotFound(f"there is no run {settings.run!r} on {address}.{there}")
    except BaseException:
        buffer.close()
        raise
    buffer.close()
    say(f'showing run "{latest}", the one opened last (--run chooses another)', err=True)
    return _readable(
        connect(settings.redis_url, run=latest, config=settings, name="inspect", origin=redis_origin(loaded))
    )


def _readable(buffer: Buffer, even_damaged: bool = False) -> Buffer:
    """Says that a run was written by an incompatible version (SchemaMismatch) before anything is done to it."""
    from rlbuffer.errors import RunDamaged

    try:
        buffer.store.meta()
    except RunDamaged:
        if not even_damaged:
            buffer.close()
            raise
    except BaseException:
        buffer.close()
        raise
    return buffer


def at_work(buffer: Buffer) -> list[str]:
    """Processes of the run that live, or ended a few seconds ago: a goodbye is a heartbeat, too."""
    from rlbuffer.client.run_state import read_run_state

    state = read_run_state(buffer.store)
    leader = ["batcher"] if state.is_led else []
    return leader + sorted(p.title for p in state.processes if p.is_fresh and p.kind != "batcher")


def resume_hint(settings: RunSettings, run: str, step: int) -> str:
    """The way for the trainer to go on from `step`: it takes its newest checkpoint, which must be of no later step."""
    folder = settings.model_copy(update={"run": run}).output_dir / "checkpoints"
    # Read by name: the module of the checkpoints loads torch.
    checkpoints = sorted((int(path.name.removeprefix("step-")), path) for path in folder.glob("step-*[0-9]"))
    newer = [str(path) for number, path in checkpoints if number > step]
    if newer:
        return f"Move newer checkpoints away ({', '.join(newer)}), then start the trainer again."
    return f"Start the trainer again from a checkpoint of step {step} or before."


def say_ended(buffer: Buffer, settings: RunSettings, code: int) -> None:
    """Leaves for whoever looks later how a supervised run ended; the batcher's heartbeat only says that it left."""
    from rlbuffer.errors import RlbufferError
    from rlbuffer.records.waiting import Wait, Waiting

    try:
        trained = buffer.store.trainer().trained
        if code == 0:
            last = Waiting(kind=Wait.ENDED, step=trained)
        else:
            log = settings.run_dir / "run.log"
            detail = "" if code == EXIT_INTERRUPTED else f"exit code {code}, see {log}"
            last = Waiting(kind=Wait.FAILED, step=trained, detail=detail)
        beat = buffer.store.heartbeats("batcher").get("leader", {})
        buffer.heartbeat("batcher", "leader", {**beat, "waiting": last.record(), "stopped": True})
    except RlbufferError as error:
        say(f"Warning: could not note that the run ended: {error}", err=True)
