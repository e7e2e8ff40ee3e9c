"""The Store protocol: every move that a process may make on a run, as docs/explain/protocol.md describes it.

The one implementation is :class:`rlbuffer.store.redis_store.RedisStore`; ``memory://`` is the same code and the same
Lua files over an in-process model of the server. All times are the server's clock, in seconds unless named otherwise.

Calls raise :class:`~rlbuffer.errors.ServerUnreachable` when the server cannot be reached within the store's patience.
Calls that are safe to repeat are repeated; `push` and `commit` answer the same when repeated, so they are too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from rlbuffer.errors import RlbufferError
from rlbuffer.packing.further_columns import Columns
from rlbuffer.records.group import Group
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.states import CommitStatus, PushStatus, SettingsState
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import Drop, RolloutRef, StepPlan
from rlbuffer.store.records import (
    Attempt,
    Claim,
    Lease,
    Ledger,
    Meta,
    PartRollout,
    PoolEntry,
    Report,
    Reused,
    Sources,
    StepPart,
)


class Store(Protocol):
    """See the module's docstring; docs/explain/protocol.md has the reason of every move."""

    run: str

    # -- life ------------------------------------------------------------------------------------------------------
    def close(self) -> None: ...
    def server(self) -> Mapping[str, Any]:
        """Facts: name, version, address, embedded, used_memory, maxmemory, machine, unfreed, buffers, policy.

        As Connection.describe says.
        """

    def sentence_until_whole(self) -> str:
        """ "" when the server's append-only file can be trusted; else why to wait. Raises ServerUnsuitable."""

    def server_id(self) -> str:
        """The server's identity: another one after every restart and failover, when newest writes may be lost."""

    def losses(self) -> int:
        """Times that this process lost the server; it may have come back without its newest writes."""

    def now(self) -> float:
        """The server's clock, Unix seconds."""

    def meta(self) -> Meta: ...
    def open_run(self) -> Meta:
        """Creates the run's meta if there is none; refuses another schema (SchemaMismatch). Safe to repeat."""

    def has_ended(self) -> bool:
        """True when every env is done, everything is trained, and nothing was pushed since."""

    def runs(self) -> Mapping[str, float]:
        """run -> Unix seconds when it was last opened."""

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

    def give_up(
        self, group: Group, *, producer: str, incarnation: str, sequence: int, epoch: int
    ) -> tuple[PushStatus, str]:
        """PUSH without the group: its sequence is used up. -> (``lost`` | ``duplicate`` when it is stored, entry id).

        Counted as lost, once. Raises as `push` does.
        """

    def take_tickets(
        self, env: str, n: int, *, ttl_seconds: float, size: int | None = None, section: str = ""
    ) -> list[int]:
        """TICKET take: up to `n` numbers, fewer (or none) while the allowance is out. Raises EnvDone.

        `size` is how many tickets the env has in all; `section` the worker's, which is not expected any more.
        """

    def say_done(self, env: str, *, epoch: int) -> None:
        """DONE: no number is given beyond those that were. Raises RunGone."""

    def renew_tickets(self, env: str, numbers: Sequence[int], *, ttl_seconds: float) -> None: ...
    def release_tickets(self, env: str, numbers: Sequence[int]) -> None: ...
    def visits(self, env: str, prompt_ids: Sequence[str]) -> list[str]: ...
    def note_visits(self, env: str, prompt_id: str, marks: str) -> None: ...

    # -- scorer ------------------------------------------------------------------------------------------------------
    def claim_scoring(
        self, entry_ids: Sequence[str], *, owner: str, ttl_seconds: float
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Claims pending entries. -> (those that `owner` holds now, those that are not pending any more)."""

    def renew_scoring(self, entry_ids: Sequence[str], *, owner: str, ttl_seconds: float) -> None: ...
    def release_scoring(self, entry_ids: Sequence[str], *, owner: str) -> None: ...

    # -- batcher (fenced by the lease token) -----------------------------------------------------------------------
    def lease(self, owner: str, *, ttl_seconds: float) -> Lease:
        """LEASE acquire or renew."""

    def release_lease(self, owner: str) -> None: ...
    def set_config(self, token: int, config: Mapping[str, Any], digest: str, *, settles: str = "") -> int:
        """The settings that steps are made with from now on. -> their revision. Raises LeaseLost."""

    def refuse_config(self, token: int, digest: str, reason: str) -> None:
        """The wanted config of this digest cannot be used. Raises LeaseLost."""

    def sources(self) -> Sources:
        """The sources that may still send something."""

    def set_ended(self, token: int, step: int | None, written: Mapping[bytes, bytes] = ...) -> bool:
        """The run has ended after `step`; None takes that back. `written`: what was seen of the ends (`Sources`).
        -> False: it has more to do. Raises LeaseLost."""

    def set_error(self, token: int, message: str) -> None:
        """The batcher's fatal error, shown to every waiting rank; "" clears it."""

    def read_pool(self, after: str = "0-0", *, count: int = 1000, block_seconds: float = 0.0) -> list[PoolEntry]:
        """INGEST: entries after the cursor, each once. Blocks at most `block_seconds` on a connection of its own."""

    def paused(self) -> frozenset[str]:
        """Envs that an operator has paused."""

    def renumber(self, token: int) -> int | None: ...
    def reused(self) -> list[Reused]:
        """Groups that were trained and may be trained again, in the order of their first push."""

    def set_allowances(self, token: int, allowances: Mapping[str, int]) -> None: ...
    def close_tickets(self, env: str, numbers: Sequence[int]) -> None:
        """Deletes the tickets of ingested groups, and of numbers that no group is wanted of."""

    def drop(self, token: int, drops: Sequence[tuple[Drop, Sequence[PoolEntry]]]) -> None:
        """DROP, in calls of at most 500 entries. Raises LeaseLost."""

    def pin(
        self, refs: Sequence[RolloutRef], entries: Mapping[str, PoolEntry], *, since: int | None = None
    ) -> list[str]:
        """PIN: payload keys made persistent, sizes compared. -> entry ids that are missing or of another size.

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

        `since`: as for PIN. Raises LeaseLost.
        """

    def load_state(self) -> Mapping[str, Any] | None:
        """The batcher's state as after the last step."""

    def closed_groups(self) -> list[str]:
        """Tombstones: ids of closed groups."""

    def retire(
        self, token: int, up_to: int, *, early: Mapping[str, int] | None = None, since: int | None = None
    ) -> int:
        """RETIRE and sweep. -> payload keys unlinked.

        `early`: memory is short; what the history says of it. `since`: as for PIN.
        """

    def recover(self, token: int, trainer: Attempt, entries: Iterable[PoolEntry]) -> Mapping[str, Any] | None:
        """RECOVER: the run goes on after the trainer's step, in a new epoch. -> what was found, None when no claim is
        there any more. Raises LeaseLost."""

    # -- operator --------------------------------------------------------------------------------------------------
    def void_from(self, step: int, *, force: bool = False) -> Mapping[str, Any]:
        """VOID: `step` and what follows it leave the run, which goes on from the step before in a new epoch."""

    def rewind(self, to: int, *, force: bool = False) -> Mapping[str, Any]:
        """VOID of what follows step `to`, and of everything that is pending."""

    def ask_config(self, config: Mapping[str, Any], digest: str, *, seen: Meta) -> SettingsState:
        """ASK: the leader shall take this config. -> ``asked`` | ``same``. Raises ConfigChanged."""

    def ask_drain(self) -> int: ...
    def ask_undrain(self) -> bool: ...
    def wishes(self) -> tuple[int, bool]: ...
    def is_led(self) -> bool: ...
    def tickets_out(self) -> Mapping[str, int]: ...

    def drop_pending(self, drops: Sequence[tuple[Drop, Sequence[PoolEntry]]]) -> int:
        """DROP by an operator, with or without a leader. -> pushes that left the pool."""

    def delete_run(self) -> int:
        """Removes everything that the server holds of the run. -> keys removed."""

    def pause(self, env: str) -> bool:
        """The env takes part in no step until it is resumed. -> False when it was paused already."""

    def resume(self, env: str) -> bool:
        """Returns False when it was not paused."""

    def forget_end(self, env: str) -> bool:
        """DONE resume: the env's end is what its workers say. -> False when it had none."""

    def expect(self, sections: Iterable[str]) -> None:
        """DONE expect: worker sections that are about to start; a run that had ended goes on."""

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
        checkpoint: int = 0,
        newest: int = 0,
        claim: Claim | None = None,
        server: str = "",
    ) -> bool:
        """REPORT: acknowledgement, checkpoint notice and heartbeat in one; monotone. `server`: whose steps the trainer
        has; "" for this one's.

        -> True, or False when the server had lost what was trained and `claim` was handed back to it.
        Raises AttemptFenced, AttemptForgotten, EpochChanged, TrainerAhead (without a claim).
        """

    def announce(self, number: int, version: PolicyVersion) -> bool:
        """ANNOUNCE. -> False when an equal or newer version is already there. Raises AttemptFenced."""

    def policy(self, adapter: str = "") -> PolicyVersion:
        """The current version; version -1 when none was announced."""

    def policies(self) -> Mapping[str, PolicyVersion]:
        """Adapter ("" is all weights) -> its current version, of all that were announced."""

    def wait_step(self, step: int, *, block_seconds: float) -> StepHeader | None:
        """Header of `step`, or None after blocking. Raises StepRetired."""

    def read_parts(self, step: int, ranks: Sequence[int] | None = None) -> list[StepPart]:
        """Parts of the given planned ranks, or all. Raises StepRetired."""

    def read_payloads(self, refs: Sequence[PartRollout]) -> list[bytes | None]:
        """The encoded rollouts, None where missing. Not verified: `wire.decode_rollout` does that."""

    def read_group_payloads(self, payload_keys: Sequence[str]) -> list[bytes | None]:
        """The encoded group part (answer, metadata) of each push, None where there is none."""

    def count_damaged(self, step: int, rollouts: Sequence[str]) -> None: ...
    def damaged_in(self, first: int, last: int) -> dict[int, int]: ...
    def damaged_of(self, step: int) -> list[str]: ...
    def count_lost(self, pushes: int) -> None:
        """Pushes that a producer knows are missing on the server and cannot send again."""

    # -- evaluation --------------------------------------------------------------------------------------------------
    def claim_evaluation(self, env: str, version: int, *, owner: str, ttl_seconds: float) -> bool:
        """Takes the evaluation of a version on an env. -> False when it is done, or another is at it."""

    def release_evaluation(self, env: str, version: int, *, owner: str) -> None:
        """Gives a claim back: what was sampled does not count."""

    def add_evaluation(self, env: str, version: int, record: Mapping[str, Any]) -> None:
        """Keeps a result; the first one of a version and env counts."""

    def evaluations(self, *, limit: int = 1000) -> list[dict[str, Any]]:
        """Results, the oldest first."""

    # -- seeing (read-only but heartbeat) ----------------------------------------------------------------------------
    def heartbeat(self, kind: str, name: str, record: Mapping[str, Any]) -> None:
        """Telemetry: kind ``worker`` | ``scorer`` | ``rank`` | ``batcher``; decides nothing."""

    def heartbeats(self, kind: str) -> Mapping[str, Mapping[str, Any]]: ...
    def set_waiting(self, who: str, sentence: str) -> None: ...
    def waiting(self) -> Mapping[str, str]: ...
    def ledger(self) -> Ledger: ...
    def allowances(self) -> Mapping[str, int]: ...
    def headers(
        self, first: int | None = None, last: int | None = None, *, problems: list[RlbufferError] | None = None
    ) -> Iterator[StepHeader]: ...
    def history(self, count: int = 1000) -> list[Mapping[str, Any]]:
        """Newest first: a record per dropped group (``event: drop``) and per committed step (``event: step``)."""

    def find_in_steps(self, group_id: str, step: int | None = None) -> list[tuple[int, PartRollout, int]]:
        """(step, rollout, planned rank) of a group's rollouts in the live steps."""

    def verify(self) -> Report:
        """Recomputes the ledger and every invariant that can be seen from outside."""
