"""``rlbuffer run``: every process of a run on this machine, restarted when it dies, with one log.

The embedded server starts when the supervisor connects. `serve` is a light process of its own; workers and the trainer
are forked from one forkserver that has torch already (:mod:`rlbuffer.process.forkserver`), except workers with a
Python, GPUs or an environment of their own (:mod:`rlbuffer.config.placement`). A process that ends is started again
after a pause that doubles while it keeps failing. The run is over when the trainer has made its steps; ctrl-C drains
workers, batcher and trainer, in that order.

``<run_dir>/run.log`` holds what all of them said, ``<run_dir>/pids.json`` who they are.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from rlbuffer.client.buffer import Buffer, connect
from rlbuffer.config.models import model_modules
from rlbuffer.config.placement import environment_of, is_apart, python_of
from rlbuffer.config.settings import RunSettings, ScoreSettings, WorkerSettings, to_json
from rlbuffer.errors import ConfigError, ResumeRefused, RlbufferError
from rlbuffer.gateway.tokens import TOKEN_FILE_VARIABLE, drawn_token
from rlbuffer.process import forkserver
from rlbuffer.process.environment import share_cores
from rlbuffer.process.files import write_whole
from rlbuffer.process.identity import may_live, visible_from
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.run import members
from rlbuffer.run.child import Child, send, signal_name
from rlbuffer.run.claim import SupervisorHeartbeat
from rlbuffer.run.run_log import LOG_FILE, RunLog, Say
from rlbuffer.state.heartbeats import FRESH_SECONDS
from rlbuffer.state.text import plural
from rlbuffer.store.operator import OperatorStore
from rlbuffer.trainer.launch.processes import leave_seconds

CHILD_POLL_SECONDS = 0.1
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.2, 10.0
"""Pause before a restart; doubled each time that the process did not live for :data:`STEADY_SECONDS`."""
STEADY_SECONDS = 30.0
MAX_FAILURES = 8
"""Failures in a row after which a process that never gets steady ends the run."""
REFUSALS = frozenset({2, ConfigError.exit_code, ResumeRefused.exit_code})
"""Exit codes of what would be refused again, until somebody has done what the message says."""
DRAIN_SECONDS = 20.0
"""Time that a process has to finish what it is doing before it is killed."""
OBSERVE_SECONDS = 0.5
INTERRUPTED = 130


class Supervisor:
    """Starts, watches, restarts and drains the processes of one run.

    `say` hears every line of every process, `on_fall` each process that ended and should not have, and how.
    """

    def __init__(
        self,
        settings: RunSettings,
        *,
        say: Say,
        on_fall: Callable[[str, str], None] = lambda name, how: None,
        origin: str = "",
    ) -> None:
        self.settings = settings
        self._on_fall = on_fall
        self.log = RunLog(settings.run_dir / LOG_FILE, say)
        self._origin = origin
        self._json = to_json(settings)
        self._context: ForkServerContext | None = None
        self._is_warm = threading.Event()
        self._seen: dict[str, int] = {}
        """Pids that this process did not start: the embedded server, the ranks."""
        self._pids: dict[str, int] = {}
        self._has_served = False
        self.trainer_done = False
        self.restarts = 0
        self._ended_by = ""

    def run(self, stop: threading.Event, tick: Callable[[], None] = lambda: None) -> int:
        """Runs until the trainer has made its steps or `stop` is set; calls `tick` about ten times a second.

        -> 0 when the trainer finished; else the exit code of the process that could not be kept alive, or 130 when
        stopped early.

        Raises:
            ServerUnreachable, ServerUnsuitable: there is no server to run on.
            ConfigError: the run has a supervisor already, or a Python that it names is not there.
        """
        settings = self.settings
        self.log.open()
        replicas = [w.replicas for w in settings.worker.values()] + [s.replicas for s in settings.score.values()]
        share_cores(settings.trainer.world_size + sum(replicas))
        try:
            self._context = self._start_forkserver()
            threading.Thread(target=self._warm, args=(self._context,), name="warm", daemon=True).start()
            with connect(
                settings.redis_url, run=settings.run, config=settings, name="supervisor", origin=self._origin
            ) as buffer:
                operator = buffer.store.role(OperatorStore)
                claim = SupervisorHeartbeat(operator, settings.run)
                claim.refuse_second(stop)
                operator.open_run()
                operator.expect(settings.worker)
                server = buffer.store.server()
                self.log.write_line(
                    "run", f"run {settings.run!r} on {server['name']} {server['version']} at {server['address']}"
                )
                ended, children = threading.Event(), self._children()
                observer = threading.Thread(target=self._observe, args=(buffer, ended), name="observe", daemon=True)
                observer.start()
                claim.start()
                try:
                    return self._watch(children, buffer, claim, stop, tick)
                finally:
                    self._drain(children)
                    ended.set()
                    observer.join(timeout=DRAIN_SECONDS)
                    claim.close()
                    (settings.run_dir / "pids.json").unlink(missing_ok=True)
        finally:
            self.log.close()

    @property
    def reason(self) -> str:
        """The error of the process that ended the run, whole; "" where none did. To read when the run is over."""
        return "\n".join(self.log.errors.get(self._ended_by, ()))

    # -- starting --------------------------------------------------------------------------------------------------
    def _start_forkserver(self) -> ForkServerContext:
        """Its own output goes into the log as the trainer's: the ranks inherit it."""
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        kept = os.dup(1), os.dup(2)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        try:
            context = forkserver.start(model_modules(self.settings.model.config))
        finally:
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            os.close(writing)
        self.log.follow("train", os.fdopen(reading, encoding="utf-8", errors="replace"))
        return context

    def _warm(self, context: ForkServerContext) -> None:
        """Waits in a thread of its own, so that a view goes on and ctrl-C is heard while torch is loaded."""
        try:
            forkserver.wait_until_loaded(context)
        except Exception as error:
            self.log.write_line("run", f"the forkserver does not answer: {type(error).__name__}: {error}")
        finally:
            self._is_warm.set()  # without it: whoever forks next meets the same error, and ends the run

    def _children(self) -> list[Child]:
        children = [Child(name="serve", start=self._start_serve, is_forked=False)]
        gateway = self.settings.gateway
        for replica in range(gateway.replicas if gateway.engines else 0):
            title = "gateway" if gateway.replicas == 1 else f"gateway-{replica}"
            children.append(Child(name=title, start=partial(self._start_gateway, title), is_forked=False))
        sections: list[tuple[str, str, WorkerSettings | ScoreSettings]] = []
        sections += [("worker", key, options) for key, options in self.settings.worker.items()]
        sections += [("score", key, options) for key, options in self.settings.score.items()]
        for kind, key, options in sections:
            for replica in range(options.replicas):
                title = key if options.replicas == 1 else f"{key}-{replica}"
                name, work = f"{kind} {title}", (kind, key, str(replica), title)
                start: Callable[[], Any] = partial(self._fork, name, *work)
                if is_apart(options):
                    python = python_of(key, options, sys.executable)
                    environment = environment_of(options, replica, python)
                    start = partial(self._start_apart, name, *work, python=python, environment=environment)
                children.append(Child(name=name, start=start, is_forked=not is_apart(options)))
        return [*children, Child(name="train", start=partial(self._fork, "train", "train"))]

    def _start_serve(self) -> subprocess.Popen[str]:
        process = self._start_apart("serve", "serve", *["again"] * self._has_served)
        self._has_served = True
        return process

    def _start_gateway(self, title: str) -> subprocess.Popen[str]:
        """Whoever begins rollouts needs a token, which no agent has: one is drawn where none is set."""
        file, environment = drawn_token(self.settings.run_dir), None
        if file is not None:
            self.log.write_line("run", f"whoever begins rollouts at the gateway needs the token in {file}")
            environment = {**os.environ, TOKEN_FILE_VARIABLE: str(file)}
        return self._start_apart(title, "gateway", title, environment=environment)

    def _start_apart(
        self, name: str, *work: str, python: str = sys.executable, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A process with an interpreter of its own. It ends when its stdin does: when this process is gone."""
        process = subprocess.Popen(
            [python, "-m", "rlbuffer.run.members", *work],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # ctrl-C is the supervisor's: it drains in order
        )
        if process.stdin is None or process.stdout is None:
            raise RlbufferError(f"the process of {name} was started without pipes")
        self.log.follow(name, process.stdout)
        with contextlib.suppress(BrokenPipeError):  # it has ended already: its exit code says so
            process.stdin.write(self._json + "\n")
            process.stdin.flush()  # and stays open
        return process

    def _fork(self, name: str, *work: str) -> ForkServerProcess:
        if self._context is None:
            raise RlbufferError("the forkserver was not started")
        reading, writing = self._context.Pipe(duplex=False)
        arguments = (self._json, writing, *work)
        process = self._context.Process(target=members.forked_main, args=arguments, name=f"rlbuffer {name}")
        # Before the start: what fails behind it would leave a child that nobody knows.
        stream = os.fdopen(os.dup(reading.fileno()), encoding="utf-8", errors="replace")
        process.start()
        writing.close()
        reading.close()
        self.log.follow(name, stream)
        return process

    # -- watching --------------------------------------------------------------------------------------------------
    def _watch(
        self,
        children: list[Child],
        buffer: Buffer,
        claim: SupervisorHeartbeat,
        stop: threading.Event,
        tick: Callable[[], None],
    ) -> int:
        losses = buffer.store.losses()
        while not stop.is_set():
            claim.check()
            claim.loads = "" if self._is_warm.is_set() else "torch is loaded first"
            if buffer.store.losses() != losses:
                # The server may be back without what a worker pushed last: whoever is done looks again.
                losses = buffer.store.losses()
                for child in children:
                    child.is_finished = False
            for child in children:
                if stop.is_set():
                    break
                code = None if child.is_finished else self._look_after(child, buffer)
                if code is not None:
                    return code
            self._write_pids({child.name: child.pid for child in children if child.pid})
            tick()
            stop.wait(CHILD_POLL_SECONDS)
        return INTERRUPTED

    def _observe(self, buffer: Buffer, ended: threading.Event) -> None:
        """Looks up who the server and the ranks are; in a thread, because it waits while the server is away."""
        message = ""
        while not ended.wait(OBSERVE_SECONDS):
            try:
                ranks = buffer.store.heartbeats("rank")
                seen = {f"rank {name}": int(r["pid"]) for name, r in ranks.items() if _is_there(r)}
            except RlbufferError:
                continue  # the server is being restarted by whoever needs it; who it is then is seen next time
            except Exception as error:  # anybody may write there, and pids are for people
                if str(error) != message:
                    message = str(error)
                    self.log.write_line("run", f"the ranks' heartbeats cannot be read: {type(error).__name__}: {error}")
                continue
            embedded = getattr(getattr(buffer.store, "connection", None), "embedded", None)
            if embedded is not None:
                seen["server"] = int(embedded.pid)
            for name, pid in sorted(seen.items() - self._seen.items()):
                self.log.write_line("run", f"{name} has pid {pid}")
            self._seen = seen

    def _look_after(self, child: Child, buffer: Buffer) -> int | None:
        """Starts or restarts one process. -> the run's exit code when it is over."""
        now = time.monotonic()
        if child.process is None:
            if now < child.restart_at or not (self._is_warm.is_set() or not child.is_forked):
                return None
            child.started = now
            try:
                child.process = child.start()
            except OSError as error:  # its Python is gone, or the host has no room for a process
                return self._failed(child, f"cannot be started ({error})", code=1)
            self.log.write_line(child.name, f"started, pid {child.pid}")
            return None
        code = child.exit_code()
        if code is None:
            return None
        child.process = None
        if child.name == "train" and code == 0:
            self.trainer_done = True
            steps = plural(self.settings.trainer.steps, "step")
            self.log.write_line("run", self._how_it_ended(buffer) or f"the trainer has made its {steps}")
            return 0
        if code == members.DONE or (child.name == "serve" and code == 0 and self._how_it_ended(buffer)):
            child.is_finished = True
            return None
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return self._failed(child, how, code=code)

    def _failed(self, child: Child, how: str, *, code: int) -> int | None:
        """Has it started again after a pause. -> the run's exit code when it failed too often."""
        self._on_fall(child.name, how)
        now = time.monotonic()
        child.failures = 1 if now - child.started > STEADY_SECONDS else child.failures + 1
        if code in REFUSALS or child.failures >= MAX_FAILURES:
            self._ended_by = child.name
            why = "it would be refused again" if code in REFUSALS else f"{child.failures} failures in a row"
            self.log.write_line("run", f"{child.name} {how}, {why}: giving up. See {self.log.path}")
            return code if code > 0 else 1
        pause = min(FIRST_PAUSE_SECONDS * 2 ** (child.failures - 1), LAST_PAUSE_SECONDS)
        child.restart_at = now + pause
        self.restarts += 1
        self.log.write_line("run", f"{child.name} {how}; starting it again in {pause:.1f} s")
        return None

    def _how_it_ended(self, buffer: Buffer) -> str:
        """ "" while the run has something to do, or nobody can tell."""
        try:
            ended = buffer.store.meta().ended if buffer.store.has_ended() else None
        except RlbufferError:
            return ""
        return "" if ended is None else str(Waiting(kind=Wait.ENDED, step=ended))

    def _write_pids(self, started: dict[str, int]) -> None:
        pids = {"run": os.getpid()} | started | self._seen
        if pids == self._pids:
            return
        self._pids = pids
        with contextlib.suppress(OSError):  # a list for people: a full disk must not end what it lists
            write_whole(self.settings.run_dir / "pids.json", json.dumps(pids, indent=2) + "\n")

    # -- draining --------------------------------------------------------------------------------------------------
    def _drain(self, children: list[Child]) -> None:
        """Workers first, so that nothing new is sampled; the trainer last, so that it can finish its step."""
        serve, train = children[0], children[-1]
        for stage in (children[1:-1], [serve], [train]):
            # The launcher kills ranks that do not leave: it is waited for a little longer than it waits for them.
            patience = DRAIN_SECONDS + (leave_seconds(self.settings) if train in stage else 0.0)
            for child in stage:
                if child.process is not None and child.exit_code() is None:
                    send(child.pid, signal.SIGTERM)
            deadline = time.monotonic() + patience
            said_at = time.monotonic() + DRAIN_SECONDS
            for child in stage:
                while child.process is not None and child.exit_code() is None:
                    if time.monotonic() > said_at and patience > DRAIN_SECONDS:
                        has = f"has {patience:.0f} s for its step and a checkpoint; ctrl-C again ends it at once"
                        self.log.write_line("run", f"{child.name} {has}")
                        said_at = math.inf
                    if time.monotonic() > deadline:
                        self.log.write_line("run", f"{child.name} did not stop within {patience:.0f} s: killed")
                        send(child.pid, signal.SIGKILL)
                        deadline = time.monotonic() + DRAIN_SECONDS
                    time.sleep(0.02)
                if isinstance(child.process, subprocess.Popen) and child.process.stdin is not None:
                    with contextlib.suppress(BrokenPipeError):  # it ended before it had read its settings
                        child.process.stdin.close()
                child.process = None


def _is_there(rank: Mapping[str, Any]) -> bool:
    """A rank of this machine that still runs: heartbeats outlive whoever was killed."""
    return rank["seconds_ago"] <= FRESH_SECONDS and rank.get("space") == visible_from() and may_live(rank)
