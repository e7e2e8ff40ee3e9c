"""The Store protocol: every move that a process may make on a run, as docs/explain/protocol.md describes it.

The one implementation is :class:`rlbuffer.store.redis_store.RedisStore`; ``memory://`` is the same code and the same
Lua files over an in-process model of the server. All times are the server's clock, in seconds unless named otherwise.

Calls raise :class:`~rlbuffer.errors.ServerUnreachable` when the server cannot be reached within the store's patience.
Calls that are safe to repeat are repeated; `push` and `commit` answer the same when repeated, so they are too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from rlbuffer.errors import RlbufferError
from rlbuffer.packing.further_columns import Columns
from rlbuffer.records.group import Group
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.states import CommitStatus, PushStatus, ReportStatus, SettingsState
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Drop, RolloutRef, StepPlan
from rlbuffer.records.waiting import Waiting
from rlbuffer.store.hand import NOTHING, Hand
from rlbuffer.store.received import Checksum, FieldReply, FieldRequest
from rlbuffer.store.records import Asked, Attempt, Claim, Lease, Meta, PartRollout, PoolEntry, Reused, Sources, StepPart
from rlbuffer.store.seeing import Seeing


class Store(Seeing, Protocol):
    """See the module's docstring; docs/explain/protocol.md has the reason of every move."""

    run: str
    patience_seconds: float
    """Seconds that calls are repeated while the server is away."""

    # -- life ------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Closes the connections; the last user of an embedded server stops it."""

    def server(self) -> Mapping[str, Any]:
        """Facts, as Connection.describe says: name, version, address, embedded, sizes in bytes, unfreed, policy."""

    def until_whole(self) -> Waiting | None:
        """None when the server's append-only file can be trusted; else why to wait. Raises ServerUnsuitable."""

    def server_id(self) -> str:
        """The server's identity: another one after every restart and failover, when newest writes may be lost."""

    def losses(self) -> int:
        """Times that this process lost the server; it may have come back without its newest writes."""

    def now(self) -> float:
        """The server's clock, Unix seconds."""

    def meta(self) -> Meta:
        """The run's meta. Raises RunGone; RunDamaged when other keys of it are there without it; SchemaMismatch."""

    def open_run(self) -> Meta:
        """OPEN: creates the run's meta if there is none, and notes that the run was opened. Safe to repeat.

        The first epoch is the server's clock in milliseconds, so that a run that was deleted and made again is in
        another epoch: whoever still works for the old one hears it (RunGone). Raises SchemaMismatch, RunDamaged.
        """

    def has_ended(self) -> bool:
        """True when every env is done, everything is trained, and nothing was pushed since: a cheap look."""

    def runs(self) -> Mapping[str, float]:
        """Run -> Unix seconds when it was last opened; the most recent first."""

    # -- worker ----------------------------------------------------------------------------------------------------
    def push(
        self, group: Group, *, producer: str, incarnation: str, sequence: int, epoch: int, replaces: str = ""
    ) -> tuple[PushStatus, str]:
        """PUSH. -> (status ``stored`` | ``duplicate``, entry id). `producer` is the worker, `incarnation` its uuid.

        `replaces` is a pending entry whose place it takes: the same rollouts, with what that one needed.

        Raises RunGone, ProducerGap (``.last`` holds what the server has), ServerRefused, ServerUnreachable (PushBroken
        when the server answers others), InvalidRollout when the server can never take it: then nothing was sent. Never
        retried inside: the writer repeats the call with the same sequence.
        """

    def push_many(
        self, pushes: Sequence[tuple[Group, str]], *, producer: str, incarnation: str, sequence: int, epoch: int
    ) -> tuple[list[tuple[PushStatus, str]], RlbufferError | None]:
        """PUSH of several, from `sequence` on: (group, the entry whose place it takes or ""), at least one.

        -> what `push` returns, of the first of them, and the error of the one that stopped it; where a connection
        broke, others may be stored. Raises InvalidRollout, ServerUnreachable, ServerRefused before it stores anything.
        """

    def take_tickets(
        self, env: str, n: int, *, ttl_seconds: float, size: int | None = None, section: str = ""
    ) -> list[int]:
        """TICKET take: up to `n` numbers, fewer (or none) while the allowance is out. Raises EnvDone.

        `size` is how many tickets the env has in all; `section` the worker's, which is not expected any more.
        """

    def ask(
        self, env: str, n: int, *, worker: str, beat: dict[str, Any], ttl_seconds: float, size: int | None, section: str
    ) -> Asked:
        """`take_tickets`, and in the same round trip the worker's heartbeat and looks at the newest policy version and
        at the wishes. The heartbeat is stored also where the tickets are refused. Raises EnvDone."""

    def say_done(self, env: str, *, epoch: int) -> None:
        """DONE: no number is given beyond those that were. Raises RunGone; EpochChanged where it may go on."""

    def renew_tickets(self, env: str, numbers: Sequence[int], *, ttl_seconds: float) -> None:
        """Keeps tickets out; one that was closed meanwhile stays closed."""

    def release_tickets(self, env: str, numbers: Sequence[int]) -> None:
        """Gives tickets back unused: they are taken again first."""

    def visits(self, env: str, prompt_ids: Sequence[str]) -> list[str]:
        """The last note on each prompt; "" for one not met yet."""

    def note_visits(self, env: str, prompt_id: str, marks: str) -> None:
        """Replaces the note on a prompt. Of two at once one is lost; of too many prompts some are forgotten."""

    # -- scorer ------------------------------------------------------------------------------------------------------
    def claim_scoring(
        self, entry_ids: Sequence[str], *, owner: str, ttl_seconds: float
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Claims pending entries, or prolongs claims. -> (those that `owner` holds now, those that are gone).

        A claim lapses after `ttl_seconds`.
        """

    def renew_scoring(self, entry_ids: Sequence[str], *, owner: str, ttl_seconds: float) -> None:
        """Prolongs claims that `owner` holds."""

    def release_scoring(self, entry_ids: Sequence[str], *, owner: str) -> None:
        """Gives claims back."""

    # -- batcher (fenced by the lease token) -----------------------------------------------------------------------
    def lease(self, owner: str, *, ttl_seconds: float) -> Lease:
        """LEASE acquire or renew."""

    def release_lease(self, owner: str) -> None:
        """Lets another lead at once. Nothing happens when `owner` does not lead."""

    def load_scripts(self) -> None:
        """Loads the scripts that the server does not know: most users may call them and load none."""

    def set_config(self, token: int, config: Mapping[str, Any], digest: str, *, settles: str = "") -> int:
        """The settings that steps are made with from now on. -> their revision. Raises LeaseLost.

        `settles` is the digest of the wanted config that need not be looked at any more.
        """

    def refuse_config(self, token: int, digest: str, reason: str) -> None:
        """Refuses the wanted config of this digest: whoever asked for it hears why. Raises LeaseLost."""

    def sources(self) -> Sources:
        """The sources that may still send something. A field that is not rlbuffer's counts as an env without an end."""

    def set_ended(self, token: int, step: int | None, written: Mapping[bytes, bytes] = ...) -> bool:
        """The run has ended after `step`; None takes that back. `written`: what was seen of the ends (`Sources`).
        -> False: it has more to do. Raises LeaseLost."""

    def set_error(self, token: int, message: str) -> None:
        """The batcher's fatal error, shown to every waiting rank; "" clears it. Raises LeaseLost."""

    def read_pool(
        self, after: str = "0-0", *, count: int = 1000, block_seconds: float = 0, keeps: bool = False
    ) -> list[PoolEntry]:
        """INGEST: entries after the cursor, each once, in the order of their pushes. In a cluster `keeps` makes their
        payloads permanent. Blocks at most `block_seconds` on a connection of its own."""

    def paused(self) -> frozenset[str]:
        """Envs that an operator has paused."""

    def reused(self) -> list[Reused]:
        """Groups that were trained and may be trained again, in the order of their first push."""

    def set_allowances(self, token: int, allowances: Mapping[str, int]) -> None:
        """Sets the tickets that may be out per env; an env that is not named has none. Raises LeaseLost."""

    def close_tickets(self, env: str, numbers: Sequence[int]) -> None:
        """Deletes the tickets of ingested groups, and of numbers that no group is wanted of."""

    def drop(self, token: int, drops: Sequence[tuple[Drop, Sequence[PoolEntry]]]) -> None:
        """DROP, in calls of at most 500 entries. Raises LeaseLost."""

    def pin(
        self, refs: Sequence[RolloutRef], entries: Mapping[str, PoolEntry], *, since: int | None = None
    ) -> list[str]:
        """PIN: are the payloads that a step is about to use there, whole? -> entries that cannot be used.

        `since`: losses when the entries were read. Raises LeaseLost when there were more: they may not hold there.
        """

    def commit(
        self,
        token: int,
        plan: StepPlan,
        entries: Mapping[str, PoolEntry],
        *,
        meta: Meta,
        state: Mapping[str, Any],
        waiting_for_version: int | None = None,
        columns: Columns | None = None,
        since: int | None = None,
    ) -> tuple[CommitStatus, Any]:
        """COMMIT. -> (``ok`` | ``duplicate``, digest) or (``gone``, [entry ids]).

        `columns` are those that the plan's pushes agree on, for a caller that knows them. `since`: losses when the
        payloads were pinned; a server that was away may have lost the pins.

        Raises:
            LeaseLost: another leads, the server was away, or the run is not where `meta` says: all must be read again.
            PayloadError: the plan names a rollout that its entry does not hold, or has a number that is not finite.
            RlbufferError: the plan does not account for whole entries.
        """

    def load_state(self) -> Mapping[str, Any] | None:
        """The batcher's state as after the last step; None before the first."""

    def closed_groups(self) -> list[str]:
        """Tombstones: ids of closed groups, the oldest first."""

    def retire(
        self, token: int, up_to: int, *, early: Mapping[str, int] | None = None, since: int | None = None
    ) -> int:
        """RETIRE steps up to `up_to`, then sweep the payloads that nothing needs any more. -> payload keys unlinked.

        `early`: no checkpoint need hold them, because memory is short; what the history says of it. `since`: losses
        when this was decided: nothing goes on a server that was away, which may need it again. Raises LeaseLost.
        """

    def recover(self, token: int, trainer: Attempt, entries: Iterable[PoolEntry]) -> Mapping[str, Any] | None:
        """RECOVER: the run goes on after the step that the trainer claims, in a new epoch. Raises LeaseLost.

        `entries` is what is pending as far as the leader has read it; what came since is late by its tombstone.
        -> epoch, step, `forgotten` (steps that the server had lost), `void` (steps here of other content), groups and
        entries that leave the pool as trained; None when the claim is not there any more: read it again.
        """

    # -- operator --------------------------------------------------------------------------------------------------
    def void_from(self, step: int, *, force: bool = False) -> Mapping[str, Any]:
        """VOID: `step` and what follows it leave the run, in a new epoch; their rollouts drop as ``void``.

        -> epoch, steps (how many are void), entries (0). Raises RlbufferError when a trainer is at work and `force`
        is not set; EpochChanged, NotFound, StepRetired, RunGone.
        """

    def rewind(self, to: int, *, force: bool = False) -> Mapping[str, Any]:
        """VOID of what follows step `to` and of everything that is pending; later policy versions are taken back.

        With `force` also to a step that was retired, for a trainer whose only checkpoint is older: its steps stay
        counted as trained. Otherwise as `void_from`.
        """

    def ask_config(self, config: Mapping[str, Any], digest: str, *, seen: Meta) -> SettingsState:
        """ASK: the leader shall take this config at its next step boundary; without one it waits for the next.

        `seen` is the run as the operator looked at it. -> ``asked``, or ``same`` when it is in force and nothing else
        is wanted. Raises ConfigChanged when somebody came in between, RunGone.
        """

    def ask_drain(self) -> int:
        """ASK: no more tickets are given. -> server time, in milliseconds, since when. Raises RunGone."""

    def ask_undrain(self) -> bool:
        """ASK: tickets are given again. -> False when nothing was drained. Raises RunGone."""

    def wishes(self) -> tuple[int, bool]:
        """`Meta.asked`, and whether the run drains: a look that is cheap enough to be taken all the time."""

    def is_led(self) -> bool:
        """True when a batcher holds the lease."""

    def tickets_out(self) -> Mapping[str, int]:
        """Tickets that are out and have not expired, by env; only envs that have some."""

    def drop_pending(self, drops: Sequence[tuple[Drop, Sequence[PoolEntry]]]) -> int:
        """DROP by an operator, with or without a leader. -> pushes that left the pool. Raises RunGone.

        May be repeated. A leader forgets what it held; a step that it plans meanwhile is refused as gone.
        """

    def delete_run(self) -> int:
        """Removes everything that the server holds of the run, control keys first. -> keys removed."""

    def pause(self, env: str) -> bool:
        """The env takes part in no step until it is resumed. -> False when it was paused already."""

    def resume(self, env: str) -> bool:
        """Returns False when it was not paused."""

    def forget_end(self, env: str) -> bool:
        """DONE resume: the env's end is what its workers say from now on. -> False when it had none."""

    def expect(self, sections: Iterable[str]) -> None:
        """DONE expect: worker sections that are about to start; a run that had ended goes on until they have come."""

    # -- trainer ---------------------------------------------------------------------------------------------------
    def attempt(self, *, uuid: str, world_size: int, resume_step: int, claim: Claim | None = None) -> Attempt:
        """ATTEMPT: from here on older attempts are fenced. The same `uuid` again gives the same attempt.

        A policy version above the run's last step, made from steps that the server has lost, is taken back. A trainer
        whose checkpoint is ahead of the server hands back `claim`, and the leader lets the run go on from there.
        Raises RunGone, also when the run does not reach to `resume_step` and nothing is handed back; StepRetired.
        """

    def trainer(self) -> Attempt:
        """The registered attempt (number 0 before the first), the announced versions, and the server's time."""

    def report(
        self,
        number: int,
        *,
        epoch: int,
        trained: int,
        digest: str,
        oldest_kept: int,
        checkpoint: int = 0,
        newest: int = 0,
        claim: Claim | None = None,
        server: str = "",
        hand: Hand = NOTHING,
        takes: bool = False,
    ) -> ReportStatus:
        """REPORT: acknowledgement, checkpoint notice and heartbeat in one; monotone. `server`: whose steps the trainer
        has; "" for this one's. `hand`: what its loop was given last; `takes`: will be, if it is here.
        Raises AttemptFenced, AttemptForgotten, EpochChanged, TrainerAhead (without a claim).
        """

    def announce(self, number: int, version: PolicyVersion) -> bool:
        """ANNOUNCE. -> False when an equal or newer version is already there, unless only this one has weights.

        Raises AttemptFenced, RunGone.
        """

    def policy(self, adapter: str = "") -> PolicyVersion:
        """The current version; version -1 when none was announced."""

    def wait_step(self, step: int, *, block_seconds: float) -> StepHeader | None:
        """Header of `step`, or None after blocking. Raises StepRetired; PayloadError when it cannot be read."""

    def read_parts(self, step: int, ranks: Sequence[int] | None = None) -> list[StepPart]:
        """Parts of the given planned ranks, or all, in their order. Raises StepRetired, NotFound, PayloadError."""

    def read_payloads(self, refs: Sequence[PartRollout]) -> list[bytes | None]:
        """The encoded rollouts, None where missing. Not verified: `wire.decode_rollout` does that."""

    def read_pushed(self, refs: Sequence[PartRollout]) -> list[tuple[bytes | memoryview | None, bytes | None]]:
        """Each rollout as `read_payloads` has it, with the encoded group part of its push, in the same round trip."""

    def receive_pushed(self, request: FieldRequest, checksum: Checksum) -> FieldReply:
        """Fields of pushes by payload key, received into the memory that the request names if they have its sizes, with
        the `checksum` of each, else as values; and the encoded group part of each push."""

    def read_group_payloads(self, payload_keys: Sequence[str]) -> list[bytes | None]:
        """The encoded group part (answer, metadata) of each push, None where there is none."""

    def count_damaged(self, step: int, rollouts: Sequence[str]) -> None:
        """Counts rollouts of `step`, each ``<group> <rollout>``, that a pull found missing or damaged; each once."""

    def damaged_in(self, first: int, last: int) -> dict[int, int]:
        """Step -> its rollouts that are counted as damaged; only steps with some, from `first` to `last`."""

    def damaged_of(self, step: int) -> list[str]:
        """Damaged rollouts of a step, each as ``<group> <rollout>``; some of them, where there are many."""

    def count_lost(self, pushes: int) -> None:
        """Pushes that a producer knows are missing on the server and cannot send again."""

    # -- evaluation --------------------------------------------------------------------------------------------------
    def claim_evaluation(self, env: str, version: int, *, owner: str, ttl_seconds: float) -> bool:
        """Takes the evaluation of a version on an env. -> False when it is done, or another is at it.

        A claim lapses after `ttl_seconds`; asked again by the same owner, it is prolonged.
        """

    def release_evaluation(self, env: str, version: int, *, owner: str) -> None:
        """Gives a claim back: what was sampled does not count."""

    def add_evaluation(self, env: str, version: int, record: Mapping[str, Any]) -> None:
        """Keeps a result; the first one of a version and env counts. Raises ServerRefused when the stream is jammed."""

    def evaluations(self, *, limit: int = 1000) -> list[dict[str, Any]]:
        """Results, the oldest first: ``env``, ``version``, ``at`` (Unix seconds), and what the record holds.

        A line's results take the place of those that earlier lines have from its first version on; above the run's last
        step there are none of earlier lines. `limit`: newest entries that are looked at.
        """
