"""Steps as the leader makes them: PIN, COMMIT and RETIRE."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from rlbuffer.errors import LeaseLost, RlbufferError
from rlbuffer.events.event import as_object
from rlbuffer.events.history import Committed, RetiredEarly
from rlbuffer.packing.further_columns import Columns
from rlbuffer.records.info import ROW, ROW_DTYPE
from rlbuffer.records.states import CommitStatus
from rlbuffer.records.step_plan import RolloutRef, StepPlan, pushes_of
from rlbuffer.store.moves.planned import Planned
from rlbuffer.store.moves.pool import HISTORY_ENTRIES, stream_order
from rlbuffer.store.moves.step_format import (
    check_numbers,
    encode,
    header_record,
    left_out,
    part_records,
    step_digest,
)
from rlbuffer.store.moves.step_reading import StepReads
from rlbuffer.store.records import Meta, PoolEntry
from rlbuffer.store.session import answers, text
from rlbuffer.wire import payload

SUMMARY_LINES = 20_000
"""Lines of the summary stream that are kept, one per step, about 200 bytes each."""
MAX_STATE_BYTES = 64 * 2**20
"""Largest state of the batcher that is decoded."""
SWEEP = 500
"""Payload keys unlinked per round trip."""
PIN_ROLLOUTS = 5_000
"""Payloads that one call of PIN looks at: nobody else is served for some 3 ms."""
_NO_ROW = b"\xff" * ROW.size
"""Stands for a rollout that its push does not have: no payload is so large."""
T = TypeVar("T")


class StepMoves(StepReads):
    """The leader's moves on the stream of steps; everybody else reads it."""

    def pin(
        self, refs: Sequence[RolloutRef], entries: Mapping[str, PoolEntry], *, since: int | None = None
    ) -> list[str]:
        broken: list[str] = []
        for page in _pages(refs):
            asked = [(entries[key].payload_key, places) for key, places in page.items()]
            if self.connection.is_cluster:
                sizes = self._pin_on_shards(asked, since)
            else:
                words = [word for key, places in asked for word in (key, _words(tuple(places)))]
                sizes = self.move("pin", (), words, since=since)
            expected = _expected_sizes(page, entries)
            if len(sizes) != len(expected):
                raise self.unexpected("pin", sizes)
            if sizes != expected:
                at = 0
                for entry_id, places in page.items():
                    its = slice(at, at := at + len(places))
                    if sizes[its] != expected[its]:
                        broken.append(entry_id)
        return broken

    def _pin_on_shards(self, asked: Sequence[tuple[str, Sequence[int]]], since: int | None) -> list[Any]:
        """The sizes of payloads on several shards, which are made permanent: COMMIT does not reach them there."""

        def ask(client: Any) -> list[Any]:
            self.stay(since)
            with client.pipeline(transaction=False) as pipe:
                for key, places in asked:
                    pipe.persist(key)
                    for place in places:
                        pipe.hstrlen(key, str(place))
                replies = iter(answers(pipe))
            return [size for _, places in asked for size in list(islice(replies, 1 + len(places)))[1:]]

        return self.look(ask)

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
        # A lost reply is followed by the same bytes again, which the script knows; with `since` it is not.
        planned = Planned(plan, entries)
        record = header_record(plan, entries, meta, waiting_for_version, columns, planned)
        record |= left_out(plan, entries, self.keys.payload_prefix)
        check_numbers(record, plan)
        header = encode(record)
        parts = [encode(part) for part in part_records(plan, entries, self.keys.payload_prefix, planned)]
        digest = step_digest(meta.digest, header, parts)
        # An adapter's data ages by its own steps, which may come as late as they like: nothing is forgotten then.
        remembered = 0 if any(plan.adapters) else self.tombstone_steps
        args: list[Any] = [
            *(token, meta.epoch, plan.step, meta.digest, digest, self.keys.payload_prefix),
            *(f"{self.tombstone_ms} {remembered}", HISTORY_ENTRIES, SUMMARY_LINES),
            *(header, payload.dumps(dict(state)), *_lines(plan, record)),
            *(_entry_lines(plan), _group_lines(plan), *parts),
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
        data = self.look(lambda client: client.get(self.keys.state))
        if data is None:
            return None
        state: Mapping[str, Any] = payload.loads(data, limit=MAX_STATE_BYTES)
        return state

    def closed_groups(self) -> list[str]:
        return [text(group_id) for group_id in self.look(lambda client: client.zrange(self.keys.closed, 0, -1))]

    def retire(
        self, token: int, up_to: int, *, early: Mapping[str, int] | None = None, since: int | None = None
    ) -> int:
        keys = self.keys
        record = b"" if early is None else payload.dumps(as_object(RetiredEarly(step=up_to, memory=early)))
        where = (keys.lease, keys.meta, keys.steps, keys.trainer, keys.history)
        reply = self.move("retire", where, (token, up_to, record, HISTORY_ENTRIES), since=since)
        if text(reply[0]) == "FENCED":
            raise self.lost(reply[1])
        retired = int(reply[1])

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


def _lines(plan: StepPlan, record: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """A step as the stream of summaries and the history keep it."""
    summary = {
        name: record[name] for name in ("step", "rollouts", "tokens", "reward", "age", "max_age", "fill", "envs")
    }
    history = as_object(Committed(groups=len(plan.group_ids), closed_by=plan.closed_by, flat=plan.flat, **summary))
    return payload.dumps(summary), payload.dumps(history)


def _entry_lines(plan: StepPlan) -> str:
    """The fate of each entry, as COMMIT reads it."""
    lines = list[str]()
    for use in sorted(plan.entries, key=lambda use: stream_order(use.entry_id)):  # COMMIT reads neighbours together
        dropped = [f" {reason} {rollouts} {tokens}" for reason, rollouts, tokens in use.dropped]
        owner = use.group_id if use.uses else ""
        lines += f"{use.entry_id} {owner} {use.packed_rollouts} {use.packed_tokens}", *dropped, "\n"
    return "".join(lines)


def _group_lines(plan: StepPlan) -> str:
    """The groups that the step closes, as COMMIT reads them."""
    env_of = {push.group_id: push.env for push in pushes_of(plan.rollouts)}
    empty = [group_id for group_id in plan.group_ids if group_id not in env_of]
    if empty:
        raise RlbufferError(f"the plan of step {plan.step} names groups without a rollout: {', '.join(empty)}")
    lines = []
    by_group = {use.group_id: use for use in plan.entries}
    for group_id in plan.group_ids:
        sample = by_group.get(group_id)
        uses, is_kept = (sample.uses, sample.is_kept) if sample else (0, False)
        lines.append(f"{group_id} {env_of[group_id]} {uses} {int(is_kept)}\n")
    return "".join(lines)


def _forget(client: Any, garbage: str, keys: Sequence[bytes]) -> None:
    client.zrem(garbage, *keys)


def _unlink(client: Any, keys: Sequence[bytes]) -> None:
    # One command per key: payload keys lie in different slots of a cluster.
    with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.unlink(key)
        pipe.execute()


def _pages(refs: Sequence[RolloutRef]) -> Iterator[dict[str, Sequence[int]]]:
    """Entry id -> the places of its rollouts, in order: about :data:`PIN_ROLLOUTS` of them at a time."""
    places: dict[str, Sequence[int]] = {}
    for push in pushes_of(refs):
        before = places.get(push.entry_id)
        places[push.entry_id] = push.places if before is None else [*before, *push.places]
    page: dict[str, Sequence[int]] = {}
    size = 0
    for entry_id, its in places.items():
        page[entry_id] = its
        size += len(its)
        if size >= PIN_ROLLOUTS:
            yield page
            page, size = {}, 0
    if page:
        yield page


@lru_cache
def _words(places: tuple[int, ...]) -> bytes:
    return b" ".join([b"%d" % place for place in places])


def _expected_sizes(page: Mapping[str, Sequence[int]], entries: Mapping[str, PoolEntry]) -> list[int]:
    """The sizes of a page's payloads as their metadata has them, in the order of the page."""
    rows = []
    for entry_id, places in page.items():
        info = entries[entry_id].info
        its = b"" if info is None else info.rows
        if places == range(len(its) // ROW.size):
            rows.append(its)
        else:
            rows += [its[ROW.size * place : ROW.size * (place + 1)] or _NO_ROW for place in places]
    sizes: list[int] = np.frombuffer(b"".join(rows), ROW_DTYPE)["size"].tolist()
    return sizes
