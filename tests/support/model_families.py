"""Small models of every family that is trained, and rows of tokens for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlbuffer.weights.model import model_from_config

LLAMA: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
)
QWEN3 = MappingProxyType(dict(LLAMA) | {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True})
MISTRAL = MappingProxyType(dict(LLAMA) | {"model_type": "mistral", "sliding_window": 8})
GEMMA2 = MappingProxyType(
    dict(LLAMA)
    | {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    }
)
GEMMA3 = MappingProxyType(
    dict(LLAMA)
    | {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    }
)
GEMMA3_SEES = MappingProxyType(
    {
        "model_type": "gemma3",
        "text_config": dict(GEMMA3),
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    }
)
"""A model of images and texts: what describes its language model is nested."""
QWEN2_WINDOWS = MappingProxyType(
    dict(LLAMA) | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
)
COHERE2 = MappingProxyType(
    dict(LLAMA)
    | {
        "model_type": "cohere2",
        "logit_scale": 0.25,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
)
GPT2 = MappingProxyType({"model_type": "gpt2", "vocab_size": 50, "n_embd": 64, "n_layer": 2, "n_head": 4})
QWEN3_MOE = MappingProxyType(
    dict(QWEN3)
    | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    }
)
GRANITE = MappingProxyType(dict(LLAMA) | {"model_type": "granite", "logits_scaling": 3.0, "embedding_multiplier": 4.0})
COHERE = MappingProxyType(dict(LLAMA) | {"model_type": "cohere", "logit_scale": 0.25})
GPT_NEO = MappingProxyType(
    {
        "model_type": "gpt_neo",
        "vocab_size": 50,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": 128,
    }
)
LOOKS_AHEAD = MappingProxyType(dict(LLAMA) | {"is_causal": False})
EVERY = (LLAMA, QWEN3, MISTRAL, GEMMA2, GPT2, QWEN3_MOE, GRANITE, COHERE)
WINDOWED = (MISTRAL, GEMMA2, GEMMA3, QWEN2_WINDOWS, COHERE2)
"""Sliding windows of 8 tokens in some or all layers; soft caps in two."""
LENGTHS = (9, 1, 40, 17, 16, 3, 33, 5, 64)
HYBRIDS = (
    {"model_type": "mamba", "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4},
    dict(QWEN3_MOE)
    | {
        "model_type": "qwen3_next",
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 32,
    },
)


def made(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return model_from_config(config, dtype=dtype)


def row(vocabulary: int = 50, lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(1)
    ids = torch.from_numpy(rng.integers(0, vocabulary, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return ids, positions, torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))))


def pieces(ids: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    return [ids[a:b] for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)]


def gradients(model: PreTrainedModel, total: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(total, list(model.parameters())), strict=True))
