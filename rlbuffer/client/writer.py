"""The worker's side: take tickets, push groups, exactly once.

A push carries a sequence number under the producer's incarnation, so that repeating it after a lost reply changes
nothing. The writer keeps its last pushes: a server that lost its newest writes in a power cut answers with a gap, and
the writer sends what is missing again. After a recovery of lost writes the run goes on in a new epoch, and so does the
writer, with the same sequence.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rlbuffer.client.asking import pauses_between_asks
from rlbuffer.client.refusals import LongWait
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.errors import (
    EpochChanged,
    InvalidRollout,
    ProducerGap,
    PushBroken,
    PushGivenUp,
    RlbufferError,
    RunGone,
    ServerRefused,
    ServerUnreachable,
)
from rlbuffer.records.checks import as_integer
from rlbuffer.records.group import Group, Pushed, Ticket
from rlbuffer.records.info import ENV_NAME, check_producer
from rlbuffer.records.states import PushStatus
from rlbuffer.records.truncation import truncated_group
from rlbuffer.store.protocol import Store

TICKET_SECONDS = 60.0
"""The usual time that a ticket stays out without renewal: after that a dead worker's prompt is taken again."""
CONFIG_SECONDS = 30.0
"""Seconds between a writer's looks whether the run cuts rollouts that are longer than a row."""
MOST_BREAKS = 5
"""Times that one push may break its connection while the server answers others, before it is given up."""
SPOOL_PUSHES = 64
"""Pushes kept for re-sending; with AOF every second a server loses at most a second of them."""
FIRST_DELAY_SECONDS, LAST_DELAY_SECONDS = 0.05, 2.0
"""Backoff while the server is away, doubled each time, with jitter."""
_RANDOM = random.Random()  # the global one is the user's: a checkpoint keeps its state


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The settings that a writer works under."""

    config: BatcherConfig | None = None
    """The batcher's, where the run says none: whether rollouts longer than a row are cut."""
    ticket_seconds: float | None = None
    """Seconds that tickets stay out without renewal; None: the usual time."""
    section: str = ""
    """The ``[worker.NAME]`` that it was started for."""


class Writer:
    """Pushes groups into the buffer. Made by :meth:`rlbuffer.client.buffer.Buffer.writer`; safe from several
    threads.

    Example:
        A batcher gives tickets once a trainer has announced a policy version. Here both are in this process.

        >>> import threading
        >>> import rlbuffer
        >>> from rlbuffer.daemon import Daemon
        >>> buffer = rlbuffer.connect("memory://", run="writer")
        >>> buffer.reader().start()
        >>> buffer.policy().announce(0, location="", size=0, checksum="")
        True
        >>> daemon, stop = Daemon(buffer, rlbuffer.BatcherConfig(8192, step_groups=8)), threading.Event()
        >>> batcher = threading.Thread(target=daemon.run, args=(stop,), daemon=True)
        >>> batcher.start()

        >>> writer = buffer.writer("worker-0")
        >>> first, second, third = writer.take("math", 3, timeout_seconds=30.0)
        >>> first.group_id, second.group_id, third.group_id
        ('math.0', 'math.1', 'math.2')
        >>> writer.renew([first, second])
        >>> str(writer.push(rlbuffer.make_group(env="math", group_id=first.group_id)).status)
        'stored'
        >>> writer.release([second])
        >>> writer.take("math", timeout_seconds=30.0) == [second]
        True
        >>> writer.skip([second, third])
        >>> writer.done("math")

        >>> stop.set()
        >>> batcher.join()
        >>> buffer.close()
    """

    def __init__(
        self,
        store: Store,
        worker: str,
        *,
        epoch: int,
        incarnation: str | None = None,
        patience_seconds: float = 300.0,
        on_retry: Callable[[RlbufferError], None] | None = None,
        terms: Terms | None = None,
    ) -> None:
        self._store = store
        self.worker = worker
        self.incarnation = incarnation or uuid.uuid4().hex
        check_producer(worker, self.incarnation)
        self._epoch = epoch
        self._patience = patience_seconds
        self._on_retry = on_retry
        terms = terms or Terms()
        self._config = terms.config
        self.ticket_seconds = TICKET_SECONDS if terms.ticket_seconds is None else terms.ticket_seconds
        """How long tickets stay out without renewal."""
        self._section = terms.section
        self._limit: int | None = None
        """Tokens that a longer rollout is cut to; None: it is left to the batcher."""
        self._limit_at = float("-inf")
        self._sequence = 0
        self._unsettled: tuple[int, Group, str] | None = None
        """A push that ended without an answer: nobody knows whether it is stored."""
        self._spool: deque[tuple[int, Group, str]] = deque(maxlen=SPOOL_PUSHES)
        """(sequence, what was stored, the entry that it replaced or "")."""
        self._breaks: dict[int, int] = {}
        """Sequence of a push that is not settled -> times that it broke its connection, and nothing else did.
        :data:`MOST_BREAKS` or more: it is given up."""
        self._lock = threading.Lock()  # one push in flight per producer: the sequence is what makes it exactly once

    def take(
        self, env: str, n: int = 1, *, timeout_seconds: float | None = None, size: int | None = None
    ) -> list[Ticket]:
        """Waits for leave to sample, and takes up to `n` tickets of `env`; none when the timeout passes.

        The batcher sets how many may be out, so that what is sampled now can still be trained in time. A ticket stays
        out for `ticket_seconds`; its group is pushed under its ``group_id``.

        `size` is how many tickets the env has in all (prompts x passes), for data that ends: no number from `size` on
        is ever given, and what another worker leaves unfinished is given again. None: it has no end.

        Raises:
            EnvDone: the env has an end, all its tickets were given, and none is out: leave the loop.
            ValueError: `env` is not an env name, or `n` is below 1.
        """
        if not isinstance(env, str) or not ENV_NAME.match(env):
            raise ValueError(f"take: env must be {ENV_NAME.pattern[:-2]}, got {env!r}")
        if n < 1:
            raise ValueError(f"take: n = {n} must be at least 1")
        if size is not None and size < 0:
            raise ValueError(f"take: size = {size} must not be negative")
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        pauses, wait = pauses_between_asks(), LongWait(self._store)
        while True:
            numbers = self._take(env, n, size)
            if numbers:
                return [Ticket(env=env, number=i, group_id=f"{env}.{i}") for i in numbers]
            pause = next(pauses)
            left = pause if deadline is None else min(pause, deadline - time.monotonic())
            if left <= 0:
                return []
            wait.look(f"a ticket of {env}")
            time.sleep(left)

    def _take(self, env: str, n: int, size: int | None) -> list[int]:
        """A server at its memory limit gives no tickets: no new groups are wanted until steps retire."""
        try:
            return self._store.take_tickets(env, n, ttl_seconds=self.ticket_seconds, size=size, section=self._section)
        except ServerRefused as error:
            if self._on_retry is not None:
                self._on_retry(error)
            return []

    def renew(self, tickets: Iterable[Ticket]) -> None:
        """Keeps tickets out for another `ticket_seconds`; a worker does so while it samples."""
        for env, numbers in _by_env(tickets).items():
            self._store.renew_tickets(env, numbers, ttl_seconds=self.ticket_seconds)

    def release(self, tickets: Iterable[Ticket]) -> None:
        """Gives tickets back unused: their prompts are taken first by whoever asks next."""
        for env, numbers in _by_env(tickets).items():
            self._store.release_tickets(env, numbers)

    def skip(self, tickets: Iterable[Ticket]) -> None:
        """Closes tickets without a group: nothing is sampled for their numbers, now or later."""
        for env, numbers in _by_env(tickets).items():
            self._store.close_tickets(env, numbers)

    def push(self, group: Group, *, sequence: int | None = None) -> Pushed:
        """Stores a group, or a part of one, exactly once; waits while the server is away.

        `sequence` is for producers that number their own pushes (``rlbuffer push`` uses the line of the file).

        Raises:
            InvalidRollout: it is no group, or too large for the wire; `sequence` is no integer from 1 to 2**53 - 1.
                Nothing was stored.
            ServerUnreachable, ServerRefused: the server stayed away, or full, for longer than the writer's patience.
                The group may be stored or not; pushing it again is safe, and the next push settles it first.
            PushGivenUp: it broke its connection again and again at a server that answers others. It is counted as lost
                there, and the next push follows it. An InvalidRollout, too.
            RunGone: the run was reset while this writer was at work.
        """
        if not isinstance(group, Group):
            raise InvalidRollout(f"push: expected a Group, got {type(group).__name__}")
        if sequence is not None:
            sequence = as_integer("push: sequence", sequence, low=1)
        with self._lock:
            return self._store_as(group, sequence) if sequence is not None else self._store_next(group)

    def done(self, env: str) -> None:
        """Says that `env` sends nothing more except its pushes and the tickets that are out: no further ticket is
        given. When every env of the run is done, its steps take what is left, and it ends with success.

        Say it once, after the last push of all producers of the env. Later pushes train all the same, as long
        as the run has not ended or is started again; ``rlbuffer env resume`` takes it back.

        Raises:
            ServerUnreachable, ServerRefused: as :meth:`push`, which settles a push that was given up first.
            RunGone: the run was reset while this writer was at work.
        """
        if not isinstance(env, str) or not ENV_NAME.match(env):
            raise ValueError(f"done: env must be {ENV_NAME.pattern[:-2]}, got {env!r}")
        with self._lock:
            if self._unsettled is not None:
                number, group, replaces = self._unsettled
                self._store_as(group, number, replaces)
            deadline = time.monotonic() + self._patience
            while True:
                try:
                    return self._store.say_done(env, epoch=self._epoch)
                except EpochChanged as change:
                    self._follow(change)
                except ServerUnreachable as error:
                    if time.monotonic() > deadline:
                        raise
                    if self._on_retry is not None:
                        self._on_retry(error)
                    time.sleep(LAST_DELAY_SECONDS * _RANDOM.uniform(0.5, 1.0))

    def replace(self, group: Group, entry_id: str) -> Pushed:
        """Puts a group in the place of a pending push of the same rollouts, which lacked what this one has.

        When that push is no longer pending (another was first, or it was dropped), this one is a ``duplicate``.
        Everything else is as with :meth:`push`.
        """
        with self._lock:
            return self._store_next(group, entry_id)

    def _store_next(self, group: Group, replaces: str = "") -> Pushed:
        if self._unsettled is not None:
            number, left, before = self._unsettled
            is_same = before == replaces and (left is group or left == group)
            # Its number may be taken on the server: another group under it would be answered as a duplicate, and
            # lost.
            try:
                pushed = self._store_as(left, number, before)
            except PushGivenUp:
                if is_same:
                    raise
            else:
                if is_same:
                    return pushed
        return self._store_as(group, self._sequence + 1, replaces)

    def _store_as(self, group: Group, number: int, replaces: str = "") -> Pushed:
        self._unsettled = (number, group, replaces)
        try:
            pushed, number, sent = self._send(group, number, replaces)
        except (InvalidRollout, RunGone):
            self._unsettled = None  # certainly not stored
            raise
        self._unsettled = None
        self._sequence = max(self._sequence, number)
        self._spool.append((number, sent, replaces))
        if pushed.status == PushStatus.LOST:
            raise PushGivenUp(
                f"group {group.group_id} is given up and counted as lost: its push broke the connection again and "
                "again, to a server that answers others. Push it in smaller parts"
            )
        # A push that was given up stays so as long as it may be sent again from the spool.
        oldest = self._spool[0][0]
        self._breaks = {n: breaks for n, breaks in self._breaks.items() if breaks >= MOST_BREAKS and n >= oldest}
        return pushed

    def _fitted(self, group: Group) -> Group:
        """`oversized = "truncate"` of the run's config, or of this process's while no batcher has served the run."""
        now = time.monotonic()
        if now - self._limit_at >= CONFIG_SECONDS:
            own = self._config.as_dict() if self._config is not None else {}
            config = self._store.meta().config or own
            self._limit = config.get("row_tokens") if config.get("oversized") == "truncate" else None
            self._limit_at = now
        return group if self._limit is None else truncated_group(group, self._limit)

    def _send(self, group: Group, sequence: int, replaces: str = "") -> tuple[Pushed, int, Group]:
        """Returns the outcome, the sequence under which it is stored, and what was stored."""
        deadline = time.monotonic() + self._patience
        delay = FIRST_DELAY_SECONDS
        last: int | None = None
        """The server's last push, when it has told that some are missing there."""
        while True:
            try:
                if not replaces:  # what takes another's place has its lengths
                    group = self._fitted(group)
                if last is not None:
                    sequence, last = self._fill(last, sequence), None
                status, entry_id = self._store_push(group, sequence, replaces)
                return Pushed(entry_id=entry_id, status=status), sequence, group
            except ProducerGap as gap:
                last = gap.last
            except EpochChanged as change:
                self._follow(change)
            except (ServerUnreachable, ServerRefused) as error:
                if time.monotonic() + delay > deadline and not (isinstance(error, PushBroken) and self._give_up()):
                    raise
                if self._on_retry is not None:
                    self._on_retry(error)
                time.sleep(delay * _RANDOM.uniform(0.5, 1.0))
                delay = min(2 * delay, LAST_DELAY_SECONDS)

    def _follow(self, change: EpochChanged) -> None:
        """Goes on in the run's epoch. Raises `change` where it is of another line of versions, or may be."""
        # An epoch before the own one: the server has lost that, and whether it began a line of versions.
        if not change.follows(self._epoch) or change.epoch < self._epoch:
            raise change
        self._epoch = change.epoch

    def _give_up(self) -> bool:
        """Patience is over: what broke its connection more than once is given up. -> whether anything is."""
        broken = [number for number, breaks in self._breaks.items() if 2 <= breaks < MOST_BREAKS]
        self._breaks.update(dict.fromkeys(broken, MOST_BREAKS))
        return bool(broken)

    def _store_push(self, group: Group, sequence: int, replaces: str) -> tuple[PushStatus, str]:
        """Returns the status, ``lost`` for a push that is given up, and the entry."""
        names: dict[str, Any] = {
            "producer": self.worker,
            "incarnation": self.incarnation,
            "sequence": sequence,
            "epoch": self._epoch,
        }
        if self._breaks.get(sequence, 0) >= MOST_BREAKS:
            return self._store.give_up(group, **names)
        try:
            return self._store.push(group, replaces=replaces, **names)
        except PushBroken:
            self._breaks[sequence] = self._breaks.get(sequence, 0) + 1
            raise

    def _fill(self, last: int, sequence: int) -> int:
        """The server knows pushes up to `last` only: sends the missing ones again. -> the sequence to go on with."""
        missing = [push for push in self._spool if last < push[0] < sequence]
        if len(missing) == sequence - last - 1:
            for number, group, replaces in missing:
                try:
                    self._store_push(group, number, replaces)
                except InvalidRollout:  # the server has other limits than when it took it
                    self._breaks[number] = MOST_BREAKS
                    self._store_push(group, number, replaces)
            return sequence
        # The spool does not reach back: what is missing cannot be sent any more, so it is counted, and a new
        # incarnation starts a sequence of its own.
        self._store.count_lost(sequence - last - 1)
        self.incarnation, self._sequence = uuid.uuid4().hex, 0
        self._spool.clear()
        self._breaks.clear()
        return 1


def _by_env(tickets: Iterable[Ticket]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for ticket in tickets:
        numbers.setdefault(ticket.env, []).append(ticket.number)
    return numbers
