"""What only the leader does: the lease, what it says of the run, DROP, PIN, COMMIT, RETIRE and RECOVER.

A server that comes back without its newest writes (power cut, failover) may be behind the trainer. The trainer hands
back a *claim*, the last steps that it has trained; the leader lets the run go on after them, in a new epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache, partial
from importlib import resources
from itertools import islice
from types import MappingProxyType
from typing import Any

import numpy as np

from rlbuffer.errors import LeaseLost, RlbufferError, StepRetired
from rlbuffer.packing.further_columns import Columns
from rlbuffer.records.info import ROW_DTYPE
from rlbuffer.records.states import CommitStatus, Reason
from rlbuffer.records.step_plan import Drop, GroupPart, PlannedRollouts, StepPlan
from rlbuffer.records.waiting import Waiting
from rlbuffer.store.claim import decode_claim
from rlbuffer.store.history import Committed, Recovered, RetiredEarly
from rlbuffer.store.member import TicketStore
from rlbuffer.store.open_rollouts import names_of
from rlbuffer.store.pool import HISTORY_ENTRIES, drop, pool_entries, reused_groups
from rlbuffer.store.records import Attempt, Claim, Decided, LeaderRead, Lease, Meta, PoolEntry, Reused
from rlbuffer.store.server.append_file import until_whole
from rlbuffer.store.server.script import Script
from rlbuffer.store.session import BLOCK_SECONDS, entries, number, raise_first, sound, text
from rlbuffer.store.step_format import (
    check_numbers,
    encoded_header,
    encoded_parts,
    header_from,
    header_record,
    left_out,
    step_digest,
)
from rlbuffer.store.unused import unused_lines
from rlbuffer.store.viewer import heartbeats_of, living_tickets, seconds_of, sources_of, tombstone_ms, tombstone_steps
from rlbuffer.wire import payload

SUMMARY_LINES = 20_000
"""Lines of the summary stream that are kept, one per step, about 200 bytes each."""
SWEEP = 500
"""Payload keys unlinked per round trip."""
SCAN_KEYS = 1_000
"""Keys of the server, other runs' too, that one look for payloads passes: nobody else is served for some 0.3 ms."""
PIN_ROLLOUTS = 5_000
"""Payloads that one call of PIN looks at: nobody else is served for some 3 ms."""
OPEN_KEPT_MS = 3_600_000
"""Milliseconds that a group of open rollouts is known after its push: whoever ends one again, or begins it again, hears
the same as before."""
OPEN_FORGOTTEN = 200
"""Groups of open rollouts that one call of FORGET forgets."""


Place = tuple[int, int]
"""Shard and cursor."""


class LeaderStore(TicketStore):
    """A run for its leader. What changes the run is fenced by the token of the lease that was acquired last: it raises
    LeaseLost when another leads.

    What is decided about steps holds on the server that it was read from. Where PIN, COMMIT and RETIRE find that the
    connection was lost since the lease was acquired, they raise LeaseLost, too: the server may have lost what was read.
    """

    FIRST_PAGE: Place = (0, 0)
    """The beginning of :meth:`payload_page`."""
    token = 0
    """Of the lease; 0 before it was acquired."""
    since: int | None = None
    """The connection's losses when the lease was acquired."""
    _owner = ""
    _ends: tuple[str, ...] = ()
    """Envs that had an end when it was looked last: of those it is asked how many tickets are out."""
    _with_tickets: tuple[str, ...] = ()
    """Envs that had given tickets when it was asked last which are out."""
    _allowances_sent = 0

    # -- the lease -------------------------------------------------------------------------------------------------

    def until_whole(self) -> Waiting | None:
        """None when the server's append-only file can be trusted; else why to wait. Raises ServerUnsuitable."""
        if self.connection.is_memory:
            return None

        def read(_: Any) -> list[Waiting | None]:
            return [until_whole(server, self.connection.address) for server in self.connection.servers()]

        return next(filter(None, self.look(read)), None)

    def lease(self, owner: str, *, ttl_seconds: float) -> Lease:
        """LEASE: acquires it for `owner`, one per process start; all that follows is under its token."""
        lease = self._acquire(owner, ttl_seconds)
        if lease.held:
            self._owner, self.token, self.since = owner, lease.token, self.losses()
        return lease

    def renew(self, *, ttl_seconds: float) -> Lease:
        """LEASE: prolongs it. One that had expired is acquired anew, and has another token than :attr:`token`."""
        return self._acquire(self._owner, ttl_seconds)

    def _acquire(self, owner: str, ttl_seconds: float) -> Lease:
        status, token, holder, remaining = self._lease_move("acquire", owner, round(1000 * ttl_seconds))
        is_held = text(status) != "HELD"
        return Lease(token=int(token), held=is_held, owner=text(holder), remaining_seconds=int(remaining) / 1000)

    def release_lease(self) -> None:
        """Lets another lead at once. Nothing happens when another leads."""
        if self._owner:
            with suppress(LeaseLost):
                self._lease_move("release", self._owner)

    def load_scripts(self) -> None:
        """Loads the scripts that the server does not know: most users may call them and load none."""
        folder = resources.files("rlbuffer.store") / "scripts"
        names = sorted(file.name.removesuffix(".lua") for file in folder.iterdir() if file.name.endswith(".lua"))
        digests = [self.script(name).sha for name in names]
        are_known = self.look(lambda client: client.script_exists(*digests))
        for name, is_known in zip(names, are_known, strict=True):
            if not is_known:
                self.look(partial(_load, script=self.script(name)))

    # -- what the leader says ----------------------------------------------------------------------------------------

    def set_config(self, config: Mapping[str, Any], digest: str, *, settles: str = "") -> int:
        """The settings that steps are made with from now on. -> their revision.

        `settles` is the digest of the wanted config that need not be looked at any more.
        """
        reply = self._as_leader("config", payload.dumps(dict(config)), digest, settles)
        self.tombstone_ms, self.tombstone_steps = tombstone_ms(config), tombstone_steps(config)
        return int(reply[1])

    def refuse_config(self, digest: str, reason: str) -> None:
        """Refuses the wanted config of this digest: whoever asked for it hears why."""
        self._as_leader("refuse", digest, reason)

    def set_error(self, message: str) -> None:
        """The batcher's fatal error, shown to every waiting rank; "" clears it."""
        self._as_leader("error", message)

    def set_allowances(self, allowances: Mapping[str, int]) -> None:
        """Sets the tickets that may be out per env; an env that is not named has none."""
        # Counted: one from a connection that was given up may arrive behind a newer one.
        self._allowances_sent += 1
        words = (word for env, n in allowances.items() for word in (env, max(0, int(n))))
        self._as_leader("allow", self._allowances_sent, *words)

    def set_ended(self, step: int | None, written: Mapping[bytes, bytes] = MappingProxyType({})) -> bool:
        """The run has ended after `step`; None takes that back. `written`: what was seen of the ends (`Sources`).
        -> False: it has more to do."""
        seen = (word for pair in written.items() for word in pair)
        return text(self._as_leader("end", "" if step is None else step, *seen)[0]) == "OK"

    def set_finished(self, finished: str) -> None:
        """The trainer has made its last step: ``<attempt> <step>``, for workers; "" takes that back."""
        self._as_leader("finish", finished)

    def _as_leader(self, action: str, *args: Any) -> list[Any]:
        return self._lease_move(action, self.token, *args)

    def _lease_move(self, action: str, *args: Any) -> list[Any]:
        keys = self.keys
        return self._led("lease", (keys.lease, keys.meta, keys.allowance, keys.pool, keys.ends), (action, *args))

    def _led(self, script: str, keys: Sequence[str], args: Sequence[Any], *, since: int | None = None) -> list[Any]:
        """A move under the lease. Raises LeaseLost where another leads."""
        reply = self.move(script, keys, args, since=since)
        if len(reply) == 2 and text(reply[0]) == "FENCED":
            holder = f"{text(reply[1])} holds it" if reply[1] else "nobody holds it"
            lease = f"the lease of run {self.run!r} is not this batcher's any more"
            raise LeaseLost(f"{lease}: {holder} ({self.keys.lease})")
        return reply

    # -- the pool --------------------------------------------------------------------------------------------------

    def take_look(
        self, after: str = "0-0", *, count: int = 1000, block_seconds: float = 0.0, beats: Sequence[str] = ()
    ) -> LeaderRead:
        """INGEST: what a turn needs, with the pool behind the cursor as :meth:`read_pool` has it, and the heartbeats of
        the kinds `beats`. In a cluster it makes the payloads permanent."""
        keys, envs = self.keys, self._ends
        block_ms = max(1, round(1000 * min(block_seconds, BLOCK_SECONDS))) if block_seconds > 0 else None

        def send() -> list[Any]:
            with self.connection.blocking.pipeline(transaction=False) as pipe:
                pipe.hgetall(keys.ends)
                pipe.hgetall(keys.numbers)
                for env in envs:
                    pipe.zcard(keys.tickets(env))
                pipe.xread({keys.pool: after}, count=count, block=block_ms)
                pipe.hgetall(keys.meta)
                pipe.hgetall(keys.trainer)
                pipe.hgetall(keys.policy)
                pipe.zrange(keys.paused, 0, -1)
                pipe.time()
                for kind in beats:
                    pipe.hgetall(keys.heartbeats(kind))
                replies = pipe.execute(raise_on_error=False)
            raise_first(replies[: len(replies) - len(beats)])  # whatever is wrong with heartbeats stops nobody
            return list(replies)

        replies = iter(self.call(send))
        written, taken = next(replies), next(replies)
        sources = sources_of(written, taken, {env: next(replies) for env in envs})
        self._ends = tuple(sources.ends)
        found = pool_entries(keys, entries(next(replies)))
        meta, trainer, versions, paused, time = islice(replies, 5)
        if self.connection.is_cluster:
            self.paged(found, lambda pipe, entry: pipe.persist(entry.payload_key))
        now = seconds_of(time)
        return LeaderRead(
            entries=found,
            sources=sources if len(found) < count else None,
            meta=self._meta_of(meta),
            trainer=self._attempt_of(trainer, versions, now),
            paused=frozenset(map(text, paused)),
            beats={kind: heartbeats_of(sound([reply])[0], now) for kind, reply in zip(beats, replies, strict=True)},
        )

    def tickets_out(self) -> dict[str, dict[int, int]]:
        """env -> number of a ticket that lives -> the version of all weights that was announced when it was taken.

        One that is taken when the pool was read already may stand here; what a worker has pushed and nobody has read
        does, because only a leader closes its ticket.
        """
        keys = self.keys
        while True:
            envs = self._with_tickets

            def ask(pipe: Any, envs: Sequence[str] = envs) -> None:
                pipe.time()
                pipe.hgetall(keys.numbers)
                for env in envs:
                    pipe.zrange(keys.tickets(env), 0, -1, withscores=True)
                    pipe.hgetall(keys.taken(env))

            time, given, *replies = self.piped(ask)
            self._with_tickets = tuple(text(env) for env in given)
            if set(self._with_tickets) <= {*envs}:
                break
        now_ms = round(1000 * seconds_of(time))
        return {
            env: {ticket.number: ticket.version for ticket in living_tickets(env, out, taken, now_ms)}
            for env, out, taken in zip(envs, replies[::2], replies[1::2], strict=True)
        }

    def reused(self) -> list[Reused]:
        """Groups that were trained and may be trained again, in the order of their first push."""
        fields = self.look(lambda client: client.hgetall(self.keys.reuse))
        return reused_groups(self.keys, fields)

    def closed_groups(self) -> list[str]:
        """Tombstones: ids of closed groups, the oldest first."""
        return [text(group_id) for group_id in self.look(lambda client: client.zrange(self.keys.closed, 0, -1))]

    def drop(self, drops: Sequence[tuple[Drop, Sequence[PoolEntry]]], decided: Decided | None = None) -> None:
        """DROP, in calls of at most 500 entries; `decided` is kept in the history."""
        drop(self._led, self.keys, self.token, drops, decided)

    # -- steps -----------------------------------------------------------------------------------------------------

    def pin(self, rollouts: PlannedRollouts, entries: Mapping[str, PoolEntry]) -> list[str]:
        """PIN: are the payloads that a step is about to use there, whole? -> entries that cannot be used."""
        broken: list[str] = []
        for page in _pages(rollouts):
            asked = [(entries[use.entry_id].payload_key, use.places) for use in page]
            if self.connection.is_cluster:
                sizes = self._pin_on_shards(asked)
            else:
                words = [word for key, places in asked for word in (key, _words(tuple(places)))]
                sizes = self.move("pin", (), words, since=self.since)
            rows = b"".join([use.rows for use in page])
            expected: list[int] = np.frombuffer(rows, ROW_DTYPE)["size"].tolist()
            if len(sizes) != len(expected):
                raise self.unexpected("pin", sizes)
            if sizes != expected:
                at = 0
                for use in page:
                    span = slice(at, at := at + len(use.places))
                    if sizes[span] != expected[span]:
                        broken.append(use.entry_id)
        return broken

    def _pin_on_shards(self, asked: Sequence[tuple[str, Sequence[int]]]) -> list[Any]:
        """The sizes of payloads on several shards, which are made permanent: COMMIT does not reach them there."""

        def ask(pipe: Any) -> None:
            self.stay(self.since)
            for key, places in asked:
                pipe.persist(key)
                for place in places:
                    pipe.hstrlen(key, str(place))

        replies = iter(self.piped(ask, lenient=True))
        return [size for _, places in asked for size in list(islice(replies, 1 + len(places)))[1:]]

    def commit(
        self,
        plan: StepPlan,
        entries: Mapping[str, PoolEntry],
        *,
        meta: Meta,
        state: Mapping[str, Any],
        waiting_for_version: int | None = None,
        columns: Columns,
        decided: Decided | None = None,
    ) -> tuple[CommitStatus, Any]:
        """COMMIT. -> (``ok`` | ``duplicate``, header) or (``gone``, [entry ids]).

        `columns` are those that the plan's pushes agree on; `decided` is kept in the history.

        Raises:
            LeaseLost: another leads, the server was away, or the run is not where `meta` says: all must be read again.
            PayloadError: the plan has a number that is not finite.
            RlbufferError: the plan does not account for whole entries.
        """
        record = header_record(plan, meta, waiting_for_version, columns)
        record |= left_out(plan, entries, self.keys.payload_prefix)
        check_numbers(record, plan)
        header = encoded_header(record)
        parts = [*encoded_parts(plan, entries, self.keys.payload_prefix)]
        digest = step_digest(meta.digest, header, parts)
        # An adapter's data ages by its own steps, which may come as late as they like: nothing is forgotten then.
        remembered = 0 if any(plan.adapters) else self.tombstone_steps
        args: list[Any] = [
            *(self.token, meta.epoch, plan.step, meta.digest, digest, self.keys.payload_prefix),
            *(f"{self.tombstone_ms} {remembered}", HISTORY_ENTRIES, SUMMARY_LINES),
            *(header, payload.dumps(dict(state)), *_lines(plan, record, decided)),
            *(_entry_lines(plan), _group_lines(plan), *parts),
        ]
        keys = self.keys

        reply = self._led(
            "commit",
            (
                keys.lease,
                keys.pool,
                keys.steps,
                keys.meta,
                keys.ledger,
                keys.closed,
                keys.garbage,
                keys.history,
                keys.summary,
                keys.state,
                keys.reuse,
            ),
            args,
            since=self.since,
        )
        if text(reply[0]) == "OK":
            return CommitStatus.OK, header_from(record, digest=digest, committed_ms=int(reply[1]))[0]
        return self._not_committed(reply, plan, entries, meta)

    def _not_committed(
        self, reply: Sequence[Any], plan: StepPlan, entries: Mapping[str, PoolEntry], meta: Meta
    ) -> tuple[CommitStatus, Any]:
        """COMMIT changed nothing; it had, where an answer was lost."""
        status = text(reply[0])
        if status == "DUP":
            try:
                header = self.wait_step(plan.step, block_seconds=0.0)
            except StepRetired:
                raise LeaseLost(f"step {plan.step} was trained and retired meanwhile: another leads this run") from None
            if header is None:
                raise LeaseLost(f"step {plan.step} was committed, and the server has lost it since: read all again")
            return CommitStatus.DUPLICATE, header
        if status == "GONE":
            return CommitStatus.GONE, [text(entry_id) for entry_id in reply[1:]]
        if status == "ORDER":
            raise LeaseLost(
                f"step {plan.step} of run {self.run!r} follows step {meta.step} of epoch {meta.epoch}, but the run "
                f"is at step {text(reply[2])} of epoch {text(reply[1])}, or has another digest: read everything again"
            )
        if status == "TWICE":
            raise RlbufferError(f"the plan of step {plan.step} names pool entry {text(reply[1])} twice")
        if status == "UNEQUAL":
            entry_id, amounts = text(reply[1]), tuple(text(count) for count in reply[2:])
            read = entries[entry_id]
            if amounts != (str(read.rollouts), str(read.tokens)):
                raise LeaseLost(f"pool entry {entry_id} of run {self.run!r} is another one than was read: read again")
            raise RlbufferError(
                f"the plan of step {plan.step} does not account for all of pool entry {text(reply[1])}, "
                f"which holds {text(reply[2])} rollouts and {text(reply[3])} tokens"
            )
        raise self.unexpected("commit", reply)

    def retire(self, up_to: int, *, early: Mapping[str, int] | None = None) -> int:
        """RETIRE steps up to `up_to`, then sweep the payloads that nothing needs any more. -> payload keys unlinked.

        `early`: no checkpoint need hold them, because memory is short; what the history says of it.
        """
        keys = self.keys
        record = b"" if early is None else payload.dumps(RetiredEarly(step=up_to, **early).as_object())
        where = (keys.lease, keys.meta, keys.steps, keys.trainer, keys.history, keys.unused)
        reply = self._led("retire", where, (self.token, up_to, record, HISTORY_ENTRIES), since=self.since)
        retired = int(reply[1])

        def here(add: Callable[[Any], object]) -> list[Any]:
            def ask(pipe: Any) -> None:
                self.stay(self.since)
                add(pipe)

            return self.piped(ask)

        def unlink(pipe: Any, names: Sequence[bytes]) -> None:
            for name in names:  # one command per key: payload keys lie in different slots of a cluster
                pipe.unlink(name)

        def forget(pipe: Any, names: Sequence[bytes]) -> None:
            pipe.zrem(keys.garbage, *names)

        swept = 0
        while members := here(lambda pipe: pipe.zrangebyscore(keys.garbage, "-inf", retired, start=0, num=SWEEP))[0]:
            # Scorers write this list, too, and the leader may unlink anything: only a payload of this run goes.
            payload_keys = [key for key in members if key.startswith(keys.payload_prefix.encode())]
            # UNLINK before ZREM: a crash in between leaves a name to be swept again, never a payload without one.
            here(partial(unlink, names=payload_keys))
            here(partial(forget, names=members))
            swept += len(payload_keys)
        return swept

    def forget_open_rollouts(self) -> int:
        """FORGET: groups of open rollouts that were pushed long ago leave nothing behind. -> groups forgotten."""
        keys = self.keys
        before = round(1000 * self.now()) - OPEN_KEPT_MS
        found = self.look(lambda client: client.zrangebyscore(keys.open_pushed, "-inf", before, 0, OPEN_FORGOTTEN))
        groups = list(map(text, found))
        if not groups:
            return 0
        counts = self.paged(groups, lambda pipe, group: pipe.hget(keys.open_group(group), "size"))
        sizes = [number(count) or 0 for count in counts]
        where, args = [keys.lease, keys.open_pushed, keys.open_keys], list[Any]([self.token, OPEN_KEPT_MS])
        for group, size in zip(groups, sizes, strict=True):
            where += [keys.open_group(group), *map(keys.open_rollout, names_of(group, size))]
            args += [group, size]
        return int(self._led("forget", where, args)[1])

    # -- strays ----------------------------------------------------------------------------------------------------

    def payload_page(self, place: Place) -> tuple[Place, list[str]]:
        """Some of the keys of this run's payloads, strays among them, from `place` on. -> the next place,
        :attr:`FIRST_PAGE` after the last one; the keys."""
        shard, cursor = place

        def scan(_: Any) -> tuple[int, list[Any], int]:
            servers = self.connection.servers()
            server = servers[min(shard, len(servers) - 1)]
            # A run's name may hold no character that a pattern gives a meaning.
            after, keys = server.scan(cursor, match=f"{self.keys.payload_prefix}*", count=SCAN_KEYS)
            return int(after), keys, len(servers)

        after, keys, shards = self.look(scan)
        following = (shard, after) if after else (shard + 1, 0)
        return following if following[0] < shards else self.FIRST_PAGE, [text(key) for key in keys]

    def not_garbage(self, keys: Sequence[str]) -> list[str]:
        """Those of these payload keys that the list of garbage does not name: it has the payloads of all steps, and of
        all that was dropped."""
        garbage = self.keys.garbage
        scores = self.paged(keys, lambda pipe, key: pipe.zscore(garbage, key))
        return [key for key, score in zip(keys, scores, strict=True) if score is None]

    def shorten_lives(self, keys: Sequence[str], milliseconds: int) -> None:
        """Gives each of these payloads, which nobody may need, that long to live; less stays less.

        In a cluster a payload has its name before its push is pending. One that was made permanent meanwhile stays so.
        """

        def shorten(pipe: Any, key: str) -> None:
            self.stay(self.since)
            has_name = self.keys.name_of(key) == key
            pipe.pexpire(key, milliseconds, lt=True, xx=self.connection.is_cluster and has_name)

        self.paged(keys, shorten)

    def expired(self, keys: Sequence[str]) -> int:
        """The number of these payloads that are gone. A server notices what has expired when it is asked for it."""
        there = self.paged(keys, lambda pipe, key: pipe.exists(key))
        pushed = self.paged(keys, lambda pipe, key: pipe.exists(self.keys.name_of(key)))
        return sum(not (waits or has_name) for waits, has_name in zip(there, pushed, strict=True))

    def recover(self, trainer: Attempt, entries: Iterable[PoolEntry]) -> Mapping[str, Any] | None:
        """RECOVER: the run goes on after the step that the trainer claims, in a new epoch.

        `entries` is what is pending as far as the leader has read it; what came since is late by its tombstone.
        -> epoch, step, `forgotten` (steps that the server had lost), `void` (steps here of other content), groups and
        entries that leave the pool as trained; None when the claim is not there any more: read it again.
        """
        claim = decode_claim(trainer.claim)
        meta = self.meta()
        last = meta.step
        # A trainer from before a recovery: what follows its step is void.
        fork = claim.step + 1 if claim.step < meta.retired else self._fork(claim, last)
        common = fork - 1 if fork else last
        groups = list(dict.fromkeys(g for step in claim.steps if step.step > common for g in step.group_ids))
        trained_groups = set(groups)
        pending: dict[str, list[PoolEntry]] = {}
        for entry in entries:
            if entry.group_id in trained_groups:
                pending.setdefault(entry.group_id, []).append(entry)
        left = {step.group_ids[0]: step.unused for step in claim.steps if step.unused}
        uses = {group_id: [*_as_trained(members, left.get(group_id, {}))] for group_id, members in pending.items()}
        entry_uses = [use for of_group in uses.values() for use in of_group]
        record = Recovered(
            step=claim.step,
            forgotten=claim.step - common,
            void=last - common,
            groups=len(groups),
            entries=len(entry_uses),
        )
        keys = self.keys
        args: list[Any] = [self.token, trainer.number, trainer.claim, claim.step, claim.digest, claim.epoch, fork]
        args += [keys.payload_prefix, HISTORY_ENTRIES, payload.dumps(record.as_object()), unused_lines(claim.steps)]
        args.append(len(groups))
        for group_id in groups:
            is_unused = group_id in left and not any(rollouts for _, rollouts, *_ in uses.get(group_id, []))
            env = pending[group_id][0].env if group_id in pending else ""
            args += [group_id, env, f"dropped:{Reason.UNUSED}" if is_unused else "trained"]
        args.append(len(entry_uses))
        for use in entry_uses:
            args += use
        where = (keys.lease, keys.meta, keys.pool, keys.steps, keys.ledger, keys.closed, keys.garbage, keys.trainer)
        reply = self._led("recover", (*where, keys.history, keys.reuse, keys.unused), args)
        status = text(reply[0])
        if status == "OK":
            return {"epoch": int(reply[1]), **asdict(record)}
        if status == "NONE":
            return None
        if status == "UNEQUAL":
            raise RlbufferError(
                f"pool entry {text(reply[1])} holds {text(reply[2])} rollouts and {text(reply[3])} tokens, which is "
                "not what was read before"
            )
        raise self.unexpected("recover", reply)

    def _fork(self, claim: Claim, last: int) -> int:
        """First step that is here with other content than the trainer's; 0 when there is none."""
        here = {header.step: header.digest for header in self.headers(first=claim.steps[0].step if claim.steps else 1)}
        theirs = {step.step: step.digest for step in claim.steps} | {claim.step: claim.digest}
        others = [step for step, digest in theirs.items() if step <= last and here.get(step, digest) != digest]
        # A last step whose header is gone is known by the run's own digest.
        if not others and claim.step <= last:
            others = [claim.step]
        return min(others, default=0)


def _load(client: Any, script: Script) -> None:
    client.script_load(script.text)


def _lines(plan: StepPlan, record: Mapping[str, Any], decided: Decided | None) -> tuple[bytes, bytes]:
    """A step as the stream of summaries and the history keep it."""
    summary = {
        name: record[name] for name in ("step", "rollouts", "tokens", "reward", "age", "max_age", "fill", "envs")
    }
    account = {} if decided is None else decided._asdict()
    history = Committed(groups=len(plan.group_ids), closed_by=plan.closed_by, flat=plan.flat, **summary, **account)
    return payload.dumps(summary), payload.dumps(history.as_object())


def _entry_lines(plan: StepPlan) -> str:
    """The fate of each entry, as COMMIT reads it."""
    lines = list[str]()
    for use in plan.entries:
        dropped = [f" {reason} {rollouts} {tokens}" for reason, rollouts, tokens in use.dropped]
        owner = use.info.group_id if use.uses else ""
        lines += f"{use.entry_id} {owner} {use.packed_rollouts} {use.packed_tokens}", *dropped, "\n"
    return "".join(lines)


def _group_lines(plan: StepPlan) -> str:
    """The groups that the step closes, as COMMIT reads them."""
    by_group = {use.info.group_id: use for use in plan.entries}
    uses = [by_group[group_id] for group_id in plan.group_ids]
    return "".join([f"{use.info.group_id} {use.info.env} {use.uses} {int(use.is_kept)}\n" for use in uses])


def _pages(rollouts: PlannedRollouts) -> Iterator[list[GroupPart]]:
    """What is trained, in order: about :data:`PIN_ROLLOUTS` at a time."""
    page: list[GroupPart] = []
    size = 0
    for use in rollouts.pushes:
        page.append(use)
        size += len(use.places)
        if size >= PIN_ROLLOUTS:
            yield page
            page, size = [], 0
    if page:
        yield page


@lru_cache
def _words(places: tuple[int, ...]) -> bytes:
    return b" ".join([b"%d" % place for place in places])


def _as_trained(entries: Iterable[PoolEntry], unused: Collection[str]) -> Iterator[list[Any]]:
    """The pending pushes of a group that was trained: each rollout counts once, a repeated one is a duplicate, and one
    of `unused` was not trained."""
    seen: set[str] = set()
    for entry in entries:
        dropped: dict[Reason, list[int]] = {}
        for info in entry.info.rollouts if entry.info else ():
            if info.rollout_id in seen or info.rollout_id in unused:
                reason = Reason.DUPLICATE if info.rollout_id in seen else Reason.UNUSED
                dropped.setdefault(reason, []).append(info.length)
            seen.add(info.rollout_id)
        lengths = [length for lengths_of_reason in dropped.values() for length in lengths_of_reason]
        rows = [
            value
            for reason, lengths_of_reason in dropped.items()
            for value in (reason, len(lengths_of_reason), sum(lengths_of_reason))
        ]
        yield [entry.entry_id, entry.rollouts - len(lengths), entry.tokens - sum(lengths), len(dropped), *rows]
