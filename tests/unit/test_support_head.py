"""Logprobs over the tokens that restricted sampling left: exact, with their gradients, and what is learnt of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rlbuffer.records.support import MOST_TOP_K, NO_TOKEN, TIES, TOO_WIDE, is_kept, left_out, support_column, support_of
from rlbuffer.trainer.model.logprobs import LogitShape, token_logprobs
from rlbuffer.worker.samplers.base import Sampling
from rlbuffer.worker.samplers.decoding import restricted

VOCABULARY = 120


def drawn(n: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weights, targets and supports of any width up to `width`; the last tenth has no record."""
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, 16, generator=made, dtype=torch.float64).requires_grad_()
    weight = torch.randn(VOCABULARY, 16, generator=made, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (n,), generator=made)
    support = torch.full((n, width), NO_TOKEN, dtype=torch.int32)
    for row, target in zip(support, targets.tolist(), strict=True):
        others = [i for i in torch.randperm(VOCABULARY, generator=made).tolist() if i != target]
        size = int(torch.randint(1, width + 1, (1,), generator=made))
        row[:size] = torch.tensor([*others[: size - 1], target])
    support[-(n // 10) :] = NO_TOKEN
    return hidden, weight, targets, support


def by_hand(logits: Tensor, targets: Tensor, support: Tensor) -> tuple[Tensor, Tensor]:
    """Row by row: the softmax over the few logits that are left."""
    logprobs, entropies = [], []
    for row, target, left in zip(logits, targets.tolist(), support.tolist(), strict=True):
        ids = sorted({i for i in left if i >= 0}) if target in left else list(range(logits.shape[1]))
        few = row[ids]
        log_p = few - few.logsumexp(0)
        logprobs.append(log_p[ids.index(target)])
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(scale=0.5, cap=3.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_the_softmax_over_the_tokens_that_are_left(
    chunk: int, shape: LogitShape, temperature: float
) -> None:
    hidden, weight, targets, support = drawn(50, 7)
    of_logprobs, of_entropy = torch.randn(50).double(), torch.randn(50).double()
    results = []
    for logprobs, entropy in (
        token_logprobs(hidden, weight, targets, support=support, temperature=temperature, shape=shape, chunk=chunk),
        by_hand(shape.apply(hidden @ weight.T) / temperature, targets, support),
    ):
        total = (logprobs * of_logprobs + entropy * of_entropy).sum()
        results.append([logprobs, entropy, *torch.autograd.grad(total, [hidden, weight])])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_a_row_without_its_own_token_is_of_the_whole_vocabulary() -> None:
    hidden, weight, targets, _ = drawn(10, 3)
    other = ((targets + 1) % VOCABULARY)[:, None].int()
    whole = token_logprobs(hidden, weight, targets)
    for support in (other, torch.full((10, 2), NO_TOKEN, dtype=torch.int32), torch.full((10, 1), 10**6)):
        for ours, expected in zip(token_logprobs(hidden, weight, targets, support=support), whole, strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_ids_that_the_model_does_not_have_stand_for_nothing() -> None:
    hidden, weight, targets, support = drawn(10, 3)
    beyond = torch.cat([support, torch.full((10, 1), VOCABULARY, dtype=torch.int32)], dim=1)
    for ours, expected in zip(
        token_logprobs(hidden, weight, targets, support=beyond),
        token_logprobs(hidden, weight, targets, support=support),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def policy_gradient(theta: Tensor, reward: Tensor, sampling: Sampling, *, with_support: bool) -> tuple[Tensor, Tensor]:
    """The mean over all that may be drawn of reward times the gradient of its logprob, as a trainer computes it; and
    the gradient of the mean reward of what is sampled, by hand."""
    log_p, left = restricted(theta.detach()[None].log_softmax(-1), sampling)
    inside = left[left >= 0].long()
    total = torch.zeros_like(theta)
    for token in inside:
        support = left if with_support else None
        logprob, _ = token_logprobs(theta[None], torch.eye(len(theta)).double(), token[None], support=support)
        total += log_p[0, token].exp() * reward[token] * torch.autograd.grad(logprob.sum(), theta)[0]
    return total, torch.autograd.grad((theta[inside].softmax(0) * reward[inside]).sum(), theta)[0]


def test_a_bandit_learns_by_the_tokens_that_are_left_and_goes_astray_by_all() -> None:
    made = torch.Generator().manual_seed(1)
    start, reward = (torch.randn(30, generator=made, dtype=torch.float64) for _ in range(2))
    sampling = Sampling(max_new_tokens=1, top_k=20, top_p=0.9, min_p=0.05)
    theta = start.clone().requires_grad_()
    for _ in range(20):
        ours, expected = policy_gradient(theta, reward + 2, sampling, with_support=True)
        assert (ours - expected).abs().max() < 1e-12
        theta = (theta + 0.5 * expected).detach().requires_grad_()
    ours, expected = policy_gradient(start.clone().requires_grad_(), reward + 2, sampling, with_support=False)
    assert (ours - expected).abs().max() > 0.01
    # Of equal rewards there is nothing to learn. The whole vocabulary learns to draw what is drawn anyway.
    equal = torch.ones(30, dtype=torch.float64)
    nothing, _ = policy_gradient(start.clone().requires_grad_(), equal, sampling, with_support=True)
    something, _ = policy_gradient(start.clone().requires_grad_(), equal, sampling, with_support=False)
    assert nothing.abs().max() < 1e-12
    assert something.abs().max() > 0.01


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"top_k": 3}, [0.4, 0.3, 0.15]),
        ({"top_k": 5, "top_p": 0.65}, [0.4, 0.3]),
        ({"top_k": 5, "top_p": 0.75}, [0.4, 0.3, 0.15]),
        ({"top_k": 5, "min_p": 0.3}, [0.4, 0.3, 0.15]),
        ({"top_k": 5, "min_p": 0.5}, [0.4, 0.3]),
        ({"top_k": 5, "min_p": 0.5, "top_p": 0.5}, [0.4]),  # of 0.4 and 0.3 alone 0.57 and 0.43
        ({"top_k": 5, "min_p": 0.5, "top_p": 0.6}, [0.4, 0.3]),
        ({"top_k": 900}, [0.4, 0.3, 0.15, 0.1, 0.05]),
    ],
)
def test_min_p_goes_first_then_top_k_then_the_nucleus_of_what_is_left(
    sampling: dict[str, float], expected: list[float]
) -> None:
    p = torch.tensor([[0.1, 0.4, 0.05, 0.15, 0.3]])
    log_p, left = restricted(p.log(), Sampling(max_new_tokens=1, **sampling))  # type: ignore[arg-type]
    ids = left[left >= 0].tolist()
    assert [round(float(p[0, i]), 6) for i in ids] == expected
    assert sorted(ids) == torch.nonzero(log_p[0] > -torch.inf)[:, 0].tolist()
    torch.testing.assert_close(log_p[0, ids].exp(), torch.tensor(expected) / sum(expected))


def test_of_tokens_that_tie_at_the_edge_top_k_are_left_and_never_more() -> None:
    log_p, left = restricted(torch.zeros(4, 50).log_softmax(-1), Sampling(max_new_tokens=1, top_k=8))
    assert (left >= 0).sum(1).tolist() == [8] * 4
    torch.testing.assert_close(log_p.exp().sum(1), torch.ones(4))
    assert log_p.amax(1).exp().tolist() == pytest.approx([1 / 8] * 4)


def test_an_engine_s_rows_keep_what_ties_with_the_last_and_what_is_wider_is_not_trained() -> None:
    rows = [[5], list(range(3 + TIES)), list(range(4 + TIES)), []]
    support = support_of(rows, top_k=3)
    assert (support.dtype, support.shape) == (np.int32, (4, 3 + TIES))
    assert support[0].tolist() == [5] + [NO_TOKEN] * (2 + TIES)
    assert support[1].tolist() == rows[1]
    assert support[2].tolist() == [TOO_WIDE] + [NO_TOKEN] * (2 + TIES)
    assert is_kept(support).tolist() == [True, True, False, True]
    assert support_of([[1] * (MOST_TOP_K + TIES + 1)], top_k=MOST_TOP_K).tolist() == [[TOO_WIDE]]


def test_stretches_of_different_widths_are_one_column() -> None:
    first, second = np.array([[1, 2]], np.int32), np.array([[3], [4]], np.int32)
    column = support_column([(2, None), (1, first), (2, second)])
    assert column is not None
    assert column.tolist() == [[-1, -1], [-1, -1], [1, 2], [3, -1], [4, -1]]
    assert support_column([(2, None)]) is None


def test_what_could_not_be_drawn_is_the_same_for_numpy() -> None:
    _, _, targets, support = drawn(20, 4)
    out = left_out(support.numpy(), targets.numpy().astype(np.int32), VOCABULARY)
    for row, target, left in zip(out, targets.tolist(), support.tolist(), strict=True):
        expected = {i for i in left if i >= 0} if target in left else set(range(VOCABULARY))
        assert set(np.flatnonzero(~row).tolist()) == expected
