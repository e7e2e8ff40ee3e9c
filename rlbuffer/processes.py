"""What each process of `rlbuffer run` does once it is started: serve, sample, train.

The supervisor hands over the settings as JSON, so that a process acts on what was loaded at the start, not on what a
file says by then. Every process ends when its supervisor is gone, whatever killed it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from rlbuffer import dotted
from rlbuffer.config import BatcherConfig
from rlbuffer.errors import RlbufferError
from rlbuffer.lines import ScoreNarrator, amount, printable
from rlbuffer.placement import gpus_of, visible
from rlbuffer.policy.waiting import AGAIN_SECONDS, Lasting, counted
from rlbuffer.settings import RunSettings

DONE = 10
"""What the supervisor hears from a worker whose env is done, or a scorer of a run that has ended: it is not to be
started again."""
GRACE_SECONDS = 10.0
"""Time between being asked to stop and leaving anyway, once the supervisor is gone."""


_FOLDERS = "folders"
"""Beside the settings: where modules of the user's own are."""


def to_json(settings: RunSettings) -> str:
    """Settings as JSON, and where modules of the user's own are; :func:`from_json` is the inverse."""
    data = settings.model_dump(mode="json", exclude={"batcher"})
    return json.dumps({**data, "batcher": settings.batcher.as_dict(), _FOLDERS: dotted.FOLDERS})


def from_json(text: str) -> RunSettings:
    """The inverse of :func:`to_json`: modules of the user's own can be imported after it."""
    data = json.loads(text)
    dotted.make_importable(data.pop(_FOLDERS, ()))
    return RunSettings.model_validate(data)


def say(text: str) -> None:
    """One line on stdout, at once: stdout is a pipe to the supervisor."""
    print(printable(text, lines=True), flush=True)


def name_process(title: str) -> None:
    """What `ps` shows; nothing where setproctitle is not installed."""
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(f"rlbuffer {title}")


def share_cores(busy: int) -> None:
    """Threads for one of `busy` processes, unless the user has set them; before torch is imported.

    Otherwise every process starts a thread per core, and they spin while they wait for each other: with two workers
    and two ranks on two busy cores, a worker sampled about five times slower that way.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // busy)))
    yield_cores()


def yield_cores() -> None:
    """Threads that wait for each other sleep, unless the user has set it; before torch is imported.

    Threads that spin hold the core that the awaited one needs: where others were at work on the cores, a trainer's step
    of 2 s took 28 s.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def stop_on_signals(stop: threading.Event) -> None:
    """SIGTERM and SIGINT set `stop`; a second one leaves at once with exit code 130."""

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def set_on_hangup(hangup: threading.Event, stop: threading.Event) -> None:
    """SIGHUP sets `hangup`; but `stop`, when it comes because the terminal of this process is gone."""
    had_terminal = os.isatty(0)

    def handle(number: int, frame: object) -> None:
        (stop if had_terminal and not os.isatty(0) else hangup).set()

    signal.signal(signal.SIGHUP, handle)


def end_with(wait_for_end: Callable[[], Any]) -> None:
    """Sends this process SIGTERM when `wait_for_end` returns, and leaves after :data:`GRACE_SECONDS` regardless."""

    def watch() -> None:
        wait_for_end()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="watch-supervisor", daemon=True).start()


def end_with_supervisor() -> None:
    """For processes made by the forkserver: the supervisor that asked for this one holds the other end of a pipe."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        end_with(parent.join)


# -- worker ----------------------------------------------------------------------------------------------------------
def sample(
    settings: RunSettings,
    key: str,
    replica: int,
    name: str,
    stop: threading.Event,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    *,
    origin: str = "",
) -> int:
    """Runs one worker until `stop` is set. -> exit code, or DONE when its env is done."""
    from rlbuffer.client import connect
    from rlbuffer.worker.loop import run_worker

    options = settings.worker[key]
    os.environ.update(visible(gpus_of(options, replica)))
    options = options.model_copy(update={"seed": options.seed + replica})
    with connect(settings.redis_url, run=settings.run, config=settings, name=f"worker-{name}", origin=origin) as buffer:
        is_done = run_worker(
            buffer,
            name,
            options,
            stop=stop,
            on_event=on_event or WorkerNarrator(say),
            evaluations=settings.eval,
            section=key,
        )
    return DONE if is_done else 0


class WorkerNarrator:
    """Tells a worker's events: versions and groups summed up every few seconds, a trouble or what is waited for at once
    and, while it lasts, every minute."""

    def __init__(self, tell: Callable[[str], None], *, every_seconds: float = 10.0) -> None:
        self._tell = tell
        self._every = every_seconds
        self._since = time.monotonic()
        self._sums = {"groups": 0, "rollouts": 0, "tokens": 0}
        self._rewards = 0.0
        self._version = -1
        self._has_pushed = False
        self._lasting = Lasting()
        self._failed: Counter[str] = Counter()
        self._last_failure = ""
        self._told_failures = float("-inf")

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "version":
            if self._version < 0:
                self._tell(f"sampling with policy version {event['version']}")
            self._version = int(event["version"])
        elif kind == "checked":
            self._tell(f"the sampler's logprobs are those of the published weights (to {event['difference']:.1g})")
        elif kind == "evaluation":
            self._tell(
                f"eval/{event['env']}/reward/mean {event['reward/mean']:.3f} +- {event['reward/error']:.3f}"
                f"  version {event['version']}  {event['rollouts']} rollouts in {event['seconds']:.1f} s"
            )
        elif kind == "group":
            self._lasting.is_over()
            self._sums["groups"] += 1
            self._sums["rollouts"] += int(event["rollouts"])
            self._sums["tokens"] += int(event["tokens"])
            self._rewards += float(event["reward"]) * int(event["rollouts"])
            if not self._has_pushed or time.monotonic() - self._since >= self._every:
                self._tell_groups()
        elif kind == "done":
            self._tell(str(event["sentence"]))
        elif kind == "trouble" and "kind" in event:
            self._fail(event)
        elif kind == "trouble":
            if self._lasting.is_due(str(event["error"]), time.monotonic()):
                self._tell(f"! {event['error']}")
        elif kind == "stopped":
            self._tell_groups()
            self._tell_failures()
            failed = f", {event['failed_groups']} given up" if event["failed_groups"] else ""
            self._tell(f"stopped after {event['groups']} groups, {event['rollouts']} rollouts{failed}")
        elif kind == "waiting":
            # Its numbers change while what is waited for is the same.
            if self._lasting.is_due(re.sub(r"\d+", "", str(event["waiting"])), time.monotonic()):
                self._tell(str(event["waiting"]))
        else:
            self._tell(f"! {event['error']}")

    def _fail(self, event: Mapping[str, Any]) -> None:
        """A group was given up: the first of a kind is told with its traceback, the others are counted."""
        if event["traceback"]:
            self._tell(f"! {event['error']}\n{event['traceback']}")
            self._told_failures = max(self._told_failures, time.monotonic())
            return
        self._failed[event["kind"]] += 1
        self._last_failure = str(event["error"])
        if time.monotonic() - self._told_failures >= AGAIN_SECONDS:
            self._tell_failures()

    def _tell_failures(self) -> None:
        if self._failed:
            self._tell(
                f"! {sum(self._failed.values())} more groups given up ({counted(self._failed)}), the last: "
                f"{self._last_failure}"
            )
        self._failed.clear()
        self._told_failures = time.monotonic()

    def _tell_groups(self) -> None:
        rollouts = self._sums["rollouts"]
        if rollouts:
            rate = rollouts / max(time.monotonic() - self._since, 1e-3)
            self._tell(
                f"pushed {self._sums['groups']} groups, {rollouts} rollouts, {amount(self._sums['tokens'])} tokens"
                f"  reward {self._rewards / rollouts:.2f}  version {self._version}"
                + (f"  {rate:.0f} rollouts/s" if self._has_pushed else "")
            )
        self._since, self._rewards, self._has_pushed = time.monotonic(), 0.0, True
        self._sums = dict.fromkeys(self._sums, 0)


# -- scorer ----------------------------------------------------------------------------------------------------------
def score(
    settings: RunSettings,
    key: str,
    replica: int,
    name: str,
    stop: threading.Event,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    *,
    origin: str = "",
) -> int:
    """Runs one scorer until `stop` is set. -> exit code, or DONE when the run has ended."""
    from rlbuffer.client import connect
    from rlbuffer.scorer.loop import run_scorer

    os.environ.update(visible(gpus_of(settings.score[key], replica)))
    with connect(settings.redis_url, run=settings.run, config=settings, name=f"score-{name}", origin=origin) as buffer:
        has_ended = run_scorer(buffer, name, key, settings, stop=stop, on_event=on_event or ScoreNarrator(say))
    return DONE if has_ended else 0


# -- either ----------------------------------------------------------------------------------------------------------
MEMBERS: Mapping[str, Callable[..., int]] = {"worker": sample, "score": score}
"""What one process of a section does, by the section's kind: ``[worker.KEY]``, ``[score.KEY]``."""


def member_main(settings_json: str, kind: str, key: str, replica: int, name: str, log: Connection) -> None:
    """One process of ``[KIND.KEY]``."""
    _enter(log, f"{kind} {name}")
    stop = threading.Event()
    stop_on_signals(stop)
    _leave_with(lambda: MEMBERS[kind](from_json(settings_json), key, replica, name, stop))


def member_apart_main(kind: str, key: str, replica: int, name: str) -> None:
    """The same with an interpreter of its own, as :func:`serve_main` is the batcher's."""
    settings, stop = _begin(f"{kind} {name}")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the supervisor's: it drains in order
    _leave_with(lambda: MEMBERS[kind](settings, key, replica, name, stop))


# -- trainer ---------------------------------------------------------------------------------------------------------
def trainer_main(settings_json: str, log: Connection) -> None:
    """The launcher of all ranks."""
    from rlbuffer.forkserver import share
    from rlbuffer.trainer.launch import launch

    _enter(log, "train")
    share()
    settings = from_json(settings_json)
    _leave_with(lambda: launch(settings, world_size=settings.trainer.world_size))


# -- batcher ---------------------------------------------------------------------------------------------------------
def serve(
    settings: RunSettings,
    stop: threading.Event,
    on_event: Callable[[dict[str, Any]], None],
    *,
    replace_config: bool = False,
    follows: bool = False,
    reread: Callable[[], BatcherConfig] | None = None,
    hangup: threading.Event | None = None,
    origin: str = "",
) -> int:
    """Runs the batcher until `stop` is set; see :class:`rlbuffer.daemon.Daemon` for the options. -> exit code."""
    from rlbuffer.client import connect
    from rlbuffer.daemon import Daemon

    with connect(settings.redis_url, run=settings.run, config=settings, name="serve", origin=origin) as buffer:
        Daemon(
            buffer,
            settings.batcher,
            on_event=on_event,
            replace_config=replace_config,
            follows=follows,
            reread=reread,
            hangup=hangup,
        ).run(stop)
    return 0


def serve_main() -> None:
    """The batcher with an interpreter of its own.

    With ``--again`` this process takes the place of one that ended: the run's settings count, which an operator may
    have changed since.
    """
    from rlbuffer.lines import ServeNarrator

    settings, stop = _begin("serve")
    narrator = ServeNarrator(say)

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            say(f"serving run {event['run']!r} from step {event['step']}")
        narrator(event)

    _leave_with(lambda: serve(settings, stop, on_event, follows="--again" in sys.argv[1:]))


# -- both ends -------------------------------------------------------------------------------------------------------
def main() -> None:
    """``python -m rlbuffer.processes WHAT``: ``serve [--again]``, or ``worker`` or ``score KEY REPLICA NAME``. Stdin as
    `_begin` says."""
    what, *rest = sys.argv[1:]
    if what in MEMBERS:
        key, replica, name = rest
        member_apart_main(what, key, int(replica), name)
    else:
        serve_main()


def _begin(title: str) -> tuple[RunSettings, threading.Event]:
    """Settings come on the first line of stdin; the end of stdin is the supervisor's."""
    name_process(title)
    settings = from_json(sys.stdin.readline())
    stop = threading.Event()
    stop_on_signals(stop)
    end_with(sys.stdin.read)
    return settings, stop


def _enter(log: Connection, title: str) -> None:
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    log.close()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    name_process(title)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the supervisor's: it drains in order
    end_with_supervisor()


def _leave_with(work: Callable[[], int]) -> None:
    """Exits with what `work` returns; an error is one line in the log and its own exit code."""
    try:
        code = work()
    except RlbufferError as error:
        if os.environ.get("RLBUFFER_DEBUG"):
            raise
        say(f"Error: {error}")
        code = error.exit_code
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
