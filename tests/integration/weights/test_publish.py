"""`policy.publish`: what a trainer of one's own gives its workers, from any rank and any wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_families import GEMMA3_SEES, HYBRIDS, LLAMA, QWEN3, QWEN3_MOE, made
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

import rlbuffer
from rlbuffer.client.buffer import Buffer
from rlbuffer.errors import RlbufferError, WeightsError
from rlbuffer.weights.files import load_state, open_weights
from rlbuffer.weights.fit import is_finite
from rlbuffer.weights.model import TINY_QWEN3, load_into, model_from_config
from rlbuffer.weights.shapes import names_and_shapes
from rlbuffer.worker.samplers.base import opened
from rlbuffer.worker.samplers.decoding import Decoder

QWEN3_NEXT = HYBRIDS[1]
MIXTRAL = MappingProxyType(dict(LLAMA) | {"model_type": "mixtral", "num_local_experts": 4})


@pytest.fixture
def buffer(tmp_path: Path) -> Buffer:
    with rlbuffer.connect("memory://", run="own", config={"home": tmp_path}) as buffer:
        yield buffer


@pytest.fixture
def alone(tmp_path: Path) -> None:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> PreTrainedModel:
    return model_from_config(TINY_QWEN3)


def test_the_first_version_is_there_before_the_first_step_and_no_version_is_written_twice(
    buffer: Buffer, tmp_path: Path
) -> None:
    reader, policy, ours = buffer.reader(), buffer.policy, model()
    assert policy.publish(ours, reader.step)
    current = policy.current()
    assert (current.version, current.location) == (0, str(next((tmp_path / "runs" / "own" / "weights").iterdir())))
    assert buffer.store.trainer().number == reader.attempt
    loaded = AutoModelForCausalLM.from_pretrained(open_weights(current))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), ours.parameters(), strict=True))
    assert not policy.publish(model(), 0)
    assert policy.current() == current
    assert policy.publish(ours, 3, tmp_path / "elsewhere", keep=1)
    assert policy.publish(ours, 4, str(tmp_path / "elsewhere"), keep=1)
    assert [path.name[:9] for path in (tmp_path / "elsewhere").iterdir()] == ["v00000004"]


def test_weights_come_to_a_version_that_a_reader_has_announced_without_them(buffer: Buffer) -> None:
    reader = buffer.reader()
    reader.start()
    reader.announce(rlbuffer.PolicyVersion(version=0))  # what `steps()` does where nobody has
    with pytest.raises(WeightsError, match="was announced without weights"):
        open_weights(buffer.policy.current())
    assert buffer.policy.publish(model(), 0)
    assert open_weights(buffer.policy.current()).is_dir()


def test_only_rank_0_writes(buffer: Buffer, tmp_path: Path) -> None:
    buffer.reader(1, 2)
    assert not buffer.policy.publish(model(), 0, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()
    assert buffer.policy.version == -1


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda ours: DistributedDataParallel(ours),
        lambda ours: torch.compile(ours, backend="eager"),
        lambda ours: torch.compile(DistributedDataParallel(ours), backend="eager"),
        lambda ours: fully_shard(ours, mesh=init_device_mesh("cpu", (1,))),
    ],
    ids=["ddp", "compiled", "compiled ddp", "fsdp"],
)
def test_a_wrapped_model_is_published_as_the_model_inside(buffer: Buffer, wrapped) -> None:
    buffer.reader()
    ours = model()
    expected = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    assert buffer.policy.publish(wrapped(ours), 0)
    state = load_state(open_weights(buffer.policy.current()))
    assert state.keys() | {"lm_head.weight"} == expected.keys()  # tied to the embedding
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


@pytest.mark.parametrize("config", [QWEN3, QWEN3_MOE, QWEN3_NEXT, MIXTRAL, GEMMA3_SEES], ids=lambda c: c["model_type"])
def test_weights_are_published_as_the_library_saves_them_and_load_again(
    buffer: Buffer, tmp_path: Path, capfd: pytest.CaptureFixture[str], config: Mapping[str, Any]
) -> None:
    """The library's models stack experts and rename parts; engines know the names of published checkpoints."""
    model = made(config)
    buffer.reader()
    assert buffer.policy.publish(model, 0)
    policy = buffer.policy.current()
    directory = Path(policy.location)
    model.save_pretrained(tmp_path)
    assert names_and_shapes(directory) == names_and_shapes(tmp_path)
    same = model.state_dict()
    other = made(config)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    load_into(other, load_state(directory))
    assert all(torch.equal(tensor, same[name]) for name, tensor in other.state_dict().items())
    assert opened(policy).vocab_size == config.get("text_config", config)["vocab_size"]
    decoder, random_state = Decoder(seed=0), torch.get_rng_state()
    capfd.readouterr()
    decoder.load(policy)
    decoder.load(policy)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert "\r" not in capfd.readouterr().err  # no progress bar at every version
    assert (decoder.vocab_size, decoder.context > 0) == (config.get("text_config", config)["vocab_size"], True)


def test_what_cannot_be_published_is_refused(buffer: Buffer, tmp_path: Path) -> None:
    with pytest.raises(RlbufferError) as unread:
        buffer.policy.publish(model(), 0)
    assert "buffer.reader(" in str(unread.value)
    buffer.reader()
    with pytest.raises(WeightsError) as other:
        buffer.policy.publish(torch.nn.Linear(2, 2), 0)
    assert "Linear" in str(other.value)
    classifier = AutoModelForSequenceClassification.from_config(model().config)
    for headless in (classifier, model().model):
        with pytest.raises(WeightsError, match="cannot be published: nothing can be sampled from it"):
            buffer.policy.publish(headless, 0)
    assert buffer.store.trainer().number == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_value_that_is_not_finite_is_seen_wherever_it_stands(dtype: torch.dtype) -> None:
    fine = torch.linspace(-3e4, 3e4, 999).to(dtype).view(27, 37)
    assert is_finite(fine)
    assert is_finite(fine.T)
    assert is_finite(fine[:0])
    assert is_finite(torch.arange(3))
    for value in (float("nan"), float("inf"), -float("inf")):
        for place in (0, 500, 998):
            bad = fine.clone()
            bad.view(-1)[place] = value
            assert not is_finite(bad)
