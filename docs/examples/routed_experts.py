"""Routing replay: the experts that the engine chose are the ones that the trainer computes with.

A rollout carries them as the column `routed_experts` [T, layers, k]: for each token the experts that took it in, as
vLLM gives them with `enable_return_routed_experts`; -1 where they are not known. Written for Qwen3-MoE of transformers,
whose routers return (logits, weights of the chosen, the chosen).
"""

from contextlib import contextmanager
from functools import partial

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter


def chosen_before(router, inputs, output, *, experts):
    """A hook behind a router: the weights are its own, the choice is `experts` [T, k] where that is known."""
    logits, weights, own = output
    chosen = torch.where(experts < 0, own, experts.to(own.dtype))
    weights = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
    if router.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights.to(logits.dtype), chosen


@contextmanager
def replayed(model, mb):
    """Inside, a forward pass of `model` over this micro-batch of tensors takes its experts."""
    experts = mb.columns.get("routed_experts")  # not there where no rollout of the step has it
    if "routed_experts" in mb.lacking:  # some rollouts came without
        experts = experts.masked_fill(mb.lacking["routed_experts"][:, None, None], -1)
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    hooks = [
        router.register_forward_hook(partial(chosen_before, experts=experts[:, layer]))
        for layer, router in enumerate(routers if experts is not None else ())
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
