"""A claim: the last steps of a trainer that is ahead of the server, as it hands them back to the leader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rlbuffer.errors import PayloadError
from rlbuffer.store.records import Claim, NotTrained, TrainedStep
from rlbuffer.wire import payload

ATTEMPT_SECONDS = 6.0
"""A trainer that is silent for this long counts as gone: it says something every second."""
MAX_CLAIM_BYTES = 16 * 2**20
"""Largest claim that is decoded: eight steps of tens of thousands of groups."""


def encode_claim(claim: Claim) -> bytes:
    """A claim as it is handed back."""
    return payload.dumps(asdict(claim) | {"steps": [pack_step(step) for step in claim.steps]})


def decode_claim(data: bytes) -> Claim:
    """A claim as the leader reads it. Raises PayloadError."""
    record = payload.loads(data, limit=MAX_CLAIM_BYTES)
    try:
        steps = tuple(unpack_step(step) for step in record["steps"])
        return Claim(step=int(record["step"]), epoch=int(record["epoch"]), digest=str(record["digest"]), steps=steps)
    except (KeyError, TypeError, ValueError) as error:
        raise PayloadError(f"claim of a trainer: unexpected content ({type(error).__name__}: {error})") from None


def pack_step(step: TrainedStep) -> dict[str, Any]:
    """A remembered step as plain values, for a claim or a checkpoint."""
    envs = {env: list(pair) for env, pair in step.envs.items()}
    unused = (
        {"unused": {rollout_id: list(amounts) for rollout_id, amounts in step.unused.items()}} if step.unused else {}
    )
    return {"step": step.step, "digest": step.digest, "group_ids": list(step.group_ids), "envs": envs} | unused


def unpack_step(record: Mapping[str, Any]) -> TrainedStep:
    """The inverse of :func:`pack_step`. Raises KeyError, TypeError, ValueError."""
    return TrainedStep(
        step=int(record["step"]),
        digest=str(record["digest"]),
        group_ids=tuple(str(group_id) for group_id in record["group_ids"]),
        envs={str(env): (int(rollouts), int(tokens)) for env, (rollouts, tokens) in record["envs"].items()},
        unused={str(rollout_id): _not_trained(*amounts) for rollout_id, amounts in record.get("unused", {}).items()},
    )


def _not_trained(tokens: Any, min_version: Any, reward: Any) -> NotTrained:
    return NotTrained(int(tokens), int(min_version), None if reward is None else float(reward))
