"""Groups that a filter chooses: those that `inspect` lists, `drop` drops, and `Buffer.groups` returns.

Most terms are answered by what the pool and the steps say of a group. Where a term is about text, the reason why
sampling ended, logprobs or advantages, payloads are read, a page of groups at a time, of groups for which everything
else holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TypeVar

from rlbuffer.client.details import GroupDetail, Steps, detail_of, stand_ins
from rlbuffer.client.filters import PAYLOAD_FIELDS, Filter, parse
from rlbuffer.client.group_view import GroupView
from rlbuffer.client.groups import GroupSource, every_group
from rlbuffer.client.rollout_view import RolloutView, logprob_mean, rollout_view
from rlbuffer.client.texts import HasTokens
from rlbuffer.errors import FilterError, PayloadError, RlbufferError
from rlbuffer.records.columns import trained_advantage
from rlbuffer.records.info import folded
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.states import State
from rlbuffer.store.records import PartRollout, PoolEntry, by_rollout
from rlbuffer.store.viewer import Viewer, chunks
from rlbuffer.wire.payload import Payload, decode, decode_rollout

TextOf = Callable[[HasTokens], str | None]
PAGE_BYTES = 4 * 2**20
"""Payloads that are read at once, when they are small; one group's are always read together."""
MOST_BYTES_READ = 2 * 2**30
"""Payloads that one search reads."""
BYTES_PER_TOKEN = 9
"""About what a payload takes."""
IN_STEPS = (State.PACKED, State.TRAINED)
MOST_BYTES_OF_A_PROMPT = 2**18
"""Payload that is read for the sake of its prompt: of some 29,000 tokens."""
OF_PUSH, OF_INFO = ("env", "id"), ("prompt", "worker", "adapter")
"""Fields that a group has from its first push, and from the metadata of that."""

_Source = TypeVar("_Source", bound=GroupSource)
_Group = TypeVar("_Group")
_Sequences = list[PartRollout]
"""Those of one rollout."""


def list_groups(
    store: Viewer,
    *,
    where: str = "",
    limit: int = 100,
    problems: list[RlbufferError] | None = None,
    text_of: TextOf | None = None,
) -> list[tuple[GroupView, GroupSource]]:
    """Groups that match `where`, each with what its rollouts are read by: pending ones, then those in steps, then
    dropped ones, the newest of each first.

    Steps that cannot be read are left out and added to `problems`, and so is a search that ends before it has seen
    everything. `text_of` gives the text of a rollout that was pushed without any.

    Raises:
        FilterError: `where` cannot be read; or, without `problems`, the search would read too many payloads.
        PayloadError: a step cannot be read, without `problems`.
    """
    chosen = parse(where)
    is_of_step = any(term.field == "step" for term in chosen.terms)
    groups = every_group(
        store,
        takes=lambda state: chosen.allows("state", state) and (state in IN_STEPS or not is_of_step),
        takes_step=lambda step: chosen.allows("step", step),
        takes_push=_taker(chosen),
        problems=problems,
    )
    out: list[tuple[GroupView, GroupSource]] = []
    try:
        out.extend(islice(matching(store, groups, chosen, text_of=text_of), limit))
    except FilterError as error:
        if problems is None:
            raise
        problems.append(error)
    return out


def list_details(
    store: Viewer,
    *,
    where: str = "",
    limit: int = 100,
    problems: list[RlbufferError] | None = None,
    text_of: TextOf | None = None,
) -> Iterator[GroupDetail]:
    """The groups of :func:`list_groups`, whole; the payloads of one at a time are read."""
    chosen = list_groups(store, where=where, limit=limit, problems=problems, text_of=text_of)
    dropped = store.dropped_payloads([view.group_id for view, _ in chosen if view.state is State.DROPPED])
    steps = Steps(store)
    for view, sources in chosen:
        yield detail_of(store, view, sources, dropped, steps)


def shortest_rollouts(store: Viewer, chosen: Iterable[tuple[GroupView, GroupSource]]) -> Iterator[tuple[str, Rollout]]:
    """Group ids, each with a rollout of the group: the smallest one, in which the prompt is read cheapest. Left out are
    groups without one that can be read, and those whose smallest is larger than :data:`MOST_BYTES_OF_A_PROMPT`."""
    smallest: dict[str, PartRollout] = {}
    for view, sources in chosen:
        firsts = [sequences[0] for sequences in by_rollout(stand_ins(sources))]
        sized = [ref for ref in firsts if 0 < ref.info.size <= MOST_BYTES_OF_A_PROMPT]
        if sized:
            smallest[view.group_id] = min(sized, key=lambda ref: ref.info.size)
    names, refs = [*smallest], [*smallest.values()]
    for page in chunks([ref.info.size for ref in refs], PAGE_BYTES):
        payloads = store.read_payloads([refs[at] for at in page])
        for at, data in zip(page, payloads, strict=True):
            with suppress(PayloadError):
                yield names[at], decode_rollout(data or b"")


def _taker(chosen: Filter) -> Callable[[PoolEntry], bool]:
    """Tells by a group's first push whether it can match at all."""
    terms = [term for term in chosen.terms if term.field in OF_PUSH]
    of_info = [term for term in chosen.terms if term.field in OF_INFO]

    def takes(entry: PoolEntry) -> bool:
        return all(term.holds(getattr(entry, term.attribute)) for term in terms) and (
            entry.info is None or all(term.holds(getattr(entry.info, term.attribute)) for term in of_info)
        )

    return takes


def matching(
    store: Viewer, groups: Iterable[tuple[GroupView, _Source]], chosen: Filter, *, text_of: TextOf | None = None
) -> Iterator[tuple[GroupView, _Source]]:
    """Those of `groups` that match, in their order.

    Raises:
        FilterError: the search has read :data:`MOST_BYTES_READ` of payloads and is not at its end.
    """
    groups = (group for group in groups if chosen.matches_group(group[0]))
    if not chosen.rollout_terms:
        yield from groups
        return
    cheap = [t for t in chosen.rollout_terms if t.field not in PAYLOAD_FIELDS]
    is_of_step = any(term.field == "rollout.advantage" for term in chosen.rollout_terms)
    text_of = text_of if any(term.field == "text" for term in chosen.terms) else None
    dropped: list[tuple[GroupView, _Source]] = []
    candidates = (
        (group, rollouts)
        for group in _but_dropped(groups, dropped)
        if (rollouts := _candidates(group[1], Filter(terms=tuple(cheap)), is_of_step))
    )
    if len(cheap) == len(chosen.rollout_terms):
        yield from (group for group, _ in candidates)
    else:
        yield from _by_payloads(store, candidates, chosen, text_of)
    keys, total = store.dropped_payloads([view.group_id for view, _ in dropped]), 0
    for group in dropped:
        _check_amount(total)
        members = detail_of(store, *group, keys).members if group[0].group_id in keys else ()
        total += sum(BYTES_PER_TOKEN * member.length for member in members)
        if any(chosen.matches_rollout(with_text(m, text_of)) for m in members):
            yield group


def _but_dropped(
    groups: Iterable[tuple[GroupView, _Source]], dropped: list[tuple[GroupView, _Source]]
) -> Iterator[tuple[GroupView, _Source]]:
    """The groups of which pool or steps know the rollouts; `dropped` takes the others."""
    for group in groups:
        if group[0].state is State.DROPPED:
            dropped.append(group)
        else:
            yield group


def _by_payloads(
    store: Viewer,
    candidates: Iterable[tuple[tuple[GroupView, _Source], list[_Sequences]]],
    chosen: Filter,
    text_of: TextOf | None,
) -> Iterator[tuple[GroupView, _Source]]:
    """Those of the candidates that match by what is in the payloads of these rollouts."""
    glance = Filter(terms=tuple(t for t in chosen.rollout_terms if t.field in PAYLOAD_FIELDS))
    total = 0
    for page in _pages(candidates):
        _check_amount(total)
        every = [ref for _, rollouts in page for sequences in rollouts for ref in sequences]
        total += sum(ref.info.size for ref in every)
        payloads = iter(store.read_payloads(every))
        for group, rollouts in page:
            read = [(sequences, [*islice(payloads, len(sequences))]) for sequences in rollouts]
            surviving = [
                (sequences, data)
                for sequences, data in read
                if len(data) > 1 or _may_match(data[0], glance, text_of, sequences[0].advantage)
            ]
            members = (rollout_view(sequences, group[0].step, None, data) for sequences, data in surviving)
            if any(m.rollout is not None and chosen.matches_rollout(with_text(m, text_of)) for m in members):
                yield group


class _Glance:
    """The fields of a payload that filters ask for, named as in :class:`RolloutView`; nothing else is checked."""

    def __init__(self, parts: Payload, text_of: TextOf | None, planned: float) -> None:
        self.finish_reason = parts.details.finish_reason
        self.tokens = parts.tokens
        self._parts, self._text_of, self._planned = parts, text_of, planned

    @property
    def text(self) -> str | None:
        """The text that was pushed, else what `text_of` gives."""
        if self._parts.text is not None or self._text_of is None:
            return self._parts.text
        return self._text_of(self)

    @property
    def advantage(self) -> float:
        """The one that it trains with."""
        return trained_advantage(self._planned, self._parts.columns, self._parts.loss_mask)

    @property
    def logprob_mean(self) -> float | None:
        """Mean over the trained tokens."""
        return logprob_mean([self._parts])


def _may_match(data: bytes | None, glance: Filter, text_of: TextOf | None, planned: float) -> bool:
    """False for a payload that is not there, is damaged or does not match; at an eighth of the cost of decoding it.
    `planned` is the advantage that its step has for the rollout."""
    if data is None:
        return False
    try:
        return glance.matches_rollout(_Glance(decode(data), text_of, planned))
    except PayloadError:
        return False


def _check_amount(total: int) -> None:
    if total >= MOST_BYTES_READ:
        raise FilterError(
            f"the filter reads payloads and has read {total / 2**30:.1f} GiB of them, which is not all: "
            "narrow it, e.g. env:math state:trained step:40"
        )


def with_text(member: RolloutView, text_of: TextOf | None) -> RolloutView:
    """The rollout with the text that a filter looks at: what was pushed, else what `text_of` gives of each sequence."""
    if member.text is not None or member.rollout is None or text_of is None:
        return member
    texts = [text for sequence in member.rollout.sequences if (text := text_of(sequence)) is not None]
    return member.changed(text="\n".join(texts) if texts else None)


def _candidates(sources: GroupSource, of_info: Filter, is_of_step: bool) -> list[_Sequences]:
    """Rollouts of the group for which the terms that need no payload hold; none of a pending one that `is_of_step`: a
    step must hold it."""
    refs = stand_ins([source for source in sources if isinstance(source, PartRollout) or not is_of_step])
    return [s for s in by_rollout(refs) if of_info.matches_rollout(folded([ref.info for ref in s]))]


def _pages(candidates: Iterable[tuple[_Group, list[_Sequences]]]) -> Iterator[list[tuple[_Group, list[_Sequences]]]]:
    """Candidates in pages of about :data:`PAGE_BYTES`."""
    page: list[tuple[_Group, list[_Sequences]]] = []
    size = 0
    for candidate in candidates:
        page.append(candidate)
        size += sum(ref.info.size for sequences in candidate[1] for ref in sequences)
        if size >= PAGE_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page
