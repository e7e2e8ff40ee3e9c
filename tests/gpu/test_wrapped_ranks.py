"""DDP and FSDP2 over NCCL, with the one rank that one GPU can hold: NCCL refuses two on a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradient_ranks import ROW_TOKENS, Trainee, packed_step
from test_gradients import ROWS, relative
from torch.distributed.device_mesh import init_device_mesh

from rlbuffer.config.trainer import TrainerSettings
from rlbuffer.process.ranks import Ranks
from rlbuffer.trainer.checkpoints.checkpoint import Checkpoint, path_of, restore, save
from rlbuffer.trainer.ranks import parallel
from rlbuffer.trainer.ranks.parallel import digest_parameters
from rlbuffer.trainer.update.update import Updates, make_optimizer, take_step
from rlbuffer.weights.state import model_state

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nccl(cuda: None) -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    yield
    dist.destroy_process_group()


def trained(trainee: Trainee, way: str, steps: int = 2) -> tuple[torch.optim.Optimizer, list[float], np.ndarray]:
    """Trains the same step a few times. -> optimizer, norms, parameters at the end."""
    ranks, settings = Ranks(0, 1, DEVICE), TrainerSettings(loss={"name": "dapo", "entropy_bonus": 0.01})
    module = (
        trainee.policy if way == "plain" else parallel.distribute(trainee.policy, Ranks(0, 2, DEVICE), parallel=way)
    )
    optimizer = make_optimizer(trainee.policy, settings.optimizer)
    norms = []
    for _ in range(steps):
        updates = Updates(module, packed_step(ROWS, 0, 1), settings, ranks, longest=ROW_TOKENS)
        for part in updates.parts:
            updates.accumulate(part)
            norms.append(take_step(trainee.policy, optimizer, learning_rate=1e-2, gradient_clip=1.0, step=1))
    found = [parallel.whole(p.detach()).reshape(-1).double() for p in trainee.policy.parameters()]
    return optimizer, norms, torch.cat(found).cpu().numpy()


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("dtype", "compute", "tolerance"), [("float64", None, 1e-9), ("float32", torch.bfloat16, 2e-2)]
)
def test_a_wrapped_policy_trains_publishes_and_checkpoints_what_the_plain_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, dtype: str, compute: torch.dtype | None, tolerance: float
) -> None:
    monkeypatch.setattr(parallel, "init_device_mesh", lambda kind, shape: init_device_mesh(kind, (1,)))
    _, norms, expected = trained(Trainee(dtype, 1, "cuda", compute=compute), "plain")
    trainee = Trainee(dtype, 1, "cuda", compute=compute)
    optimizer, ours, parameters = trained(trainee, way)
    assert ours == pytest.approx(norms, rel=tolerance)
    assert relative(parameters, expected) <= tolerance
    state = model_state(trainee.policy, inside="model", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    place = Checkpoint(step=2, reader={}, run="r", learning_rate=1e-2)
    save(tmp_path, place, trainee.policy, optimizer, keep=1)
    before = digest_parameters(trainee.policy)
    with torch.no_grad():
        for parameter in trainee.policy.parameters():
            parameter.zero_()
    restore(path_of(tmp_path, 2), trainee.policy, optimizer)
    assert digest_parameters(trainee.policy) == before
