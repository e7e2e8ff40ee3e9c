"""Ranks share one policy: each holds all of it (DDP), or a part of every tensor (FSDP2).

DDP exchanges gradients and nothing else; every rank holds parameters, gradients and optimizer state of the whole
model. FSDP2 splits all three over the ranks and gathers one decoder layer at a time, for what DDP has no memory for.
DDP averages the gradient over ranks in the last backward pass of an update, and only there. FSDP2 does so in every one
and keeps its part: whole gradients would be 4 bytes a parameter on every rank, 32 GB for 8 billion of them.

The embedding, the final norm and the head form one part, gathered for the whole forward pass: the chunked head reads
its matrix outside of the head's own module, and tied embeddings are one tensor in two places.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rlbuffer.process.ranks import Ranks
from rlbuffer.trainer.model.packed_policy import PackedPolicy
from rlbuffer.weights.blocks import decoder_layers

Parallel = Literal["ddp", "fsdp"]

_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
"""DDP's switch, by its name in this torch. Buffers (rotary tables) are constants: exchanging them only costs time."""


def distribute(policy: PackedPolicy, ranks: Ranks, *, parallel: Parallel) -> nn.Module:
    """The module whose forward pass every rank calls. With one rank it is the policy itself.

    Call it before the optimizer is made: sharding puts other parameters into the policy.
    """
    if ranks.world_size == 1:
        return policy
    if parallel == "ddp":
        ids = [ranks.device.index] if ranks.device.type == "cuda" else None
        options: dict[str, Any] = {"device_ids": ids, _SYNC_BUFFERS: False}
        return DistributedDataParallel(policy, **options)
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    for layer in decoder_layers(policy.model):
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    policy.in_one_batch = True
    return policy


@contextmanager
def exchanging(module: nn.Module, is_last: bool) -> Iterator[None]:
    """DDP exchanges the gradients of a backward pass in here if it is the update's last one, else only adds them up."""
    quiet = isinstance(module, DistributedDataParallel) and not is_last
    with module.no_sync() if quiet else nullcontext():  # type: ignore[operator]
        yield


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> float:
    """Scales the gradients to a global L2 norm of `limit` at most. -> the norm before, over all ranks' parts."""
    norm = nn.utils.clip_grad_norm_(parameters, limit)
    return float(whole(norm))


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which ranks may hold parts, whole. All ranks must ask for it."""
    gathered: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered


def digest_parameters(module: nn.Module) -> str:
    """SHA-256 (hex) of the bytes of all parameters, by name, by which ranks, or two runs, show that they hold the same.
    Where ranks hold parts, all of them must call it."""
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        digest.update(name.encode())
        flat = whole(parameter.detach()).contiguous().cpu().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
