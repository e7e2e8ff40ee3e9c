"""A Hugging Face causal LM that takes packed rows, checked at start: packed must equal separate.

Libraries decide from subtle signs whether a row is packed (transformers 5 honours restarting position ids only with
``use_cache=False`` and without a mask; otherwise it silently attends across rollouts, 0.4 nats off). So nothing is
taken on trust: before training, a few short segments run packed and one by one, and must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlbuffer.errors import PackedForwardError
from rlbuffer.trainer.attention import NAME, SegmentPlan
from rlbuffer.trainer.logprobs import token_logprobs

SELF_TEST_LENGTHS = (7, 1, 19, 5, 33, 12)
"""Tokens of the self-test's segments: a lone token, and both sides of the smallest batch of the segment attention."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Nats that packed and separate logprobs may differ by at most. float64 is not tighter because the models' norms and
rotary tables compute in float32 inside."""

PackedForward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(input_ids [T], position_ids [T], cu_seqlens [S + 1]) -> [T] logprob of each token, 0 for the first of a segment."""


class PackedPolicy(nn.Module):
    """A causal LM whose forward pass takes one packed row and gives logprobs and entropies of chosen tokens.

    Made by :func:`prepare`. The language model is `model`; parameters are its own, under the prefix ``model.``.
    """

    def __init__(self, model: PreTrainedModel, *, attention: str) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        """:data:`rlbuffer.trainer.attention.NAME`, or ``sdpa`` with a dense mask where that does not fit the model."""
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if head is None or not isinstance(getattr(head, "weight", None), Tensor):
            raise PackedForwardError(f"{type(model).__name__} has no output embeddings: it is not a causal LM")
        self._head: list[nn.Module] = [head]

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T, D] last hidden states of a packed row; every segment sees only itself."""
        arguments: dict[str, Any] = {}
        if self.attention == NAME:
            arguments["segments"] = SegmentPlan(cu_seqlens.cpu().numpy(), input_ids.device)
        output = self.model.base_model(
            input_ids=input_ids[None].long(), position_ids=position_ids[None].long(), use_cache=False, **arguments
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        chosen: Tensor,
        temperature: Tensor | float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Logprob and entropy of the chosen tokens, under all tokens before them in their segment.

        Shapes: ``input_ids``, ``position_ids`` [T]; ``cu_seqlens`` [S + 1]; ``chosen`` [N] indices of tokens, none of
        them the first of its segment; ``temperature`` a number or [N]; -> ([N], [N]), nats.
        """
        hidden = self.hidden_states(input_ids, position_ids, cu_seqlens)
        head = self._head[0]
        logprobs, entropy = token_logprobs(
            hidden[chosen - 1],
            head.weight,  # type: ignore[arg-type]
            input_ids[chosen].long(),
            bias=getattr(head, "bias", None),
            temperature=temperature,
        )
        return logprobs, entropy


def prepare(model: PreTrainedModel) -> PackedPolicy:
    """Makes a packed policy of `model`, on the device that it is on, and proves that packed equals separate.

    Dropout is turned off: with it the trained policy would not be the one that sampled. The segment attention is tried
    first; models with sliding windows, soft caps or other needs of their own fall back to sdpa with a dense mask.

    Raises:
        PackedForwardError: neither gives the same logprobs packed as separately (models with state across tokens, or
            whose head does more than a matrix product); the message has both reasons.
    """
    model.eval()  # type: ignore[no-untyped-call]
    if next(model.parameters()).dtype == torch.float64:
        _norms_in_float64(model)
    reasons = []
    for attention in (NAME, "sdpa"):
        policy = PackedPolicy(model, attention=attention)
        try:
            model.set_attn_implementation(attention)
            self_test(model, packed_forward(policy))
        except (PackedForwardError, ValueError, KeyError) as error:
            reasons.append(f"{attention}: {error}")
            continue
        return policy
    raise PackedForwardError(
        f"{type(model).__name__} cannot be trained on packed rows. {'; '.join(reasons)}. "
        "Models that keep state across tokens, or scale or cap their logits, are not supported"
    )


def packed_forward(policy: PackedPolicy) -> PackedForward:
    """The policy's forward pass in the form that :func:`self_test` takes."""

    def forward(input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        chosen = torch.nonzero(position_ids > 0)[:, 0]
        logprobs, _ = policy(input_ids, position_ids, cu_seqlens, chosen)
        out = logprobs.new_zeros(len(input_ids))
        out[chosen] = logprobs
        scattered: Tensor = out
        return scattered

    return forward


def vocabulary_of(model: PreTrainedModel) -> int:
    """Symbols that the model has an embedding for."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def separate_logprobs(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """[L] logprobs of one rollout on its own by the library's own attention and head; 0 for the first token."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        logits = model(input_ids=tokens[None].long(), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(ours)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    log_p = torch.log_softmax(logits[:-1], dim=-1)
    picked: Tensor = log_p.gather(1, tokens[1:, None].long())[:, 0]
    return torch.cat((picked.new_zeros(1), picked))


@torch.no_grad()
def self_test(model: PreTrainedModel, forward: PackedForward) -> None:
    """Runs a few segments packed by `forward` and one by one by the library, and compares.

    Also changes the first segment and looks whether any later one notices: that finds a leak even in a model whose
    weights are still too small for attention to matter.

    Raises:
        PackedForwardError: with the largest difference and what it means.
    """
    parameter = next(model.parameters())
    device, tolerance = parameter.device, TOLERANCES[parameter.dtype]
    vocabulary = vocabulary_of(model)
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, vocabulary, sum(SELF_TEST_LENGTHS))).to(device)
    positions = torch.cat([torch.arange(n) for n in SELF_TEST_LENGTHS]).to(device)
    bounds = np.concatenate(([0], np.cumsum(SELF_TEST_LENGTHS)))
    cu_seqlens = torch.from_numpy(bounds).to(device)
    packed = forward(tokens, positions, cu_seqlens)
    separate = torch.cat([separate_logprobs(model, tokens[a:b]) for a, b in pairwise(bounds)])
    difference = float((packed - separate).abs().max())
    if not difference <= tolerance:
        raise PackedForwardError(
            f"packed logprobs differ from separate ones by {difference:.2g} nats (at most {tolerance:g})"
        )
    first = SELF_TEST_LENGTHS[0]
    changed = tokens.clone()
    changed[:first] = (changed[:first] + 1) % vocabulary
    leak = float((forward(changed, positions, cu_seqlens) - packed)[first:].abs().max())
    if not leak <= tolerance / 100:
        raise PackedForwardError(f"changing one rollout moves the logprobs of another by {leak:.2g} nats")


def _norms_in_float64(model: PreTrainedModel) -> None:
    """Lets RMS norms compute in float64 too, where the library's own round to float32 in between.

    float64 is there to show that sums over ranks agree; a norm that rounds turns differences of 1e-16 into 1e-8.
    """
    for module in model.modules():
        epsilon = getattr(module, "variance_epsilon", None)
        weight = getattr(module, "weight", None)
        is_plain = type(module).__name__ in PLAIN_NORMS
        if is_plain and isinstance(epsilon, float) and isinstance(weight, nn.Parameter):
            module.forward = _exact_norm(weight, epsilon)


PLAIN_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm"})
"""Norms known to be weight * x / sqrt(mean(x^2) + epsilon); others keep their own arithmetic."""


def _exact_norm(weight: nn.Parameter, epsilon: float) -> Callable[[Tensor], Tensor]:
    def forward(hidden_states: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(hidden_states, (len(weight),), weight, epsilon)

    return forward
