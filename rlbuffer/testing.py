"""Helpers for tests of rlbuffer and of code that uses it: made groups, a clock that stands still, a check of samplers.

``connect("memory://")`` gives the server to go with them: the real scripts, in process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rlbuffer.records.group import Group
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import Turn, VersionSpan

VOCABULARY = 256
"""Token ids of made groups are below this."""


class FakeClock:
    """A clock that moves only when told.

    Example:
        >>> clock = FakeClock(now=5.0)
        >>> clock.advance(2.5)
        >>> clock()
        7.5
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        """Seconds."""

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Moves the clock forward; clocks do not go back.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self.now += seconds


def make_group(
    *,
    env: str = "a",
    size: int = 4,
    rewards: Sequence[float | None] | None = None,
    lengths: Sequence[int] | None = None,
    version: int = 0,
    seed: int = 0,
    group_id: str | None = None,
    prompt_id: str | None = None,
    planned_size: int | None = None,
    adapter: str = "",
    worker: str = "",
    needs: Sequence[str] = (),
    created: float | None = None,
    answer: Any = None,
    metadata: Mapping[str, Any] | None = None,
    columns: Sequence[Mapping[str, ArrayLike]] | None = None,
    rollout_ids: Sequence[str] | None = None,
) -> Group:
    """A valid group of single-turn rollouts, the same for the same arguments and another one for every `seed`.

    Args:
        size: rollouts; follows `rewards` or `lengths` where given.
        rewards: one per rollout; 0 and 1 in turn by default, so that a group of two or more has variance.
        lengths: tokens per rollout, the prompt (a quarter, at least one token) included; 8 to 31 by default.
        version: the policy version that sampled every token.
        seed: also names the group, ``<env>.<seed>``, unless `group_id` does.
        planned_size: as many as there are rollouts by default; more makes the group a part.
        columns: further columns, one mapping per rollout.
        rollout_ids: needed when several parts of one group are made.

    Raises:
        ValueError: the sequences have unequal lengths.

    Example:
        >>> group = make_group(env="math", rewards=[0.0, 1.0], lengths=[8, 12], seed=3)
        >>> group.group_id, [r.length for r in group.rollouts], group.rollouts[1].prompt_tokens
        ('math.3', [8, 12], 3)
    """
    rng = np.random.default_rng(seed)
    for given in (rewards, lengths, columns, rollout_ids):
        if given is not None:
            size = len(given)
            break
    lengths = [int(n) for n in rng.integers(8, 32, size)] if lengths is None else lengths
    rewards = [float(i % 2) for i in range(size)] if rewards is None else rewards
    columns = [{}] * size if columns is None else columns
    rollout_ids = [""] * size if rollout_ids is None else rollout_ids
    rows = zip(lengths, rewards, columns, rollout_ids, strict=True)
    return Group(
        group_id=f"{env}.{seed}" if group_id is None else group_id,
        env=env,
        prompt_id=f"prompt-{seed}" if prompt_id is None else prompt_id,
        rollouts=tuple(_made(rng, n, reward, version, extra, name) for n, reward, extra, name in rows),
        planned_size=size if planned_size is None else planned_size,
        adapter=adapter,
        answer=answer,
        metadata=metadata or {},
        needs=tuple(needs),
        worker=worker,
        created=created,
    )


def check_sampler(
    name: str,
    directory: str | Path,
    *,
    options: Mapping[str, Any] | None = None,
    temperature: float = 1.0,
    record_experts: bool = False,
) -> None:
    """Checks that a sampler does what a worker relies on: with tiny models that are published under `directory`, their
    logprobs computed again. Takes about a minute of a CPU; needs the extra ``train``.

    Args:
        name: as ``sampler`` of a worker, ``package.module:Class``.
        directory: an empty one.
        options: its ``sampler_options``.
        temperature: another one than 1 that it is asked for, too, as ``[worker.NAME]`` may.
        record_experts: as ``[worker.NAME]`` may; the models have experts then, and logprobs are computed again with
            those that the sampler names.

    Raises:
        AssertionError: it does not; the message says what.
        ConfigError: there is no such sampler, it refuses the options, or it cannot record experts.
    """
    from rlbuffer.config.settings import WorkerSettings
    from rlbuffer.worker.samplers import make_sampler
    from rlbuffer.worker.samplers.conformance import PLAIN, check

    settings = WorkerSettings(
        env="vcopy",
        sampler=name,
        sampler_options=options or {},
        temperature=temperature,
        record_experts=record_experts,
    )
    samplings = tuple(replace(PLAIN, temperature=t) for t in dict.fromkeys((1.0, temperature)))
    asyncio.run(check(make_sampler(settings), Path(directory), samplings, records_experts=record_experts))


def _made(
    rng: np.random.Generator,
    length: int,
    reward: float | None,
    version: int,
    columns: Mapping[str, ArrayLike],
    rollout_id: str,
) -> Rollout:
    prompt = max(1, length // 4)
    sampled = np.arange(length) >= prompt
    turns = (Turn("user", 0, prompt), Turn("assistant", prompt, length))
    return Rollout(
        rollout_id=rollout_id,
        tokens=rng.integers(0, VOCABULARY, length, dtype=np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, -rng.random(length), 0.0).astype(np.float32),
        reward=reward,
        version_spans=(VersionSpan(version, min(prompt, length - 1), length),),
        turns=turns if length > prompt else turns[:1],
        finish_reason="stop",
        columns={name: np.asarray(values) for name, values in columns.items()},
    )
