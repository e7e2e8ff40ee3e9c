"""Read-only views of a run: what `inspect` shows and :meth:`rlbuffer.client.buffer.Buffer.groups` returns.

A view is put together from what is on the server anyway: the pool (forming, ready), the live steps (packed, trained)
and the history (dropped). Looking changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from rlbuffer.errors import NotFound, PayloadError, RlbufferError, StepRetired
from rlbuffer.records.failure import Failure
from rlbuffer.records.info import RolloutNumbers, own_numbers
from rlbuffer.records.rollout import Rollout, TokenArrays, TokenSequence
from rlbuffer.records.states import Reason, State
from rlbuffer.records.step_header import StepHeader
from rlbuffer.records.step_plan import version_trained
from rlbuffer.state.text import counted
from rlbuffer.store.history import VOID_FIELDS, Committed, Dropped, RunRewound, StepsVoided
from rlbuffer.store.open_rollouts import OpenRollout
from rlbuffer.store.part_rollouts import StepPart
from rlbuffer.store.records import PartRollout, PoolEntry, is_stream
from rlbuffer.store.viewer import Viewer
from rlbuffer.wire.metadata import scored_rewards

VIEW_PAGE = 250
"""Pool entries per read: about a millisecond of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One group as a table row."""

    group_id: str
    env: str
    state: State
    rollouts: int
    tokens: int
    min_version: int
    max_version: int
    prompt_id: str = ""
    reason: str = ""
    """Reason of its drop, a :class:`~rlbuffer.records.states.Reason` as the history has it; "" otherwise."""
    planned_size: int = 0
    """0 when no longer known."""
    reward: float | None = None
    """Mean over the scored rollouts."""
    rewards: tuple[float, ...] = ()
    """Every scored rollout's, in the order of the rollouts."""
    age: int | None = None
    """Policy versions, at the step that consumed it or was open when it was dropped, or now while it is pending."""
    created: float | None = None
    """Unix seconds of its first push."""
    waited_seconds: float | None = None
    """Seconds from the first push until now, or until it was packed or dropped."""
    worker: str = ""
    step: int | None = None
    """The step that consumed it; of what was unused the one in which the trainer was given it."""
    detail: str = ""
    """The rule that dropped it, with value and limit."""
    uses: int = 0
    """Steps that trained it, up to this one."""
    adapter: str = ""
    """LoRA adapter that it trains; "" is all weights."""


class StepPlace(NamedTuple):
    """The place of a rollout in a step."""

    rank: int
    """The rank that it was planned for."""
    row: int
    """Row of that rank, from 0, over all its micro-batches."""


class SharedBeginning(NamedTuple):
    """The token ids that a sequence and an earlier one of its rollout both begin with."""

    rollout_id: str
    """That sequence, ``g/0.1``: the first of those with which most is shared."""
    tokens: int
    """Tokens of the longest common beginning."""
    trained: int
    """Tokens of it that earlier sequences train, and this one does not."""


class Underway(NamedTuple):
    """A rollout that an agent is at work on, or that waits for the others of its group, at one moment."""

    rollout: OpenRollout
    now: float
    """Unix seconds, the server's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView(RolloutNumbers):
    """One rollout of a group, or one of its sequences; `rollout` is its payload, None when it is gone or damaged."""

    advantage: float | None
    """None until packed."""
    finish_reason: str
    logprob_mean: float | None
    """Mean over trained tokens; None without a payload."""
    text: str | None
    rollout: Any
    step: int | None
    place: StepPlace | None
    """Its place in the step; that of its first sequence, where it has several."""
    failure: Failure | None = None
    """Why the attempt failed; without a payload its kind alone."""
    left_out: str = ""
    """Reason for which its group was trained without it."""

    sequence: int | None = None
    """Its place among the sequences of its rollout; None: it is the whole rollout."""
    shared: SharedBeginning | None = None
    """None of a whole rollout, and of a sequence that begins with a token of its own."""
    underway: Underway | None = None
    """None of a rollout that was pushed."""

    @property
    def name(self) -> str:
        """The name of the sequence; "" where it has none, and of a rollout of several."""
        return "" if self.rollout is None or self.rollout.further else self.rollout.name

    @property
    def lacks(self) -> str:
        """Why it has no tokens; "" where it has."""
        if self.rollout is not None:
            return ""
        if self.underway is None:
            return "its payload is no longer kept"
        return "its calls cannot be shown" if self.underway.rollout.calls else "its agent has asked nothing yet"

    @property
    def main(self) -> RolloutView:
        """What stands for it where one row of tokens is shown: the first of several sequences, else itself."""
        whole: Rollout | None = self.rollout
        return self if whole is None or not whole.further else self._of(whole, 0)

    def sequences(self) -> tuple[RolloutView, ...]:
        """A view of each of its sequences, where it has several; sequence 2 of ``g/0`` is named ``g/0.2``."""
        whole: Rollout | None = self.rollout
        if whole is None or not whole.further:
            return ()
        return tuple(self._of(whole, number) for number in range(len(whole.sequences)))

    def _of(self, whole: Rollout, number: int) -> RolloutView:
        its, name = whole.sequences[number], f"{self.rollout_id}.{number}"
        values = {f.name: getattr(its, f.name) for f in fields(TokenSequence)}
        return replace(
            self,
            **own_numbers(whole, its),
            rollout_id=name,
            logprob_mean=logprob_mean([its]),
            text=None if number else self.text,
            rollout=replace(whole, **values, rollout_id=name, text=None if number else whole.text, further=()),
            place=None if number else self.place,
            sequence=number,
            shared=_shared_beginning(self.rollout_id, whole.sequences[: number + 1]),
        )


def logprob_mean(sequences: Iterable[TokenArrays]) -> float | None:
    """Mean over the trained tokens of a rollout's sequences; None without any."""
    trained = np.concatenate([its.logprobs[its.loss_mask] for its in sequences])
    return float(trained.mean()) if len(trained) else None


def _shared_beginning(rollout_id: str, sequences: Sequence[TokenSequence]) -> SharedBeginning | None:
    """What the last of these sequences shares with those before it."""
    *earlier, its = sequences
    lengths = [_alike(its, other) for other in earlier]
    most = max(lengths, default=0)
    if not most:
        return None
    trained = np.zeros(most, np.bool_)
    for other, length in zip(earlier, lengths, strict=True):
        trained[:length] |= other.loss_mask[:length]
    trained &= ~its.loss_mask[:most]
    return SharedBeginning(f"{rollout_id}.{lengths.index(most)}", most, int(np.count_nonzero(trained)))


def _alike(a: TokenSequence, b: TokenSequence) -> int:
    """Tokens of the longest common beginning."""
    most = min(len(a.tokens), len(b.tokens))
    differs = a.tokens[:most] != b.tokens[:most]
    return int(differs.argmax()) if differs.any() else most


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDetail:
    """One group whole."""

    view: GroupView
    members: tuple[RolloutView, ...]
    answer: Any
    metadata: Mapping[str, Any]

    def tree(self) -> tuple[RolloutView, ...]:
        """Its rollouts, each followed by its sequences where it has several."""
        return tuple(its for member in self.members for its in (member, *member.sequences()))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """A committed step: its header, and every sequence of its rollouts with its place."""

    header: StepHeader
    rollouts: tuple[tuple[int, PartRollout], ...]
    """(planned rank, sequence of a rollout)."""
    rows: tuple[tuple[tuple[tuple[str, ...], ...], ...], ...] = field(default=())
    """``rows[rank][micro_step]``: each row's rollouts by their ids, sequences of several as ``g/0.2``."""
    row_tokens: int = 0
    """Tokens that a row can hold."""

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """Every rollout of the step."""
        return tuple(dict.fromkeys(r.info.rollout_id for _, r in self.rollouts))


GroupSource = Sequence[PoolEntry] | Sequence[PartRollout]
"""The pushes of a pending group, or the rollouts of one in a step; () of one of which neither is kept."""


def every_group(
    store: Viewer,
    *,
    takes: Callable[[State], bool] = lambda state: True,
    takes_step: Callable[[int], bool] = lambda step: True,
    takes_push: Callable[[PoolEntry], bool] = lambda entry: True,
    problems: list[RlbufferError] | None = None,
) -> Iterator[tuple[GroupView, GroupSource]]:
    """Every group in a state, of a first push, or a step, that is taken; others are not read.

    A group that is packed or dropped while this reads is named once, as it was when it was read first. Steps that
    cannot be read are left out and added to `problems`; None: PayloadError.
    """
    pending, began_ms = set[str](), math.inf
    if takes(State.FORMING) or takes(State.READY):
        began_ms = math.floor(1000 * store.now())
        for view, sources in pending_groups(store, takes_push=takes_push):
            pending.add(view.group_id)
            yield view, sources
    if takes(State.PACKED) or takes(State.TRAINED):
        for (view, members), header in _in_steps(store, takes_step, problems):
            # Of a group that may be used again one is pending while another use of it is trained.
            if view.group_id not in pending or header.committed_ms < began_ms:
                yield view, members
    if takes(State.DROPPED):
        # A part that came late or twice is dropped while its group is pending.
        history = [
            record
            for record in store.history()
            if record.get("group_id") not in pending or round(1000 * record.get("at", 0)) < began_ms
        ]
        yield from ((view, ()) for view in dropped_groups(history, is_stream=is_stream(store.meta())))


# -- pending -----------------------------------------------------------------------------------------------------------
def pool_pages(store: Viewer, cursor: str = "0-0") -> Iterator[list[PoolEntry]]:
    """The pool behind the id `cursor`, the oldest first, :data:`VIEW_PAGE` entries at a time."""
    while entries := store.read_pool(cursor, count=VIEW_PAGE):
        yield entries
        cursor = entries[-1].entry_id


def _by_group(store: Viewer) -> dict[str, list[PoolEntry]]:
    parts: dict[str, list[PoolEntry]] = {}
    for page in pool_pages(store):
        for entry in page:
            parts.setdefault(entry.group_id, []).append(entry)
    return parts


def pending_groups(
    store: Viewer,
    *,
    takes_push: Callable[[PoolEntry], bool] = lambda entry: True,
) -> Iterator[tuple[GroupView, Sequence[PoolEntry]]]:
    """The groups in the pool, newest first, each with the pushes that make it up; as :func:`every_group`."""
    parts = _by_group(store)
    if not parts:
        return
    now = store.now()
    versions = _versions(store)
    for group_id in reversed(list(parts)):
        its = parts[group_id]
        if takes_push(its[0]):
            yield _pending_view(group_id, its, versions=versions, now=now), its


def _versions(store: Viewer) -> dict[str, int]:
    """Adapter -> its newest policy version; of all weights at least the last step."""
    versions = {adapter: policy.version for adapter, policy in store.trainer().policies.items()}
    meta = store.meta()
    versions[""] = max(versions.get("", 0), 0 if is_stream(meta) else meta.step)
    return versions


def _pending_view(group_id: str, parts: Sequence[PoolEntry], *, versions: Mapping[str, int], now: float) -> GroupView:
    infos = [entry.info for entry in parts if entry.info is not None]
    adapter = infos[0].adapter if infos else ""
    planned = infos[0].planned_size if infos else 0
    if len(infos) == 1 and infos[0].totals.is_distinct:  # nearly every one: nothing of it is unpacked
        totals, scored = infos[0].totals, scored_rewards(infos[0])
        count, oldest, newest = totals.rollouts, totals.oldest, totals.newest
    else:
        members = {r.rollout_id: r for info in infos for r in info.rollouts}
        scored = tuple(r.reward for r in members.values() if r.reward is not None)
        count = len(members) or sum(entry.rollouts for entry in parts)
        oldest = min((r.min_version for r in members.values()), default=0)
        newest = max((r.max_version for r in members.values()), default=0)
    failed = {r.rollout_id: r.failure for info in infos if info.totals.failed for r in info.rollouts if r.failure}
    complete = len(scored) + len(failed) >= planned > 0 and not any(info.needs for info in infos)
    needs = sorted({need for info in infos for need in info.needs})
    needed = [f"needs {', '.join(needs)}"] if needs else []
    needed += [f"failed: {counted(Counter(failed.values()))}"] if failed else []
    created = parts[0].pushed_ms / 1000
    return GroupView(
        group_id=group_id,
        env=parts[0].env,
        prompt_id=infos[0].prompt_id if infos else "",
        state=State.READY if complete else State.FORMING,
        rollouts=count,
        planned_size=planned,
        reward=fmean(scored) if scored else None,
        rewards=scored,
        age=max(versions.get(adapter, 0) - oldest, 0),
        tokens=sum(entry.tokens for entry in parts),
        created=created,
        waited_seconds=max(now - created, 0.0),
        worker=infos[0].worker if infos else "",
        detail="; ".join([*(entry.error for entry in parts if entry.error), *needed]),
        min_version=oldest,
        max_version=newest,
        adapter=adapter,
    )


# -- packed and trained ------------------------------------------------------------------------------------------------
def _in_steps(
    store: Viewer, takes_step: Callable[[int], bool], problems: list[RlbufferError] | None
) -> Iterator[tuple[tuple[GroupView, Sequence[PartRollout]], StepHeader]]:
    trained, unused = store.trainer().trained, store.unused()
    headers = [header for header in store.headers(problems=problems) if takes_step(header.step)]
    for header in sorted(headers, key=lambda h: -h.step):
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
        left = unused[header.step].rollout_ids if header.step in unused else ()
        for group_id in header.group_ids:
            members = groups.get(group_id, [])
            if used := [member for member in members if member.info.rollout_id not in left]:
                yield (_consumed_view(group_id, used, header, trained=trained), members), header


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
        rollouts=sum(m.sequence == 0 for m in members),
        planned_size=members[0].planned_size,
        reward=fmean(scored) if scored else None,
        rewards=tuple(scored),
        age=version_trained(header.adapters, members[0].adapter, header.step) - oldest,
        tokens=sum(m.info.length for m in members),
        created=pushed_ms / 1000,
        waited_seconds=max(header.committed_ms - pushed_ms, 0) / 1000,
        worker=members[0].worker,
        step=header.step,
        min_version=oldest,
        max_version=max(m.info.max_version for m in members),
        uses=header.uses.get(group_id, 0) + 1,
        adapter=members[0].adapter,
    )


def left_out_of(store: Viewer, step: int, refs: Sequence[PartRollout]) -> list[tuple[PartRollout, str]]:
    """Stand-ins for the sequences that a step leaves out of the pushes of `refs`, each with the reason; none where the
    step was retired."""
    try:
        header = store.wait_step(step, block_seconds=0.0)
    except StepRetired:
        return []
    if header is None:
        return []
    pushes = {ref.payload_key: ref for ref in refs}
    return [
        (replace(ref, index=index, info=replace(ref.info, size=0), advantage=0.0), reason)
        for key, ref in pushes.items()
        for index, reason in header.left_out.get(key.removeprefix(store.keys.payload_prefix), ())
    ]


def left_out_in_words(members: Iterable[RolloutView]) -> str:
    """Which rollouts of a group its step leaves out; "" where that is none."""
    left = [member for member in members if member.left_out]
    kinds = counted(Counter(member.failure.kind for member in left if member.failure))
    reasons = Counter(member.left_out for member in left).items()
    said = [
        f"{count} {reason}" + (f" ({kinds})" if reason == Reason.FAILED and kinds else "") for reason, count in reasons
    ]
    return f"left out: {', '.join(said)}" if said else ""


# -- dropped -----------------------------------------------------------------------------------------------------------
def dropped_groups(newest_first: Iterable[Mapping[str, Any]], *, is_stream: bool = False) -> Iterator[GroupView]:
    """The groups that these records of a history say were dropped, the newest first. In a stream's no age is known: the
    steps in it are no versions."""
    since: list[Mapping[str, Any]] = []  # since the step that is met next, which was the last one then
    for record in newest_first:
        event = record.get("event")
        if event == Dropped.event:
            since.append(record)
        elif event == Committed.event:
            committed = None if is_stream else int(record["step"])
            yield from (dropped_view(one, committed=committed) for one in since)
            since = []
        elif event in (StepsVoided.event, RunRewound.event):
            yield from map(dropped_view, since)
            since = []
            for row in reversed(record.get("groups", ())):
                yield dropped_view({**dict(zip(VOID_FIELDS, row, strict=True)), "reason": Reason.VOID})
    yield from map(dropped_view, since)


def dropped_view(record: Mapping[str, Any], committed: int | None = None) -> GroupView:
    """A dropped group; `committed` was the last step then, None where that is not known."""
    # Of metadata that cannot be read no version is known, and the versions of an adapter are not those of the steps.
    has_version = committed is not None and record.get("prompt_id") is not None and not record.get("adapter")
    age = max(0, committed - int(record.get("min_version", 0))) if committed is not None and has_version else None
    reward, pushed = record.get("reward"), record.get("pushed_ms")
    created = pushed / 1000 if isinstance(pushed, int) else None
    return GroupView(
        group_id=str(record["group_id"]),
        env=str(record["env"]),
        prompt_id=str(record.get("prompt_id") or ""),
        state=State.DROPPED,
        reason=str(record["reason"]),
        rollouts=int(record["rollouts"]),
        planned_size=int(record.get("planned_size") or 0),
        reward=None if reward in (None, "") else float(str(reward)),
        age=age,
        tokens=int(record["tokens"]),
        created=created,
        waited_seconds=None if created is None or "at" not in record else max(0.0, float(record["at"]) - created),
        worker=str(record.get("worker") or ""),
        step=step if isinstance(step := record.get("step"), int) else None,
        detail=str(record.get("detail", "")),
        min_version=int(record.get("min_version", 0)),
        max_version=int(record.get("min_version", 0)),
    )


# -- one step ----------------------------------------------------------------------------------------------------------
def view_step(store: Viewer, n: int) -> StepView:
    """A committed step with every rollout's place. Raises NotFound when it was never committed, StepRetired later."""
    header = store.wait_step(n, block_seconds=0.0)
    if header is None:
        raise NotFound(f"run {store.run!r} has no step {n}: the last committed one is {store.meta().step}.")
    return step_view(header, store.read_parts(n))


def step_view(header: StepHeader, parts: Sequence[StepPart]) -> StepView:
    """A step put together from its header and its parts."""
    return StepView(
        header=header,
        rollouts=tuple((part.rank, member) for part in parts for member in part.rollouts),
        rows=tuple(
            tuple(tuple(tuple(part.rollouts[i].name for i in row) for row in step) for step in part.rows)
            for part in parts
        ),
        row_tokens=parts[0].row_tokens,
    )
