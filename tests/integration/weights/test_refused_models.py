"""A model that nobody could load is refused at `publish`, with its tensor, before anything of it is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from model_families import LLAMA, QWEN3, QWEN3_MOE, made
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from transformers import PreTrainedModel

import rlbuffer
from rlbuffer.client.buffer import Buffer
from rlbuffer.errors import WeightsError
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.files import load_state, publish_adapter, read_config

Q = "model.layers.0.self_attn.q_proj"
LORA = {"r": 2, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}


def empty(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if "layers" in name:
            parameter.data = torch.empty(0)


def all_empty(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.data = torch.empty(0)


def valued(value: float, dtype: torch.dtype = torch.float32, name: str = f"{Q}.weight") -> Callable[..., None]:
    def change(model: PreTrainedModel) -> None:
        model.to(dtype)
        model.get_parameter(name).data.view(-1)[-1] = value

    return change


def on_meta(model: PreTrainedModel) -> None:
    model.get_submodule(Q).to("meta")


def typed(dtype: torch.dtype) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        weight = model.get_parameter(f"{Q}.weight").data
        model.get_submodule(Q).weight = nn.Parameter(weight.to(dtype), requires_grad=False)

    return change


def untie(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)


def tie(model: PreTrainedModel) -> None:
    model.lm_head.weight = model.get_input_embeddings().weight


def shorten(model: PreTrainedModel) -> None:
    del model.model.layers[1]


def grow(model: PreTrainedModel) -> None:
    model.value = nn.Linear(64, 1)


def widen(model: PreTrainedModel) -> None:
    model.model.embed_tokens = nn.Embedding(56, 64)
    model.lm_head.weight = model.model.embed_tokens.weight


def bias(model: PreTrainedModel) -> None:
    model.get_submodule(Q).bias = nn.Parameter(torch.zeros(64))


def split(model: PreTrainedModel) -> None:
    """As a tool does that quantises in place."""
    layer = model.get_submodule(Q)
    layer.register_buffer("weight_scale", torch.ones(1))


BROKEN: dict[str, tuple[Callable[[PreTrainedModel], object], str, str]] = {
    "ZeRO-3, not gathered": (empty, f"{Q}.weight", "has shape [0]"),
    "ZeRO-3, nothing gathered": (all_empty, "model.embed_tokens.weight", "has shape [0]"),
    "PEFT in place": (lambda m: peft.get_peft_model(m, peft.LoraConfig(**LORA)), f"{Q}.weight", "PEFT has put"),
    "an adapter injected": (
        lambda m: peft.inject_adapter_in_model(peft.LoraConfig(**LORA), m),
        f"{Q}.base_layer.weight",
        "have unknown",
    ),
    "NaN": (valued(float("nan")), f"{Q}.weight", "not finite"),
    "infinite": (valued(float("inf")), f"{Q}.weight", "not finite"),
    "-infinite in bfloat16": (valued(-float("inf"), torch.bfloat16), f"{Q}.weight", "not finite"),
    "NaN in a norm": (valued(float("nan"), name="model.norm.weight"), "model.norm.weight", "not finite"),
    "meta": (on_meta, f"{Q}.weight", "no values"),
    "float8": (typed(torch.float8_e4m3fn), f"{Q}.weight", "float8_e4m3fn"),
    "int8": (typed(torch.int8), f"{Q}.weight", "int8"),
    "complex": (typed(torch.complex64), f"{Q}.weight", "complex64"),
    "scales of a quantiser": (split, f"{Q}.weight_scale", "have unknown"),
    "a layer is gone": (shorten, "model.layers.1.", "they lack"),
    "a head beside": (grow, "value.weight", "have unknown"),
    "a bias beside": (bias, f"{Q}.bias", "have unknown"),
    "more tokens than its config": (widen, "model.embed_tokens.weight", "that of its config is [50, 64]"),
    "untied, and its config ties": (untie, "lm_head.weight", "differs from model.embed_tokens.weight"),
    "experts without one of their tensors": (
        lambda m: m.model.layers[0].mlp.experts.__delattr__("down_proj"),
        "model.layers.0.mlp.experts.down_proj",
        "they lack",
    ),
    "tied, and its config does not tie": (tie, "lm_head.weight", "they lack"),
}
CONFIGS = {"tied, and its config does not tie": LLAMA, "experts without one of their tensors": QWEN3_MOE}


@pytest.fixture
def buffer(tmp_path: Path) -> Buffer:
    with rlbuffer.connect("memory://", run="own", config={"home": tmp_path}) as buffer:
        buffer.reader()
        yield buffer


@pytest.fixture
def alone(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_refused_with_its_tensor_and_nothing_is_left(
    buffer: Buffer, tmp_path: Path, case: str
) -> None:
    change, tensor, reason = BROKEN[case]
    model = made(CONFIGS.get(case, QWEN3))
    change(model)
    with pytest.raises(WeightsError) as refused:
        buffer.policy.publish(model, 0, tmp_path / "weights")
    told = str(refused.value)
    print(f"| {case} | {told} |")
    assert told.startswith("the model cannot be published: ")
    assert tensor in told
    assert reason in told
    assert not (tmp_path / "weights").exists()
    assert buffer.policy.version == -1


@pytest.mark.usefixtures("alone")
def test_a_shared_model_is_refused_alike(buffer: Buffer, tmp_path: Path) -> None:
    model = made(QWEN3)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model.get_parameter(f"{Q}.weight").to_local().data.fill_(float("nan"))
    with pytest.raises(WeightsError, match=f"not finite: {Q}.weight"):
        buffer.policy.publish(model, 0, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("parts", ["layers", "one tensor"])
def test_a_model_of_which_parts_are_shared_is_published_whole(buffer: Buffer, tmp_path: Path, parts: str) -> None:
    model, mesh = made(QWEN3), init_device_mesh("cpu", (1,))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if parts == "layers":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
    else:
        layer = model.get_submodule(Q)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate()]))
    assert buffer.policy.publish(model, 0)
    state = load_state(Path(buffer.policy.current().location))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
    assert state.keys() | {"lm_head.weight"} == expected.keys()


@pytest.mark.usefixtures("alone")
def test_a_shared_models_config_names_the_class_that_engines_know(buffer: Buffer) -> None:
    model = made(QWEN3)
    assert buffer.policy.publish(fully_shard(model, mesh=init_device_mesh("cpu", (1,))), 0)
    config = read_config(Path(buffer.policy.current().location))
    assert config["architectures"] == ["Qwen3ForCausalLM"]


def test_a_model_with_compiled_layers_is_published_under_its_own_names(buffer: Buffer) -> None:
    model = made(QWEN3)
    expected = set(model.state_dict()) - {"lm_head.weight"}
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    assert buffer.policy.publish(model, 0)
    assert set(load_state(Path(buffer.policy.current().location))) == expected


def factors(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    both = {"A": torch.ones(2, 64), "B": torch.zeros(64, 2)} | changes
    return {f"base_model.model.{Q}.lora_{half}.weight": t for half, t in both.items() if t is not None}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, "the adapter has no tensors"),
        (factors(B=None), f"{Q}.lora_A.weight is no half of a pair"),
        (factors(A=torch.ones(3, 64)), f"{Q}.lora_A.weight is [3, 64] at rank 2"),
        (factors(B=torch.full((64, 2), float("nan"))), f"not finite: base_model.model.{Q}.lora_B.weight"),
        (factors() | {"base_model.model.lm_head.weight": torch.ones(2, 2)}, "lm_head.weight is no half of a pair"),
        (factors(A=torch.empty(0)), "is [0] at rank 2"),
        (factors(A=torch.ones(2, 64, dtype=torch.int8)), "is int8"),
        (factors(A=torch.ones(2, 64, device="meta")), "on the meta device"),
    ],
)
def test_a_broken_adapter_is_refused_with_its_tensor_and_nothing_is_left(
    tmp_path: Path, state: dict[str, torch.Tensor], reason: str
) -> None:
    base = PolicyVersion(version=0, location="/base", size=1, checksum="0" * 64)
    with pytest.raises(WeightsError) as refused:
        publish_adapter(tmp_path / "weights", 0, state=state, config={"r": 2}, base=base, keep=2)
    assert reason in str(refused.value)
    assert not (tmp_path / "weights").exists()
