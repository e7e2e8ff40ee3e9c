"""The store's records: what its moves take and answer, as docs/explain/protocol.md describes them.

All times are the server's clock, in seconds unless named otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from rlbuffer.errors import PayloadError
from rlbuffer.records.info import GroupInfo, RolloutInfo
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.step_in_hand import NOTHING, StepInHand
from rlbuffer.wire import payload

MAX_TRAINER_BYTES = 64 * 2**10
"""Largest record of a policy version."""


class TakenTicket(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket that is out."""

    env: str
    number: int
    version: int
    """Of all weights, announced when it was taken."""
    seconds: float
    """Since it was taken."""


class PoolEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One push that is pending. A leader that takes over makes a million, and a Struct is made in C."""

    entry_id: str
    info: GroupInfo | None
    """None when the metadata could not be decoded; `error` says why."""
    payload_key: str
    env: str
    group_id: str
    rollouts: int
    """Rollouts, as the ledger counted them at push; also there when `info` is None."""
    tokens: int
    error: str = ""
    replaces: str = ""
    """The entry whose place it took, when a scorer added what that one needed; "" otherwise."""
    first_ms: int = 0
    """Server ms of the rollouts' first push, when a scorer replaced an entry; 0 otherwise."""

    @property
    def came_ms(self) -> int:
        """Server time when the entry came, in milliseconds (the first half of the stream id)."""
        return int(self.entry_id.split("-", 1)[0])

    @property
    def pushed_ms(self) -> int:
        """Server time when the rollouts were pushed first, in milliseconds."""
        return self.first_ms or self.came_ms

    @property
    def jams(self) -> bool:
        """True for the largest ids of a stream, which no client of ours makes: the pool takes no push until it is
        removed, and what comes then has smaller ids. No cursor goes behind such an entry."""
        return self.entry_id.startswith(f"{2**64 - 1}-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused:
    """A group that was trained and may be trained again."""

    group_id: str
    uses: int
    """Steps that trained it."""
    step: int
    """The last of them."""
    entries: tuple[PoolEntry, ...]
    """Its pushes, which are not in the pool any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The answer of the lease script."""

    token: int
    """Fencing token; grows with every new holder."""
    held: bool
    """This owner holds it now."""
    owner: str
    """Name of the holder."""
    remaining_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """The run's meta hash."""

    schema: int
    epoch: int
    step: int
    """Last committed step; 0 before the first."""
    digest: str
    """Digest of the last committed step; "" before the first."""
    retired: int
    """Last retired step."""
    config: Mapping[str, Any]
    config_digest: str
    error: str
    """Fatal error of the batcher; "" when there is none."""
    since: int = 0
    """First epoch that this one goes on from: equal to `epoch` but after a recovery of lost writes or a new line of
    versions."""
    checkpoint_now: bool = False
    """The next step's header asks the trainer for a checkpoint."""
    revision: int = 0
    """Revision of `config`: grows with each one that the leader accepts, from 1; 0 before the first."""
    asked: int = 0
    """Grows with everything that operators ask: what the leader holds in memory may not be true any more."""
    wanted: Mapping[str, Any] = field(default_factory=dict)
    """The config that an operator wants and no leader has taken yet; empty when there is none."""
    wanted_digest: str = ""
    refused: str = ""
    """Reason why the leader did not take the last wanted config: its digest, a blank, the reason."""
    draining_ms: int = 0
    """Server time since when no tickets are given, in milliseconds; 0 while they are."""
    ended: int | None = None
    """The step after which the run has ended: every env was done then, and nothing was pending."""
    finished: str = ""
    """``<attempt> <step>`` of the trainer that has made its last step; "" while there is one that goes on, or none
    yet."""
    early: int = 0
    """Last step that retired early, because the server's memory was short; 0: none did."""
    early_ms: int = 0
    """Server time of it, in milliseconds."""
    created: int = 0
    """Server time when the run was begun, in milliseconds: a run that is begun anew under the same name has another."""

    @property
    def finished_step(self) -> int:
        """The last step of the trainer that `finished` names; 0 where it names none."""
        step = self.finished.partition(" ")[2]
        return int(step) if step.isdecimal() else 0


def is_stream(meta: Meta) -> bool:
    """True for a run whose groups one trainer takes one by one; False also while no batcher has served it."""
    return bool(meta.config.get("feeds") == "stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The envs by whether a worker or producer may still send something of them."""

    done: frozenset[str] = frozenset()
    """Envs with an end of which every ticket was given, and none is out."""
    declared: frozenset[str] = frozenset()
    """Those of them whose end a producer or an operator has said: no part of a group comes any more either."""
    open: frozenset[str] = frozenset()
    """Other envs that were sampled, or whose workers have come."""
    expected: frozenset[str] = frozenset()
    """Worker sections whose workers have not come yet, and so which envs they sample is not known."""
    ends: Mapping[str, int] = field(default_factory=dict)
    """env -> how many tickets it has; only envs with an end."""
    written: Mapping[bytes, bytes] = field(default_factory=dict)
    """The hash of ends as it stood on the server: the run ends only while it still stands so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the trainer, fenced by its number, and what the server knew when it was asked."""

    number: int
    """0 before the first attempt."""
    world_size: int = 0
    resume_step: int = 0
    epoch: int = 0
    trained: int = 0
    """Last trained step; never goes back, over attempts too."""
    at: int = 0
    """Last step that this attempt's state contains: below `trained` while it trains steps again."""
    checkpoint: int = 0
    """This attempt's newest checkpoint: the one that it resumed from, or wrote last. 0: the fresh weights."""
    digest: str = ""
    oldest_kept: int = 0
    """Oldest checkpoint that the trainer still has: steps up to it may be retired."""
    seen_seconds_ago: float | None = None
    """Seconds since its last word; None before the first attempt."""
    announced: Mapping[bytes, bytes] = field(default_factory=dict)
    """Adapter -> its current version, of all that were announced, as the server has them."""
    seen_ms: int = 0
    """Server time of its last accepted word, in milliseconds."""
    newest: int = 0
    """No attempt has made a version above this one in this line; known to the attempt's own process."""
    server: str = ""
    """Server that the trainer last spoke to (:meth:`~rlbuffer.store.session.Session.server_id`)."""
    hand: StepInHand = NOTHING
    is_finished: bool = False
    """It has made its last step, and said so."""
    claim: bytes = b""
    """Steps that the trainer has and the server has not, handed back by it (:class:`Claim`); empty when there are
    none."""

    @property
    def policies(self) -> dict[str, PolicyVersion]:
        """Adapter ("" is all weights) -> its current version, decoded for whoever asks.

        Raises:
            PayloadError: one is no version.
        """
        named = [(adapter.decode("utf-8", "replace"), value) for adapter, value in self.announced.items()]
        return {adapter: policy_of(adapter, value) for adapter, value in named}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderRead:
    """State of the run as the leader reads it in a turn, in one round trip: the sources first, then the pool, then the
    rest. An env is done on the server after its last push is there, and so before the pool is read to its end."""

    entries: Sequence[PoolEntry]
    """The pool behind the leader's cursor, a page at most."""
    sources: Sources | None
    """None where the pool goes on behind `entries`."""
    meta: Meta
    trainer: Attempt
    paused: frozenset[str]
    """Envs that an operator has paused."""
    beats: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """Kind -> name -> its last heartbeat, of the kinds that were asked for."""


class Decided(NamedTuple):
    """What a leader knew when it decided, beside the groups: the same batcher that is told the same decides the same
    again."""

    read: str
    """The last pool entry that it had read."""
    decided: float
    """As of when, Unix seconds: it had read all that had come by then. By the server's clock at its takeover, and what
    has passed since."""
    since: float
    """Its takeover, by the same clock."""
    began: float
    """When it had read everything, by the same clock: its memory is as old, and begins anew where settings change."""
    published: Mapping[str, int]
    """Adapter ("" is all weights) -> the policy version that was announced; -1: none."""
    is_held: bool = False
    """It could make no step then, and let go only what was too old."""


class NotTrained(NamedTuple):
    """A rollout that the trainer was given and has not trained."""

    tokens: int
    min_version: int
    """Oldest policy version that sampled it."""
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """A step as the trainer remembers it, for a server that may forget it."""

    step: int
    digest: str
    group_ids: tuple[str, ...]
    envs: Mapping[str, tuple[int, int]]
    """env -> rollouts, tokens."""
    unused: Mapping[str, NotTrained] = field(default_factory=dict)
    """Rollout -> what is told of it, of those of a stream's group that the trainer was given and has not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """The part of a stream's group that the trainer was given and has not trained."""

    step: int
    env: str
    rollouts: int
    tokens: int
    rollout_ids: tuple[str, ...]
    """Which ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The steps that a trainer hands back to a server that has lost acknowledged writes."""

    step: int
    """Last step that the trainer's state contains."""
    epoch: int
    """Newest epoch that the trainer knows."""
    digest: str
    """Digest of `step`."""
    steps: tuple[TrainedStep, ...]
    """The last ones up to `step`, the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRollout:
    """A rollout, or a sequence of it, as a step's part names it: enough to pull it, and to stand in for it when it is
    damaged."""

    payload_key: str
    index: int
    """Payload field."""
    info: RolloutInfo
    group_id: str
    env: str
    adapter: str
    advantage: float
    sequence: int = 0
    """Place among the sequences of its rollout."""
    sequences: int = 1
    """Sequences of its rollout."""
    number: int = 0
    """Of its rollout in the step, the same in all parts; 0 where it is not planned."""
    rollout_loss_tokens: int = 0
    """Trained tokens of its rollout, over all sequences; 0 where it is not planned."""
    prompt_id: str = ""
    """This and what follows is for people who look at a consumed group; nothing trains on it."""
    planned_size: int = 0
    worker: str = ""
    pushed_ms: int = 0
    """Server time of its push."""
    entry_id: str = ""
    """Its push in the pool: ids order pushes, also those of one millisecond."""
    seconds: float | None = None
    """From its ticket to its push, as its worker measured them; None where it had no ticket."""

    @property
    def name(self) -> str:
        """The rollout's id; of a sequence of several ``g/0.2``."""
        return f"{self.info.rollout_id}.{self.sequence}" if self.sequences > 1 else self.info.rollout_id


def by_rollout(refs: Iterable[PartRollout]) -> list[list[PartRollout]]:
    """The sequences of each rollout, in the order of their pushes."""
    out: dict[tuple[str, str], list[PartRollout]] = {}
    for ref in sorted(refs, key=lambda ref: (ref.payload_key, ref.index)):
        out.setdefault((ref.payload_key, ref.info.rollout_id), []).append(ref)
    return [*out.values()]


HistoryOf = Literal["history", "records"]
"""The stream of drops and steps, or that of the trainer's records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPage:
    """Records of a stream behind a place, the oldest first."""

    records: tuple[tuple[str, Mapping[str, Any]], ...]
    """(id in the stream, record); ids grow, and begin with the server's ms."""
    is_cut: bool
    """Records behind the place are gone: the stream is capped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvLedger:
    """One env's account, in rollouts and tokens: pushed = pending + packed + trained + sum of dropped."""

    pushed: tuple[int, int] = (0, 0)
    pending: tuple[int, int] = (0, 0)
    packed: tuple[int, int] = (0, 0)
    trained: tuple[int, int] = (0, 0)
    dropped: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """reason -> (rollouts, tokens)."""
    reused: tuple[int, int] = (0, 0)
    """Counted beside the account: what later steps took again of what was packed once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The whole account; `pending` is what `pushed` leaves over."""

    envs: Mapping[str, EnvLedger]
    damaged: int = 0
    """Rollouts found missing or damaged when pulled; each once per step."""
    lost: int = 0
    """Pushes that producers know are missing on the server."""

    def total(self) -> EnvLedger:
        """Sum over the envs."""

        def add(pairs: Sequence[tuple[int, int]]) -> tuple[int, int]:
            return sum(p[0] for p in pairs), sum(p[1] for p in pairs)

        accounts = list(self.envs.values())
        reasons = sorted({r for a in accounts for r in a.dropped})
        return EnvLedger(
            pushed=add([a.pushed for a in accounts]),
            pending=add([a.pending for a in accounts]),
            packed=add([a.packed for a in accounts]),
            trained=add([a.trained for a in accounts]),
            dropped={r: add([a.dropped.get(r, (0, 0)) for a in accounts]) for r in reasons},
            reused=add([a.reused for a in accounts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAnswers:
    """The answers to a worker that asks for all it waits for at once."""

    numbers: tuple[int, ...]
    """Numbers of the tickets that it has taken."""
    policy: PolicyVersion
    """The newest version of all weights; -1 when none was announced."""
    is_draining: bool
    """An operator wants no more tickets given."""
    is_heard: bool
    """Its heartbeat was stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One violated invariant."""

    invariant: str
    """``I1`` ... ``I14`` of docs/explain/protocol.md."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The findings of `verify`. `ok` when there are none."""

    findings: tuple[Violation, ...]
    checked: Mapping[str, int]
    """Numbers of the things that were looked at: entries, rollouts, steps, payloads."""

    @property
    def ok(self) -> bool:
        return not self.findings


def policy_of(adapter: str, value: bytes | None) -> PolicyVersion:
    """The version of an adapter as the server has it; None: nothing was announced.

    Raises:
        PayloadError: it is no version.
    """
    if value is None:
        return PolicyVersion(version=-1, adapter=adapter)
    try:
        _, version, record = value.split(b" ", 2)
        location, size, checksum, *more = payload.loads(record, limit=MAX_TRAINER_BYTES)
        labels = dict(*more)
        return PolicyVersion(
            version=int(version), location=location, size=size, checksum=checksum, adapter=adapter, labels=labels
        )
    except (PayloadError, ValueError, TypeError):
        raise PayloadError(
            f"the announced version of adapter {adapter!r} cannot be read: {value[:80]!r}. Nobody has announced it: "
            "remove the field from the run's hash `policy`"
        ) from None
