"""Random trees of turns, whose leaves are the sequences of a rollout."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout, TokenSequence

Way = list[tuple[str, list[int], list[float] | None]]
"""Turns from the root on: role, token ids, their logprobs where they were sampled."""
VOCABULARY = 90


def ways(rng: np.random.Generator, leaves: int) -> list[Way]:
    """Each leaf's whole way from the root: some begin alike, up to any turn."""
    way: Way = [("user", rng.integers(1, VOCABULARY, rng.integers(1, 5)).tolist(), None)]
    out = []
    for _ in range(leaves):
        del way[int(rng.integers(1, len(way) + 1)) :]
        for _ in range(int(rng.integers(1, 4))):
            sampled = rng.integers(1, VOCABULARY, rng.integers(1, 7)).tolist()
            logprobs = np.float32(-0.05 - rng.random(len(sampled))).tolist()
            way.append(("assistant", sampled, logprobs))
            way.append(("tool", rng.integers(1, VOCABULARY, rng.integers(0, 3)).tolist(), None))
        out.append(list(way))
    return out


def sequence(way: Way, version: int = 0) -> TokenSequence:
    """The sequence of a leaf, named after who spoke last."""
    turns: list[dict[str, Any]] = [
        {"role": role, "tokens": tokens} | ({} if logprobs is None else {"logprobs": logprobs})
        for role, tokens, logprobs in way
    ]
    return TokenSequence.from_turns(turns, policy_version=version, name=way[-1][0])


def rollout(rng: np.random.Generator, version: int = 0) -> Rollout:
    """A rollout of one to five sequences."""
    leaves = ways(rng, int(rng.integers(1, 6)))
    return Rollout.from_sequences([sequence(way, version) for way in leaves], reward=float(rng.random()))


def groups(seed: int, count: int, size: int, *, version: int = 0) -> list[Group]:
    """Groups of such rollouts, named after the seed."""
    rng = np.random.default_rng(seed)
    return [
        Group(
            f"a.{seed}-{n}",
            env="a",
            prompt_id=f"p{n}",
            planned_size=size,
            rollouts=tuple(rollout(rng, version) for _ in range(size)),
        )
        for n in range(count)
    ]
