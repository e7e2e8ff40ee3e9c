"""Tiny models with experts, of every kind of router, and rollouts of an engine that chooses other experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from rlbuffer.weights.experts import Experts
from rlbuffer.weights.model import model_from_config

VOCABULARY = 61
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v3": {**_LATENT, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "deepseek_v2": {
        **_LATENT,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    },
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "layer_types": ["full_attention"] * 2,
    },
}
"""What each has beside `_BASE`."""
PADDED = ("gpt_oss",)
"""Families that packed rows refuse (sinks)."""


def config_of(family: str) -> dict[str, Any]:
    return {**_BASE, "model_type": family, **FAMILIES[family]}


def made(config: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model whose routers choose by more than noise."""
    torch.manual_seed(3)
    model = model_from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if "router" in name or "gate.weight" in name:
            nn.init.normal_(parameter, std=1.0)
    return model


def layout_of(family: str) -> Any:
    return "padded" if family in PADDED else "packed"


def gates(family: str, router: Any, hidden: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and gates of given experts, by the papers' formulas: the implementation to compare with."""
    logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
    if family == "gpt_oss":
        logits = logits + router.bias
        return logits, torch.softmax(logits.gather(1, index), 1)
    if family in ("deepseek_v3", "glm4_moe"):
        chosen = (1 / (1 + torch.exp(-logits))).gather(1, index)
        return logits, chosen / (chosen.sum(1, keepdim=True) + 1e-20) * router.routed_scaling_factor
    chosen = (logits - logits.logsumexp(1, keepdim=True)).exp().gather(1, index)
    if family == "deepseek_v2":
        return logits, chosen * router.routed_scaling_factor
    return logits, chosen / chosen.sum(1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Rollouts of an engine, behind one another."""

    ids: Tensor
    """[T]."""
    positions: Tensor
    cu_seqlens: Tensor
    """[S + 1]."""
    logprobs: Tensor
    """[T]; 0 of the prompts."""
    routed: Tensor
    """[T, layers, K]; 0 of each rollout's last token, which no forward pass took in."""
    chosen: Tensor
    """[N] places of the sampled tokens."""

    def part(self, number: int) -> slice:
        """The places of one rollout."""
        return slice(int(self.cu_seqlens[number]), int(self.cu_seqlens[number + 1]))


def sample(
    model: PreTrainedModel,
    experts: Experts,
    *,
    attention: str = "sdpa",
    share: float = 1.0,
    lengths: Sequence[tuple[int, int]] = ((13, 4), (9, 2), (17, 5)),
) -> Sampled:
    """Rollouts token by token with a cache, as an engine samples; of a `share` of tokens and layers the experts are
    drawn at random. `lengths`: tokens of each, and of its prompt."""
    generator = torch.Generator().manual_seed(7)
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    ids, logprobs, routed = [], [], []
    for length, prompt in lengths:
        tokens = torch.randint(0, VOCABULARY, (prompt,), generator=generator)
        told, rows, cache = torch.zeros(prompt, dtype=torch.float64), [], DynamicCache(config=model.config)
        feed = tokens
        with torch.inference_mode():
            while len(tokens) < length:
                draws = torch.rand(len(feed), experts.layers, experts.num_experts, generator=generator)
                other = draws.argsort(-1)[..., : experts.top_k]
                other[torch.rand(other.shape[:2], generator=generator) >= share] = -1
                with experts.replaying(other), experts.recording() as recording:
                    out = model(input_ids=feed[None], cache=cache, use_cache=True).logits[0, -1]
                rows.append(recording.rows())
                distribution = out.double().log_softmax(-1)
                feed = torch.multinomial(distribution.exp(), 1, generator=generator)
                tokens, told = torch.cat([tokens, feed]), torch.cat([told, distribution[feed]])
        ids.append(tokens)
        logprobs.append(told)
        routed.append(torch.cat([*rows, torch.zeros_like(rows[0][:1])]))
    model.set_attn_implementation(before)
    joined = torch.cat(logprobs)
    return Sampled(
        ids=torch.cat(ids),
        positions=torch.cat([torch.arange(n) for n, _ in lengths]),
        cu_seqlens=torch.from_numpy(np.concatenate(([0], np.cumsum([n for n, _ in lengths])))),
        logprobs=joined,
        routed=torch.cat(routed).int(),
        chosen=torch.nonzero(joined)[:, 0],
    )
