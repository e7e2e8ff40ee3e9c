"""Open rollouts: rollouts under way in agents, call by call, as the server keeps them; their records, and how they are
read.

Life of one::

    BEGIN -> open -- CALL, any number -> open -- END, or its deadline passed -> ended -- PUSH of its group -> pushed

A call is on the server before its agent hears the answer, so that whichever gateway has the next call goes on from it.
A group is pushed whole, once all its rollouts have ended. :class:`~rlbuffer.store.gateway.GatewayStore` changes them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import operator
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout, OpenRolloutUnknown, PayloadError
from rlbuffer.records.failure import Failure
from rlbuffer.records.info import GROUP_ID
from rlbuffer.records.rollout import MAX_SEQUENCES, Rollout
from rlbuffer.records.spans import VersionSpan
from rlbuffer.store.session import number, text
from rlbuffer.store.viewer import Viewer, seconds_of
from rlbuffer.wire import payload
from rlbuffer.wire.checksum import sealed, unsealed

MOST_ROLLOUTS = 512
"""Open rollouts of one group."""
MOST_CALLS = 2_000
"""Calls of one open rollout."""
MOST_BYTES = 1 << 30
"""Bytes of the calls of one open rollout."""
MOST_CALL_BYTES = 256 << 20
"""Bytes of one call, and of what a gateway keeps of a group."""
CALLS_PER_READ = 64
"""Calls that are read in one round trip."""
_CAPABILITY = re.compile(r"(?P<group>[A-Za-z0-9_.:-]{3,128})\.(?P<index>[0-9]{1,3})\.(?P<secret>[A-Za-z0-9_-]{43})\Z")
_KEPT = ("state", "capability", "epoch", "begun", "heard", "calls", "sequences", "bytes", "tokens", "oldest", "end")
"""Fields of an open rollout that stay when it is pushed."""
_SMALL = (*_KEPT, "dropped", "frozen")
"""Fields of an open rollout that are read with it."""


class OpenState(StrEnum):
    """Where an open rollout stands."""

    OPEN = "open"
    """It takes calls."""
    ENDED = "ended"
    """It has its reward or failure; its group waits for the others, or for its push."""
    PUSHED = "pushed"
    """It is part of a push: the pool has it, or what came after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How an open rollout ended: two that are equal are one end."""

    reward: float | None = None
    """Scalar reward; None where it has none, or failed."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named components."""
    failure: Failure | None = None
    """Why it is a failed attempt."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """The gateway's own; msgpack types only."""

    def encoded(self) -> bytes:
        """The same bytes for the same end, whatever the order of its names. Raises PayloadError."""
        failure = None if self.failure is None else list(self.failure)
        return payload.dumps([self.reward, _sorted(self.rewards), failure, _sorted(self.details)])

    @staticmethod
    def decoded(data: bytes) -> End:
        """The inverse of :meth:`encoded`. Raises PayloadError."""
        try:
            reward, rewards, failure, details = payload.loads(data, limit=MOST_CALL_BYTES)
            return End(
                reward=reward,
                rewards=dict(rewards),
                failure=None if failure is None else Failure(*failure),
                details=dict(details),
            )
        except (TypeError, ValueError) as error:
            raise PayloadError(f"the end of an open rollout cannot be read: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenCall:
    """One call of a policy: what it saw behind an earlier call, and what it sampled.

    A server that lost its newest writes gives their numbers to other calls: the id tells them apart.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    """16 hexadecimal digits, of this sample alone; the one that is recorded again has the same."""
    after: int = 0
    """Number of the call whose prompt and answer it goes on from; 0 begins a new sequence."""
    after_id: str = ""
    """Id of that call; "" where its number alone is known."""
    prompt: NDArray[np.int32]
    """[P] int32; what is new behind that."""
    tokens: NDArray[np.int32]
    """[T] int32; what was sampled."""
    logprobs: NDArray[np.float32]
    """[T] float32; one per sampled token, under the version that sampled it."""
    version_spans: tuple[VersionSpan, ...] = ()
    """Policy version that sampled each range of `tokens`: places from 0 to T."""
    finish_reason: str = ""
    """Reason why sampling ended: ``stop``, ``length``, ..."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """The gateway's own (the message, the engine's id of the request, ...); msgpack types only."""
    number: int = 0
    """Of the call in its rollout, from 1; 0 before it is recorded."""

    def encoded(self) -> bytes:
        """The call as the server keeps it. Raises PayloadError."""
        prompt, tokens = (np.ascontiguousarray(ids, np.int32).tobytes() for ids in (self.prompt, self.tokens))
        logprobs = np.ascontiguousarray(self.logprobs, np.float32).tobytes()
        spans = [list(span) for span in self.version_spans]
        ids = bytes.fromhex(self.id + self.after_id)
        record = [ids, self.after, prompt, tokens, logprobs, spans, self.finish_reason, dict(self.details)]
        return sealed(payload.dumps(record))

    @staticmethod
    def decoded(data: bytes, at: int) -> OpenCall:
        """The inverse of :meth:`encoded`, of the call with that number. Raises PayloadError."""
        what = f"call {at} of an open rollout"
        try:
            ids, after, prompt, tokens, logprobs, spans, finish, details = payload.loads(
                unsealed(data, what), limit=MOST_CALL_BYTES
            )
            return OpenCall(
                id=ids[:8].hex(),
                after=int(after),
                after_id=ids[8:].hex(),
                prompt=np.frombuffer(prompt, np.int32),
                tokens=np.frombuffer(tokens, np.int32),
                logprobs=np.frombuffer(logprobs, np.float32),
                version_spans=tuple(VersionSpan(*span) for span in spans),
                finish_reason=str(finish),
                details=details,
                number=at,
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise PayloadError(f"{what} cannot be read: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRollout:
    """An open rollout as the server has it, without its calls."""

    name: str
    """``<group_id>/<index>``."""
    state: OpenState
    calls: int
    """Calls that are recorded."""
    sequences: int = 0
    """Conversations that they make: paths from a call that goes on from none to one that none goes on from."""
    bytes: int
    """Bytes of them."""
    tokens: int
    """Sampled tokens of them."""
    oldest_version: int | None
    """Oldest policy version that has sampled one of them; None before the first."""
    begun_ms: int
    """Server ms when its group was begun."""
    heard_ms: int
    """Server ms of its last call or touch."""
    deadline_ms: int
    """Server ms when it ends as abandoned if nothing more is heard; 0 where it has ended."""
    end: End | None
    """How it ended; None while it is open, and where that cannot be read."""
    dropped: str = ""
    """Why its calls are gone: the server was full; "" where they are there."""
    is_frozen: bool = False
    """It takes no calls any more, and has not ended yet."""
    is_void: bool
    """The run has gone into another line of versions since it was begun: what it sampled cannot be trained."""

    @property
    def group_id(self) -> str:
        """``<env>.<number of the ticket>``."""
        return self.name.rpartition("/")[0]

    @property
    def index(self) -> int:
        """Place in its group, from 0."""
        return int(self.name.rpartition("/")[2])

    @property
    def env(self) -> str:
        """The env of its ticket."""
        return ticket_of(self.group_id)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a gateway must know before it answers a call."""

    rollout: OpenRollout
    line: int
    """The run's line of versions."""
    request_call: int
    """Newest call of the request that was asked for; 0: none."""
    is_heard: bool
    """Its agent has heard that one."""
    heard_ms: int
    """Server ms when it did; 0 where it has not."""
    heard_tries: int
    """Earlier tries of the request that it was told to."""
    history: str
    """The first of the histories that were asked for that is known; "" for none."""
    history_call: int
    """The call whose answer ends that history; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """A call is on the server."""

    number: int
    is_new: bool
    """False: it was there before, or another call of the same request is there and stands for it."""
    call: OpenCall
    """The one that stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A group of open rollouts."""

    group_id: str
    size: int
    """Rollouts planned for it."""
    about: Mapping[str, Any]
    """What its gateway keeps of it; empty once it is pushed."""
    end_keys: tuple[str, ...] = field(repr=False)
    """Of each rollout. Whoever has one may end it, and can make its capability."""
    is_new: bool
    """False: an earlier call with the same key has begun it."""

    @property
    def env(self) -> str:
        """The env of its ticket."""
        return ticket_of(self.group_id)[0]

    @property
    def number(self) -> int:
        """Number of its ticket."""
        return ticket_of(self.group_id)[1]

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Of each rollout. Whoever has one may make calls in it, and cannot make its end key."""
        return tuple(map(capability_of, self.end_keys))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its open rollouts, for people and for rollout ids."""
        return names_of(self.group_id, self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingGroup:
    """A group whose rollouts have all ended, and which is not pushed yet."""

    group_id: str
    size: int
    about: Mapping[str, Any]
    """What its gateway keeps of it."""
    since_ms: int
    """Server ms when the last of its rollouts ended."""
    begun_ms: int
    """Server ms when it was begun, right behind its ticket; 0 where that cannot be read."""
    read_ms: int
    """Server ms when this was read."""
    epoch: int
    """The run's epoch when it was read: its push is refused in another one."""
    is_void: bool
    """It was begun in another line of versions: it can only be pushed as failures."""
    rollouts: tuple[OpenRollout, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its open rollouts."""
        return names_of(self.group_id, self.size)

    @property
    def seconds(self) -> float | None:
        """Seconds since its ticket; None where nobody knows."""
        return max(0.0, (self.read_ms - self.begun_ms) / 1000) if self.begun_ms else None

    @property
    def bytes(self) -> int:
        """Bytes of its calls that are there."""
        return sum(rollout.bytes for rollout in self.rollouts if not rollout.dropped)

    @property
    def env(self) -> str:
        """The env of its ticket."""
        return ticket_of(self.group_id)[0]

    @property
    def number(self) -> int:
        """Number of its ticket."""
        return ticket_of(self.group_id)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCounts:
    """Open rollouts of an env since the run began: begun = open + ended + pushed (I14)."""

    begun: int = 0
    open: int = 0
    """They take calls."""
    ended: int = 0
    """Ended, and not pushed yet."""
    pushed: int = 0
    calls: int = 0
    tokens: int = 0
    """Sampled in these calls."""


def checked_end(end: End) -> End:
    """An end that the server can keep, and with which a rollout can be made: its numbers are floats.

    Raises:
        InvalidRollout: `end` is none.
    """
    if end.failure is None and end.reward is None and not end.rewards:
        raise InvalidRollout("an end needs a reward, named rewards, or a failure")
    rollout = Rollout(
        tokens=np.array([0, 0], np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.array([0.0, -1.0], np.float32),
        version_spans=(VersionSpan(0, 0, 2),),
        reward=end.reward,
        rewards=end.rewards,
        failure=end.failure,
        metadata=end.details,
    )
    found = End(
        reward=None if end.reward is None else float(end.reward),
        rewards={name: float(value) for name, value in end.rewards.items()},
        failure=rollout.failure,
        details=end.details,
    )
    try:
        found.encoded()
    except PayloadError as error:
        raise InvalidRollout(f"the end cannot be kept: {error}") from None
    return found


# -- names -------------------------------------------------------------------------------------------------------------
def names_of(group_id: str, size: int) -> tuple[str, ...]:
    """Names of a group's open rollouts."""
    return tuple(f"{group_id}/{i}" for i in range(size))


def ticket_of(group_id: str) -> tuple[str, int]:
    """Env and number of a group's ticket. Raises OpenRolloutUnknown where it is of none."""
    env, _, digits = group_id.rpartition(".")
    if not env or not digits.isdecimal() or len(digits) > 15 or not GROUP_ID.match(group_id):
        raise OpenRolloutUnknown(f"{group_id[:128]!r} is no group of open rollouts")
    return env, int(digits)


def end_keys_of(key: str, salt: str, group_id: str, size: int) -> tuple[str, ...]:
    """The end keys of a group's open rollouts. The server has only digests of their capabilities, and the salt: so who
    may read the run, but does not have the key that its caller gave, can make none of them."""
    secrets = (hmac.digest(key.encode(), f"{salt} {i}".encode(), "sha256") for i in range(size))
    return tuple(f"{group_id}.{i}.{_word(secret)}" for i, secret in enumerate(secrets))


def capability_of(end_key: str) -> str:
    """The capability that belongs to an end key. It is made of it one way: an agent, which has the capability alone,
    cannot end itself. Raises OpenRolloutUnknown."""
    name_of(end_key)
    secret = hashlib.sha256(f"call {end_key}".encode()).digest()
    return f"{end_key.rpartition('.')[0]}.{_word(secret)}"


def _word(secret: bytes) -> str:
    return base64.urlsafe_b64encode(secret).rstrip(b"=").decode()


def name_of(capability: str) -> str:
    """The name of the open rollout that a capability or an end key is of. Raises OpenRolloutUnknown, without it."""
    match = _CAPABILITY.match(capability)
    if match is None:
        raise OpenRolloutUnknown("what was given is no capability of an open rollout")
    ticket_of(match["group"])
    return f"{match['group']}/{int(match['index'])}"


def digest_of(secret: str) -> str:
    """A capability, or a caller's key, as the server has it."""
    return hashlib.sha256(secret.encode()).hexdigest()


def full_message(name: str, calls: int, size: int, sequences: int) -> str:
    """Why an open rollout takes no call more."""
    return (
        f"open rollout {name} has {calls} calls of {size} bytes in {sequences} sequences: it may have {MOST_CALLS} "
        f"calls, {MOST_BYTES} bytes and {MAX_SEQUENCES} sequences. A conversation that does not go on from an earlier "
        "answer is a sequence of its own"
    )


# -- reading -----------------------------------------------------------------------------------------------------------
def read_rollouts(store: Viewer, names: Sequence[str]) -> list[OpenRollout | None]:
    """These open rollouts; None for one that is not there."""
    keys = store.keys

    def ask(pipe: Any) -> None:
        pipe.hmget(keys.meta, "epoch", "line", "since")
        for name in names:
            pipe.hmget(keys.open_rollout(name), _SMALL)
            pipe.zscore(keys.open, name)

    meta, *replies = store.piped(ask, lenient=True)
    _, line = place_of(meta or ())
    return [
        rollout_of(name, fields or (), deadline, line)
        for name, fields, deadline in zip(names, replies[::2], replies[1::2], strict=True)
    ]


def open_rollouts(store: Viewer, limit: int = 1000) -> list[OpenRollout]:
    """The open rollouts that take calls, the one whose deadline comes first before the others."""
    names = store.piped(lambda pipe: pipe.zrange(store.keys.open, 0, limit - 1), lenient=True)[0] or []
    return [rollout for rollout in read_rollouts(store, list(map(text, names))) if rollout is not None]


def read_calls(store: Viewer, name: str, numbers: Iterable[int] | None = None) -> list[OpenCall]:
    """Calls of an open rollout: those with these numbers, else all in order. What is not there is left out, also
    where it is pushed. Raises PayloadError for one that is damaged."""
    key = store.keys.open_rollout(name)
    if numbers is None:
        there = store.piped(lambda pipe: pipe.hget(key, "calls"), lenient=True)[0]
        numbers = range(1, 1 + min(number(there) or 0, MOST_CALLS))
    asked, found = list(numbers), list[OpenCall]()
    for start in range(0, len(asked), CALLS_PER_READ):
        page = asked[start : start + CALLS_PER_READ]
        ask = operator.methodcaller("hmget", key, [f"c:{at}" for at in page])
        (replies,) = store.piped(ask, lenient=True)
        found += [OpenCall.decoded(data, at) for at, data in zip(page, replies or (), strict=False) if data is not None]
    return found


def read_counts(store: Viewer) -> dict[str, OpenCounts]:
    """Env -> its open rollouts in numbers."""
    (fields,) = store.piped(lambda pipe: pipe.hgetall(store.keys.open_counts), lenient=True)
    return counts_of(fields or {})


def counts_of(fields: Mapping[bytes, bytes]) -> dict[str, OpenCounts]:
    """The hash of counts, decoded; what is no number counts as none."""
    sums: dict[str, dict[str, int]] = {}
    for name, value in fields.items():
        env, _, what = text(name).rpartition(":")
        sums.setdefault(env, {})[what] = number(value) or 0
    return {
        env: OpenCounts(
            begun=counts.get("begun", 0),
            open=counts.get("begun", 0) - counts.get("ended", 0),
            ended=counts.get("ended", 0) - counts.get("pushed", 0),
            pushed=counts.get("pushed", 0),
            calls=counts.get("calls", 0),
            tokens=counts.get("tokens", 0),
        )
        for env, counts in sorted(sums.items())
    }


def place_of(meta: Sequence[bytes | None]) -> tuple[int, int]:
    """Epoch, and the epoch in which its line of versions began, of the fields ``epoch``, ``line``, ``since``; 0 where
    there is no run."""
    epoch, line, since = [*meta, None, None, None][:3]
    return number(epoch) or 0, number(line) or number(since) or number(epoch) or 0


def rollout_of(name: str, fields: Sequence[bytes | None], deadline: Any, line: int) -> OpenRollout | None:
    """An open rollout of its fields, in the order of those that stay; None where it is not there, or has no state."""
    by_name = dict(zip(_SMALL, fields, strict=False))
    try:
        state = OpenState(text(by_name.get("state") or b""))
    except ValueError:
        return None

    def whole(field_name: str) -> int:
        return number(by_name[field_name]) or 0

    return OpenRollout(
        name=name,
        state=state,
        calls=whole("calls"),
        sequences=whole("sequences"),
        bytes=whole("bytes"),
        tokens=whole("tokens"),
        oldest_version=number(by_name["oldest"]),
        begun_ms=whole("begun"),
        heard_ms=whole("heard"),
        deadline_ms=0 if deadline is None else int(deadline),
        end=end_of(by_name.get("end")),
        dropped=text(by_name.get("dropped") or b""),
        is_frozen=by_name.get("frozen") is not None and state is OpenState.OPEN,
        is_void=whole("epoch") < line,
    )


def end_of(data: bytes | None) -> End | None:
    """How an open rollout ended; None where it has not, or where that cannot be read."""
    try:
        return None if not data else End.decoded(data)
    except PayloadError:
        return None


def look_up(store: Viewer, capability: str, request: str, histories: Sequence[str]) -> Found:
    """An open rollout by its capability, and what is known of a request and of its histories, in one round trip."""
    name = name_of(capability)
    keys, key = store.keys, store.keys.open_rollout(name)
    asked = [f"r:{request}", f"a:{request}", *[f"h:{history}" for history in histories]]

    def ask(pipe: Any) -> None:
        pipe.hmget(keys.meta, "epoch", "line", "since")
        pipe.hmget(key, [*_SMALL, *asked])
        pipe.zscore(keys.open, name)

    meta, found, deadline = store.piped(ask, lenient=True)
    epoch, line = place_of(meta or ())
    if not epoch:
        raise store.no_run()
    fields = found or [None] * (len(_SMALL) + len(asked))
    small, (newest, heard, *history_calls) = fields[: len(_SMALL)], fields[len(_SMALL) :]
    rollout = rollout_of(name, small, deadline, line)
    if rollout is None or not hmac.compare_digest(text(small[1] or b""), digest_of(capability)):
        raise OpenRolloutUnknown(f"there is no open rollout {name} with that capability ({key})")
    told = [number(part.encode()) or 0 for part in [*text(heard or b"").split(" "), "", "", ""][:3]]
    is_heard = newest is not None and told[0] == number(newest)
    place = next((i for i, call in enumerate(history_calls) if call is not None), None)
    return Found(
        rollout=rollout,
        line=line,
        request_call=number(newest) or 0,
        is_heard=is_heard,
        heard_ms=told[1] if is_heard else 0,
        heard_tries=told[2] if is_heard else 0,
        history="" if place is None else histories[place],
        history_call=0 if place is None else number(history_calls[place]) or 0,
    )


def waiting_groups(store: Viewer, limit: int) -> list[WaitingGroup]:
    """Groups of open rollouts that wait for their push, the one that has waited for longest first.

    What of a group cannot be read is none of the others' business: its end is None then, its `about` empty. What was
    pushed meanwhile, and names that stand for no group, take no place of those that wait.
    """
    keys, found, at = store.keys, list[WaitingGroup](), 0
    while len(found) < limit:
        page = operator.methodcaller("zrange", keys.open_ended, at, at + limit - 1, withscores=True)
        (waiting,) = store.piped(page, lenient=True)
        found += _waiting_of(store, {text(group): int(since) for group, since in waiting or ()})
        at += limit
        if len(waiting or ()) < limit:
            break
    return found[:limit]


def _waiting_of(store: Viewer, groups: Mapping[str, int]) -> Iterator[WaitingGroup]:
    """Those of these groups that wait. `groups`: name -> server ms when its last rollout ended."""
    keys = store.keys

    def ask(pipe: Any) -> None:
        pipe.hmget(keys.meta, "epoch", "line", "since")
        pipe.time()
        for group in groups:
            pipe.hmget(keys.open_group(group), "size", "about", "epoch", "begun", "id")

    meta, now, *replies = store.piped(ask, lenient=True) if groups else (None, (0, 0))
    read_ms = round(1000 * seconds_of(now))
    epoch, line = place_of(meta or ())
    for (group, since), reply in zip(groups.items(), replies, strict=True):
        size, about, begun_in, begun, pushed = reply or [None] * 5
        count = number(size) or 0
        if not 1 <= count <= MOST_ROLLOUTS or pushed is not None:
            continue
        names = names_of(group, count)
        rollouts = zip(names, read_rollouts(store, names), strict=True)
        yield WaitingGroup(
            group_id=group,
            size=len(names),
            about=about_of(about),
            since_ms=since,
            begun_ms=number(begun) or 0,
            read_ms=read_ms,
            epoch=epoch,
            is_void=(number(begun_in) or 0) < line,
            rollouts=tuple(rollout if rollout is not None else _unreadable(name) for name, rollout in rollouts),
        )


def about_of(data: bytes | None) -> Mapping[str, Any]:
    """What a gateway keeps of a group; empty where that is not there, or cannot be read."""
    try:
        about = payload.loads(data or b"", limit=MOST_CALL_BYTES)
    except PayloadError:
        return {}
    return about if isinstance(about, Mapping) else {}


def _unreadable(name: str) -> OpenRollout:
    """Stands for an open rollout of which nothing is there, in a group that waits."""
    return OpenRollout(
        name=name,
        state=OpenState.ENDED,
        calls=0,
        bytes=0,
        tokens=0,
        oldest_version=None,
        begun_ms=0,
        heard_ms=0,
        deadline_ms=0,
        end=None,
        is_void=False,
    )


def _sorted(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in sorted(values)}
