"""What a gateway does with a run: it begins open rollouts of tickets, records their calls, ends and pushes them.

No gateway keeps anything of them: each may go on with what another has begun. docs/explain/protocol.md has the moves.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlbuffer.errors import (
    EpochChanged,
    NotFound,
    OpenRolloutEnded,
    OpenRolloutFull,
    OpenRolloutUnknown,
    OtherEnd,
    ServerFull,
    TicketGone,
)
from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Group, Ticket
from rlbuffer.records.rollout import MAX_SEQUENCES
from rlbuffer.records.states import PushStatus
from rlbuffer.store.open_rollouts import (
    MOST_BYTES,
    MOST_CALL_BYTES,
    MOST_CALLS,
    MOST_ROLLOUTS,
    Begun,
    End,
    Found,
    OpenCall,
    RecordedCall,
    WaitingGroup,
    about_of,
    capability_of,
    digest_of,
    end_keys_of,
    end_of,
    full_message,
    look_up,
    name_of,
    names_of,
    read_calls,
    ticket_of,
    waiting_groups,
)
from rlbuffer.store.producer import PushOrigin
from rlbuffer.store.server.connection import Connection
from rlbuffer.store.session import DEFAULT_PATIENCE_SECONDS, number, text
from rlbuffer.store.worker import LONGEST_TICKET_SECONDS, WorkerStore
from rlbuffer.wire import payload

IDLE_SECONDS = 600.0
"""An open rollout of which nothing was heard for so long is abandoned."""
GRACE_SECONDS = 60.0
"""A ticket stays out for so much longer than the deadline of its open rollouts: time to push them."""
LONGEST_IDLE_SECONDS = LONGEST_TICKET_SECONDS - GRACE_SECONDS
"""Longest idle limit: a ticket that is out for longer than :data:`LONGEST_TICKET_SECONDS` would be given again."""
MOST_KEY = 512
"""Characters of a caller's key."""
SAMPLING_SHARE = 0.9
"""Share of maxmemory from which nothing is sampled: what is open must still be recorded and pushed."""
SHARE_SECONDS = 1.0
"""For so long the answer of the server about its memory counts."""
ABANDONED = "abandoned"
"""Kind of the failure of an open rollout of which nothing was heard."""
ABANDONED_AT_ONCE = 64
"""Open rollouts that one look ends."""
_GRACE_MS = round(1000 * GRACE_SECONDS)
_LONGEST_IDLE_MS = round(1000 * LONGEST_IDLE_SECONDS)


class GatewayStore(WorkerStore):
    """A run for a gateway."""

    def __init__(self, connection: Connection, run: str, *, patience_seconds: float = DEFAULT_PATIENCE_SECONDS) -> None:
        super().__init__(connection, run, patience_seconds=patience_seconds)
        self._has_room, self._asked_at = True, float("-inf")
        self._refused: set[str] = set()
        """Groups whose push the server had no room for."""

    # -- begin -----------------------------------------------------------------------------------------------------

    def begun(self, key: str) -> Begun | None:
        """The group that was begun with this key; None: none was, or it was pushed and forgotten since."""
        _check_key(key)
        group = self.look(lambda client: client.hget(self.keys.open_keys, digest_of(key)))
        return None if group is None else self._begun(key, text(group), is_new=False)

    def begin(
        self, key: str, ticket: Ticket, *, size: int, about: Mapping[str, Any], idle_seconds: float = IDLE_SECONDS
    ) -> Begun:
        """BEGIN: `size` open rollouts for a ticket. Safe to repeat: the same key is answered with the same group.

        End keys, and the capabilities of them, are made of `key`, which is as secret as they are: draw one where the
        caller gives none. `about` is what every gateway must know of the group. The ticket needs no renewal any more.

        Raises:
            TicketGone: the ticket is not out any more: take another. Or the group that the key has begun is lost: then
                the ticket `is_out`.
            ServerFull: nothing is begun at the memory limit.
            RunGone, ServerRefused, ServerUnreachable.
        """
        _check_key(key)
        if not 1 <= size <= MOST_ROLLOUTS:
            raise ValueError(f"size = {size}: a group has 1 to {MOST_ROLLOUTS} open rollouts")
        if not 1.0 <= idle_seconds <= LONGEST_IDLE_SECONDS:
            raise ValueError(f"idle_seconds = {idle_seconds:g}: expected 1 to {LONGEST_IDLE_SECONDS:g}")
        keys, group = self.keys, ticket.group_id
        if ticket_of(group) != (ticket.env, ticket.number):
            raise ValueError(f"ticket {ticket.number} of env {ticket.env} is not of group {group}")
        salt, data = uuid.uuid4().hex, payload.dumps(dict(about))
        if len(data) > MOST_CALL_BYTES:
            raise ValueError(f"about: {len(data)} bytes are above the limit of {MOST_CALL_BYTES}")
        digests = [digest_of(capability_of(end_key)) for end_key in end_keys_of(key, salt, group, size)]
        where = [
            keys.meta,
            keys.open,
            keys.open_keys,
            keys.open_group(group),
            keys.open_counts,
            keys.tickets(ticket.env),
        ]
        where += map(keys.open_rollout, names_of(group, size))
        args = [digest_of(key), group, ticket.env, ticket.number, round(1000 * idle_seconds), _GRACE_MS, salt, data]
        reply = self.move("begin", where, [*args, *digests])
        status = text(reply[0])
        if status == "TAKEN":
            raise TicketGone(
                f"ticket {ticket.number} of env {ticket.env} is not out any more, or its group was begun by another: "
                "take another ticket"
            )
        if status not in ("OK", "DUP"):
            raise self.unexpected("begin", reply)
        # After a lost reply the first of the two answers: its salt is the one that counts.
        begun = self._begun(key, text(reply[1]), is_new=status == "OK")
        if begun is None:
            gone = TicketGone(
                f"group {text(reply[1])}, which this key has begun, is not on the server any more: use another key"
            )
            gone.is_out = text(reply[1]) != group
            raise gone
        return begun

    def _begun(self, key: str, group: str, *, is_new: bool) -> Begun | None:
        fields = self.look(lambda client: client.hmget(self.keys.open_group(group), "size", "salt", "about", "key"))
        size, salt, about, owner = fields
        if size is None or salt is None or owner != digest_of(key).encode():
            return None
        count = number(size) or 0
        return Begun(
            group_id=group,
            size=count,
            about=about_of(about),
            end_keys=end_keys_of(key, text(salt), group, count),
            is_new=is_new,
        )

    def may_sample(self) -> bool:
        """False while the server's memory is nearly full, or a group waits whose push it had no room for: then nothing
        must be sampled, because what is open needs the rest. Asks the server at most once a second."""
        if time.monotonic() - self._asked_at > SHARE_SECONDS:
            facts = self.server()
            limit, used = facts["maxmemory"], facts["used_memory"]
            self._refused -= {group for group in tuple(self._refused) if not self._waits(group)}
            self._has_room = not self._refused and (not limit or used < SAMPLING_SHARE * limit)
            self._asked_at = time.monotonic()
        return self._has_room

    def _waits(self, group: str) -> bool:
        return self.look(lambda client: client.zscore(self.keys.open_ended, group)) is not None

    def can_make_room(self) -> bool:
        """Something is pending or committed, and leaves the server once it is trained: a full server has room then."""
        pending = self.look(lambda client: client.xlen(self.keys.pool))
        return bool(pending) or self.meta().step > self.trainer().trained

    # -- calls -----------------------------------------------------------------------------------------------------

    def look_up(self, capability: str, *, request: str = "", histories: Sequence[str] = ()) -> Found:
        """An open rollout, the newest call of a request, and which of `histories`, the longest first, is known.

        Raises:
            OpenRolloutUnknown: there is none with that capability.
        """
        return look_up(self, capability, request, histories)

    def read_calls(self, name: str, numbers: Iterable[int] | None = None) -> list[OpenCall]:
        """Calls of an open rollout, by number, else all in order (:func:`~rlbuffer.store.open_rollouts.read_calls`)."""
        return read_calls(self, name, numbers)

    def record(
        self, capability: str, call: OpenCall, *, request: str, seen: int, history: str, line: int
    ) -> RecordedCall:
        """CALL: `call` is part of its open rollout. Safe to repeat, and never refused for memory.

        A call that is there already, by its id, is answered as it stands. Another one is recorded only while the newest
        call of `request` is the one that was `seen` (`Found.request_call`); else the one that is there is answered, and
        is what the agent must hear. `line` is `Found.line`, as it was before
        anything was sampled.

        Raises:
            OpenRolloutUnknown.
            OpenRolloutEnded: it has ended, or is frozen.
            OpenRolloutFull: it has :data:`~rlbuffer.store.open_rollouts.MOST_CALLS` calls or
                :data:`~rlbuffer.store.open_rollouts.MOST_BYTES` bytes; or the call begins a sequence, and it has
                :data:`~rlbuffer.records.rollout.MAX_SEQUENCES` of them.
            NotFound: the call that it goes on from is not there: the server lost it, and may have given its number to
                another one. Look up again.
            EpochChanged: the run is in another line of versions: look it up again.
        """
        data = call.encoded()
        oldest = min([span.policy_version for span in call.version_spans], default=0)
        args = [line, request, seen, call.after, history, data, oldest, len(call.tokens), MOST_CALLS, MOST_BYTES]
        args += [call.id, call.after_id, MAX_SEQUENCES]
        reply = self._call("record", capability, args)
        match text(reply[0]):
            case "OK":
                return RecordedCall(number=int(reply[1]), is_new=True, call=OpenCall.decoded(data, int(reply[1])))
            case "SAME":
                return RecordedCall(number=int(reply[1]), is_new=False, call=OpenCall.decoded(data, int(reply[1])))
            case "DUP":
                return RecordedCall(number=int(reply[1]), is_new=False, call=OpenCall.decoded(reply[2], int(reply[1])))
            case "FROZEN":
                raise OpenRolloutEnded(
                    f"open rollout {name_of(capability)} is frozen: it takes no calls any more, and waits for its end"
                )
            case "FULL":
                raise OpenRolloutFull(full_message(name_of(capability), *(int(part) for part in reply[1:])))
            case "MISSING":
                raise NotFound(f"open rollout {name_of(capability)} has no call {text(reply[1])} to go on from")
            case "LINE":
                raise EpochChanged(
                    f"run {self.run!r} is in another line of versions than open rollout {name_of(capability)} was "
                    "sampled in: it was rewound, or the server lost steps",
                    epoch=int(text(reply[1]) or 0),
                    since=int(text(reply[2]) or 0),
                )
        raise self.unexpected("call", reply)

    def heard(self, capability: str, request: str, call: int, *, call_id: str = "", tries: int = 0) -> None:
        """The agent has the answer of a call: the same request is another call from now on. Nothing happens where the
        open rollout is not there any more, or has ended, or where the call with that number has another id. `tries`:
        the earlier tries of the request that it was told to."""
        self._touch(capability, request, call, call_id, tries)

    def touch(self, capability: str) -> None:
        """Something is at work for an open rollout: its deadline is as far away as after a call."""
        self._touch(capability)

    def freeze(self, capability: str) -> None:
        """No call is recorded in an open rollout from now on; its end is still to come. Safe to repeat.

        Raises:
            OpenRolloutUnknown.
            OpenRolloutEnded: it takes none anyway.
        """
        self._call("freeze", capability, ())

    def _touch(self, capability: str, request: str = "", call: int = 0, call_id: str = "", tries: int = 0) -> None:
        try:
            self._call("touch", capability, (request, call, call_id, tries))
        except (OpenRolloutUnknown, OpenRolloutEnded):
            return

    def _call(self, action: str, capability: str, args: Sequence[Any]) -> list[Any]:
        name, keys = name_of(capability), self.keys
        env, ticket = ticket_of(name.rpartition("/")[0])
        where = (keys.meta, keys.open, keys.open_rollout(name), keys.tickets(env), keys.open_counts)
        reply = self.move("call", where, (action, name, digest_of(capability), env, ticket, _GRACE_MS, *args))
        match text(reply[0]):
            case "UNKNOWN":
                raise OpenRolloutUnknown(f"there is no open rollout {name} with that capability ({where[2]})")
            case "ENDED":
                end = end_of(reply[1])
                raise OpenRolloutEnded(f"open rollout {name} has ended with {_shown(end)}", end=end)
        return reply

    # -- ends ------------------------------------------------------------------------------------------------------

    def end(self, capability: str, end: End) -> str:
        """END. -> ``ended``, or ``same`` where it had this end already.

        Raises:
            OtherEnd: it has ended with another reward or failure, which stands.
            OpenRolloutUnknown.
        """
        name = name_of(capability)
        reply = self._end("end", name, end, digest_of(capability))
        match text(reply[0]):
            case "OK":
                return "ended"
            case "SAME":
                return "same"
            case "OTHER":
                stands = end_of(reply[1])
                raise OtherEnd(
                    f"open rollout {name} has ended with {_shown(stands)}, not with {_shown(end)}: the first end "
                    "stands",
                    end=stands,
                )
            case "UNKNOWN":
                raise OpenRolloutUnknown(
                    f"there is no open rollout {name} with that capability ({self.keys.open_rollout(name)})"
                )
        raise self.unexpected("end", reply)

    def fail(self, name: str, failure: Failure) -> bool:
        """END of an open rollout by the gateway itself. -> False: it had ended, or is not there."""
        return text(self._end("end", name, End(failure=failure), "")[0]) == "OK"

    def end_abandoned(self) -> list[str]:
        """Ends open rollouts of which nothing was heard until their deadline, with the failure ``abandoned``. -> their
        names."""
        keys = self.keys
        now = round(1000 * self.now())
        # A deadline that is farther off than any can be is of a clock that has been set back since: it is given anew.
        beyond = f"({now + _LONGEST_IDLE_MS}"
        late, off = self.piped(
            lambda pipe: pipe.zrangebyscore(keys.open, "-inf", now, 0, ABANDONED_AT_ONCE).zrangebyscore(
                keys.open, beyond, "+inf", 0, ABANDONED_AT_ONCE
            )
        )
        end = End(failure=Failure(ABANDONED, "nothing was heard of it until its deadline"))
        return [
            name
            for name in map(text, [*late, *off])
            if text(self._end("expire", name, end, _LONGEST_IDLE_MS)[0]) == "OK"
        ]

    def drop_calls(self, waiting: WaitingGroup, why: str) -> None:
        """The calls of a group that waits go, so that the server has room: it is pushed as failures. `why` is kept of
        each (`OpenRollout.dropped`). Works at the memory limit. What is pushed meanwhile stays as it is."""
        for name in waiting.names:
            self._end("drop", name, End(), why)

    def _end(self, action: str, name: str, end: End, word: str | int) -> list[Any]:
        keys, group = self.keys, name.rpartition("/")[0]
        env, ticket = ticket_of(group)
        where = [keys.meta, keys.open, keys.open_rollout(name), keys.open_group(group), keys.open_ended]
        args = (action, name, end.encoded(), group, env, ticket, _GRACE_MS, word)
        return self.move("end", (*where, keys.open_counts, keys.tickets(env)), args)

    # -- weights ---------------------------------------------------------------------------------------------------

    def claim_loading(self, owner: str, *, ttl_seconds: float) -> bool:
        """Takes the loading of policy versions into the engines, or keeps it. -> False while another gateway has it."""
        return self._claimed(self.keys.loading, owner, ttl_seconds)

    def release_loading(self, owner: str) -> None:
        """Gives it back."""
        self._release_claim(self.keys.loading, owner)

    # -- pushes ----------------------------------------------------------------------------------------------------

    def waiting(self, limit: int = 16) -> list[WaitingGroup]:
        """Groups whose open rollouts have all ended, the one that has waited for longest first."""
        return waiting_groups(self, limit)

    def push_rollouts(self, waiting: WaitingGroup, group: Group) -> tuple[PushStatus, str]:
        """PUSH of a group of open rollouts, whole. -> (``stored`` | ``duplicate``, entry id). Safe to repeat, also by
        other gateways: in the same move the rollouts count as pushed, and their calls go.

        Raises:
            ValueError: `group` is not what waits.
            EpochChanged, RunGone: read what waits again.
            OpenRolloutUnknown: it does not wait on the server any more.
            InvalidRollout: it is larger than the server takes: push its rollouts as failures of one token.
            ServerFull, ServerRefused, ServerUnreachable, PushRefused, PushBroken: as of any push.
        """
        if (group.group_id, group.env, group.planned_size, len(group.rollouts)) != (
            waiting.group_id,
            waiting.env,
            waiting.size,
            waiting.size,
        ):
            raise ValueError(
                f"group {group.group_id} of env {group.env} ({len(group.rollouts)} of {group.planned_size} rollouts) "
                f"is not the group {waiting.group_id} of {waiting.size} open rollouts"
            )
        if waiting.is_void and any(rollout.failure is None for rollout in group.rollouts):
            raise ValueError(
                f"group {group.group_id} is of another line of versions: all its rollouts must be failures"
            )
        names, is_spread = names_of(waiting.group_id, waiting.size), self.connection.is_cluster
        # Another name for the payload of each try: two gateways need not make the same bytes of it.
        source = PushOrigin(
            self.keys, waiting.group_id, uuid.uuid4().hex, waiting.epoch, is_spread=is_spread, opened=names
        )
        outcomes, error = self._push_from(source, [(group, "")], 1)
        if error is None:
            return outcomes[0]
        if isinstance(error, ServerFull):
            self._refused.add(group.group_id)
        raise self._explained(error, source, group, 1) from error


def _check_key(key: str) -> None:
    if not 1 <= len(key) <= MOST_KEY:
        raise ValueError(f"key: expected 1 to {MOST_KEY} characters, got {len(key)}")


def _shown(end: End | None) -> str:
    if end is None:
        return "an end that cannot be read"
    if end.failure is not None:
        return f"the failure {end.failure.kind}"
    rewards = "".join(f", {name} {value:g}" for name, value in sorted(end.rewards.items()))
    return f"reward {'none' if end.reward is None else format(end.reward, 'g')}{rewards}"
