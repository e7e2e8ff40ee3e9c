"""Ranks that share a model: no whole gradients of sharded ones, and no wait for gradients that no text brings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from model_families import EVERY, GEMMA3_SEES, QWEN3, made, row
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rlbuffer.config.trainer import LoraSettings
from rlbuffer.trainer.model.lora import add_adapter
from rlbuffer.trainer.model.packed_policy import prepare
from rlbuffer.trainer.ranks.parallel import exchanging
from rlbuffer.weights.blocks import decoder_layers


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gradients_are_parts_after_each_micro_batch(alone: None) -> None:
    policy, mesh = prepare(made(QWEN3)), init_device_mesh("cpu", (1,))
    for layer in decoder_layers(policy.model):
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    ids, positions, cu_seqlens = row()
    chosen = torch.nonzero(positions > 0)[:, 0]
    sums = []
    for is_last in (False, True):
        with exchanging(policy, is_last):
            policy(ids, positions, cu_seqlens, chosen)[0].sum().backward()
        gradients = [parameter.grad for parameter in policy.parameters()]
        assert all(isinstance(gradient, DTensor) for gradient in gradients)
        sums.append(torch.cat([g.to_local().reshape(-1) for g in gradients if isinstance(g, DTensor)]))
    assert torch.allclose(sums[1], 2 * sums[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_model_of_images_is_trained_where_texts_go(alone: None, has_adapter: bool) -> None:
    """What is trained in a tower of images gets no gradient, for which ranks wait."""
    policy = prepare(made(GEMMA3_SEES))
    assert [type(layer).__name__ for layer in decoder_layers(policy.model)] == ["Gemma3DecoderLayer"] * 2
    if has_adapter:
        add_adapter(policy.model, LoraSettings(rank=4), seed=0)
    shared = DistributedDataParallel(policy)
    ids, positions, cu_seqlens = row()
    chosen = torch.nonzero(positions > 0)[:, 0]
    for _ in range(2):
        shared(ids, positions, cu_seqlens, chosen)[0].sum().backward()
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert all("vision" not in name and "projector" not in name for name in trained)
    assert {".lora_" in name for name in trained} == {has_adapter}


def test_every_parameter_of_a_model_of_texts_is_trained() -> None:
    for config in EVERY:
        assert all(parameter.requires_grad for parameter in prepare(made(config)).model.parameters())
