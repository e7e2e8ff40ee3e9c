"""The chunked head gives what the whole softmax gives, gradients too, at a fraction of its memory."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from rlbuffer.trainer.model.logprobs import chunk_tokens, token_logprobs


def inputs(n: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, 5, generator=made, dtype=dtype).requires_grad_()
    weight = torch.randn(11, 5, generator=made, dtype=dtype).requires_grad_()
    bias = torch.randn(11, generator=made, dtype=dtype).requires_grad_()
    targets = torch.randint(0, 11, (n,), generator=made)
    return hidden, weight, bias, targets


def whole(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax((hidden @ weight.T + bias) / scale[:, None], dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 6, 7, 8, 100])
@pytest.mark.parametrize("per_token", [False, True])
def test_chunks_of_any_size_give_the_values_and_gradients_of_the_whole(chunk: int, per_token: bool) -> None:
    hidden, weight, bias, targets = inputs(7)
    scale = torch.linspace(0.5, 1.5, 7, dtype=torch.float64) if per_token else torch.full((7,), 0.8).double()
    of_logprobs, of_entropy = torch.randn(7).double(), torch.randn(7).double()
    results = []
    for logprobs, entropy in (
        token_logprobs(
            hidden, weight, targets, bias=bias, temperature=scale if per_token else float(scale[0]), chunk=chunk
        ),
        whole(hidden, weight, bias, targets, scale),
    ):
        total = (logprobs * of_logprobs + entropy * of_entropy).sum()
        results.append([logprobs, entropy, *torch.autograd.grad(total, [hidden, weight, bias])])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_no_tokens_still_reach_every_parameter_with_gradient_zero() -> None:
    hidden, weight, bias, _ = inputs(4)
    logprobs, entropy = token_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64), bias=bias)
    assert logprobs.shape == entropy.shape == (0,)
    for gradient in torch.autograd.grad(logprobs.sum() + entropy.sum(), [hidden, weight, bias]):
        assert not gradient.any()


def test_half_precision_is_summed_in_float32() -> None:
    hidden, weight, _, targets = inputs(64, torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, weight, targets, chunk=4)
    assert logprobs.dtype == entropy.dtype == torch.float32
    (ours,) = torch.autograd.grad(logprobs.sum(), weight)
    (expected,) = torch.autograd.grad(
        torch.log_softmax(hidden.float() @ weight.float().T, -1).gather(1, targets[:, None]).sum(), weight
    )
    torch.testing.assert_close(ours, expected, rtol=0.05, atol=0.1)


def test_the_whole_of_the_logits_is_never_held() -> None:
    saved: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    hidden, weight, _, targets = inputs(50)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        token_logprobs(hidden, weight, targets, chunk=8)
    assert saved
    assert torch.Size([50, 11]) not in saved


def test_three_chunks_of_logits_are_held_at_most() -> None:
    """With the gradient of the weights, a sixteenth of a chunk, and what one product takes."""
    made = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 2, generator=made).requires_grad_() for n in (64, 4096))
    targets = torch.randint(0, 4096, (64,), generator=made)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        torch.autograd.backward(token_logprobs(hidden, weight, targets, chunk=32)[0].sum())
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert 2 <= max(accumulate(sizes)) / (32 * 4096 * 4) < 3.5


@pytest.mark.parametrize(
    ("vocabulary", "kind", "tokens"),
    [(13, "cpu", 645_278), (32_000, "cpu", 263), (2**23, "cpu", 1), (2**24, "cpu", 1), (32_000, "cuda", 4195)],
)
def test_a_chunk_holds_a_fixed_number_of_logits(vocabulary: int, kind: str, tokens: int) -> None:
    assert chunk_tokens(vocabulary, kind) == tokens


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_symbol_that_is_masked_by_a_logit_of_minus_infinity_changes_nothing_for_the_others(
    temperature: float,
) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    targets = torch.tensor([0, 1, 2, 3, 4])

    def computed(symbols: int, bias: torch.Tensor) -> list[torch.Tensor]:
        leaves = [hidden.clone().requires_grad_(), weight[:symbols].clone().requires_grad_()]
        logprobs, entropy = token_logprobs(*leaves, targets, bias=bias, temperature=temperature, chunk=2)
        gradients = torch.autograd.grad((logprobs * 3 - entropy * 2).sum(), leaves)
        return [logprobs, entropy, gradients[0], gradients[1][:6]]

    masked = torch.zeros(7, dtype=torch.float64)
    masked[6] = -torch.inf
    for ours, expected in zip(computed(7, masked), computed(6, masked[:6]), strict=True):
        assert torch.isfinite(ours).all()
        assert torch.allclose(ours, expected, rtol=1e-12)


def test_a_target_that_is_masked_has_a_finite_logprob_and_no_gradient_of_its_own() -> None:
    hidden = torch.ones(1, 2, requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -torch.inf])
    logprobs, entropy = token_logprobs(hidden, torch.zeros(3, 2), torch.tensor([2]), bias=bias)
    assert logprobs.item() == -1e4
    assert entropy.item() == pytest.approx(0.6931472)
    (gradient,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), hidden)
    assert torch.isfinite(gradient).all()
