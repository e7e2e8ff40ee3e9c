"""The calls of an agent in a rollout that came by a gateway: which of them sampled which tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rlbuffer.records.rollout import Rollout, TokenSequence
from rlbuffer.records.spans import Turn

IDS = "calls"
"""The entry of a rollout's metadata with the id of each call."""
CALL = "call"
"""The entry of a turn's metadata with the number of the call that sampled it."""


class AgentCall(NamedTuple):
    """A call in a sequence."""

    number: int
    """In its rollout, from 1, in the order in which calls were recorded."""
    start: int
    """Its first sampled token."""
    end: int


def calls_in(sequence: TokenSequence | Rollout) -> list[AgentCall]:
    """The calls that made a sequence; [] where its turns name none."""
    return [
        AgentCall(call, turn.start, turn.end)
        for turn in sequence.turns
        if (call := call_of(turn)) and turn.end > turn.start
    ]


def call_of(turn: Turn) -> int:
    """The number of the call that sampled a turn; 0 for none. Anybody may have written it."""
    number = turn.metadata.get(CALL) if isinstance(turn.metadata, Mapping) else None
    return number if type(number) is int and number > 0 else 0


def call_count(sequences: Iterable[TokenSequence]) -> int:
    """Calls that made these sequences, each counted once."""
    return len({call.number for sequence in sequences for call in calls_in(sequence)})
