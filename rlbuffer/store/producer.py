"""PUSH: groups become pending, each exactly once.

A push is two moves: its payload goes first, under a key of its own, and then the script makes it pending. Both share a
round trip, with further pushes of their producer. In a cluster the payload may lie on another shard than what the
script writes, and goes in a round trip before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import redis

from rlbuffer.errors import (
    InvalidRollout,
    OpenRolloutUnknown,
    ProducerGap,
    PushBroken,
    PushRefused,
    RlbufferError,
    ServerRefused,
    ServerUnreachable,
    ServerUnsuitable,
    WrongAnswer,
)
from rlbuffer.records.group import Group
from rlbuffer.records.states import PushStatus
from rlbuffer.store.keys import Keys
from rlbuffer.store.member import Member
from rlbuffer.store.session import number, raise_first, text
from rlbuffer.wire import payload

BATCH_PUSHES, BATCH_BYTES = 16, 8 << 20
"""Pushes of a round trip at most, and bytes of their payloads, unless a single one has more."""
NEVER_THERE = "0-1"
"""Id that no entry of a pool can have: the server's clock gives them."""
WEEK_MS = 7 * 86_400_000
"""Milliseconds that a payload is kept that never became pending."""


class ProducerStore(Member):
    """A run for who pushes, a worker or a scorer."""

    step_heard = 0
    """The run's last committed step, as the last push that was stored has heard it."""

    def push(
        self, group: Group, *, producer: str, incarnation: str, sequence: int, epoch: int, replaces: str = ""
    ) -> tuple[PushStatus, str]:
        """PUSH. -> (status ``stored`` | ``duplicate``, entry id). `producer` is the worker, `incarnation` its uuid.

        `replaces` is a pending entry whose place it takes: the same rollouts, with what that one needed.

        Raises RunGone, ProducerGap (``.last`` holds what the server has), ServerRefused, PushRefused, ServerUnreachable
        (PushBroken when the server answers others), InvalidRollout when the server can never take it: then nothing was
        sent. Never retried inside: the writer repeats the call with the same sequence.
        """
        source = PushOrigin(self.keys, producer, incarnation, epoch, is_spread=self.connection.is_cluster)
        outcomes, error = self._push_from(source, [(group, replaces)], sequence)
        if error is None:
            return outcomes[0]
        raise self._explained(error, source, group, sequence) from error

    def _explained(self, error: RlbufferError, source: PushOrigin, group: Group, sequence: int) -> RlbufferError:
        """The error of a push that failed: what it says of the push itself where that is the cause."""
        is_strange = isinstance(error, ServerRefused) and not error.is_known
        is_refused = is_strange or isinstance(error, WrongAnswer | ServerUnsuitable)
        if not is_refused:
            is_lost = isinstance(error, ServerUnreachable)
            unnamed = self.keys.unnamed_payload(group.group_id, source.suffix(sequence))
            if not (is_lost and self._answers(unnamed)):
                return error
        size = sum(_sizes(group, payload.encode_push(group)).values())
        if is_refused:
            return PushRefused(
                f"the push of group {group.group_id} ({size} bytes) failed: {error}", may_pass=is_strange
            )
        return PushBroken(
            f"the connection to {self.connection.address} broke in the push of group {group.group_id} "
            f"({size} bytes); the server answers others. If it breaks each "
            "time, push the group in parts, or raise what limits a request: the server's client-query-buffer-limit, or "
            "a proxy's limit"
        )

    def push_many(
        self, pushes: Sequence[tuple[Group, str]], *, producer: str, incarnation: str, sequence: int, epoch: int
    ) -> tuple[list[tuple[PushStatus, str]], RlbufferError | None]:
        """PUSH of several, from `sequence` on: (group, the entry whose place it takes or ""), at least one.

        -> what `push` returns, of the first of them, and the error of the one that stopped it; where a connection
        broke, others may be stored. Raises InvalidRollout, ServerUnreachable, ServerRefused before it stores anything.
        """
        source = PushOrigin(self.keys, producer, incarnation, epoch, is_spread=self.connection.is_cluster)
        return self._push_from(source, pushes, sequence)

    def _push_from(
        self, source: PushOrigin, pushes: Sequence[tuple[Group, str]], sequence: int
    ) -> tuple[list[tuple[PushStatus, str]], RlbufferError | None]:
        """:meth:`push_many` of a source."""
        sent = [_Push(source, n, group, replaces) for n, (group, replaces) in enumerate(pushes, sequence)]
        self._check_sizes(sent)
        outcomes = []
        try:
            for batch in _batches(sent):
                for outcome in self._move_pushes(source, batch):
                    outcomes.append(outcome)
        except RlbufferError as error:
            return outcomes, error
        return outcomes, None

    def leave_out(self, *, producer: str, incarnation: str, sequence: int, epoch: int) -> str:
        """Takes a sequence for a push that never comes. -> "", or the entry's id when the push is stored all the same.
        Raises as :meth:`push`."""
        source = PushOrigin(self.keys, producer, incarnation, epoch, is_spread=self.connection.is_cluster)
        keys = self.keys
        # A push that would take the place of what was never there: PUSH notes its sequence, and stores nothing.
        args = [epoch, sequence, "", "", "", source.suffix(sequence), 0, 0, b"", NEVER_THERE, keys.payload_prefix, 0]
        reply = self.move("push", source.where, args, repeat=False)
        match text(reply[0]):
            case "LATE":
                return ""
            case "DUP":
                return text(reply[1])
            case "GAP":
                raise self._gap(reply, source, sequence)
            case "GONE":
                raise self.gone(reply, source.epoch)
        raise self.unexpected("push", reply)

    def count_lost(self, pushes: int) -> None:
        """Pushes that a producer knows are missing on the server and cannot send again."""
        # A lost reply may count twice. That is better than a writer that fails because it could not count.
        self._tell((self.keys.ledger,), ("count", "lost", pushes))

    def _move_pushes(self, source: PushOrigin, batch: Sequence[_Push]) -> Iterator[tuple[PushStatus, str]]:
        """Makes pushes pending.

        -> their outcomes, until one is refused: its error comes out. The script refuses those behind it as a gap, so
        nothing of them is pending.
        """
        replies, stop = list[Any](), None
        if source.is_spread:
            self._store_payloads(batch)

        try:
            self.call(partial(self._send, source, batch, replies), repeat=False, op="push")
        except RlbufferError as error:
            stop = error
        if source.is_spread:
            self._make_permanent(source, batch, replies)
        for push, reply in zip(batch, replies, strict=False):
            if isinstance(reply, Exception):
                break
            yield self._outcome(source, push, reply)
        if stop is not None:
            raise stop

    def _send(self, source: PushOrigin, batch: Sequence[_Push], replies: list[Any]) -> None:
        """Sends the script of each push, and before it its payload unless that is stored, in one round trip.

        `replies` gets that of each script; in the place of one whose payload was not stored, the reason why. The first
        of these is raised.
        """
        script = self.script("push")
        names = self.declared(source.where)
        client: Any = self.connection.sender(sum(push.size for push in batch))
        with client.pipeline(transaction=False) as pipe:
            stores = []
            for push in batch:
                stores.append(() if source.is_spread else _add_payload(pipe, push, is_spread=False))
                pipe.evalsha(script.sha, len(names), *names, *push.args)
            answers = iter(pipe.execute(raise_on_error=False))
        for push, commands in zip(batch, stores, strict=True):
            fault = _fault(push, commands, answers) if commands else None
            reply = next(answers)
            is_there = isinstance(reply, list) and text(reply[0]) in ("OK", "DUP")  # an earlier try had stored it
            replies.append(reply if is_there else fault or reply)
        if isinstance(replies[0], redis.exceptions.NoScriptError):
            # The server was restarted. It has the payloads; the scripts come again, one by one.
            replies.clear()
            for push in batch:
                replies.append(script(names, push.args))
        raise_first(replies)

    def _make_permanent(self, source: PushOrigin, batch: Sequence[_Push], replies: Sequence[Any]) -> None:
        """Makes the payloads of what is pending permanent, in a cluster, where the script does not reach them.

        The leader does it for a producer that dies before this. A payload that it took for a stray meanwhile, where
        memory is short, is stored again, and the leader makes that one permanent. A duplicate's payload was stored
        again: where its entry is pending no more, it may be swept already, and this one would stay for ever.
        """

        def is_pending(reply: Any) -> bool:
            if isinstance(reply, Exception):
                return False
            # Of a group of open rollouts a duplicate may be another gateway's push, whose payload is another one.
            return text(reply[0]) == "OK" or (text(reply[0]) == "DUP" and reply[2] == b"1" and not source.opened)

        answers = zip(batch, replies, strict=False)
        pending = [(push, text(reply[0])) for push, reply in answers if is_pending(reply)]
        self.paged(pending, lambda pipe, one: pipe.persist(one[0].name))
        fresh = [push for push, status in pending if status == "OK"]  # a duplicate's may have been swept for good
        there = self.paged(fresh, lambda pipe, push: pipe.exists(push.name))
        gone = [push for push, is_there in zip(fresh, there, strict=True) if not is_there]
        if gone:
            self._store_payloads(gone)

    def _outcome(self, source: PushOrigin, push: _Push, reply: Sequence[Any]) -> tuple[PushStatus, str]:
        status, sequence = text(reply[0]), push.sequence
        if status == "LATE":
            return PushStatus.DUPLICATE, ""
        if status == "OK":
            self.step_heard = number(reply[2]) or 0
        if status == "OK" or status == "DUP":
            return (PushStatus.STORED if status == "OK" else PushStatus.DUPLICATE), text(reply[1])
        if status == "MISSING":
            raise ServerRefused(
                f"the payload of push {push.suffix} is not on the server any more ({push.key}): sent again"
            )
        if status == "UNEQUAL":
            rollouts, tokens = (text(part) for part in reply[1:])
            group = push.group
            raise InvalidRollout(
                f"group {group.group_id} ({group.env}, {push.rollouts} rollouts, {push.tokens} tokens) cannot "
                f"replace {push.replaces}, which holds {rollouts} rollouts and {tokens} tokens"
            )
        if status == "JAMMED":
            raise ServerRefused(
                f"the pool of run {self.run!r} takes no push ({self.keys.pool}: {text(reply[1])}): an entry did not "
                "come through rlbuffer. Remove the pool (DEL), and with it what is pending"
            )
        if status == "GAP":
            raise self._gap(reply, source, sequence)
        if status == "OPEN":
            raise OpenRolloutUnknown(
                f"the open rollouts of group {push.group.group_id} do not wait for a push ({source.key}): one of them "
                "has not ended, or the server lost it"
            )
        if status == "GONE":
            raise self.gone(reply, source.epoch)
        raise self.unexpected("push", reply)

    def _gap(self, reply: Sequence[Any], source: PushOrigin, sequence: int) -> ProducerGap:
        return ProducerGap(
            f"push {sequence} of producer {source.producer!r} came, but the server's last is {text(reply[1])}: "
            f"it lost acknowledged writes ({source.key})",
            last=int(reply[1]),
        )

    def _answers(self, payload_key: str) -> bool:
        """True when the server answers something small now; in a cluster both shards of a push do."""
        try:
            for key in (self.keys.meta, payload_key)[: 1 + self.connection.is_cluster]:
                self.connection.call(partial(self.client.exists, key), patience_seconds=0.0, repeat=False)
        except RlbufferError:
            return False
        return True

    def _check_sizes(self, pushes: Sequence[_Push]) -> None:
        """Raises InvalidRollout, before anything is sent, when the server can never take one of them."""
        limits = self.connection.limits(self.patience_seconds, on_retry=self.on_retry)
        for push in pushes:
            refusal = limits.refusal(push.sizes)
            if refusal:
                raise InvalidRollout(
                    f"group {push.group.group_id} cannot be pushed to {self.connection.address}: {refusal}. Push it in "
                    "parts, or raise the server's limit"
                )

    def _store_payloads(self, pushes: Sequence[_Push]) -> None:
        """Stores payloads by themselves, in one round trip, each in a transaction of its own: they may lie in several
        slots."""
        is_spread = self.connection.is_cluster

        def store() -> None:
            client: Any = self.connection.sender(sum(push.size for push in pushes))
            with client.pipeline(transaction=False) as pipe:
                stores = [_add_payload(pipe, push, is_spread=is_spread) for push in pushes]
                answers = iter(pipe.execute(raise_on_error=False))
            raise_first([_fault(push, commands, answers) for push, commands in zip(pushes, stores, strict=True)])

        self.call(store, repeat=False, op="payload")


def _add_payload(pipe: Any, push: _Push, *, is_spread: bool) -> tuple[str, ...]:
    """Adds the transaction to a pipeline that stores a payload. -> what its commands do, in the order of their answers,
    without MULTI before them and EXEC behind them."""
    pipe.execute_command("MULTI")
    pipe.unlink(push.key)
    pipe.hset(push.key, mapping=push.fields)
    pipe.pexpire(push.key, WEEK_MS)
    if is_spread:
        # The script is on another shard. What stands under the name already is this very payload.
        pipe.renamenx(push.key, push.name)
        pipe.unlink(push.key)
    pipe.execute_command("EXEC")
    return ("clear", "store", "expire", *(("name", "unname") if is_spread else ()))


def _fault(push: _Push, commands: Sequence[str], answers: Iterator[Any]) -> Exception | None:
    """The reason why a payload is not stored, by the next answers, which are those to its transaction; None: it is."""
    queued = [*islice(answers, 1 + len(commands))]
    done = next(answers)
    errors = [one for one in (*queued, *(done if isinstance(done, list) else [done])) if isinstance(one, Exception)]
    if errors:
        return errors[0]
    result = dict(zip(commands, done, strict=True))
    if result["store"] != len(push.fields) or not result["expire"]:
        return ServerRefused(f"the server answered {done} when {len(push.fields)} fields were stored under {push.key}")
    return None


class PushOrigin:
    """The producer of pushes: a worker or a scorer, by its own key; or a group of open rollouts, which is its own."""

    def __init__(
        self, keys: Keys, producer: str, incarnation: str, epoch: int, *, is_spread: bool, opened: Sequence[str] = ()
    ) -> None:
        """`opened`: the open rollouts whose push it is; `producer` is their group then."""
        self.keys, self.producer, self.incarnation, self.epoch = keys, producer, incarnation, epoch
        self.is_spread, self.opened = is_spread, len(opened)
        self.key = keys.open_group(producer) if opened else keys.producer(producer, incarnation)
        further = (keys.open_ended, keys.open_pushed, keys.open_counts, *map(keys.open_rollout, opened))
        self.where = (keys.meta, keys.pool, self.key, keys.ledger, keys.garbage, *(further if opened else ()))
        """Keys of PUSH."""

    def suffix(self, sequence: int) -> str:
        """The end of a payload's key, another one for each push."""
        return f"{self.incarnation}.{sequence}"


class _Push:
    """A push as it is sent. Raises InvalidRollout when it is too large for the wire."""

    def __init__(self, source: PushOrigin, sequence: int, group: Group, replaces: str = "") -> None:
        self.sequence, self.group, self.replaces = sequence, group, replaces
        self.suffix = source.suffix(sequence)
        self.key = source.keys.unnamed_payload(group.group_id, self.suffix)
        """Of its payload, until it is pending."""
        self.name = source.keys.payload(group.group_id, self.suffix)
        push = payload.encode_push(group)
        self.rollouts, self.tokens = len(group.rollouts), sum([rollout.length for rollout in group.rollouts])
        self.fields: dict[Any, Any] = {str(i): data for i, data in enumerate(push.payloads)}
        if push.group_payload is not None:
            self.fields["group"] = push.group_payload
        self.sizes = _sizes(group, push)
        self.size = sum(self.sizes.values())
        stored = "" if source.is_spread else self.key
        self.args: list[Any] = [source.epoch, sequence, stored, group.env, group.group_id, self.suffix]
        self.args += [self.rollouts, self.tokens, push.metadata, replaces, source.keys.payload_prefix, source.opened]


def _batches(pushes: Sequence[_Push]) -> Iterator[list[_Push]]:
    """Pushes in the order of their sequence, as many at once as may be."""
    batch: list[_Push] = []
    for push in pushes:
        if batch and (len(batch) == BATCH_PUSHES or sum(other.size for other in batch) + push.size > BATCH_BYTES):
            yield batch
            batch = []
        batch.append(push)
    yield batch


def _sizes(group: Group, push: payload.EncodedPush) -> dict[str, int]:
    """Bytes of each value of a push's payload, under what it is called in messages."""
    ids = [
        f"rollout {rollout.rollout_id}" + (f", sequence {i}" if i else "")
        for rollout in group.rollouts
        for i in range(len(rollout.sequences))
    ]
    sizes = {name: len(payload) for name, payload in zip(ids, push.payloads, strict=True)}
    return sizes | {"answer and metadata": len(push.group_payload or b"")}
