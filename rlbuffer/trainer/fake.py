"""Made-up steps in place of a server: the same trainer, without anything to connect to.

For trying a model, a loss or a host's speed, and for tests of the trainer itself. Step s is a function of the seed
and s alone, whatever the world size, so runs at different world sizes train on the same rollouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.batcher.advantages import advantage
from rlbuffer.config.settings import RunSettings
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.packing.further_columns import column_spec
from rlbuffer.packing.planner import plan
from rlbuffer.records.micro_batch import Sample, Step
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.step_plan import Normalizers

GROUPS = 8
"""Groups of a step."""
GROUP_SIZE = 4
"""Rollouts of a group."""


class FakeBuffer:
    """Stands in for :class:`rlbuffer.client.buffer.Buffer` where the trainer needs it."""

    def __init__(self, settings: RunSettings, *, vocabulary: int) -> None:
        self.settings = settings
        self._vocabulary = vocabulary

    def reader(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        timeout_seconds: float = 300.0,
        pad_token_id: int = 0,
        pad_to_multiple_of: int = 1,
        vocabulary: int | None = None,
        adapters: bool = True,
        columns: Sequence[str] = (),
    ) -> FakeReader:
        """A reader for one rank; its tokens are the model's own, and its rollouts have `columns`."""
        return FakeReader(self.settings, rank, world_size, self._vocabulary, pad_to_multiple_of, columns)

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Nobody keeps it."""

    def policy(self) -> FakePolicy:
        """A policy that nobody samples from."""
        return FakePolicy()

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> FakeBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FakePolicy:
    """Remembers nothing: every version may be announced."""

    def current(self, adapter: str = "") -> PolicyVersion:
        """None was announced yet."""
        return PolicyVersion(version=-1)

    def announce(self, version: int, *, location: str, size: int, checksum: str, adapter: str = "") -> bool:
        """Nobody listens."""
        return True


class FakeReader:
    """Yields made-up steps as :class:`rlbuffer.client.reader.Reader` yields pulled ones."""

    def __init__(
        self, settings: RunSettings, rank: int, world_size: int, vocabulary: int, padded_to: int, columns: Sequence[str]
    ) -> None:
        self._settings = settings
        self._rank = rank
        self._world_size = world_size
        self._vocabulary = vocabulary
        self._padded_to = padded_to
        self._columns = columns
        self._trained = 0

    has_ended = False
    warns = False

    def start(self, resume_step: int | None = None) -> None:
        """Continues after `resume_step`."""
        if resume_step is not None:
            self._trained = resume_step

    def steps(self, start: int | None = None, *, until: Callable[[], bool] | None = None) -> Iterator[Step]:
        """Yields step after step without end: it never waits, and so never asks `until`."""
        number = self._trained + 1 if start is None else start
        while True:
            yield self._step(number)
            number += 1

    def still_there(self, step: Step) -> bool:
        """It can be made up again at any time."""
        return True

    def trained(self, step: Step) -> None:
        """Remembers the place."""
        self._trained = step.number

    def finished(self) -> None:
        """Nobody asks."""

    def checkpointed(self, step: int, *, oldest_kept: int | None = None) -> None:
        """Nothing is ever retired."""

    def state_dict(self) -> dict[str, Any]:
        """The place."""
        return {"step": self._trained, "epoch": 0, "digest": ""}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the place."""
        self._trained = int(state["step"])

    def _groups(self, number: int) -> tuple[list[Rollout], list[Sample]]:
        """The rollouts of a step, group by group, and what each is worth."""
        rng = np.random.default_rng((self._settings.seed, number))
        further = np.random.default_rng((self._settings.seed, number, 1))  # no column changes a token
        row_tokens = self._settings.batcher.row_tokens
        rollouts, samples = [], []
        for g in range(GROUPS):
            prompt = rng.integers(0, self._vocabulary, rng.integers(1, max(2, row_tokens // 16)))
            made = [_rollout(rng, prompt, row_tokens, self._vocabulary, number) for _ in range(GROUP_SIZE)]
            made = [replace(r, columns={n: _column(n, r, further) for n in self._columns}) for r in made]
            rewards = [float(r.reward or 0.0) for r in made]
            credits = advantage(self._settings.batcher.advantage, rewards, lengths=[r.loss_tokens for r in made])
            for i, (rollout, credit) in enumerate(zip(made, credits, strict=True)):
                rollouts.append(rollout)
                samples.append(_sample(rollout, f"fake.{number}.{g}", i, float(credit)))
        return rollouts, samples

    def _step(self, number: int) -> Step:
        row_tokens = self._settings.batcher.row_tokens
        rollouts, samples = self._groups(number)
        planned = plan(
            [r.length for r in rollouts],
            row_tokens=row_tokens,
            world_size=self._world_size,
            rows_per_micro_batch=self._settings.batcher.rows_per_micro_batch,
            cost=self._settings.batcher.cost,
            pad_to_multiple_of=self._padded_to,
        )
        normalizers = Normalizers(
            loss_tokens=sum(r.loss_tokens for r in rollouts), rollouts=len(rollouts), groups=GROUPS
        )
        items = [
            PackItem(rollout=r, length=r.length, sample=s, adapter="") for r, s in zip(rollouts, samples, strict=True)
        ]
        micro_batches = assemble(
            [micro_step[self._rank] for micro_step in planned.rows],
            items,
            row_tokens=row_tokens,
            normalizers=normalizers,
            pad_to_multiple_of=self._padded_to,
        )
        tokens = sum(r.length for r in rollouts)
        reward = float(np.mean([r.reward for r in rollouts]))
        step = Step(
            number=number,
            epoch=0,
            digest=hashlib.sha256(f"{self._settings.seed}:{number}".encode()).hexdigest(),
            world_size=self._world_size,
            micro_batches=micro_batches,
            normalizers=normalizers,
            rollouts=len(rollouts),
            groups=GROUPS,
        )
        rows = sum(len(rank) for micro_step in planned.rows for rank in micro_step)
        env = {
            "rollouts": len(rollouts),
            "tokens": tokens,
            "groups": GROUPS,
            "reward": reward,
            "age": 0.0,
            "max_age": 0,
        }
        header = replace(
            step.header, tokens=tokens, fill=tokens / (row_tokens * rows), envs={"fake": env}, reward=reward
        )
        return replace(step, header=header)


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


def _sample(rollout: Rollout, group_id: str, index: int, credit: float) -> Sample:
    return Sample(
        rollout_id=f"{group_id}/{index}",
        group_id=group_id,
        env="fake",
        reward=rollout.reward,
        rewards={},
        advantage=credit,
        policy_versions=(rollout.min_policy_version, rollout.max_policy_version),
        answer=None,
        prompt_tokens=rollout.prompt_tokens,
        length=rollout.length,
    )
