"""Samples of rollouts that no batcher dealt."""

from __future__ import annotations

from typing import Any

from rlbuffer.records.micro_batch import Sample


def sample_of(rollout_id: str, *, length: int, **fields: Any) -> Sample:
    """Of env `a`, behind a prompt of one token."""
    values: dict[str, Any] = {
        "group_id": "g",
        "env": "a",
        "reward": 0.0,
        "rewards": {},
        "advantage": 0.0,
        "policy_versions": (0, 0),
        "answer": None,
        "prompt_tokens": 1,
    }
    return Sample(rollout_id=rollout_id, length=length, **(values | fields))
