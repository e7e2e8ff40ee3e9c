"""A producer: its pushes in their sequence, each stored exactly once, whatever breaks in between.

A push carries a sequence number under the producer's incarnation, so that repeating it after a lost reply changes
nothing. Several are sent together; what is not settled by that goes one by one. The last pushes are kept: a server that
lost its newest writes in a power cut answers with a gap, and what is missing is sent again. After a recovery of lost
writes the run goes on in a new epoch, and so does the producer, with the same sequence.
"""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlbuffer.errors import (
    EpochChanged,
    InvalidRollout,
    ProducerGap,
    PushBroken,
    PushRefused,
    RlbufferError,
    RunGone,
    ServerRefused,
    ServerUnreachable,
)
from rlbuffer.records.group import Group, Pushed
from rlbuffer.records.info import check_producer
from rlbuffer.records.states import PushStatus
from rlbuffer.store.producer import ProducerStore

PATIENCE_SECONDS = 300.0
"""Longest that a push is repeated while the server is away."""
SPOOL_PUSHES = 64
"""Pushes kept for re-sending; with AOF every second a server loses at most a second of them."""
FIRST_DELAY_SECONDS, LAST_DELAY_SECONDS = 0.05, 2.0
"""Backoff while the server is away, doubled each time, with jitter."""
_RANDOM = random.Random()  # the global one is the user's: a checkpoint keeps its state


@dataclass(slots=True)
class _Push:
    """A push of the last call."""

    sequence: int
    group: Group
    replaces: str
    """The entry whose place it takes, or ""."""
    pushed: Pushed | None = None
    """None: it is not settled, and nobody knows whether it is stored."""
    is_broken: bool = False
    """Its connection broke until patience was over, while the server answered others."""
    is_refused: bool = False
    """It was refused for a reason of its own, and its sequence is still to be left out."""


class Producer:
    """The pushes of one name and incarnation, a writer's or a scorer's; safe from several threads.

    `fit` makes of a group what is stored of it, where it takes no other's place.
    """

    def __init__(
        self,
        store: ProducerStore,
        name: str,
        incarnation: str | None = None,
        *,
        epoch: int,
        patience_seconds: float = PATIENCE_SECONDS,
        on_retry: Callable[[RlbufferError], None] | None = None,
        fit: Callable[[Group], Group] = lambda group: group,
    ) -> None:
        self._is_named = incarnation is not None
        """The user has given the incarnation, so that it survives a restart."""
        self._is_parents = False
        """It is named, and this process was forked from the one that it is of."""
        self.incarnation = incarnation or uuid.uuid4().hex
        check_producer(name, self.incarnation)
        self._store = store
        self._name = name
        self.epoch = epoch
        self._patience = patience_seconds
        self._on_retry = on_retry
        self._fit = fit
        self.sequence = 0
        """Of the last push that is settled."""
        self._call: list[_Push] = []
        """The pushes of the last call, until it has answered for all of them."""
        self._spool: deque[tuple[int, Group | None, str]] = deque(maxlen=SPOOL_PUSHES)
        """(sequence, what was stored, the entry that it replaced or ""). None: nothing, the push was refused."""
        self._lock = threading.Lock()  # one call in flight per producer: the sequence is what makes it exactly once
        _producers.add(self)

    def renew(self) -> None:
        """Goes on under another incarnation, whose first push is 1."""
        self.incarnation, self.sequence = uuid.uuid4().hex, 0
        self._spool.clear()

    def leave_to_parent(self) -> None:
        """Renews it in a forked process: what is under way here is its parent's, and so are the sequence, under which
        other groups would be answered as duplicates, and the lock, which a thread may hold that is not here."""
        self._lock = threading.Lock()
        self._call = []
        self._is_parents = self._is_named
        self.renew()

    def push(self, pushes: Sequence[tuple[Group, str]], sequence: int | None = None) -> list[Pushed]:
        """Stores (group, the entry whose place it takes or ""), the first under `sequence`. -> their outcomes.

        What an earlier call has left is settled first, and a call that begins with the pushes of that one is answered
        for them. Raises as :meth:`rlbuffer.client.writer.Writer.push_many`.
        """
        if not pushes:
            return []
        self._check_process()
        with self._lock:
            again: list[_Push] = []
            if sequence is None:
                # Their numbers may be taken on the server: other groups under them would be answered as duplicates,
                # and lost.
                self._leave_broken([group for group, _ in pushes])
                self._send_rest()
                for push, (group, replaces) in zip(self._call, pushes, strict=False):
                    if push.replaces != replaces or not (push.group is group or push.group == group):
                        break
                    again.append(push)
                sequence = self.sequence + 1
            fresh = [_Push(number, *push) for number, push in enumerate(pushes[len(again) :], sequence)]
            self._call = again + fresh
            if len(fresh) > 1:
                self._send_together(fresh)
            self._send_rest()
            done, self._call = self._call, []
            return [push.pushed for push in done if push.pushed]

    def say_last(self, say: Callable[[int], None]) -> None:
        """Settles what is left, and then says something in the epoch that it is given."""
        self._check_process()
        with self._lock:
            self._leave_broken([])
            self._send_rest()
            deadline = time.monotonic() + self._patience
            while True:
                try:
                    return say(self.epoch)
                except EpochChanged as change:
                    self._follow(change)
                except (ServerUnreachable, ServerRefused) as error:
                    if time.monotonic() > deadline:
                        raise
                    if self._on_retry is not None:
                        self._on_retry(error)
                    time.sleep(LAST_DELAY_SECONDS * _RANDOM.uniform(0.5, 1.0))

    def _check_process(self) -> None:
        if self._is_parents:
            raise RlbufferError(
                f"the incarnation of writer {self._name!r} was given in the process that this one was forked from, and "
                "is that one's: make a writer here, with an incarnation of its own"
            )

    def _send_together(self, pushes: Sequence[_Push]) -> None:
        """Sends pushes in as few round trips as may be. Whatever goes wrong is left to :meth:`_send_rest`."""
        try:
            fitted = [push.group if push.replaces else self._fit(push.group) for push in pushes]
            outcomes, _ = self._store.push_many(
                [(group, push.replaces) for group, push in zip(fitted, pushes, strict=True)],
                producer=self._name,
                incarnation=self.incarnation,
                sequence=pushes[0].sequence,
                epoch=self.epoch,
            )
        except InvalidRollout:
            del self._call[-len(pushes) :]
            raise
        except RlbufferError:
            return
        for push, group, outcome in zip(pushes, fitted, outcomes, strict=False):
            self._note(push, group, *outcome)

    def _send_rest(self) -> None:
        """Stores what is not settled of the last call, one push after the other."""
        for push in tuple(self._call):
            if push.pushed is not None:
                continue
            try:
                self._send(push)
            except InvalidRollout:
                del self._call[self._call.index(push) :]  # certainly not stored
                raise
            except PushBroken as error:
                push.is_broken, error.group = True, push.group
                raise
            except PushRefused as error:
                error.group = push.group
                raise
            except RunGone:
                self._call.clear()
                raise

    def _leave_broken(self, asked: Sequence[Group]) -> None:
        """Goes on behind a push that breaks its connection each time, unless the same group is asked for again.

        The next push has the next sequence: a server that does not have the broken one answers with a gap. The spool
        may hold what cannot be sent, too.
        """
        for push in self._call:
            if push.is_broken and not any(push.group is group or push.group == group for group in asked):
                self._call = [other for other in self._call if other is not push]
                self.sequence = max(self.sequence, push.sequence)
                self._spool.clear()

    def _note(self, push: _Push, sent: Group, status: PushStatus, entry_id: str) -> None:
        """`push` is settled, and `sent` is what was stored."""
        push.pushed = Pushed(entry_id=entry_id, status=status)
        self.sequence = max(self.sequence, push.sequence)
        self._spool.append((push.sequence, sent, push.replaces))

    def _send(self, push: _Push) -> None:
        """Sends a push until it is settled. Raises PushRefused; then its sequence goes to nothing, now or with the next
        call, and the next push follows it."""
        if push.is_refused:
            self._insist(push, self._leave_out)
            return
        try:
            self._insist(push, self._store_one)
        except PushRefused:
            push.is_refused = True
            with suppress(RlbufferError):
                self._leave_out(push)
            if push.pushed is None:
                raise

    def _insist(self, push: _Push, move: Callable[[_Push], None]) -> None:
        """Makes a move of `push`, again and again where that may help, and what is missing before it first."""
        deadline = time.monotonic() + self._patience
        delay = FIRST_DELAY_SECONDS
        last: int | None = None
        """The last push that the server has, known when some are missing there."""
        while True:
            try:
                if last is not None:
                    self._fill(last, push.sequence, waits_until=deadline - 2 * LAST_DELAY_SECONDS)
                    last = None
                return move(push)
            except ProducerGap as gap:
                last = gap.last
            except EpochChanged as change:
                self._follow(change)
            except (ServerUnreachable, ServerRefused, PushRefused) as error:
                is_final = isinstance(error, PushRefused) and not error.may_pass
                if is_final or time.monotonic() + delay > deadline:
                    raise
                if self._on_retry is not None:
                    self._on_retry(error)
                time.sleep(delay * _RANDOM.uniform(0.5, 1.0))
                delay = min(2 * delay, LAST_DELAY_SECONDS)

    def _store_one(self, push: _Push) -> None:
        # What takes another's place has its lengths.
        group = push.group if push.replaces else self._fit(push.group)
        outcome = self._store.push(group, sequence=push.sequence, replaces=push.replaces, **self._names)
        self._note(push, group, *outcome)

    def _leave_out(self, push: _Push) -> None:
        """Gives the sequence of a refused push to nothing."""
        entry_id = self._store.leave_out(sequence=push.sequence, **self._names)
        push.is_refused = False
        if entry_id:  # an earlier try had stored it, and its answer was lost
            self._note(push, push.group, PushStatus.DUPLICATE, entry_id)
            return
        self._call = [other for other in self._call if other is not push]
        self.sequence = max(self.sequence, push.sequence)
        self._spool.append((push.sequence, None, ""))

    def _follow(self, change: EpochChanged) -> None:
        """Goes on in the run's epoch. Raises `change` where it is of another line of versions, or may be."""
        # An epoch before the own one: the server has lost that, and whether it began a line of versions.
        if not change.follows(self.epoch) or change.epoch < self.epoch:
            raise change
        self.epoch = change.epoch

    @property
    def _names(self) -> dict[str, Any]:
        return {"producer": self._name, "incarnation": self.incarnation, "epoch": self.epoch}

    def _fill(self, last: int, sequence: int, *, waits_until: float) -> None:
        """The server knows pushes up to `last` only: sends the missing ones again, up to `sequence`.

        One that the server does not take any more costs itself alone. A refusal that may pass is waited out by the
        caller, until `waits_until` (monotonic seconds).
        """
        missing = [push for push in self._spool if last < push[0] < sequence]
        if len(missing) == sequence - last - 1:
            for number, group, replaces in missing:
                try:
                    if group is not None:
                        self._store.push(group, sequence=number, replaces=replaces, **self._names)
                        continue
                except (InvalidRollout, PushRefused) as error:  # other limits, or another proxy, than when it was taken
                    may_pass = isinstance(error, PushRefused) and error.may_pass
                    if may_pass and isinstance(error.__cause__, ServerRefused) and time.monotonic() < waits_until:
                        raise error.__cause__ from error
                    self._store.count_lost(1)
                    self._spool[self._spool.index((number, group, replaces))] = (number, None, "")
                self._store.leave_out(sequence=number, **self._names)
            return
        # What is missing cannot be sent any more, so it is counted, and a new incarnation starts a sequence of its own.
        self._store.count_lost(sequence - last - 1)
        self.renew()
        for number, push in enumerate([push for push in self._call if push.pushed is None], start=1):
            push.sequence = number


_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


def _after_fork() -> None:
    for producer in _producers:
        producer.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
