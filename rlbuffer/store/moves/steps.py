"""Steps: COMMIT, PULL and RETIRE, and reading what was committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from rlbuffer.errors import LeaseLost, NotFound, PayloadError, RlbufferError, StepRetired
from rlbuffer.events.event import as_object
from rlbuffer.events.history import Committed, RetiredEarly
from rlbuffer.records.states import CommitStatus
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import RolloutRef, StepPlan
from rlbuffer.store.keys import Keys
from rlbuffer.store.moves.pool import HISTORY_ENTRIES
from rlbuffer.store.moves.step_format import (
    check_numbers,
    decode_header,
    decode_part,
    encode,
    header_record,
    part_records,
    step_digest,
)
from rlbuffer.store.records import Meta, PartRollout, PoolEntry, StepPart
from rlbuffer.store.session import BLOCK_SECONDS, LAST_IN_STEP, Fields, Session, answers, ranged, text
from rlbuffer.wire import payload

SUMMARY_LINES = 20_000
"""Lines of the summary stream that are kept, one per step, about 200 bytes each."""
MAX_STATE_BYTES = 64 * 2**20
"""Largest state of the batcher that is decoded."""
HEADERS_PER_READ = 64
"""Headers per read."""
SWEEP = 500
"""Payload keys unlinked per round trip."""
T = TypeVar("T")


class StepMoves(Session):
    """The steps stream: ``<s>-0`` is the header of step s, ``<s>-<r+1>`` the part of planned rank r."""

    def pin(
        self, refs: Sequence[RolloutRef], entries: Mapping[str, PoolEntry], *, since: int | None = None
    ) -> list[str]:
        """PIN: whether the payloads that a step is about to use are there, whole. -> entries that cannot be used.

        With `since`, the connection's losses when the entries were read, a server that was away meanwhile is not asked.

        Raises:
            LeaseLost: it was away.
        """
        used = dict.fromkeys(ref.entry_id for ref in refs)

        def ask(client: Any) -> list[Any]:
            self.stay(since)
            with client.pipeline(transaction=False) as pipe:
                for ref in refs:
                    pipe.hstrlen(entries[ref.entry_id].payload_key, str(ref.index))
                return answers(pipe)

        sizes = self.look(ask)
        broken = {
            ref.entry_id
            for ref, size in zip(refs, sizes, strict=True)
            if size != _expected_size(entries[ref.entry_id], ref.index)
        }
        return [entry_id for entry_id in used if entry_id in broken]

    def commit(
        self,
        token: int,
        plan: StepPlan,
        entries: Mapping[str, PoolEntry],
        *,
        meta: Meta,
        state: Mapping[str, Any],
        waiting_for_version: int | None = None,
        since: int | None = None,
    ) -> tuple[CommitStatus, Any]:
        """COMMIT. -> (``ok`` | ``duplicate``, digest) or (``gone``, [entry ids]).

        A lost reply is followed by the same bytes again, which the script knows; but not with `since`, the connection's
        losses when the plan's payloads were pinned: a server that was away may have lost the pins.

        Raises:
            LeaseLost: another leads, the server was away, or the run is not where `meta` says: all must be read again.
            PayloadError: the plan names a rollout that its entry does not hold, or has a number that is not finite.
            RlbufferError: the plan does not account for whole entries.
        """
        record = header_record(plan, entries, meta, waiting_for_version)
        check_numbers(record, plan)
        header = encode(record)
        parts = [encode(part) for part in part_records(plan, entries, self.keys.payload_prefix)]
        digest = step_digest(meta.digest, header, parts)
        summary = {name: record[name] for name in ("step", "rollouts", "tokens", "reward", "age", "max_age", "fill")}
        summary["envs"] = record["envs"]
        history = as_object(Committed(groups=len(plan.group_ids), closed_by=plan.closed_by, **summary))
        args: list[Any] = [token, meta.epoch, plan.step, meta.digest, digest, self.keys.payload_prefix]
        # An adapter's data ages by its own steps, which may come as late as they like: nothing is forgotten then.
        remembered = 0 if any(plan.adapters) else self.tombstone_steps
        args += [f"{self.tombstone_ms} {remembered}", HISTORY_ENTRIES, SUMMARY_LINES]
        args += [header, payload.dumps(dict(state)), payload.dumps(summary), payload.dumps(history), len(parts), *parts]
        args.append(len(plan.entries))
        for use in plan.entries:
            args += [
                use.entry_id,
                use.group_id if use.uses else "",
                use.packed_rollouts,
                use.packed_tokens,
                len(use.dropped),
            ]
            for reason, rollouts, tokens in use.dropped:
                args += [reason, rollouts, tokens]
        env_of = {ref.group_id: ref.env for ref in plan.rollouts}
        empty = [group_id for group_id in plan.group_ids if group_id not in env_of]
        if empty:
            raise RlbufferError(f"the plan of step {plan.step} names groups without a rollout: {', '.join(empty)}")
        args.append(len(plan.group_ids))
        by_group = {use.group_id: use for use in plan.entries}
        for group_id in plan.group_ids:
            sample = by_group.get(group_id)
            args += [
                group_id,
                env_of[group_id],
                sample.uses if sample else 0,
                int(sample is not None and sample.is_kept),
            ]
        keys = self.keys

        reply = self.move(
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
            since=since,
        )
        return self._committed(reply, plan, entries, meta, digest)

    def _committed(
        self, reply: Sequence[Any], plan: StepPlan, entries: Mapping[str, PoolEntry], meta: Meta, digest: str
    ) -> tuple[CommitStatus, Any]:
        status = text(reply[0])
        if status == "OK":
            return CommitStatus.OK, digest
        if status == "DUP":
            return CommitStatus.DUPLICATE, digest
        if status == "GONE":
            return CommitStatus.GONE, [text(entry_id) for entry_id in reply[1:]]
        if status == "FENCED":
            raise self.lost(reply[1])
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

    def load_state(self) -> Mapping[str, Any] | None:
        """The batcher's state as after the last step; None before the first."""
        data = self.look(lambda client: client.get(self.keys.state))
        if data is None:
            return None
        state: Mapping[str, Any] = payload.loads(data, limit=MAX_STATE_BYTES)
        return state

    def closed_groups(self) -> list[str]:
        """Tombstones: ids of closed groups, the oldest first."""
        return [text(group_id) for group_id in self.look(lambda client: client.zrange(self.keys.closed, 0, -1))]

    def retire(
        self, token: int, up_to: int, *, early: Mapping[str, int] | None = None, since: int | None = None
    ) -> int:
        """RETIRE steps up to `up_to`, then sweep the payloads that nothing needs any more. -> payload keys unlinked.

        `early`: no checkpoint need hold them, because memory is short; what the history says of it. With `since`, the
        connection's losses when this was decided, nothing goes on a server that was away meanwhile: it may need again
        what was to go.

        Raises:
            LeaseLost: another leads, or the server was away.
        """
        keys = self.keys
        record = b"" if early is None else payload.dumps(as_object(RetiredEarly(step=up_to, memory=early)))
        where = (keys.lease, keys.meta, keys.steps, keys.trainer, keys.history, keys.holds)
        reply = self.move("retire", where, (token, up_to, record, HISTORY_ENTRIES), since=since)
        if text(reply[0]) == "FENCED":
            raise self.lost(reply[1])
        retired = int(reply[1])
        if text(reply[2]) == "1":
            return 0  # a backup copies payloads: the next retirement sweeps these, too

        def here(command: Callable[[Any], T]) -> T:
            def ask(client: Any) -> T:
                self.stay(since)
                return command(client)

            return self.look(ask)

        swept = 0
        while members := here(lambda client: client.zrangebyscore(keys.garbage, "-inf", retired, start=0, num=SWEEP)):
            # Scorers write this list, too, and the leader may unlink anything: only a payload of this run goes.
            own = [key for key in members if key.startswith(keys.payload_prefix.encode())]
            # UNLINK before ZREM: a crash in between leaves a name to be swept again, never a payload without one.
            here(partial(_unlink, keys=own))
            here(partial(_forget, garbage=keys.garbage, keys=members))
            swept += len(own)
        return swept

    # -- pull ------------------------------------------------------------------------------------------------------
    def wait_step(self, step: int, *, block_seconds: float) -> StepHeader | None:
        """Header of `step`, or None after blocking. Raises StepRetired; PayloadError when it cannot be read."""
        if step < 1:
            raise NotFound(f"steps start at 1, there is no step {step}")
        deadline = time.monotonic() + block_seconds
        after = f"{step - 1}-{LAST_IN_STEP}"
        left = 0.0
        while True:
            entries = self.stream(self.keys.steps, after, count=1, block_seconds=min(left, BLOCK_SECONDS))
            if entries:
                entry_id, fields = entries[0]
                if entry_id == f"{step}-0":
                    with self._reading(step):
                        return header_of(fields)[0]
                raise self._retired(step)
            if left == 0.0 and step <= self._retired_step():
                raise self._retired(step)
            left = deadline - time.monotonic()
            if left <= 0:
                return None

    def read_parts(self, step: int, ranks: Sequence[int] | None = None) -> list[StepPart]:
        """Parts of the given planned ranks, or all, in the order of ranks.

        Raises:
            StepRetired: the step was trained, checkpointed and removed.
            NotFound: the step was not committed yet, or has no such rank.
            PayloadError: a part cannot be read.
        """

        def read(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                if ranks is None:
                    pipe.xrange(self.keys.steps, f"{step}-1", f"{step}-{LAST_IN_STEP}")
                else:
                    for rank in ranks:
                        pipe.xrange(self.keys.steps, f"{step}-{rank + 1}", f"{step}-{rank + 1}")
                return list(pipe.execute())

        replies = self.look(read)
        ranges = [ranged(reply) for reply in replies]
        if any(not entries for entries in ranges):
            if step <= self._retired_step():
                raise self._retired(step)
            which = f"step {step}" if ranks is None else f"one of the ranks {list(ranks)} in step {step}"
            raise NotFound(f"run {self.run!r} has no {which}")
        with self._reading(step):
            return [part_of(entry_id, fields, self.keys) for entries in ranges for entry_id, fields in entries]

    def read_payloads(self, refs: Sequence[PartRollout]) -> list[bytes | None]:
        """The encoded rollouts, None where missing; one HMGET per payload key, all in one round trip."""
        indices_of: dict[str, dict[int, None]] = {}
        for ref in refs:
            indices_of.setdefault(ref.payload_key, {})[ref.index] = None
        if not indices_of:
            return []

        def read(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                for key, indices in indices_of.items():
                    pipe.hmget(key, [str(index) for index in indices])
                return answers(pipe)

        values = self.look(read)
        payloads = {
            (key, index): value
            for (key, indices), fields in zip(indices_of.items(), values, strict=True)
            for index, value in zip(indices, fields or [None] * len(indices), strict=True)
        }
        return [payloads[ref.payload_key, ref.index] for ref in refs]

    def read_group_payloads(self, payload_keys: Sequence[str]) -> list[bytes | None]:
        """The encoded group part (answer, metadata) of each push, None where there is none."""

        def read(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                for key in payload_keys:
                    pipe.hget(key, "group")
                return answers(pipe)

        return self.look(read) if payload_keys else []

    # -- look ------------------------------------------------------------------------------------------------------
    def headers(
        self, first: int | None = None, last: int | None = None, *, problems: list[RlbufferError] | None = None
    ) -> Iterator[StepHeader]:
        """Headers of the live steps in [first, last], oldest first; what is retired meanwhile is left out.

        One that cannot be read is added to `problems`; None: PayloadError.
        """
        retired, newest = self._bounds()
        low, high = max(first or 1, retired + 1), newest if last is None else min(last, newest)
        for start in range(low, high + 1, HEADERS_PER_READ):
            steps = range(start, min(start + HEADERS_PER_READ, high + 1))

            def read(client: Any, steps: range = steps) -> list[Any]:
                with client.pipeline(transaction=False) as pipe:
                    for step in steps:
                        pipe.xrange(self.keys.steps, f"{step}-0", f"{step}-0")
                    return list(pipe.execute())

            for reply in self.look(read):
                for entry_id, fields in ranged(reply):
                    try:
                        with self._reading(int(entry_id.split("-")[0])):
                            header = header_of(fields)[0]
                    except PayloadError as error:
                        if problems is None:
                            raise
                        problems.append(error)
                        continue
                    yield header

    def find_in_steps(self, group_id: str, step: int | None = None) -> list[tuple[int, PartRollout, int]]:
        """(step, rollout, planned rank) of a group's rollouts in the live steps, or in `step`."""
        places = []
        for header in self.headers(step, step):
            if group_id not in header.group_ids:
                continue
            try:
                parts = self.read_parts(header.step)
            except StepRetired:
                continue  # the leader retired it between the two reads
            for part in parts:
                places += [(header.step, member, part.rank) for member in part.rollouts if member.group_id == group_id]
        return places

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Says of a step that cannot be read what to do: nobody can train it, now or later."""
        try:
            yield
        except PayloadError as error:
            raise PayloadError(
                f"step {step} of run {self.run!r} cannot be read: {error}. Take it back, and what follows it, "
                f"with `rlbuffer step void {step}`"
            ) from None

    def _bounds(self) -> tuple[int, int]:
        retired, step = self.look(lambda client: client.hmget(self.keys.meta, ["retired", "step"]))
        return int(retired or 0), int(step or 0)

    def _retired_step(self) -> int:
        return self._bounds()[0]

    def _retired(self, step: int) -> StepRetired:
        retired = self._retired_step()
        reason = self.early_reason(step)
        why = f"trained and retired early ({reason})" if reason else "trained, checkpointed and retired"
        return StepRetired(
            f"step {step} of run {self.run!r} was {why}: steps up to {retired} are gone, resume from a newer checkpoint"
        )


def header_of(fields: Fields) -> tuple[StepHeader, dict[str, Any]]:
    """A header entry decoded, and the age limits it was committed under. Raises PayloadError."""
    at = fields.get(b"at", b"0")
    return decode_header(
        fields.get(b"header", b""), digest=text(fields.get(b"digest", b"")), committed_ms=int(at) if at.isdigit() else 0
    )


def part_of(entry_id: str, fields: Fields, keys: Keys) -> StepPart:
    """A part entry decoded. Raises PayloadError, also when it is another part than its id says."""
    part = decode_part(fields.get(b"part", b""), prefix=keys.payload_prefix)
    if entry_id != f"{part.step}-{part.rank + 1}":
        raise PayloadError(f"step part {entry_id} says that it is rank {part.rank} of step {part.step}")
    return part


def _forget(client: Any, garbage: str, keys: Sequence[bytes]) -> None:
    client.zrem(garbage, *keys)


def _unlink(client: Any, keys: Sequence[bytes]) -> None:
    # One command per key: payload keys lie in different slots of a cluster.
    with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.unlink(key)
        pipe.execute()


def _expected_size(entry: PoolEntry, index: int) -> int:
    return -1 if entry.info is None or index >= entry.info.totals.rollouts else entry.info.rollouts[index].size
