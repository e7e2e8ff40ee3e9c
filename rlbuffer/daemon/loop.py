"""The serve loop: one leader at a time, fenced by a lease.

::

    standing by -> leading -> (reconnect or lost lease: forget everything) -> standing by
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from contextlib import suppress

from rlbuffer.batcher.batcher import Batcher
from rlbuffer.client.buffer import Buffer, connect
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.daemon.archiving import Archiving
from rlbuffer.daemon.leadership import Leadership, LeaderTerm
from rlbuffer.daemon.lease_keeper import LeaseKeeper
from rlbuffer.daemon.reporter import Reporter
from rlbuffer.daemon.revisions import Revisions
from rlbuffer.daemon.server_watch import ServerCheck, ServerWatch
from rlbuffer.daemon.watches import ReadAgain
from rlbuffer.errors import (
    ConfigError,
    LeaseLost,
    RlbufferError,
    RunDamaged,
    RunGone,
    SchemaMismatch,
    ServerRefused,
    ServerUnreachable,
)
from rlbuffer.process.logs import RateLimited, fields
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.store.leader import LeaderStore
from rlbuffer.store.viewer import Viewer

_log = logging.getLogger(__name__)
LEASE_SECONDS = 5.0
"""A leader that is silent for this long may be replaced."""
BACKOFF_SECONDS = 0.5
"""Pause before a new takeover after the server went away or the lease was lost."""
_RANDOM = random.Random()  # the global one is the user's: a checkpoint keeps its state

FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.05, 5.0
"""Seconds between two looks at whether the server has rewritten its append-only file."""


class Daemon:
    """Serves one run until told to stop.

    Args:
        buffer: the run.
        config: what steps are made of.
        replace_config: go on with a run that was started with another config.
        follows: go on with the run's config, whatever it is; `config` is for a run that has none.
        look: what is wrong with the server now, of what may change while a run goes on; None: nobody looks.
        lease_seconds: a leader that is silent for this long may be replaced.
    """

    def __init__(
        self,
        buffer: Buffer,
        config: BatcherConfig,
        *,
        replace_config: bool = False,
        follows: bool = False,
        look: ServerCheck | None = None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self._store = buffer.store.role(LeaderStore)
        self._settings = buffer.settings
        self._trainer = buffer.settings.trainer
        if self._settings.archive.dir is not None:
            import rlbuffer.archive  # noqa: F401  (says what is missing, before anything is led)
        self._reporter = Reporter(self._store)
        self._revisions = Revisions(self._store, config, replace=replace_config, follows=follows)
        self._look = look
        self._lease_seconds = lease_seconds
        self._owner = uuid.uuid4().hex  # one per process start: a restarted leader is another leader
        self._leads = False
        self._has_opened = False
        """The run was there, or begun, when this process came."""
        self._is_at_work = False
        """It leads, with settings that the run has taken."""
        self._lost = RateLimited()
        self._ended: int | None = None
        """The step after which the run has ended."""

    def run(self, stop: threading.Event) -> None:
        """Leads until `stop` is set or the run has ended; stands by while another leads, and takes over when the server
        comes back.

        Not :func:`~rlbuffer.process.serving.serve_until_stopped`: no event loop runs here, a server that is away and a
        lost lease end a lead as a run that is gone does, and what is fatal is told to the ranks.

        Raises:
            ConfigError: the run was started with other settings and `replace_config` is not set; or a function of the
                user's own that the settings name failed. Every waiting rank hears of the latter, too.
            SchemaMismatch: the run was written by an incompatible version.
            RunDamaged: at the start the run has no meta, but other keys.
            RlbufferError: a fatal error; every waiting rank hears it before it is raised.
        """
        while not stop.is_set() and self._ended is None:
            try:
                if self._acquire(stop):
                    with (
                        LeaseKeeper(self._store, lease_seconds=self._lease_seconds, say=self._reporter.beat) as keeper,
                        Archiving(self._another_store, self._settings.archive.dir) as archive,
                        ServerWatch(self._look) as server,
                    ):
                        self._lead(keeper, stop, archive, server)
            except (ServerUnreachable, ServerRefused, LeaseLost, RunGone) as error:
                if isinstance(error, RunDamaged) and not self._has_opened:
                    raise  # who starts the batcher must hear it; one that is at work waits for a person
                if self._lost.is_due(str(error), time.monotonic()):
                    _lead_lost(error)
                self._leads = False
                stop.wait(BACKOFF_SECONDS * _RANDOM.uniform(1, 2))
            except Exception as error:
                if isinstance(error, ConfigError) and not self._is_at_work:
                    self._store.release_lease()
                # Where the schema is another one nothing may be written, not even that this failed.
                elif not isinstance(error, SchemaMismatch):
                    self._fail(error)  # the run cannot go on, and the ranks must not wait for it
                raise
        self._leave()

    def _acquire(self, stop: threading.Event) -> bool:
        """Waits for the lease. -> False: it was stopped before."""
        is_there = self._is_there()
        if not self._has_opened and not is_there:
            Batcher(self._revisions.config)  # settings that are refused begin no run
        self._store.open_run()
        if self._has_opened and not is_there:
            _log.warning("%s", _begins_again(self._store.run), extra=fields("begins again", run=self._store.run))
        self._has_opened = True
        self._revisions.check()
        last_owner = ""
        while not stop.is_set():
            lease = self._store.lease(self._owner, ttl_seconds=self._lease_seconds)
            if lease.held:
                self._leads = True
                self._store.load_scripts()
                return True
            if lease.owner != last_owner:
                last_owner = lease.owner
                text = "standing by: another batcher leads this run (%s); takes over when it stops"
                _log.info(text, lease.owner, extra=fields("leader", state="standby", owner=lease.owner))
            stop.wait(min(0.2, max(0.02, lease.remaining_seconds)))
        return False

    def _lead(self, keeper: LeaseKeeper, stop: threading.Event, archive: Archiving, server: ServerWatch) -> None:
        """Leads until stopped. The next leadership remembers nothing of one that a recovery or an operator ended."""
        self._await_whole_file(keeper, stop)
        term = LeaderTerm(self._store, archive, server)
        while not stop.is_set() and self._ended is None:
            self._is_at_work = False
            config = self._revisions.at_takeover()
            leadership = Leadership(
                self._store,
                config,
                self._reporter,
                lease=keeper,
                trainer=self._trainer,
                term=term,
                asked=self._revisions.asked,
            )
            leadership.take_over()
            self._is_at_work = True
            self._lost.is_over()
            with suppress(ReadAgain):
                while not stop.is_set() and leadership.ended is None:
                    leadership.turn()
            self._ended = leadership.ended

    def _await_whole_file(self, keeper: LeaseKeeper, stop: threading.Event) -> None:
        """Waits until the server's append-only file cannot hold half a transaction
        (:mod:`rlbuffer.store.server.append_file`)."""
        pause = FIRST_LOOK_SECONDS
        while not stop.is_set() and (waiting := self._store.until_whole()) is not None:
            self._reporter.report(waiting, lambda: {"idle": False})
            keeper.check()
            stop.wait(pause)
            pause = min(2 * pause, LONGEST_LOOK_SECONDS)

    def _another_store(self) -> Viewer:
        settings = self._settings
        return connect(settings.redis_url, run=self._store.run, config=settings, name="archive").store

    def _is_there(self) -> bool:
        try:
            self._store.meta()
        except RunGone:
            return False
        return True

    def _leave(self) -> None:
        if not self._leads:
            return  # stood by: what is waited for is the leader's to say
        try:
            ended = self._ended
            last = Waiting(kind=Wait.STOPPED) if ended is None else Waiting(kind=Wait.ENDED, step=ended)
            self._reporter.say_goodbye(last)
            self._store.release_lease()
        except RlbufferError as error:
            # Leaving without the server is fine: the lease runs out by itself.
            _lead_lost(error)

    def _fail(self, error: Exception) -> None:
        """Tells every waiting rank at once, then lets the error out."""
        try:
            self._store.set_error(f"{type(error).__name__}: {error}")
            self._reporter.say_goodbye()
            self._store.release_lease()
        except RlbufferError as second:
            _lead_lost(second)


def _lead_lost(error: Exception) -> None:
    extra = fields("leader", state="lost", reason=str(error))
    _log.warning("lost the lead: %s. Trying again.", error, extra=extra)


def _begins_again(run: str) -> str:
    return (
        f'run "{run}" is not on the server any more: it was reset, or the server lost its data. It begins again at '
        f"step 0. To go on from a copy of the server, stop everything and begin it with that "
        "(docs/guide/operate/back_up.md)."
    )
