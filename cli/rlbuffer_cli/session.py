"""Opening a run that is there already: looking must not start fresh state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlbuffer.errors import NotFound, RlbufferError, RunDamaged
from rlbuffer_cli.options import EXIT_INTERRUPTED, redis_origin, say
from rlbuffer_cli.starting import starting

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer
    from rlbuffer.config.loading import Loaded
    from rlbuffer.config.settings import RunSettings
    from rlbuffer_cli.options import RunFlags


def connected(loaded: Loaded, name: str, run: str = "") -> Buffer:
    """Connects to the server of the settings as `name`, to their run; to `run` where the server has answered before."""
    from rlbuffer.client.buffer import connect

    settings = of_run(loaded, run or loaded.settings.run).settings
    if not run:
        starting("connecting to the server")
    return connect(settings.redis_url, run=settings.run, config=settings, name=name, origin=redis_origin(loaded))


def check_home(loaded: Loaded) -> None:
    """Raises NotFound when the embedded server of the settings was never started: looking must not start one."""
    settings = loaded.settings
    if settings.redis_url is None and not (settings.home_dir / "server").is_dir():
        raise NotFound(
            f"nothing was ever stored under {settings.home} ({loaded.place('home')}): no embedded server has run "
            f"there. Start one with `rlbuffer demo`, or say where the run is: --redis URL or --home DIR."
        )


def warn_of_server(loaded: Loaded) -> None:
    """Says which settings of [server] an embedded server at work does not have."""
    from rlbuffer.checks.server import other_settings

    for finding in other_settings(loaded):
        say(f"Warning: {finding.text}. {finding.fix}", err=True)


def of_run(loaded: Loaded, run: str) -> Loaded:
    """The settings as if `run` had been typed."""
    settings = loaded.settings.model_copy(update={"run": run})
    return replace(loaded, settings=settings, sources={**loaded.sources, "run": "--run"})


def open_run(given: RunFlags) -> Buffer:
    """The run that the flags, variables and the file mean, as :func:`open_existing`."""
    return open_existing(given.load())


def open_existing(loaded: Loaded, *, even_damaged: bool = False) -> Buffer:
    """Connects to an existing run: the one named by flag, variable or file, else the one opened last.

    A file's run that was never opened on this server does not count: the example file has one. `even_damaged`: also one
    that has lost its meta.

    Raises:
        NotFound: there is no server data, or no such run on the server. SchemaMismatch: it was written by an
            incompatible version. RunDamaged.
    """
    from rlbuffer.config.loading import TYPED, meant_run

    check_home(loaded)
    buffer, given_run = connected(loaded, "inspect"), loaded.settings.run
    try:
        runs = buffer.store.runs()
        run, latest = meant_run(loaded, runs), max(runs, key=lambda name: runs[name], default="")
        if run not in runs:
            there = f" Runs there: {', '.join(sorted(runs, key=lambda r: -runs[r])[:8])}." if runs else ""
            raise NotFound(f"there is no run {run!r} on {buffer.store.server()['address']}.{there}")
        if loaded.place("run") not in TYPED and not run == given_run == latest:
            why = "the one opened last" if run == latest else f'of {loaded.place("run")}; "{latest}" was opened later'
            say(f'showing run "{run}", {why} (--run chooses another)', err=True)
        if run != given_run:
            buffer.close()
            buffer = connected(loaded, "inspect", run)
        try:
            buffer.store.meta()
        except RunDamaged:
            if not even_damaged:
                raise
    except BaseException:
        buffer.close()
        raise
    return buffer


def at_work(buffer: Buffer) -> list[str]:
    """Processes of the run that live, as far as is known: a rank says no goodbye, its trainer says when it has made its
    last step."""
    from rlbuffer.client.run_state import read_run_state

    state = read_run_state(buffer.store)
    leader = ["batcher"] if state.is_led else []
    left_out = {"batcher"} | ({"rank"} if buffer.store.trainer().is_finished else set())
    return leader + sorted(p.title for p in state.processes if p.is_alive and p.kind not in left_out)


def resume_hint(settings: RunSettings, step: int) -> str:
    """The way for the trainer to go on from `step`: it takes its newest checkpoint, which must be of no later step."""
    newer = [str(path) for path in later_checkpoints(settings, step)]
    if newer:
        return f"Move newer checkpoints away ({', '.join(newer)}), then start the trainer again."
    return f"Start the trainer again from a checkpoint of step {step} or before."


def later_checkpoints(settings: RunSettings, step: int) -> list[Path]:
    """The checkpoints of steps after `step`, the oldest first. Read by name: their own module loads torch."""
    folder = settings.output_dir / "checkpoints"
    checkpoints = sorted((int(path.name.removeprefix("step-")), path) for path in folder.glob("step-*[0-9]"))
    return [path for number, path in checkpoints if number > step]


def say_ended(buffer: Buffer, settings: RunSettings, code: int) -> None:
    """Leaves for whoever looks later how a supervised run ended; the batcher's heartbeat only says that it left."""
    from rlbuffer.records.waiting import Wait, Waiting
    from rlbuffer.store.member import Member

    try:
        kind, detail = {0: Wait.ENDED, EXIT_INTERRUPTED: Wait.STOPPED}.get(code, Wait.FAILED), ""
        if kind is Wait.FAILED:
            detail = f"exit code {code}, see {settings.run_dir / 'run.log'}"
        trained = buffer.store.trainer().trained
        beat = buffer.store.heartbeats("batcher").get("leader", {})
        last = Waiting(kind=kind, step=trained, detail=detail)
        buffer.store.role(Member).heartbeat("batcher", "leader", {**beat, "waiting": last.record(), "stopped": True})
    except RlbufferError as error:
        say(f"Warning: could not note that the run ended: {error}", err=True)
