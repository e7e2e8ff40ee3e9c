"""One rank of a trainer that publishes; only rank 0 has a stream."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rlbuffer
from rlbuffer.errors import RlbufferError
from rlbuffer.weights.model import TINY_QWEN3, model_from_config

WORLD_SIZE = 2


def run_rank(rank: int, folder: Path, way: str) -> None:
    """Publishes versions 0 and 1 of a model that is ``shared`` (DDP) or ``sharded`` (FSDP2). Rank 0 leaves what it has
    published in ``published``. ``forgotten``: sharded, and rank 0 has no stream."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(0)
    model = model_from_config(TINY_QWEN3)
    if rank == 0:
        torch.save(model.state_dict(), folder / "whole")
    if way != "shared":
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    else:
        model = DistributedDataParallel(model)
    with rlbuffer.connect("memory://", config={"home": folder / str(rank), "batcher": {"feeds": "stream"}}) as buffer:
        if way == "forgotten":
            with pytest.raises(RlbufferError, match="rank 0 has no reader"):
                buffer.policy.publish(model, 0)
        else:
            publish(buffer, model, rank, folder)
    dist.barrier()


def publish(buffer: rlbuffer.Buffer, model: object, rank: int, folder: Path) -> None:
    """As a trainer does."""
    if rank == 0:
        buffer.stream().resume()
    written = [buffer.policy.publish(model, version) for version in (0, 1, 1)]
    assert written == [rank == 0, rank == 0, False], written
    if rank == 0:
        (folder / "published").write_text(buffer.policy.current().location)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    os._exit(0)  # as a rank of the trainer ends: threads of gloo outlive main, and may abort the process
