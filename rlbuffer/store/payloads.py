"""Rollouts as a trainer pulls them: read, verified, and held against what it can train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlbuffer.errors import PayloadError
from rlbuffer.packing.further_columns import ColumnSpec, misfit
from rlbuffer.records.info import RolloutInfo
from rlbuffer.records.readable import readable
from rlbuffer.records.rollout import TokenSequence
from rlbuffer.store.records import PartRollout
from rlbuffer.store.viewer import FETCH_BYTES, Viewer, chunks
from rlbuffer.wire import payload
from rlbuffer.wire.payload import Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """The rollouts that a trainer can train, as its ranks say in their heartbeats."""

    vocabulary: int | None = None
    """Number of token ids of its model; None: not known here."""
    adapters: bool = True
    """True when it trains LoRA adapters, each with steps of its own."""
    columns: tuple[str, ...] = ()
    """Further columns without which it cannot train a rollout."""

    @classmethod
    def of(cls, beats: Iterable[Mapping[str, Any]]) -> Trainable:
        """The rollouts that all ranks of these heartbeats can train, columns aside."""
        ranks = [cls(**readable(cls, beat)) for beat in beats]
        sizes = [rank.vocabulary for rank in ranks if rank.vocabulary is not None]
        return cls(vocabulary=min(sizes, default=None), adapters=all(rank.adapters for rank in ranks))

    def record(self) -> dict[str, Any]:
        """The fields for a heartbeat."""
        return {"vocabulary": self.vocabulary, "adapters": self.adapters}

    def refusal(self, *, adapter: str = "", largest_token: int = -1) -> str:
        """Why a rollout of this adapter, or with this token, cannot be trained; "" where it can."""
        if adapter and not self.adapters:
            return f"it is of adapter {adapter!r}, and the trainer trains all weights and no adapters"
        if self.vocabulary is not None and largest_token >= self.vocabulary:
            # The model would fail at it, in every replay of the step.
            return f"token {largest_token} is outside of the model's vocabulary of {self.vocabulary}"
        return ""


def read_rollouts(
    store: Viewer, refs: Sequence[PartRollout], schema: Mapping[str, ColumnSpec], can: Trainable
) -> Iterator[tuple[PartRollout, TokenSequence | str]]:
    """Each sequence; what is wrong with it where it cannot be trained.

    `schema`: the further columns of its step.
    """
    for chunk in chunks([ref.info.size for ref in refs], FETCH_BYTES):
        chunk_refs = refs[chunk.start : chunk.stop]
        for ref, data in zip(chunk_refs, store.read_payloads(chunk_refs), strict=True):
            read = opened(data, ref.info, ref.adapter, schema, can)
            yield ref, read if isinstance(read, str) else sound(read, can)


def opened(
    data: bytes | None,
    announced: RolloutInfo,
    adapter: str,
    schema: Mapping[str, ColumnSpec],
    can: Trainable,
) -> Payload | str:
    """A payload, verified up to the values of tokens and logprobs; what is wrong with it where it cannot be trained."""
    if data is None:
        return "its payload is missing"
    if refusal := can.refusal(adapter=adapter):
        return refusal
    try:
        read = payload.decode(data, announced)
    except PayloadError as error:
        return str(error)
    if read.columns and (wrong := misfit(read, schema)):
        return wrong
    if can.columns and (lacking := [name for name in can.columns if name not in read.columns]):
        return f"it lacks column {', '.join(lacking)}, without which the trainer cannot train"
    return read


def sound(read: Payload, can: Trainable) -> TokenSequence | str:
    """The sequence of a payload that was opened; what is wrong with it where one of its values cannot be trained."""
    try:
        rollout = read.record()
    except PayloadError as error:
        return str(error)
    return can.refusal(largest_token=int(rollout.tokens.max())) or rollout
