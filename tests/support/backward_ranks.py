"""One of two DDP ranks that computes the gradient of a step: `python backward_ranks.py URL RUN FOLDER`, started as
torchrun would."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import rlbuffer
from rlbuffer.weights.model import TINY_QWEN3, model_from_config


def model() -> torch.nn.Module:
    """The same in every process, in float64: sums in another order give the same gradient."""
    torch.manual_seed(0)
    return model_from_config({**TINY_QWEN3, "vocab_size": 256, "attn_implementation": "eager"}).double().eval()


def loss_of(module: torch.nn.Module, mb: rlbuffer.MicroBatch) -> torch.Tensor:
    """Policy gradient over the trained tokens of the whole step."""
    logits = module(input_ids=mb.input_ids[None], position_ids=mb.position_ids[None], use_cache=False).logits[0]
    logprobs = -cross_entropy(logits, mb.targets, reduction="none")  # at t: of token t + 1
    trained = mb.loss_mask.nonzero()[:, 0]
    return -(logprobs[trained - 1] * mb.advantages[trained]).sum() / mb.normalizers.loss_tokens


def gradient(module: torch.nn.Module) -> torch.Tensor:
    """All of it as one vector."""
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def main(url: str, run: str, folder: str) -> None:
    dist.init_process_group("gloo")
    rank, trained = dist.get_rank(), model()
    ddp = DistributedDataParallel(trained)
    with rlbuffer.connect(url, run=run) as buffer, buffer.reader(rank, dist.get_world_size()) as reader:
        for step in reader.steps(last=1):
            batches = list(step)
            for micro_batch in batches:
                is_last = micro_batch is batches[-1]
                with nullcontext() if is_last else ddp.no_sync():
                    micro_batch.backward(loss_of(ddp, micro_batch.to("cpu")))
    torch.save(
        {"gradient": gradient(trained), "dummies": sum(mb.is_dummy for mb in batches), "batches": len(batches)},
        Path(folder) / f"{rank}.pt",
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
