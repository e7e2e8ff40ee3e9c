"""A step as it is stored: a header, a part per planned rank, and the digest that chains them to the step before.

Both are msgpack with fixed field order, so that the same step is always the same bytes, and a CRC-32: a rank reads its
own part alone, and the digest is over all of them. The digest and the time of the commit stand beside the header, not
in it: one is computed from it, the other is the server's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import chain, count, islice
from operator import itemgetter
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import PayloadError
from rlbuffer.packing.further_columns import Columns
from rlbuffer.records.checks import MAX_COUNT, MAX_NUMBER
from rlbuffer.records.info import FURTHER, HAS_REWARD, IS_TRUNCATED, ROW, GroupInfo
from rlbuffer.records.states import ClosedBy
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import AdapterProgress, PlannedRollouts, StepPlan
from rlbuffer.store.part_rollouts import PART_ROW, PartRollouts, SourcePush, StepPart
from rlbuffer.store.records import Meta, PoolEntry, is_stream
from rlbuffer.wire import payload
from rlbuffer.wire.bounded_msgpack import pack
from rlbuffer.wire.checksum import sealed, unsealed
from rlbuffer.wire.metadata import has_no_names, names_of

MAX_STEP_BYTES = 512 * 2**20
"""Largest header or part that is decoded: the server's own limit for one value."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
_HEADER_FIELDS = frozenset(field.name for field in fields(StepHeader))


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: _Count
    rank: _Count
    row_tokens: _Count
    rows_per_micro_batch: _Count
    sources: list[SourcePush]
    rollouts: bytes
    """Of :data:`PART_ROW` each, in the order of the rows."""
    ids: list[str] | None
    """None: each is ``<group id>/<index>``."""
    rewards: list[dict[str, Annotated[float, msgspec.Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]]] | None
    """Named rewards; None where no rollout has any."""
    rows: list[list[_Count]]
    """Per micro-step the number of rollouts of each row."""


_ENCODER, _PARTS = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Part)


def step_digest(previous: str, header: bytes, parts: Sequence[bytes]) -> str:
    """SHA-256, in hex, over the digest before, the header and the parts in the order of ranks, each with its length."""
    digest = hashlib.sha256()
    for piece in (previous.encode(), header, *parts):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()


def check_numbers(header: Mapping[str, Any], plan: StepPlan) -> None:
    """Checks that the numbers computed for a step, which did not come in with its rollouts, can be read again: nobody
    can train a step that cannot be read, and it stays for ever.

    Raises:
        PayloadError: a number is not finite.
    """
    try:
        payload.check(dict(header))
        payload.check([float(np.sum(np.abs(plan.advantages, dtype=np.float64)))])
    except PayloadError as error:
        raise PayloadError(f"step {plan.step} is not committed, because it could never be read: {error}") from None


def header_record(plan: StepPlan, meta: Meta, waiting_for: int | None, columns: Columns) -> dict[str, Any]:
    """The header of a planned step; means over rollouts, rewards over the scored ones only. `columns` are those that
    its pushes agree on."""
    layout, rollouts, ages = plan.plan, plan.rollouts, plan.ages()
    envs, rewards = _envs_of(rollouts, ages)
    capacity = layout.world_size * layout.micro_steps * layout.rows_per_micro_batch * layout.row_tokens
    return {
        "step": plan.step,
        "epoch": meta.epoch,
        "previous_digest": meta.digest,
        "world_size": layout.world_size,
        "normalizers": {
            "loss_tokens": plan.normalizers.loss_tokens,
            "rollouts": plan.normalizers.rollouts,
            "groups": plan.normalizers.groups,
        },
        "rollouts": len(rollouts.numbers),
        # Where each rollout has one, as nearly everywhere, the header is what it always was.
        **({"sequences": len(rollouts)} if len(rollouts) > len(rollouts.numbers) else {}),
        "tokens": plan.tokens,
        "bytes": int(rollouts.numbers["size"].sum(dtype=np.int64)),
        "group_ids": list(plan.group_ids),
        "closed_by": plan.closed_by,
        "fill": plan.tokens / capacity if capacity and not is_stream(meta) else 0.0,
        "envs": envs,
        "reward": _mean(rewards),
        **_ages(ages),
        "waiting_for_version": waiting_for,
        "checkpoint_now": meta.checkpoint_now,
        "uses": {use.info.group_id: use.uses for use in plan.entries if use.uses},
        "max_uses": int(meta.config.get("max_uses", 1)),
        "revision": meta.revision,
        "columns": {name: [dtype, *shape] for name, (dtype, shape) in columns.items()},
        # The rule that held at the commit, so that it can be checked after the config has changed.
        "age_limits": {env: age_limit(meta.config, env) for env in envs},
        "masks_truncated": rollouts.masks,
        "adapters": {adapter: asdict(progress) for adapter, progress in sorted(plan.adapters.items())},
    }


def _envs_of(rollouts: PlannedRollouts, ages: NDArray[np.int64]) -> tuple[dict[str, dict[str, Any]], list[float]]:
    """The header's lines of the envs, by name; and all rewards, in the order of each env's first rollout."""
    groups: dict[str, set[str]] = {}
    for use in rollouts.pushes:
        groups.setdefault(use.info.env, set()).add(use.info.group_id)
    lengths, of_all, rewards = rollouts.numbers["length"], rollouts.numbers["reward"], list[float]()
    envs = {}
    for env, places in rollouts.by_env.items():
        env_rewards = of_all[places[rollouts.are_scored[places]]].tolist()
        envs[env] = {
            "rollouts": len(places),
            "tokens": int(lengths[places].sum(dtype=np.int64)),
            "groups": len(groups[env]),
            "reward": _mean(env_rewards),
            **_ages(ages[places]),
        }
        rewards += env_rewards
    return dict(sorted(envs.items(), key=itemgetter(0))), rewards


def _ages(ages: NDArray[np.int64]) -> dict[str, float]:
    """The header's fields of the ages of some rollouts."""
    return {"age": int(ages.sum()) / len(ages), "max_age": int(ages.max())} if len(ages) else {"age": 0.0, "max_age": 0}


def left_out(plan: StepPlan, entries: Mapping[str, PoolEntry], prefix: str) -> dict[str, Any]:
    """The header's field of what groups of the step hold besides; nothing where they hold nothing.

    `prefix`: that of the run's payload keys, which does not stand in it.
    """
    left = {
        entries[use.entry_id].payload_key.removeprefix(prefix): [
            [place, str(reason)] for index, reason in use.left_out for place in use.info.places_of([index])
        ]
        for use in plan.entries
        if use.left_out
    }
    return {"left_out": left} if left else {}


def age_limit(config: Mapping[str, Any], env: str) -> int | None:
    """`max_age` for `env` in a run's config; None when the run has no config."""
    of_env = (config.get("envs") or {}).get(env) or {}
    limit = of_env.get("max_age")
    return config.get("max_age") if limit is None else limit


def encoded_parts(plan: StepPlan, entries: Mapping[str, PoolEntry], prefix: str = "") -> Iterator[bytes]:
    """The parts of a planned step, in the order of ranks. Each has its rollouts in the order of its rows.

    Payload keys stand in them without the run's `prefix`.
    """
    layout = plan.plan
    sources_of_all = [_source(use.info, entries[use.entry_id], prefix) for use in plan.rollouts.pushes]
    packed = [msgspec.Raw(_ENCODER.encode(source)) for source in sources_of_all]
    ids, named = _names(plan.rollouts)
    table = _table(plan)
    for rank in range(layout.world_size):
        rank_rows = [micro_step[rank] for micro_step in layout.rows]
        order = [*chain.from_iterable(chain.from_iterable(rank_rows))]
        part_table = table.take(order, axis=0).view(PART_ROW).reshape(-1)
        sources, part_table["source"] = _numbered(part_table["source"].astype(np.int64))
        part = _Part(
            step=plan.step,
            rank=rank,
            row_tokens=layout.row_tokens,
            rows_per_micro_batch=layout.rows_per_micro_batch,
            sources=[packed[source] for source in sources.tolist()],
            rollouts=part_table.tobytes(),
            ids=None if ids is None else [ids[i] for i in order],
            rewards=None if named is None else [dict(named[i]) for i in order],
            rows=[[len(row) for row in rows] for rows in rank_rows],
        )
        yield sealed(_ENCODER.encode(part))


def _source(info: GroupInfo, entry: PoolEntry, prefix: str) -> SourcePush:
    return SourcePush(
        payload_key=entry.payload_key.removeprefix(prefix),
        group_id=info.group_id,
        env=info.env,
        adapter=info.adapter,
        prompt_id=info.prompt_id,
        planned_size=info.planned_size,
        worker=info.worker,
        pushed_ms=entry.pushed_ms,
        entry_id=entry.entry_id,
        seconds=info.seconds,
    )


def _names(rollouts: PlannedRollouts) -> tuple[list[str] | None, list[Mapping[str, float]] | None]:
    """[sequences] id and named rewards of its rollout. None: each is ``<group id>/<index>``; none has any."""
    if all(has_no_names(use.info) for use in rollouts.pushes):
        return None, None
    all_ids, all_named, default = list[str](), list[Mapping[str, float]](), list[str]()
    places = iter(rollouts.places_in_push)
    for use in rollouts.pushes:
        ids, named = names_of(use.info)
        for place in islice(places, len(use.places)):
            all_ids.append(ids[place])
            all_named.append(named[place])
            default.append(f"{use.info.group_id}/{place}")
    return all_ids if all_ids != default else None, all_named if any(all_named) else None


def _table(plan: StepPlan) -> NDArray[np.uint8]:
    """[sequences, bytes] of :data:`~rlbuffer.store.part_rollouts.PART_ROW`; sources are places in the plan's pushes."""
    rollouts = plan.rollouts
    rows, numbers, counts = rollouts.rows, rollouts.numbers, rollouts.sequences
    data = np.empty((len(rows), PART_ROW.itemsize), np.uint8)
    data[:, -ROW.size :] = rows.view(np.uint8).reshape(-1, ROW.size)
    out = data.view(PART_ROW).reshape(-1)
    out["source"] = rollouts.spread(range(len(rollouts.pushes)))
    out["index"] = [*chain.from_iterable([use.places for use in rollouts.pushes])]
    out["rollout"], out["advantage"] = rollouts.places_in_push, plan.advantages
    out["sequence"] = np.arange(len(rows)) - np.repeat(rollouts.heads, counts)
    out["sequences"] = np.repeat(counts, counts)
    out["number"] = np.repeat(np.arange(len(counts)), counts)
    out["rollout_loss_tokens"] = np.repeat(numbers["loss_tokens"], counts)
    out["reward"] = np.repeat(numbers["reward"], counts)
    out["flags"] |= np.repeat(numbers["flags"] & HAS_REWARD, counts)
    return data


def _numbered(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The different values, none below 0, in the order in which they come; and for each of `values` its place there."""
    places = np.arange(len(values))
    first = np.zeros(values.max(initial=-1) + 1, dtype=np.int64)
    first[values[::-1]] = places[::-1]  # of equal ones the last that is written stays: the first
    is_first = first[values] == places
    return values[is_first], (np.cumsum(is_first) - 1)[first[values]]


def encoded_header(record: Mapping[str, Any]) -> bytes:
    """A header's bytes; what is in it has been checked."""
    return sealed(pack(record))


def decode_header(data: bytes, *, digest: str, committed_ms: int) -> tuple[StepHeader, dict[str, Any]]:
    """Returns the header, and the age limits per env that held when it was committed."""
    packed = unsealed(data, "step header")
    try:
        return header_from(payload.loads(packed, limit=MAX_STEP_BYTES), digest=digest, committed_ms=committed_ms)
    except PayloadError as error:
        raise PayloadError(f"step header: {error}") from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise PayloadError(f"step header: unexpected content ({type(error).__name__}: {error})") from None


def header_from(values: Mapping[str, Any], *, digest: str, committed_ms: int) -> tuple[StepHeader, dict[str, Any]]:
    """As :func:`decode_header`, of the values of a header. Raises PayloadError, and whatever wrong values raise."""
    record = dict(values)
    limits = dict(record.pop("age_limits"))
    record.setdefault("sequences", record["rollouts"])
    group_ids = tuple(record.pop("group_ids"))
    closed_by = ClosedBy(record.pop("closed_by"))
    columns = {name: (dtype, tuple(shape)) for name, (dtype, *shape) in record.pop("columns").items()}
    adapters = {name: AdapterProgress(**progress) for name, progress in record.pop("adapters", {}).items()}
    if unknown := sorted(record.keys() - _HEADER_FIELDS):
        raise PayloadError(
            f"this rlbuffer does not know {', '.join(unknown)}: a newer one made the step, update this one"
        )
    header = StepHeader(
        digest=digest,
        committed_ms=committed_ms,
        group_ids=group_ids,
        closed_by=closed_by,
        columns=columns,
        adapters=adapters,
        **record,
    )
    return header, limits


def decode_part(data: bytes, prefix: str = "") -> StepPart:
    """A part as the reader wants it; `prefix` is that of the run's payload keys."""
    packed = unsealed(data, "step part")
    try:
        part = _PARTS.decode(packed)
        table = np.frombuffer(part.rollouts, PART_ROW)
        _check_part(part, table)
    except (msgspec.MsgspecError, ValueError) as error:
        raise PayloadError(f"step part: unexpected content ({error})") from None
    places = count()
    rows = tuple(tuple(tuple(islice(places, n)) for n in row_lengths) for row_lengths in part.rows)
    sources = [source._replace(payload_key=prefix + source.payload_key) for source in part.sources]
    return StepPart(
        step=part.step,
        rank=part.rank,
        rollouts=PartRollouts(table, sources, part.ids, part.rewards),
        rows=rows,
        row_tokens=part.row_tokens,
        rows_per_micro_batch=part.rows_per_micro_batch,
    )


def _check_part(part: _Part, table: NDArray[np.void]) -> None:
    in_rows = sum(map(sum, part.rows))
    if in_rows != len(table):
        raise ValueError(f"its rows hold {in_rows} rollouts, and it has {len(table)}")
    if table["source"].max(initial=0) >= max(len(part.sources), 1):
        raise ValueError("a rollout names a push that the part does not have")
    if any(values is not None and len(values) != len(table) for values in (part.ids, part.rewards)):
        raise ValueError("ids or named rewards of another number of rollouts")
    numbers_are_right = (
        (table["length"] > 0)
        & (table["flags"] <= HAS_REWARD | IS_TRUNCATED | FURTHER)
        & (table["sequence"] < table["sequences"])
        & ((table["sequence"] > 0) == (table["flags"] & FURTHER != 0))
        & np.isfinite(table["reward"])
        & np.isfinite(table["advantage"])
    )
    if not numbers_are_right.all():
        raise ValueError(f"rollout {int(numbers_are_right.argmin())} has numbers that no rollout has")


def _mean(values: Sequence[float]) -> float | None:
    return float(sum(values) / len(values)) if values else None
