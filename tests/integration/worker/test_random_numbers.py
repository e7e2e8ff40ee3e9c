"""The random numbers that a worker draws: others in each of its lives, the same ones where a run is deterministic."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
from pydantic import BaseModel
from test_sampler import published
from worker_stage import FakeSampler, Stage, eventually

from rlbuffer.client.buffer import connect
from rlbuffer.config.settings import RunSettings, WorkerSettings
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.member import Member
from rlbuffer.worker.loop import run_worker
from rlbuffer.worker.samplers.base import seeds_of
from rlbuffer.worker.samplers.transformers import Batched

LONG = 16
"""Tokens of a completion that comes twice by chance once in 13**16 times, or so."""


class Seeded(Batched):
    """A sampler of somebody's own, which says with what it was made."""

    seeds: ClassVar[list[int]] = []

    class Options(BaseModel):
        """None."""

    @classmethod
    def make(cls, settings: WorkerSettings, options: Any, *, seed: int) -> Self:
        cls.seeds.append(seed)
        return cls(FakeSampler())  # type: ignore[arg-type]


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    monkeypatch.setattr(Seeded, "seeds", [])
    return Seeded.seeds  # type: ignore[return-value]


def lives(*names: str, deterministic: bool = False, seed: int = 0) -> None:
    """A life of a worker for each name, one after the other; it ends before it samples."""
    over = threading.Event()
    over.set()
    settings = RunSettings(deterministic=deterministic, seed=seed)
    with connect("memory://", config=settings) as buffer:
        buffer.store.role(Member).open_run()
        for name in names:
            run_worker(buffer, name, WorkerSettings(env="vcopy", sampler=f"{__name__}:Seeded"), stop=over)


def test_each_life_of_a_worker_and_each_replica_has_a_seed_of_its_own(seeds: list[int]) -> None:
    lives("math", "math", "math", "math-1", "math-1")
    lives("math")  # another run
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_a_deterministic_worker_has_the_same_seed_each_time_by_its_name_and_the_runs_seed(seeds: list[int]) -> None:
    lives("math", "math", "code", deterministic=True)
    lives("math", deterministic=True)
    lives("math", deterministic=True, seed=1)
    first, again, other, in_another_run, with_another_seed = seeds
    assert first == again == in_another_run
    assert len({first, other, with_another_seed}) == 3


def test_a_seed_gives_the_same_further_ones_each_time_and_another_one_others() -> None:
    one, again, other = (list(islice(seeds_of(seed), 8)) for seed in (5, 5, 6))
    assert one == again
    assert len({*one, *other}) == 16
    assert all(0 <= seed < 2**32 for seed in (*one, *other))


def sampled(policy: PolicyVersion, lives: int, **settings: Any) -> list[list[tuple[int, ...]]]:
    """The long completions of each life of one worker, of the same few prompts."""
    out = []
    for _ in range(lives):
        stage = Stage(config=RunSettings(**settings))
        try:
            stage.announce(policy)
            stage.allow(3, "repeat")
            stage.start(env="repeat", group_size=8, max_new_tokens=LONG)
            eventually(lambda stage=stage: len(stage.groups()) == 3)
            completions = [r.tokens[3:].tolist() for group in stage.rollouts() for r in group]
        finally:
            stage.finish()
            stage.buffer.close()
        out.append([tuple(tokens) for tokens in completions if len(tokens) == LONG])
    return out


def test_a_worker_that_starts_again_draws_other_completions_of_the_same_prompts(tmp_path: Path) -> None:
    first, second = sampled(published(tmp_path)[1], 2)
    assert min(len(first), len(second)) >= 3
    assert not {*first} & {*second}


def test_a_deterministic_worker_draws_the_same_completions_of_the_same_prompts(tmp_path: Path) -> None:
    first, second = sampled(published(tmp_path)[1], 2, deterministic=True)
    assert len(first) >= 3
    assert first == second
