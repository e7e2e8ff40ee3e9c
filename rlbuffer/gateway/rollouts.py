"""The calls of open rollouts as rollouts, and a group of them for its push.

Calls are a tree: each goes on from the one whose answer its conversation ends in, or begins a sequence. Every path from
a beginning to a call that nobody went on from is a sequence; what two of them share is trained in the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.client.agent_calls import CALL, IDS
from rlbuffer.errors import InvalidRollout
from rlbuffer.gateway.experts import rows_of
from rlbuffer.records.failure import Failure
from rlbuffer.records.group import Group
from rlbuffer.records.info import ROW
from rlbuffer.records.rollout import MAX_SEQUENCES, Rollout, TokenSequence
from rlbuffer.records.support import SUPPORT
from rlbuffer.store.open_rollouts import End, OpenCall
from rlbuffer.traces.attempt import Stretch
from rlbuffer.traces.calls import Call, paths_of, sequences_of
from rlbuffer.wire.encoding import encode_push, encode_rollout
from rlbuffer.wire.metadata import MAX_METADATA_BYTES

REWARD_BYTES = 9
"""Of a named reward in a push's metadata."""
SPARE_BYTES = 2048
"""More than the rest of a push's metadata takes."""
STALE = Failure("stale", "the run has gone into another line of versions since it was begun")


def rollout_of(calls: Sequence[OpenCall], end: End, *, rollout_id: str, version: int) -> Rollout:
    """The rollout of an open one.

    Args:
        calls: all of it, by number.
        end: how it ended.
        rollout_id: its name.
        version: policy version of one that has asked nothing, for people.

    Raises:
        InvalidRollout: no rollout can be made of them.
    """
    failure = end.failure
    if not calls:
        failure = failure or Failure("empty", "the agent asked nothing")
        turns = [{"role": "user", "tokens": [0]}]
        return Rollout.from_turns(
            turns,
            policy_version=version,
            failure=failure,
            rollout_id=rollout_id,
            reward=None,
            rewards=end.rewards,
        )
    places = {call.number: place for place, call in enumerate(calls)}
    parents = [places[call.after] if call.after else None for call in calls]
    paths = sorted(paths_of(parents))  # the conversation that began first comes first, however long it goes on
    if len(paths) > MAX_SEQUENCES:
        kind = f"the agent held {len(paths)} conversations, a rollout has {MAX_SEQUENCES} sequences at most"
        failure, paths = failure or Failure("sequences", kind), paths[:MAX_SEQUENCES]
    made: dict[int, Call] = {}
    sequences = sequences_of([_path([calls[place] for place in path], made) for path in paths])
    # Not from_sequences, which takes equal beginnings of two answers for one: each call was sampled by itself.
    main, *further = (_columns(sequence) for sequence in sequences)
    return Rollout(
        **main,
        further=tuple(TokenSequence(**one) for one in further),
        finish_reason=calls[-1].finish_reason,
        failure=failure,
        metadata={**dict(end.details), IDS: [call.id for call in calls]},
        rollout_id=rollout_id,
        reward=None if failure else end.reward,
        rewards=end.rewards,
    )


def _columns(sequence: Stretch) -> dict[str, Any]:
    names = ("tokens", "loss_mask", "logprobs", "version_spans", "turns", "columns")
    return {name: getattr(sequence, name) for name in names}


def group_of(
    group_id: str,
    env: str,
    about: Mapping[str, Any],
    rollouts: Sequence[Rollout],
    *,
    needs: Sequence[str],
    created: float,
    worker: str,
    seconds: float | None = None,
) -> Group:
    """The group of rollouts that have all ended. `about`: what its opening has said; `seconds`: since its ticket.

    Raises:
        InvalidRollout: what was said of it, or a rollout, cannot be in a group.
    """
    return Group(
        group_id=group_id,
        env=env,
        prompt_id=str(about.get("prompt_id") or group_id.rpartition(".")[2]),
        rollouts=tuple(rollouts),
        planned_size=len(rollouts),
        answer=about.get("answer"),
        metadata=about.get("metadata") or {},
        needs=tuple(need for need in needs if not _have(rollouts, need)),
        worker=worker,
        created=created,
        seconds=seconds,
    )


def checked_about(group_id: str, env: str, about: Mapping[str, Any]) -> Mapping[str, Any]:
    """`about`, with which a group can be pushed once its rollouts have ended. Raises InvalidRollout."""
    rollout = rollout_of((), End(), rollout_id=f"{group_id}/0", version=0)
    encode_push(group_of(group_id, env, about, [rollout], needs=(), created=0.0, worker="gateway"))
    return about


def by_size(group: Group) -> list[int]:
    """Places of a group's rollouts that is too large to be pushed: the one that takes most of what it has too much of
    comes first.

    Those of which a payload alone is too large come before all others. Then counts what all have too much of: rows of
    the push's metadata, which has 64 KiB, else bytes of payloads.
    """
    rows = [ROW.size * len(rollout.sequences) + REWARD_BYTES * len(rollout.rewards) for rollout in group.rollouts]
    sizes = [_payload_bytes(rollout) for rollout in group.rollouts]
    weights = sizes if sum(sizes) == math.inf or sum(rows) < MAX_METADATA_BYTES - SPARE_BYTES else rows
    return sorted(range(len(weights)), key=lambda place: -weights[place])


def _payload_bytes(rollout: Rollout) -> float:
    try:
        return float(sum(len(encode_rollout(rollout, number)) for number in range(len(rollout.sequences))))
    except InvalidRollout:
        return math.inf


def _path(calls: Sequence[OpenCall], made: dict[int, Call]) -> list[Call]:
    """The calls of a path with all that each saw: views of one array, since a path may have thousands of calls."""
    whole = np.concatenate([part for call in calls for part in (call.prompt, call.tokens)])
    place, found = 0, []
    for call in calls:
        place += len(call.prompt)
        if call.number not in made:
            made[call.number] = Call(
                prompt=whole[:place],
                tokens=call.tokens,
                logprobs=call.logprobs,
                mask=np.ones(len(call.tokens), np.bool_),
                support=_support(call),
                version_spans=call.version_spans,
                temperature=float(call.details.get("temperature", 1.0)),
                role=str(call.details.get("role") or "user")[:64],
                key=call.number,
                about={CALL: call.number},
                routed=rows_of(call.details),
            )
        found.append(made[call.number])
        place += len(call.tokens)
    return found


def _support(call: OpenCall) -> NDArray[np.int32] | None:
    """[n, W]; the tokens that sampling left for each of a call."""
    kept = call.details.get(SUPPORT)
    return None if kept is None else np.frombuffer(kept, "<i4").reshape(len(call.tokens), -1)


def _have(rollouts: Sequence[Rollout], need: str) -> bool:
    """All rollouts that did not fail have what the need is."""
    sound = [rollout for rollout in rollouts if not rollout.failure]
    if need == "reward":
        return all(rollout.reward is not None for rollout in sound)
    name = need.removeprefix("rewards.")
    if name != need:
        return all(name in rollout.rewards for rollout in sound)
    return all(name in sequence.columns for rollout in sound for sequence in rollout.sequences)
