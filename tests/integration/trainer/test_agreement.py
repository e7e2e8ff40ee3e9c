"""Before each step all ranks make the same decision, whatever happened to one of them. Ranks are threads here."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlbuffer.errors import BatchTimeout, RankFailed, RlbufferError
from rlbuffer.packing.pack import pack
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.trainer.ranks.agreement import Agreement, Verdict, agree


class Table:
    """Table on which simulated ranks lay down what they bring, and pick up everybody's."""

    def __init__(self, world_size: int) -> None:
        self.texts = [""] * world_size
        self.barrier = threading.Barrier(world_size)


class SimulatedRanks(Ranks):
    def __init__(self, rank: int, table: Table) -> None:
        super().__init__(rank, len(table.texts), torch.device("cpu"))
        self._table = table

    def gather_text(self, text: str, **_: Any) -> list[str]:
        self._table.texts[self.rank] = text
        self._table.barrier.wait(timeout=10)
        return self._table.texts


def step(number: int = 4, *, content: str = "x", trained: int = 10, expected: int = 20) -> Step:
    rollout = Rollout.from_completion(
        prompt_ids=[1], token_ids=[2] * trained, logprobs=[-1.0] * trained, reward=1.0, policy_version=0
    )
    return Step(
        number=number,
        epoch=1,
        digest=hashlib.sha256(content.encode()).hexdigest(),
        world_size=2,
        micro_batches=(pack([rollout], row_tokens=64),),
        normalizers=Normalizers(loss_tokens=expected, rollouts=2, groups=1),
        rollouts=2,
        groups=1,
    )


def decide(per_rank: Sequence[dict[str, Any]]) -> list[Agreement | RlbufferError]:
    table = Table(len(per_rank))
    results: list[Any] = [None] * len(per_rank)

    def run(rank: int) -> None:
        try:
            results[rank] = agree(SimulatedRanks(rank, table), **per_rank[rank])
        except RlbufferError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(per_rank))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_ranks_with_the_same_step_train_it() -> None:
    results = decide([{"step": step()}, {"step": step()}])
    assert results == [Agreement(verdict=Verdict.TRAIN)] * 2


def test_ranks_with_different_steps_pull_again() -> None:
    for other in (step(content="y"), step(number=5)):
        for result in decide([{"step": step()}, {"step": other}]):
            assert isinstance(result, Agreement)
            assert result.verdict is Verdict.PULL_AGAIN
            assert result.held[0].startswith("rank 0: step 4 of epoch 1, digest 2d711642b726")


def test_a_run_has_ended_when_all_ranks_have_seen_it() -> None:
    for others, verdict in (([], Verdict.END), ([{"step": step()}], Verdict.PULL_AGAIN)):
        for result in decide([{"step": None}, {"step": None}, *others]):
            assert isinstance(result, Agreement)
            assert result.verdict is verdict


def test_one_that_stops_stops_all() -> None:
    for stopping in ({"step": None, "is_stopping": True}, {"step": step(), "is_stopping": True}):
        for result in decide([{"step": step()}, stopping]):
            assert isinstance(result, Agreement)
            assert result.verdict is Verdict.STOP


def test_an_error_of_one_rank_ends_all_with_its_exit_code() -> None:
    error = BatchTimeout("no batch")
    first, second = decide([{"step": step()}, {"step": None, "failure": error}])
    assert second is error
    assert isinstance(first, RankFailed)
    assert first.exit_code == 5
    assert str(first) == "rank 1 could not go on; its own message says why"


@pytest.mark.parametrize(("readable", "damaged"), [(10, 0), (9, 1), (0, 10)])
def test_damage_over_all_ranks_is_counted(readable: int, damaged: int) -> None:
    results = decide([{"step": step()}, {"step": step(trained=readable)}])
    assert results == [Agreement(verdict=Verdict.TRAIN, damaged_tokens=damaged)] * 2
