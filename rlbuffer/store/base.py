"""The Store protocol: every move that a process may make on a run, as docs/protocol.md describes it.

The one implementation is :class:`rlbuffer.store.redis_store.RedisStore`; ``memory://`` is the same code and the same
Lua files over an in-process model of the server. All times are the server's clock, in seconds unless named otherwise.

Calls raise :class:`~rlbuffer.errors.ServerUnreachable` when the server cannot be reached within the store's patience.
Calls that are safe to repeat are repeated; `push` and `commit` answer the same when repeated, so they are too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlbuffer.batches import Drop, RolloutRef, StepPlan
from rlbuffer.records import Group, GroupInfo, PolicyVersion, RolloutInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEntry:
    """One push that is pending."""

    entry_id: str
    info: GroupInfo | None
    """None when the metadata could not be decoded; `error` says why."""
    payload_key: str
    env: str
    group_id: str
    rollouts: int
    """As the ledger counted them at push; also there when `info` is None."""
    tokens: int
    error: str = ""

    @property
    def pushed_ms(self) -> int:
        """Server time of the push, in milliseconds (the first half of the stream id)."""
        return int(self.entry_id.split("-", 1)[0])


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
    """What the lease script answered."""

    token: int
    """Fencing token; grows with every new holder."""
    held: bool
    """This owner holds it now."""
    owner: str
    """Who holds it."""
    remaining_seconds: float
    renewed: bool
    """It was renewed without having lapsed: nobody else can have led in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """The run's meta hash."""

    schema: int
    epoch: int
    step: int
    """Last committed step; 0 before the first."""
    digest: str
    """Of the last committed step; "" before the first."""
    retired: int
    """Last retired step."""
    config: Mapping[str, Any]
    config_digest: str
    error: str
    """Fatal error of the batcher; "" when there is none."""
    since: int = 0
    """First epoch that this one goes on from: equal to `epoch` but after a recovery of lost writes."""
    checkpoint_now: bool = False
    """The next step's header asks the trainer for a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the trainer, fenced by its number."""

    number: int
    """0 before the first attempt."""
    world_size: int = 0
    resume_step: int = 0
    epoch: int = 0
    trained: int = 0
    """Last trained step; never goes back, over attempts too."""
    digest: str = ""
    oldest_kept: int = 0
    """Oldest checkpoint that the trainer still has: steps up to it may be retired."""
    seen_seconds_ago: float | None = None
    seen_ms: int = 0
    """Server time of its last accepted word, in milliseconds."""
    claim: bytes = b""
    """Steps that the trainer has and the server has not, handed back by it (:class:`Claim`); empty when there are
    none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """A step as the trainer remembers it, for a server that may forget it."""

    step: int
    digest: str
    group_ids: tuple[str, ...]
    envs: Mapping[str, tuple[int, int]]
    """env -> rollouts, tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a trainer hands back to a server that has lost acknowledged writes."""

    step: int
    """Last step that the trainer's state contains."""
    epoch: int
    """Newest epoch that the trainer knows."""
    digest: str
    """Of `step`."""
    steps: tuple[TrainedStep, ...]
    """The last ones up to `step`, the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeader:
    """`<s>-0` of the steps stream."""

    step: int
    epoch: int
    digest: str
    previous_digest: str
    world_size: int
    normalizers: Mapping[str, int]
    rollouts: int
    tokens: int
    group_ids: tuple[str, ...]
    closed_by: str
    fill: float
    """Tokens over capacity, 0-1."""
    envs: Mapping[str, Mapping[str, Any]]
    """env -> rollouts, tokens, groups, reward (mean or None), age (mean), max_age."""
    reward: float | None
    """Mean over rollouts."""
    age: float
    """Mean over rollouts."""
    max_age: int
    committed_ms: int
    columns: Mapping[str, tuple[str, tuple[int, ...]]]
    """Further column -> dtype and trailing shape: the same in all micro-batches of all ranks."""
    waiting_for_version: int | None = None
    checkpoint_now: bool = False
    """The trainer writes a checkpoint when it has trained this step."""
    uses: Mapping[str, int] = field(default_factory=dict)
    """group id -> steps that trained it before this one, of the groups that were."""
    max_uses: int = 1
    """The rule that held at the commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRollout:
    """A rollout as a step's part names it: enough to pull it, and to stand in for it when it is damaged."""

    payload_key: str
    index: int
    info: RolloutInfo
    group_id: str
    env: str
    adapter: str
    advantage: float
    prompt_id: str = ""
    """This and what follows is for people who look at a consumed group; nothing trains on it."""
    planned_size: int = 0
    worker: str = ""
    pushed_ms: int = 0
    """Server time of its push."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """`<s>-<r+1>`: what planned rank r trains on."""

    step: int
    rank: int
    rollouts: tuple[PartRollout, ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    """``rows[micro_step]`` are the rank's rows; indices into `rollouts`, () a dummy."""
    row_tokens: int
    rows_per_micro_batch: int


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
    """Rollouts found missing or damaged when pulled."""
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
class Finding:
    """One violated invariant."""

    invariant: str
    """``I1`` ... ``I12`` of docs/protocol.md."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `verify` found. `ok` when there are no findings."""

    findings: tuple[Finding, ...]
    checked: Mapping[str, int]
    """What was looked at: entries, rollouts, steps, payloads."""

    @property
    def ok(self) -> bool:
        return not self.findings


class Store(Protocol):
    """See the module's docstring; docs/protocol.md has the reason of every move."""

    run: str

    # -- life ------------------------------------------------------------------------------------------------------
    def close(self) -> None: ...
    def server(self) -> Mapping[str, Any]:
        """name, version, address, embedded (bool), used_memory, maxmemory, policy; checks that it can hold a run."""

    def losses(self) -> int:
        """Times that this process lost the server; it may have come back without its newest writes."""

    def now(self) -> float:
        """The server's clock, Unix seconds."""

    def meta(self) -> Meta: ...
    def open_run(self) -> Meta:
        """Creates the run's meta if there is none; refuses another schema (SchemaMismatch). Safe to repeat."""

    def runs(self) -> Mapping[str, float]:
        """run -> Unix seconds when it was last opened."""

    # -- worker ----------------------------------------------------------------------------------------------------
    def push(self, group: Group, *, producer: str, incarnation: str, sequence: int, epoch: int) -> tuple[str, str]:
        """PUSH. -> (status ``stored`` | ``duplicate``, entry id). `producer` is the worker, `incarnation` its uuid.

        Raises RunGone, ProducerGap (``.last`` holds what the server has), ServerRefused, ServerUnreachable. Never
        retried inside: the writer repeats the call with the same sequence.
        """

    def take_tickets(self, env: str, n: int, *, ttl_seconds: float) -> list[int]:
        """TICKET take: up to `n` numbers, fewer (or none) while the allowance is out."""

    def renew_tickets(self, env: str, numbers: Sequence[int], *, ttl_seconds: float) -> None: ...
    def release_tickets(self, env: str, numbers: Sequence[int]) -> None:
        """Gives tickets back unused: they are taken again first."""

    # -- batcher (fenced by the lease token) -----------------------------------------------------------------------
    def lease(self, owner: str, *, ttl_seconds: float) -> Lease:
        """LEASE acquire or renew."""

    def release_lease(self, owner: str) -> None: ...
    def set_config(self, token: int, config: Mapping[str, Any], digest: str) -> None: ...
    def set_error(self, token: int, message: str) -> None:
        """The batcher's fatal error, shown to every waiting rank; "" clears it."""

    def read_pool(self, after: str = "0-0", *, count: int = 1000, block_seconds: float = 0.0) -> list[PoolEntry]:
        """INGEST: entries after the cursor, each once. Blocks at most `block_seconds` on a connection of its own."""

    def paused(self) -> frozenset[str]:
        """Envs that an operator has paused."""

    def reused(self) -> list[Reused]:
        """Groups that were trained and may be trained again, in the order of their first push."""

    def set_allowances(self, token: int, allowances: Mapping[str, int]) -> None: ...
    def close_tickets(self, env: str, numbers: Sequence[int]) -> None:
        """Deletes the tickets of ingested groups."""

    def drop(self, token: int, drops: Sequence[tuple[Drop, Sequence[PoolEntry]]]) -> None:
        """DROP, in calls of at most 500 entries. Raises LeaseLost."""

    def pin(self, refs: Sequence[RolloutRef], entries: Mapping[str, PoolEntry]) -> list[str]:
        """PIN: payload keys made persistent, sizes compared. -> entry ids that are missing or of another size."""

    def commit(
        self,
        token: int,
        plan: StepPlan,
        entries: Mapping[str, PoolEntry],
        *,
        meta: Meta,
        state: Mapping[str, Any],
        waiting_for_version: int | None = None,
    ) -> tuple[str, Any]:
        """COMMIT. -> ("ok" | "duplicate", digest) or ("gone", [entry ids]). Raises LeaseLost."""

    def load_state(self) -> Mapping[str, Any] | None:
        """The batcher's state as after the last step."""

    def closed_groups(self) -> list[str]:
        """Tombstones: ids of closed groups."""

    def retire(self, token: int, up_to: int) -> int:
        """RETIRE and sweep. -> payload keys unlinked."""

    def recover(self, token: int, trainer: Attempt, entries: Iterable[PoolEntry]) -> Mapping[str, Any] | None:
        """RECOVER: the run goes on after the trainer's step, in a new epoch. -> what was found, None when no claim is
        there any more. Raises LeaseLost."""

    # -- operator --------------------------------------------------------------------------------------------------
    def void_from(self, step: int, *, force: bool = False) -> Mapping[str, Any]:
        """VOID: `step` and what follows it leave the run, which goes on from the step before in a new epoch."""

    def rewind(self, to: int, *, force: bool = False) -> Mapping[str, Any]:
        """VOID of what follows step `to`, and of everything that is pending."""

    def delete_run(self) -> int:
        """Removes everything that the server holds of the run. -> keys removed."""

    def pause(self, env: str) -> bool:
        """The env takes part in no step until it is resumed. -> False when it was paused already."""

    def resume(self, env: str) -> bool:
        """-> False when it was not paused."""

    # -- trainer ---------------------------------------------------------------------------------------------------
    def attempt(self, *, uuid: str, world_size: int, resume_step: int, claim: Claim | None = None) -> Attempt:
        """ATTEMPT; `claim` is handed back when the trainer's state is ahead of the server."""

    def trainer(self) -> Attempt:
        """The registered attempt; number 0 when there was none."""

    def report(
        self,
        number: int,
        *,
        epoch: int,
        trained: int,
        digest: str,
        oldest_kept: int,
        claim: Claim | None = None,
    ) -> bool:
        """REPORT: acknowledgement, checkpoint notice and heartbeat in one; monotone.

        -> True, or False when the server had lost what was trained and `claim` was handed back to it.
        Raises AttemptFenced, AttemptForgotten, EpochChanged, TrainerAhead (without a claim).
        """

    def announce(self, number: int, version: PolicyVersion) -> bool:
        """ANNOUNCE. -> False when an equal or newer version is already there. Raises AttemptFenced."""

    def policy(self, adapter: str = "") -> PolicyVersion:
        """The current version; version -1 when none was announced."""

    def wait_step(self, step: int, *, block_seconds: float) -> StepHeader | None:
        """Header of `step`, or None after blocking. Raises StepRetired."""

    def read_parts(self, step: int, ranks: Sequence[int] | None = None) -> list[StepPart]:
        """Parts of the given planned ranks, or all. Raises StepRetired."""

    def read_payloads(self, refs: Sequence[PartRollout]) -> list[bytes | None]:
        """The encoded rollouts, None where missing. Not verified: `wire.decode_rollout` does that."""

    def read_group_payloads(self, payload_keys: Sequence[str]) -> list[bytes | None]:
        """The encoded group part (answer, metadata) of each push, None where there is none."""

    def count_damaged(self, rollouts: int) -> None: ...
    def count_lost(self, pushes: int) -> None:
        """Pushes that a producer knows are missing on the server and cannot send again."""

    # -- seeing (read-only but heartbeat) ----------------------------------------------------------------------------
    def heartbeat(self, kind: str, name: str, record: Mapping[str, Any]) -> None:
        """Telemetry: kind ``worker`` | ``rank`` | ``batcher``; decides nothing."""

    def heartbeats(self, kind: str) -> Mapping[str, Mapping[str, Any]]: ...
    def set_waiting(self, who: str, sentence: str) -> None: ...
    def waiting(self) -> Mapping[str, str]: ...
    def ledger(self) -> Ledger: ...
    def allowances(self) -> Mapping[str, int]: ...
    def headers(self, first: int | None = None, last: int | None = None) -> Iterator[StepHeader]: ...
    def history(self, count: int = 1000) -> list[Mapping[str, Any]]:
        """Newest first: a record per dropped group (``event: drop``) and per committed step (``event: step``)."""

    def find_in_steps(self, group_id: str) -> list[tuple[int, PartRollout, int]]:
        """(step, rollout, planned rank) of a group's rollouts in the live steps."""

    def verify(self) -> Report:
        """Recomputes the ledger and every invariant that can be seen from outside."""
