"""One rank of :mod:`test_experts_over_ranks`: the gradient of recorded experts under DDP and under FSDP2."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from expert_families import config_of, made
from torch import Tensor

from rlbuffer.process.ranks import Ranks
from rlbuffer.trainer.model.packed_policy import PackedPolicy, prepare
from rlbuffer.trainer.ranks.parallel import Parallel, distribute, whole

FAMILY = "deepseek_v2"
LENGTHS = ((14, 11), (9, 13, 3))
"""Rollouts of each rank's row."""


def row_of(policy: PackedPolicy, rank: int) -> tuple[Tensor, ...]:
    """Tokens, positions, boundaries, chosen, recorded experts and weights: the same ones in every process."""
    generator, lengths = torch.Generator().manual_seed(rank), LENGTHS[rank]
    positions = torch.cat([torch.arange(n) for n in lengths])
    assert policy.experts is not None
    draws = torch.rand(len(positions), policy.experts.layers, policy.experts.num_experts, generator=generator)
    return (
        torch.randint(0, 61, (len(positions),), generator=generator),
        positions,
        torch.tensor([0, *lengths]).cumsum(0),
        torch.nonzero(positions > 0)[:, 0],
        draws.argsort(-1)[..., : policy.experts.top_k].int(),
        torch.randn(int((positions > 0).sum()), generator=generator, dtype=torch.float64),
    )


def gradient(rank: int, parallel: Parallel, *, recompute: bool, is_replayed: bool = True) -> dict[str, Tensor]:
    """Of this rank's row, averaged over the ranks."""
    policy = prepare(made(config_of(FAMILY)), recompute=recompute)
    ids, positions, cu_seqlens, chosen, routed, weights = row_of(policy, rank)
    module = distribute(policy, Ranks(rank, len(LENGTHS), torch.device("cpu")), parallel=parallel)
    logprobs, _ = module(ids, positions, cu_seqlens, chosen, 1.0, routed if is_replayed else None)
    (logprobs * weights).sum().backward()
    return {name: whole(p.grad) for name, p in policy.named_parameters() if p.grad is not None}


def run_rank(rank: int, folder: str) -> None:
    """What rank 0 leaves in `folder`: ``gradients.pt``, by what was done."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(LENGTHS))
    made_here = {
        "ddp": gradient(rank, "ddp", recompute=False),
        "fsdp": gradient(rank, "fsdp", recompute=False),
        "fsdp, computed again": gradient(rank, "fsdp", recompute=True),
        "own choice": gradient(rank, "ddp", recompute=False, is_replayed=False),
    }
    if rank == 0:
        torch.save(made_here, Path(folder) / "gradients.pt")
    dist.barrier()


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), sys.argv[2])
    os._exit(0)  # as a rank of the trainer ends: threads of gloo outlive main, and may abort the process
