"""Made-up steps in place of a server: the same trainer, without anything to connect to.

For trying a model, a loss or a host's speed, and for tests of the trainer itself. Step s is a function of the seed
and s alone, whatever the world size, so runs at different world sizes train on the same rollouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.batcher.advantages import advantage
from rlbuffer.client.serverless import Serverless
from rlbuffer.config.settings import RunSettings
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.packing.further_columns import column_spec
from rlbuffer.packing.planner import plan
from rlbuffer.records.micro_batch import Sample, Step
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.step_plan import Normalizers

GROUPS = 8
"""Groups of a step."""
GROUP_SIZE = 4
"""Rollouts of a group."""


class FakeRun(Serverless):
    """Stands in for a run, with made-up steps without end."""

    def __init__(self, settings: RunSettings, vocabulary: int) -> None:
        self._settings = settings
        self._vocabulary = vocabulary

    def reader(
        self, rank: int = 0, world_size: int = 1, *, columns: Sequence[str] = (), pad_to_multiple_of: int = 1, **_: Any
    ) -> FakeRun:
        """Itself, for one rank; its tokens are the model's own, and its rollouts have `columns`."""
        self._rank, self._world_size = rank, world_size
        self._padded_to, self._columns = pad_to_multiple_of, columns
        return self

    def steps(self, start: int | None = None, *, until: Callable[[], bool] | None = None) -> Iterator[Step]:
        """Yields step after step without end: it never waits, and so never asks `until`."""
        return map(self._step, count(self.step + 1 if start is None else start))

    def _groups(self, number: int) -> Iterator[PackItem]:
        """The rollouts of a step, group by group, each with what it is worth."""
        rng = np.random.default_rng((self._settings.seed, number))
        further = np.random.default_rng((self._settings.seed, number, 1))  # no column changes a token
        row_tokens, vocabulary = self._settings.batcher.row_tokens, self._vocabulary
        for g in range(GROUPS):
            prompt = rng.integers(0, vocabulary, rng.integers(1, max(2, row_tokens // 16)))
            made = [_rollout(rng, prompt, row_tokens, vocabulary, number) for _ in range(GROUP_SIZE)]
            made = [replace(r, columns={n: _column(n, r, further) for n in self._columns}) for r in made]
            rewards = [float(r.reward or 0.0) for r in made]
            credits = advantage(self._settings.batcher.advantage, rewards, lengths=[r.loss_tokens for r in made])
            for i, (rollout, credit) in enumerate(zip(made, credits, strict=True)):
                sample = Sample(
                    rollout_id=f"fake.{number}.{g}/{i}",
                    group_id=f"fake.{number}.{g}",
                    env="fake",
                    reward=rollout.reward,
                    rewards={},
                    advantage=float(credit),
                    policy_versions=(number - 1, number - 1),
                    answer=None,
                    prompt_tokens=rollout.prompt_tokens,
                    length=rollout.length,
                    rollout=g * GROUP_SIZE + i,
                    rollout_loss_tokens=rollout.loss_tokens,
                )
                yield PackItem(rollout=rollout, sample=sample)

    def _step(self, number: int) -> Step:
        batcher, items = self._settings.batcher, [*self._groups(number)]
        planned = plan(
            [item.sample.length for item in items],
            row_tokens=batcher.row_tokens,
            world_size=self._world_size,
            rows_per_micro_batch=batcher.rows_per_micro_batch,
            cost=batcher.cost,
            pad_to_multiple_of=self._padded_to,
        )
        loss_tokens = sum(int(item.rollout.loss_mask.sum()) for item in items if item.rollout is not None)
        normalizers = Normalizers(loss_tokens=loss_tokens, rollouts=len(items), groups=GROUPS)
        step = Step(
            number=number,
            epoch=0,
            digest=hashlib.sha256(f"{self._settings.seed}:{number}".encode()).hexdigest(),
            world_size=self._world_size,
            micro_batches=assemble(
                [micro_step[self._rank] for micro_step in planned.rows],
                items,
                row_tokens=batcher.row_tokens,
                normalizers=normalizers,
                pad_to_multiple_of=self._padded_to,
                world_size=self._world_size,
            ),
            normalizers=normalizers,
            rollouts=len(items),
            groups=GROUPS,
        )
        tokens, rows = (
            sum(item.sample.length for item in items),
            sum(len(rank) for dealt in planned.rows for rank in dealt),
        )
        reward = float(np.mean([item.sample.reward for item in items]))
        env = {"rollouts": len(items), "tokens": tokens, "groups": GROUPS, "reward": reward, "age": 0.0, "max_age": 0}
        fill = tokens / (batcher.row_tokens * rows)
        return replace(step, header=replace(step.header, tokens=tokens, fill=fill, envs={"fake": env}, reward=reward))


def _rollout(
    rng: np.random.Generator, prompt: NDArray[np.int64], row_tokens: int, vocabulary: int, number: int
) -> Rollout:
    sampled = int(rng.integers(1, max(2, row_tokens // 4 - len(prompt))))
    return Rollout.from_completion(
        prompt_ids=prompt,
        token_ids=rng.integers(0, vocabulary, sampled),
        logprobs=rng.normal(-np.log(vocabulary), 0.1, sampled).clip(max=0.0),
        reward=float(rng.random()),
        policy_version=number - 1,
    )


def _column(name: str, rollout: Rollout, rng: np.random.Generator) -> NDArray[Any]:
    """[length, ...] values that the name and its declaration allow: logprobs near the rollout's own, else numbers in
    0..1."""
    spec = column_spec(name)
    dtype, shape = (np.dtype(np.float32), ()) if spec is None else (spec.dtype, spec.shape)
    if name.endswith("logprobs"):
        noise = rng.normal(0.0, 0.1, rollout.length)
        return np.where(rollout.loss_mask, (rollout.logprobs + noise).clip(max=0.0), 0.0).astype(dtype)
    if dtype.kind == "f":
        return rng.random((rollout.length, *shape)).astype(dtype)
    return rng.integers(0, 2, (rollout.length, *shape)).astype(dtype)
