"""One rollout of a group, or one sequence of it, as people and their pages see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from rlbuffer.errors import PayloadError
from rlbuffer.records.columns import trained_advantage
from rlbuffer.records.failure import Failure
from rlbuffer.records.info import RolloutInfo, RolloutNumbers, folded, numbers_of, own_numbers
from rlbuffer.records.rollout import Rollout, TokenArrays, TokenSequence
from rlbuffer.records.states import Reason
from rlbuffer.state.text import counted
from rlbuffer.store.open_rollouts import OpenRollout
from rlbuffer.store.part_rollouts import StepPart
from rlbuffer.store.records import PartRollout
from rlbuffer.wire import payload


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


class RolloutView(RolloutNumbers, frozen=True, kw_only=True):
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
        sequence, name = whole.sequences[number], f"{self.rollout_id}.{number}"
        values = {f.name: getattr(sequence, f.name) for f in fields(TokenSequence)}
        return self.changed(
            **own_numbers(whole, sequence),
            rollout_id=name,
            logprob_mean=logprob_mean([sequence]),
            text=None if number else self.text,
            rollout=replace(whole, **values, rollout_id=name, text=None if number else whole.text, further=()),
            place=None if number else self.place,
            sequence=number,
            shared=_shared_beginning(self.rollout_id, whole.sequences[: number + 1]),
        )


def logprob_mean(sequences: Iterable[TokenArrays]) -> float | None:
    """Mean over the trained tokens of a rollout's sequences; None without any."""
    trained = np.concatenate([sequence.logprobs[sequence.loss_mask] for sequence in sequences])
    return float(trained.mean()) if len(trained) else None


def _shared_beginning(rollout_id: str, sequences: Sequence[TokenSequence]) -> SharedBeginning | None:
    """What the last of these sequences shares with those before it."""
    *earlier, last = sequences
    lengths = [_alike(last, other) for other in earlier]
    most = max(lengths, default=0)
    if not most:
        return None
    trained = np.zeros(most, np.bool_)
    for other, length in zip(earlier, lengths, strict=True):
        trained[:length] |= other.loss_mask[:length]
    trained &= ~last.loss_mask[:most]
    return SharedBeginning(f"{rollout_id}.{lengths.index(most)}", most, int(np.count_nonzero(trained)))


def _alike(a: TokenSequence, b: TokenSequence) -> int:
    """Tokens of the longest common beginning."""
    most = min(len(a.tokens), len(b.tokens))
    differs = a.tokens[:most] != b.tokens[:most]
    return int(differs.argmax()) if differs.any() else most


def rollout_view(
    refs: Sequence[PartRollout], step: int | None, place: StepPlace | None, payloads: Sequence[bytes | None]
) -> RolloutView:
    """A rollout at its place, with the encoded payloads of its sequences where they are there."""
    infos = [ref.info for ref in refs]
    try:
        rollout = payload.decode_whole(payloads, infos)
    except PayloadError:
        rollout = None
    return view_of(folded(infos), rollout, refs[0].advantage if step is not None else None, step, place)


def view_of(
    info: RolloutInfo,
    rollout: Rollout | None,
    advantage: float | None = None,
    step: int | None = None,
    place: StepPlace | None = None,
) -> RolloutView:
    """A rollout at its place, with its payload where it is there."""
    return RolloutView(
        **numbers_of(info),
        advantage=trained_advantage(advantage, rollout.columns, rollout.loss_mask)
        if advantage is not None and rollout is not None
        else advantage,
        finish_reason=rollout.finish_reason if rollout is not None else "",
        logprob_mean=None if rollout is None else logprob_mean(rollout.sequences),
        text=rollout.text if rollout is not None else None,
        rollout=rollout,
        step=step,
        place=place,
        failure=rollout.failure if rollout is not None else Failure(info.failure) if info.failure else None,
    )


def places_of(parts: Iterable[StepPart]) -> dict[tuple[str, int], StepPlace]:
    """(payload key, index) -> place in the step, of every sequence."""
    return {
        (part.rollouts[at].payload_key, part.rollouts[at].index): StepPlace(part.rank, number)
        for part in parts
        for number, row in enumerate(row for rows in part.rows for row in rows)
        for at in row
    }


def left_out_in_words(members: Iterable[RolloutView]) -> str:
    """Which rollouts of a group its step leaves out; "" where that is none."""
    left = [member for member in members if member.left_out]
    kinds = counted(Counter(member.failure.kind for member in left if member.failure))
    reasons = Counter(member.left_out for member in left).items()
    parts = [
        f"{count} {reason}" + (f" ({kinds})" if reason == Reason.FAILED and kinds else "") for reason, count in reasons
    ]
    return f"left out: {', '.join(parts)}" if parts else ""
