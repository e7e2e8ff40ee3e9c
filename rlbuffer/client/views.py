"""Read-only views of a run: what `inspect` shows and :meth:`rlbuffer.client.buffer.Buffer.groups` returns.

A view is put together from what is on the server anyway: the pool (forming, ready), the live steps (packed, trained)
and the history (dropped). Looking changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rlbuffer.errors import NotFound, PayloadError, RlbufferError, StepRetired
from rlbuffer.events.history import Dropped, RunRewound, StepsVoided
from rlbuffer.records.info import RolloutInfo
from rlbuffer.records.states import Reason, State
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import version_trained
from rlbuffer.store.protocol import Store
from rlbuffer.store.records import PartRollout, PoolEntry
from rlbuffer.wire import payload

VOID_FIELDS = ("group_id", "env", "rollouts", "tokens", "reward", "min_version", "detail")
"""Fields of each group in the record of a void step or a rewind."""
VIEW_PAGE = 1000
"""Pool entries per read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One group as a table row."""

    group_id: str
    env: str
    prompt_id: str
    state: State
    reason: str
    """Reason of its drop, a :class:`~rlbuffer.records.states.Reason` as the history has it; "" otherwise."""
    rollouts: int
    planned_size: int
    """0 when no longer known."""
    reward: float | None
    """Mean over the scored rollouts."""
    rewards: tuple[float, ...]
    """Every scored rollout's, in the order of the rollouts."""
    age: int | None
    """Policy versions, at the step that consumed it, or now while it is pending."""
    tokens: int
    created: float | None
    """Unix seconds of its first push."""
    waited_seconds: float | None
    """Seconds from the first push until now, or until it was packed or dropped."""
    worker: str
    step: int | None
    """The step that consumed it."""
    detail: str
    """The rule that dropped it, with value and limit."""
    min_version: int
    max_version: int
    uses: int = 0
    """Steps that trained it, up to this one."""
    adapter: str = ""
    """LoRA adapter that it trains; "" is all weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """One rollout of a group; `rollout` is its payload, None when it is gone or damaged."""

    rollout_id: str
    reward: float | None
    rewards: Mapping[str, float]
    advantage: float | None
    """None until packed."""
    length: int
    loss_tokens: int
    prompt_tokens: int
    min_version: int
    max_version: int
    is_truncated: bool
    finish_reason: str
    logprob_mean: float | None
    """Mean over trained tokens; None without a payload."""
    text: str | None
    rollout: Any
    step: int | None
    rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDetail:
    """One group whole."""

    view: GroupView
    members: tuple[RolloutView, ...]
    answer: Any
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """A committed step: its header, and every rollout with its place."""

    header: StepHeader
    rollouts: tuple[tuple[int, PartRollout], ...]
    """(planned rank, rollout)."""
    rows: tuple[tuple[tuple[tuple[str, ...], ...], ...], ...] = field(default=())
    """``rows[rank][micro_step]``: each row's rollout ids."""
    row_tokens: int = 0
    """Tokens that a row can hold."""

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """Every rollout of the step."""
        return tuple(r.info.rollout_id for _, r in self.rollouts)


def list_groups(
    store: Store, *, where: str = "", limit: int = 100, problems: list[RlbufferError] | None = None
) -> list[GroupView]:
    """Groups that match `where`: pending ones first, then by step and time, newest first.

    Steps that cannot be read are left out and added to `problems`; None: PayloadError.
    """
    from rlbuffer.client.filters import parse

    chosen = parse(where)
    out: list[GroupView] = []
    for view in _all_groups(store, takes=lambda state: chosen.allows("state", state), problems=problems):
        if chosen.matches(view):
            out.append(view)
            if len(out) >= limit:
                break
    return out


def _all_groups(
    store: Store, takes: Callable[[State], bool] = lambda state: True, problems: list[RlbufferError] | None = None
) -> Iterator[GroupView]:
    """Every group in a state that `takes` accepts; groups of other states are not read."""
    if takes(State.FORMING) or takes(State.READY):
        yield from _pending(store)
    if takes(State.PACKED) or takes(State.TRAINED):
        yield from _in_steps(store, problems)
    if takes(State.DROPPED):
        for record in store.history():
            if record.get("event") == Dropped.event:
                yield _dropped(record)
            elif record.get("event") in (StepsVoided.event, RunRewound.event):
                for row in reversed(record.get("groups", ())):
                    yield _dropped({**dict(zip(VOID_FIELDS, row, strict=True)), "reason": Reason.VOID})


# -- pending -----------------------------------------------------------------------------------------------------------
def _pool(store: Store) -> Iterator[PoolEntry]:
    cursor = "0-0"
    while entries := store.read_pool(cursor, count=VIEW_PAGE):
        yield from entries
        cursor = entries[-1].entry_id


def _pending(store: Store) -> Iterator[GroupView]:
    for view, _ in pending_groups(store):
        yield view


def pending_groups(store: Store) -> Iterator[tuple[GroupView, Sequence[PoolEntry]]]:
    """The groups in the pool, newest first, each with the pushes that make it up."""
    parts: dict[str, list[PoolEntry]] = {}
    for entry in _pool(store):
        parts.setdefault(entry.group_id, []).append(entry)
    if not parts:
        return
    now = store.now()
    versions = {adapter: policy.version for adapter, policy in store.policies().items()}
    versions[""] = max(versions.get("", 0), store.meta().step)
    for group_id in reversed(parts):
        yield _pending_view(group_id, parts[group_id], versions=versions, now=now), parts[group_id]


def _pending_view(group_id: str, parts: Sequence[PoolEntry], *, versions: Mapping[str, int], now: float) -> GroupView:
    infos = [entry.info for entry in parts if entry.info is not None]
    adapter = infos[0].adapter if infos else ""
    members = {r.rollout_id: r for info in infos for r in info.rollouts}
    planned = infos[0].planned_size if infos else 0
    scored = [r.reward for r in members.values() if r.reward is not None]
    complete = len(scored) >= planned > 0 and not any(info.needs for info in infos)
    needs = sorted({need for info in infos for need in info.needs})
    needed = [f"needs {', '.join(needs)}"] if needs else []
    oldest = min((r.min_version for r in members.values()), default=0)
    created = parts[0].pushed_ms / 1000
    return GroupView(
        group_id=group_id,
        env=parts[0].env,
        prompt_id=infos[0].prompt_id if infos else "",
        state=State.READY if complete else State.FORMING,
        reason="",
        rollouts=len(members) or sum(entry.rollouts for entry in parts),
        planned_size=planned,
        reward=fmean(scored) if scored else None,
        rewards=tuple(scored),
        age=max(versions.get(adapter, 0) - oldest, 0),
        tokens=sum(entry.tokens for entry in parts),
        created=created,
        waited_seconds=max(now - created, 0.0),
        worker=infos[0].worker if infos else "",
        step=None,
        detail="; ".join([*(entry.error for entry in parts if entry.error), *needed]),
        min_version=oldest,
        max_version=max((r.max_version for r in members.values()), default=0),
        adapter=adapter,
    )


# -- packed and trained ------------------------------------------------------------------------------------------------
def _in_steps(store: Store, problems: list[RlbufferError] | None) -> Iterator[GroupView]:
    trained = store.trainer().trained
    for header in sorted(store.headers(problems=problems), key=lambda h: -h.step):
        groups: dict[str, list[PartRollout]] = {}
        try:
            for part in store.read_parts(header.step):
                for member in part.rollouts:
                    groups.setdefault(member.group_id, []).append(member)
        except StepRetired:
            continue  # the leader retired it between the two reads
        except (PayloadError, NotFound) as error:
            if problems is None:
                raise
            problems.append(error)
            continue
        for group_id in header.group_ids:
            if group_id in groups:
                yield _consumed_view(group_id, groups[group_id], header, trained=trained)


def _consumed_view(group_id: str, members: Sequence[PartRollout], header: StepHeader, *, trained: int) -> GroupView:
    # A step holds them in the order of its rows.
    members = sorted(members, key=lambda m: (m.pushed_ms, m.payload_key, m.index))
    scored = [m.info.reward for m in members if m.info.reward is not None]
    oldest = min(m.info.min_version for m in members)
    pushed_ms = min(m.pushed_ms for m in members)
    return GroupView(
        group_id=group_id,
        env=members[0].env,
        prompt_id=members[0].prompt_id,
        state=State.TRAINED if header.step <= trained else State.PACKED,
        reason="",
        rollouts=len(members),
        planned_size=members[0].planned_size,
        reward=fmean(scored) if scored else None,
        rewards=tuple(scored),
        age=version_trained(header.adapters, members[0].adapter, header.step) - oldest,
        tokens=sum(m.info.length for m in members),
        created=pushed_ms / 1000,
        waited_seconds=max(header.committed_ms - pushed_ms, 0) / 1000,
        worker=members[0].worker,
        step=header.step,
        detail="",
        min_version=oldest,
        max_version=max(m.info.max_version for m in members),
        uses=header.uses.get(group_id, 0) + 1,
        adapter=members[0].adapter,
    )


# -- dropped -----------------------------------------------------------------------------------------------------------
def _dropped(record: Mapping[str, Any]) -> GroupView:
    reward = record.get("reward")
    return GroupView(
        group_id=str(record["group_id"]),
        env=str(record["env"]),
        prompt_id="",
        state=State.DROPPED,
        reason=str(record["reason"]),
        rollouts=int(record["rollouts"]),
        planned_size=0,
        reward=None if reward in (None, "") else float(str(reward)),
        rewards=(),
        age=None,
        tokens=int(record["tokens"]),
        created=None,
        waited_seconds=None,
        worker="",
        step=None,
        detail=str(record.get("detail", "")),
        min_version=int(record.get("min_version", 0)),
        max_version=int(record.get("min_version", 0)),
    )


# -- one group, one step -----------------------------------------------------------------------------------------------
def find_group(store: Store, group_id: str) -> GroupDetail:
    """Finds a group by its id, a rollout's id (``<group>/<index>``), or a unique prefix of the group's id."""
    id_or_prefix = group_id.rsplit("/", 1)[0]
    candidates: dict[str, GroupView] = {}
    problems: list[RlbufferError] = []
    for view in _all_groups(store, problems=problems):
        if view.group_id == id_or_prefix:
            return _detail(store, view)
        if view.group_id.startswith(id_or_prefix):
            candidates.setdefault(view.group_id, view)
    if len(candidates) == 1:
        return _detail(store, next(iter(candidates.values())))
    if candidates:
        some = ", ".join(sorted(candidates)[:5])
        raise NotFound(f"{group_id!r} fits {len(candidates)} groups of run {store.run!r}: {some}. Give more of the id.")
    if problems:
        raise problems[0]  # it may be in there
    raise NotFound(f"run {store.run!r} has no group {group_id!r}: it was retired with its step, or never pushed.")


def _detail(store: Store, view: GroupView) -> GroupDetail:
    places: list[tuple[PartRollout, int | None, int | None]] = []
    if view.state in (State.PACKED, State.TRAINED):
        in_steps = store.find_in_steps(view.group_id, view.step)
        places = [(member, step, rank) for step, member, rank in in_steps if step == view.step]
    elif view.state in (State.FORMING, State.READY):
        places = [
            (stand_in(entry, index, info), None, None)
            for entry in _pool(store)
            if entry.group_id == view.group_id and entry.info is not None
            for index, info in enumerate(entry.info.rollouts)
        ]
    places.sort(key=lambda place: (place[0].payload_key, place[0].index))
    refs = [ref for ref, _, _ in places]
    payloads = store.read_payloads(refs) if refs else []
    members = tuple(_member(ref, step, rank, data) for (ref, step, rank), data in zip(places, payloads, strict=True))
    answer, metadata = _group_payload(store, refs)
    return GroupDetail(view=view, members=members, answer=answer, metadata=metadata)


def stand_in(entry: PoolEntry, index: int, info: RolloutInfo) -> PartRollout:
    """A pending rollout as a step would name it: what its payload is read by."""
    return PartRollout(
        payload_key=entry.payload_key,
        index=index,
        info=info,
        group_id=entry.group_id,
        env=entry.env,
        adapter=entry.info.adapter if entry.info else "",
        advantage=0.0,
    )


def _member(ref: PartRollout, step: int | None, rank: int | None, data: bytes | None) -> RolloutView:
    info, rollout = ref.info, None
    if data is not None:
        try:
            rollout = payload.decode_rollout(data, expected=info)
        except PayloadError:
            rollout = None
    trained_logprobs = rollout.logprobs[rollout.loss_mask] if rollout is not None else ()
    return RolloutView(
        rollout_id=info.rollout_id,
        reward=info.reward,
        rewards=info.rewards,
        advantage=ref.advantage if step is not None else None,
        length=info.length,
        loss_tokens=info.loss_tokens,
        prompt_tokens=info.prompt_tokens,
        min_version=info.min_version,
        max_version=info.max_version,
        is_truncated=info.is_truncated,
        finish_reason=rollout.finish_reason if rollout is not None else "",
        logprob_mean=float(sum(trained_logprobs) / len(trained_logprobs)) if len(trained_logprobs) else None,
        text=rollout.text if rollout is not None else None,
        rollout=rollout,
        step=step,
        rank=rank,
    )


def _group_payload(store: Store, refs: Sequence[PartRollout]) -> tuple[Any, Mapping[str, Any]]:
    keys = list(dict.fromkeys(ref.payload_key for ref in refs))
    for data in store.read_group_payloads(keys) if keys else []:
        if data is not None:
            try:
                return payload.decode_group_payload(data)
            except PayloadError:
                continue
    return None, {}


def view_step(store: Store, n: int) -> StepView:
    """A committed step with every rollout's place. Raises NotFound when it was never committed, StepRetired later."""
    header = store.wait_step(n, block_seconds=0.0)
    if header is None:
        raise NotFound(f"run {store.run!r} has no step {n}: the last committed one is {store.meta().step}.")
    parts = store.read_parts(n)
    return StepView(
        header=header,
        rollouts=tuple((part.rank, member) for part in parts for member in part.rollouts),
        rows=tuple(
            tuple(tuple(tuple(part.rollouts[i].info.rollout_id for i in row) for row in step) for step in part.rows)
            for part in parts
        ),
        row_tokens=parts[0].row_tokens,
    )
