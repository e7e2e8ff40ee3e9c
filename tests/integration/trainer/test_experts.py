"""The trainer computes with the experts that the engine took, of every kind of router."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_families import FAMILIES, Sampled, config_of, gates, layout_of, made, sample
from model_families import QWEN3
from model_families import made as made_dense
from torch import Tensor

from rlbuffer.config.settings import RunSettings
from rlbuffer.config.trainer import LoraSettings
from rlbuffer.errors import ConfigError
from rlbuffer.trainer.fake import FakeRun
from rlbuffer.trainer.loop import train
from rlbuffer.trainer.model.lora import add_adapter
from rlbuffer.trainer.model.packed_policy import PackedPolicy, prepare
from rlbuffer.weights.experts import Experts, experts_of, is_recorded


def experts_in(policy: PackedPolicy) -> Experts:
    assert policy.experts is not None
    return policy.experts


def trainer_of(family: str, **options: Any) -> tuple[PackedPolicy, Sampled]:
    policy = prepare(made(config_of(family)), layout=layout_of(family), **options)
    sampled = sample(policy.model, experts_in(policy), attention="eager" if family == "gpt_oss" else "sdpa")
    return policy, sampled


def logprobs(policy: PackedPolicy, its: Sampled, routed: Tensor | None, number: int | None = None) -> Tensor:
    """Of the sampled tokens, of all rollouts in one row or of one alone."""
    if number is None:
        return policy(its.ids, its.positions, its.cu_seqlens, its.chosen, routed=routed)[0]
    part = its.part(number)
    inside = its.chosen[(its.chosen >= part.start) & (its.chosen < part.stop)] - part.start
    bounds = torch.tensor([0, part.stop - part.start])
    return policy(its.ids[part], its.positions[part], bounds, inside, routed=None if routed is None else routed[part])[
        0
    ]


def loss_of(policy: PackedPolicy, its: Sampled, routed: Tensor | None) -> Tensor:
    weights = torch.randn(len(its.chosen), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (logprobs(policy, its, routed) * weights).sum()


def gradients(policy: PackedPolicy, its: Sampled, routed: Tensor | None) -> dict[str, Tensor]:
    policy.zero_grad(set_to_none=True)
    loss_of(policy, its, routed).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of a tensor's elements, in what its largest is."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - g).abs().max() / (g.abs().max() + 1e-12)) for n, g in theirs.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_computes_with_the_experts_that_were_sampled_with(family: str) -> None:
    policy, its = trainer_of(family)
    experts = experts_in(policy)
    with torch.no_grad():
        replayed, own = logprobs(policy, its, its.routed), logprobs(policy, its, None)
    assert float((replayed - its.logprobs[its.chosen]).abs().max()) < 1e-9
    assert float((own - its.logprobs[its.chosen]).abs().max()) > 0.1
    with torch.no_grad():  # each rollout alone has what it has in the row
        alone = torch.cat([logprobs(policy, its, its.routed, number) for number in range(3)])
    torch.testing.assert_close(alone, replayed, rtol=0, atol=1e-9)
    lacking = its.routed.clone()
    lacking[its.part(0)] = -1
    with torch.no_grad():
        mixed, first = logprobs(policy, its, lacking), int((its.chosen < its.part(0).stop).sum())
    torch.testing.assert_close(mixed[:first], own[:first], rtol=0, atol=1e-9)
    torch.testing.assert_close(mixed[first:], replayed[first:], rtol=0, atol=1e-9)

    ours = gradients(policy, its, its.routed)
    for number, router in experts.routers[:2]:  # central differences
        name = next(n for n, p in policy.named_parameters() if p is router.weight)
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                router.weight[1, 2] += sign * 1e-5
                ends.append(float(loss_of(policy, its, its.routed)))
                router.weight[1, 2] -= sign * 1e-5
        assert abs((ends[0] - ends[1]) / 2e-5 - float(ours[name][1, 2])) < 1e-8, number
    if family not in ("gpt_oss",):  # whose batches of similar lengths the plain formula below does not know
        for number, router in experts.routers:
            router.forward = partial(_by_hand, family, router, router.forward, its.routed[:, number].long())
        theirs = gradients(policy, its, None)
    else:
        theirs = _summed([_alone_by_hand(family, policy, its, number) for number in range(3)])
    assert apart(ours, theirs) < 1e-12


def _by_hand(family: str, router: Any, forward: Any, index: Tensor, hidden: Tensor) -> Any:
    with torch.no_grad():
        fallback = forward(hidden)[2]
    index = torch.where(is_recorded(index)[:, None], index, fallback)
    return *gates(family, router, hidden, index), index


def _alone_by_hand(family: str, policy: PackedPolicy, its: Sampled, number: int) -> dict[str, Tensor]:
    part, before = its.part(number), [(router, router.forward) for _, router in experts_in(policy).routers]
    for layer, router in experts_in(policy).routers:
        router.forward = partial(_by_hand, family, router, router.forward, its.routed[part, layer].long())
    weights = torch.randn(len(its.chosen), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inside = (its.chosen >= part.start) & (its.chosen < part.stop)
    policy.zero_grad(set_to_none=True)
    (logprobs(policy, its, None, number) * weights[inside]).sum().backward()  # type: ignore[no-untyped-call]
    for router, forward in before:
        router.forward = forward
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def _summed(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = set[str]().union(*parts)
    return {name: torch.stack([part[name] for part in parts if name in part]).sum(0) for name in names}


def test_in_16_bit_the_ratio_is_1_where_the_engine_took_other_experts() -> None:
    """A fresh model alone shows nothing: 16 bit turns a choice over so seldom that its ratios hide it."""
    sizes = {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4, "initializer_range": 0.1}
    policy = prepare(made({**config_of("qwen3_moe"), **sizes}, torch.float32), compute=torch.bfloat16)
    its = sample(policy.model, experts_in(policy), share=0.5, lengths=[(60, 4)] * 4)
    with torch.no_grad():
        with_record, without = (
            logprobs(policy, its, routed).double() - its.logprobs[its.chosen] for routed in (its.routed, None)
        )
    assert float(with_record.abs().mean()) <= 0.005
    assert float((with_record.exp() - 1 - with_record).mean()) <= 2e-5
    assert float(without.abs().mean()) >= 0.1
    assert float((without.exp() - 1 - without).mean()) >= 0.01


@pytest.mark.parametrize("family", ["deepseek_v2", "gpt_oss"])
def test_what_is_computed_again_has_the_experts_of_its_own_call(family: str) -> None:
    policy, its = trainer_of(family)
    kept = gradients(policy, its, its.routed)
    again, _ = trainer_of(family, recompute=True)
    assert apart(gradients(again, its, its.routed), kept) < 1e-12
    assert apart(gradients(again, its, None), kept) > 1e-3


def test_an_adapter_trains_with_the_experts_that_were_sampled_with() -> None:
    policy, its = trainer_of("qwen3_moe")
    add_adapter(policy.model, LoraSettings(rank=4), seed=0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        replayed = logprobs(policy, its, its.routed)
    changed = sample(policy.model, experts_in(policy))
    with torch.no_grad():
        assert float((logprobs(policy, changed, changed.routed) - changed.logprobs[changed.chosen]).abs().max()) < 1e-9
        assert float((replayed - its.logprobs[its.chosen]).abs().max()) > 1e-3
    ours = gradients(policy, changed, changed.routed)
    assert all(".lora_" in name for name in ours)
    assert apart(ours, gradients(policy, changed, None)) > 1e-3


def test_a_record_of_another_model_is_none_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever pushes could end every rank with one, at each start again."""
    policy, its = trainer_of("qwen3_moe")
    without = logprobs(policy, its, None)
    assert not torch.equal(logprobs(policy, its, its.routed), without)
    for wrong in (its.routed[:, 0, 0], its.routed[:, :1], its.routed[..., :2], its.routed + 8, -its.routed - 1):
        assert torch.equal(logprobs(policy, its, wrong), without)
    told = [line for line in caplog.messages if "The column is not used" in line]
    assert len(told) == 1
    assert "[] for a token), and this model has [2, 3]: " in told[0]
    caplog.clear()
    dense = prepare(made_dense({**QWEN3, "vocab_size": policy.model.config.vocab_size}))
    assert torch.equal(logprobs(dense, its, its.routed), logprobs(dense, its, None))
    assert "Qwen3ForCausalLM has no experts. The column is not used" in caplog.text


def test_a_family_whose_choice_cannot_be_seen_is_found_at_the_start() -> None:
    phimoe = {**config_of("mixtral"), "model_type": "phimoe"}
    policy = prepare(made(phimoe, torch.float32))
    assert policy.experts is None
    assert "Phimoe" in policy.no_replay
    with pytest.raises(ConfigError, match="could not be told from none"):
        experts_of(made({**config_of("mixtral"), "num_experts_per_tok": 1}, torch.float32))


def test_a_run_that_records_what_its_trainer_cannot_replay_ends_at_the_start(tmp_path: Path) -> None:
    phimoe = {**config_of("mixtral"), "model_type": "phimoe"}
    worker = {"math": {"env": "vcopy", "record_experts": True}}
    given: dict[str, Any] = {"home": tmp_path, "batcher": {"row_tokens": 128}, "model": {"config": phimoe}}
    trainer = {"steps": 1, "output": tmp_path, "device": "cpu"}
    with pytest.raises(ConfigError, match=r"worker.math records experts.*Phimoe") as refused:
        train(RunSettings(**given, worker=worker, trainer=trainer), rank=0, world_size=1, source=FakeRun)
    assert refused.value.setting == "trainer.replay_experts"
    unused = trainer | {"replay_experts": False}
    assert train(RunSettings(**given, worker=worker, trainer=unused), rank=0, world_size=1, source=FakeRun)


def test_a_block_that_a_fused_kernel_computes_is_found_at_the_start() -> None:
    model = made(config_of("qwen3_moe"), torch.float32)
    block: Any = model.get_submodule("model.layers.1.mlp")
    block.forward = lambda hidden: hidden  # as a kernel from the hub takes the place of the block
    with pytest.raises(ConfigError, match="of layer 1 ran 0 times in a forward pass"):
        experts_of(model)


def test_a_block_that_does_not_listen_to_its_router_is_found_at_the_start() -> None:
    model = made(config_of("mixtral"), torch.float32)
    fixed = torch.tensor([0, 1])

    def deaf(inner: Any, hidden: Tensor, index: Tensor, gate: Tensor) -> Any:
        return inner(hidden, fixed.expand_as(index), torch.ones_like(gate))

    for layer in (0, 1):
        block: Any = model.get_submodule(f"model.layers.{layer}.mlp")
        block.experts.forward = partial(deaf, block.experts.forward)
    with pytest.raises(ConfigError, match="do not follow another choice"):
        experts_of(model)


def test_a_row_is_a_record_where_its_experts_are_different_ones() -> None:
    rows = torch.tensor([[2, 0], [0, 0], [-1, -1], [-1, 3], [3, 3], [7, 1]], dtype=torch.int32)
    assert is_recorded(rows).tolist() == [True, False, False, False, False, True]
    assert is_recorded(rows, 7).tolist() == [True, False, False, False, False, False]
