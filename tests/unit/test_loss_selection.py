"""Tokens chosen over a whole update: the same however it is cut over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from trained_tokens import tokens

from rlbuffer.config.losses import ClipCovOptions, LossChoice
from rlbuffer.trainer.losses import TrainedTokens
from rlbuffer.trainer.losses.selection import Means, covariance, drawn_covariance, largest, means_of


def alone(values: Tensor) -> Tensor:
    return values


def over_ranks(parts: list[list[Tensor]], count: int) -> list[list[Tensor]]:
    """Choice of each rank when all add up together: one thread per rank, in step."""
    from threading import Barrier, Thread

    world, held, out = len(parts), [torch.zeros(0)] * len(parts), [[]] * len(parts)
    barrier = Barrier(world)

    def total(rank: int) -> Callable[[Tensor], Tensor]:
        def add(values: Tensor) -> Tensor:
            held[rank] = values
            barrier.wait(timeout=20)
            summed = torch.stack(held).sum(0)
            barrier.wait(timeout=20)
            return summed

        return add

    def run(rank: int) -> None:
        out[rank] = largest(parts[rank], count, total(rank))

    threads = [Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.integers(1, 45),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_the_largest_are_those_of_a_sort_however_they_are_cut(values: list[float], count: int, cuts: list[int]) -> None:
    scores = torch.tensor(values, dtype=torch.float64)
    border = sorted(values, reverse=True)[min(count, len(values)) - 1]
    chosen = torch.cat(largest(list(torch.tensor_split(scores, sorted(cuts))), count, alone))
    assert chosen.tolist() == [v >= border for v in values]


def test_ranks_choose_together() -> None:
    scores = torch.tensor([5.0, -1.0, 3.0, 2.0, -7.0, 4.0, 0.5], dtype=torch.float64)
    chosen = over_ranks([[scores[:1], scores[1:3]], [scores[3:6]], [scores[6:]], [scores[:0]]], 3)
    assert torch.cat([c for rank in chosen for c in rank]).tolist() == [True, False, True, False, False, True, False]


def test_what_is_no_candidate_is_never_chosen() -> None:
    scores = [torch.tensor([-torch.inf, 1.0, -torch.inf, -2.0], dtype=torch.float64)]
    assert largest(scores, 1, alone)[0].tolist() == [False, True, False, False]
    assert largest(scores, 4, alone)[0].tolist() == [False, True, False, True]
    assert largest([torch.full((2,), -torch.inf, dtype=torch.float64)], 1, alone)[0].tolist() == [False, False]


def test_equal_scores_at_the_border_are_all_chosen() -> None:
    scores = [torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, -0.0, 0.0], dtype=torch.float64)]
    assert [part.tolist() for part in largest(scores, 2, alone)] == [[True, True], [True, False, False]]
    assert [part.tolist() for part in largest(scores, 4, alone)] == [[True, True], [True, True, True]]


def weighed(policy: list[float], advantages: list[float], **fields: Tensor) -> TrainedTokens:
    sampled = torch.full((len(policy),), -1.0, dtype=torch.float64)
    return tokens(policy, inference_logprobs=sampled, advantages=torch.tensor(advantages).double(), **fields)


def test_means_are_those_of_all_parts() -> None:
    parts = [weighed([0.5, 0.25], [1.0, -1.0]), weighed([0.5], [3.0])]
    means = means_of(parts, alone)
    assert (means.tokens, means.advantage) == (3, 1.0)
    assert means.logprob == pytest.approx(float(torch.tensor([0.5, 0.25, 0.5]).double().log().mean()))
    assert means_of([], alone) == Means(tokens=0, advantage=0.0, logprob=0.0)


def test_only_tokens_of_some_covariance_that_are_not_clipped_are_drawn() -> None:
    policy, advantages = [0.9, 0.8, 0.1, 0.36], [1.0, -1.0, -1.0, 0.1]
    made = weighed(policy, advantages, draws=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    means = Means(tokens=4, advantage=0.0, logprob=-1.0)
    told = ClipCovOptions(cov_low=0.1, cov_high=10.0)
    # Covariances: 0.89, -0.78, 1.30, -0.002; token 0 is clipped (ratio 2.4, A > 0), token 2 too (ratio 0.27, A < 0).
    assert covariance(made, told, means).tolist() == pytest.approx([0.8946, -0.7769, 1.3026, -0.00217], abs=1e-3)
    assert drawn_covariance(made, told, means).tolist() == [-torch.inf] * 4
    wide = ClipCovOptions(cov_low=0.1, cov_high=10.0, clip_low=0.9, clip_high=9.0)
    assert drawn_covariance(made, wide, means).tolist() == [0.1, -torch.inf, 0.3, -torch.inf]


def test_the_share_of_uncertain_tokens_is_rounded_and_at_least_one() -> None:
    from rlbuffer.trainer.update.token_choice import choose

    made = weighed([0.1, 0.2, 0.3, 0.4, 0.5], [1.0] * 5)
    for share, expected in ((0.5, 2), (0.01, 1), (0.7, 4)):
        [chosen] = choose([made], LossChoice(top_entropy=share), alone)
        assert int(chosen["is_uncertain"].sum()) == expected
