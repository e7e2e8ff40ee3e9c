"""The worker's heartbeat, which keeps its tickets, and what it logs: both say the same."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import ConfigError, RlbufferError
from rlbuffer.process.heartbeat import Heartbeats, starting
from rlbuffer.process.identity import may_live
from rlbuffer.process.logs import RateLimited, fields
from rlbuffer.process.stages import Stages
from rlbuffer.process.throughput_log import ThroughputLog
from rlbuffer.records.group import Group, Ticket
from rlbuffer.records.waiting import Problem, Trouble, Wait, Waiting
from rlbuffer.state.heartbeats import failing
from rlbuffer.state.text import plural
from rlbuffer.worker.failures import Failures, RunningCalls

if TYPE_CHECKING:
    from rlbuffer.client.writer import Writer
    from rlbuffer.store.member import Member

WORKER_TICKET_SECONDS = 12.0
"""Seconds that a ticket stays out when its worker has died: five beats missed, and a reconnect."""
SAY_WAITING_SECONDS = 5.0
"""Waiting is normal; for this long it is worth a sentence."""
_log = logging.getLogger(__name__)


@contextmanager
def telling_start(store: Member, name: str, settings: WorkerSettings) -> Iterator[None]:
    """Says what a worker loads while the block makes its env and its sampler, to a run that is there."""

    def tell(record: dict[str, Any]) -> Mapping[str, Any] | None:
        store.meta()  # RunGone where there is none: this begins none
        return store.heartbeat("worker", name, record)

    with starting(tell, f"it loads its env and its sampler ({settings.sampler})", env=_env_of(settings)):
        yield


def _env_of(settings: WorkerSettings) -> str:
    """Its name before it is made."""
    return str(settings.env_options.get("name") or settings.env)


@contextmanager
def telling_why(store: Member, name: str, settings: WorkerSettings) -> Iterator[None]:
    """A worker that cannot begin says why to a run that is there: its heartbeat is the last one."""
    try:
        yield
    except ConfigError as error:
        heartbeat = WorkerHeartbeat(store, name, _env_of(settings))
        heartbeat.ended = str(error)
        with suppress(RlbufferError):
            store.meta()  # RunGone where there is none: this begins none
            other = store.heartbeats("worker").get(name)
            if other is None or not may_live(other):  # one that works has not ended
                store.heartbeat("worker", name, heartbeat.record())
        raise


class WorkerHeartbeat(Heartbeats):
    """Says what a worker samples with and has pushed, its troubles and what it waits for; renews its tickets."""

    def __init__(self, store: Member, name: str, env: str, calls: RunningCalls | None = None) -> None:
        super().__init__("rlbuffer-heartbeat", Trouble.WORKER_STUCK)
        self.version = -1
        """Policy version that samples."""
        self.skipped = 0
        """Tickets closed because nothing was to be sampled for them."""
        self.failures = Failures()
        """Groups abandoned, by kind."""
        self.ended = ""
        """Why the worker ends, where that is no order."""
        self.other_prompts: Problem | None = None
        """The env's prompts are not those that the run's tickets have counted."""
        self._calls = calls or RunningCalls()
        self._store, self._name, self._env = store, name, env
        self._writer: Writer | None = None
        self._held: dict[int, Ticket] = {}
        self._progress = ThroughputLog(_log, "pushed")
        self._lasting, self._failing = RateLimited(), RateLimited()
        self._waiting_since: float | None = None
        self._said_waiting = 0.0
        self._weights: Mapping[str, Any] = {}
        """What bringing the version that samples took: seconds by stage, bytes by kind, and its size."""
        self._loading: tuple[int, float] | None = None
        """The version that is being loaded, and since when (monotonic)."""
        self._listing = threading.Lock()  # never held while the server is asked: the worker's event loop takes it

    def hold(self, writer: Writer) -> None:
        """Renews tickets through this writer from now on."""
        with self._listing:
            self._writer, self._held = writer, {}

    def add(self, tickets: Iterable[Ticket]) -> None:
        """Renews these tickets, too, from now on."""
        with self._listing:
            self._held |= {ticket.number: ticket for ticket in tickets}
            self._carried_until = float("-inf")

    def remove(self, tickets: Iterable[Ticket]) -> None:
        """Ends the renewal of these tickets, from the next one on."""
        with self._listing:
            for ticket in tickets:
                self._held.pop(ticket.number, None)

    def drop_tickets(self) -> list[Ticket]:
        """Ends the renewal of all tickets, from the next one on. -> those that were held."""
        with self._listing:
            tickets, self._held = list(self._held.values()), {}
            return tickets

    def wait_for_renewal(self) -> None:
        """Waits for the renewal that is under way, which may take as long as the server is away: not for an event loop.
        Before removed tickets are given back: a renewal behind that would take them out again."""
        with self._holding:
            return

    # -- what happens ------------------------------------------------------------------------------------------------
    @contextmanager
    def loading(self, version: int) -> Iterator[None]:
        """While it lasts, heartbeats say that `version` is being loaded, whatever else is waited for."""
        self._loading = version, time.monotonic()
        try:
            yield
        finally:
            self._loading = None

    def loaded(self, version: int, took: Stages, *, size: int = 0) -> None:
        """`version`, of so many bytes, serves now (-1: none); bringing it took so long."""
        level = logging.INFO if self.version < 0 else logging.DEBUG
        self._weights = {"seconds": dict(took.seconds), "bytes": dict(took.bytes), "size": size}
        self.version = version
        if version >= 0:
            extra = fields("version", version=version, seconds=sum(took.seconds.values()))
            _log.log(level, "sampling with policy version %d", version, extra=extra)

    def pushed(self, group: Group, seconds: float) -> None:
        """A group is on the server, `seconds` after its prompt was there."""
        count, tokens = len(group.rollouts), sum(rollout.length for rollout in group.rollouts)
        self.groups += 1
        self.rollouts += count
        self.tokens += tokens
        self._lasting.is_over()
        version, rewards = self.version, [r.reward for r in group.rollouts if r.reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        extra = fields(
            "group",
            group_id=group.group_id,
            version=version,
            rollouts=count,
            tokens=tokens,
            reward=mean,
            seconds=seconds,
            lowest=min(rewards, default=None),
            highest=max(rewards, default=None),
        )
        _log.debug("group %s is pushed", group.group_id, extra=extra)
        self._progress.add(count, tokens, reward=mean * count, more=f"version {version}")

    def trouble(self, sentence: str, *, kind: str = "", passes: bool = True) -> None:
        """Something is wrong, and the worker goes on. Said at once, and each minute while it lasts.

        Args:
            kind: what of it is always the same; "": all of the sentence.
            passes: it is over when a group is pushed, and said at once the next time.
        """
        is_due = (self._lasting if passes else self._failing).is_due(kind or sentence, time.monotonic())
        if is_due:
            self.error = sentence
        _log.log(logging.WARNING if is_due else logging.DEBUG, "%s", sentence, extra=fields("trouble"))

    def failure(self, kind: str, what: str, sentence: str = "", trace: str = "") -> None:
        """A group is not made, for `what`: counted, and said with its traceback, each kind of error once a minute."""
        self.failures.note(kind, what, trace)
        sentence, level = sentence or what, logging.DEBUG
        if self._failing.is_due(kind, time.monotonic()):
            level, count = logging.WARNING, self.failures.record().get(kind, 0)
            again = f" ({kind}: {plural(count, 'time')} so far)" if count > 1 else ""
            sentence = "\n".join(filter(None, (sentence + again, trace)))
        _log.log(level, "%s", sentence, extra=fields("trouble", kind=kind))

    def has_other_prompts(self, problem: Problem) -> None:
        """Says that the env has other prompts than before; the heartbeat does so from now on."""
        self.other_prompts = problem
        trouble = replace(problem, env=self._env, worker=self._name)
        _log.warning("%s", trouble, extra=fields("trouble", kind=str(trouble.kind)))

    def waits(self, waiting: Waiting) -> None:
        """Notes what is waited for, and says it once it has lasted."""
        if threading.current_thread() is self._thread:
            return  # a renewal waits, and the loop may be at work
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = self._said_waiting = now
        waiting = replace(waiting, seconds=round(now - self._waiting_since, 1))
        self.waiting = waiting
        if now - self._said_waiting >= SAY_WAITING_SECONDS:
            self._said_waiting = now
            level = logging.INFO if self._lasting.is_due(waiting.key, now) else logging.DEBUG
            extra = fields("waiting", **waiting.record())
            _log.log(level, "waiting for %.0f s: %s", waiting.seconds, waiting, extra=extra)

    def works(self) -> None:
        """Nothing is waited for any more."""
        self._waiting_since = None
        self.waiting = None

    def stopped(self) -> None:
        """The worker has ended: counts since its start."""
        self._progress.flush()
        failed = f", {self.failed_groups} abandoned" if self.failed_groups else ""
        text = f"stopped after {plural(self.groups, 'group')}, {plural(self.rollouts, 'rollout')}{failed}"
        counts = {"groups": self.groups, "rollouts": self.rollouts, "failed_groups": self.failed_groups}
        _log.info("%s", text, extra=fields("stopped", **counts))

    # -- beats -------------------------------------------------------------------------------------------------------
    def record(self) -> dict[str, Any]:
        """The content of a heartbeat; msgpack types."""
        loading, record = self._loading, super().record()
        if loading is not None:
            seconds = round(time.monotonic() - loading[1], 1)
            record["waiting"] = Waiting(kind=Wait.LOADING, version=loading[0], seconds=seconds).record()
        return record | {
            "env": self._env,
            "version": self.version,
            **{f"weights_{name}": value for name, value in self._weights.items()},
            "skipped": self.skipped,
            "sampling": len(self._held),
            "failures": self.failures.record(),
            "traceback": self.failures.traceback,
        }

    def _problems(self) -> list[Problem]:
        failed = failing(self.failures.record(), self.failures.last)
        problems = super()._problems() + ([failed] if failed else [])
        if busy := self._calls.sentence():
            problems.append(Problem(kind=Trouble.ENV_HANGS, detail=busy))
        if self.other_prompts:
            problems.append(self.other_prompts)
        if self.ended:
            problems.append(Problem(kind=Trouble.WORKER_ENDED, detail=self.ended))
        return problems

    def _renew(self) -> None:
        with self._listing:
            writer, tickets = self._writer, tuple(self._held.values())
        if writer is not None and tickets:
            writer.renew(tickets)

    def _tell(self, record: dict[str, Any]) -> Mapping[str, Any] | None:
        return self._store.heartbeat("worker", self._name, record)
