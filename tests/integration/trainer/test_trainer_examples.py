"""The examples of docs/tutorial/your_trainer.md and the loss of docs/guide/losses.md, as a reader would run them."""

from __future__ import annotations

import importlib
import re
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from daemon_runs import leading
from model_families import GEMMA2, WINDOWED
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TrainingArguments

import rlbuffer
from rlbuffer.testing import make_group
from rlbuffer.trainer.losses import TrainedTokens
from rlbuffer.weights.experts import experts_of
from rlbuffer.weights.model import TINY_QWEN3, model_from_config

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
CONFIG = rlbuffer.BatcherConfig(64, step_groups=2, max_age=8)
STEPS = 2


@pytest.fixture
def run(redis_url: str) -> Iterator[tuple[str, str]]:
    """(url, name) of a run with a batcher, and groups for STEPS steps."""
    name = f"examples-{uuid.uuid4().hex[:8]}"
    groups = [make_group(seed=seed, size=2, rewards=[0.0, 1.0]) for seed in range(2 * STEPS)]
    with rlbuffer.connect(redis_url, run=name) as buffer, leading(buffer, CONFIG):
        buffer.writer("w").push_many(groups)
        yield redis_url, name


def tiny() -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**TINY_QWEN3, "vocab_size": 256, "attention_dropout": 0.5})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


def trained(run: tuple[str, str]) -> int:
    with rlbuffer.connect(run[0], run=run[1]) as buffer:
        return buffer.store.trainer().trained


def example(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


def change(model: torch.nn.Module) -> torch.Tensor:
    """Movement of the parameters from the fresh model's."""
    pairs = zip(model.parameters(), tiny().parameters(), strict=True)
    return torch.cat([(ours - fresh).detach().reshape(-1) for ours, fresh in pairs])


def test_trainer_and_accelerate_make_the_same_updates_of_the_same_steps_without_dropout(
    run: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="accelerate comes with PEFT")
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "hf"),
        max_steps=STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        optim="adamw_torch",
        weight_decay=0.0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    by_trainer, by_accelerate = tiny(), tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own, about pinned memory and the like
        with rlbuffer.connect(run[0], run=run[1]) as buffer:
            example(monkeypatch, "hf_trainer").train(by_trainer, buffer, buffer.reader(), arguments)
        assert trained(run) == STEPS
        with rlbuffer.connect(run[0], run=run[1]) as buffer:  # from step 1 again
            example(monkeypatch, "accelerate_loop").train(by_accelerate, buffer, tmp_path, STEPS)
    assert trained(run) == STEPS
    ours, theirs = change(by_trainer), change(by_accelerate)
    assert float(ours.abs().max()) > 1e-4
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_step_that_trains_nothing_has_a_loss_of_0_and_leaves_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """`truncated = "mask"` makes one where every rollout was cut."""
    (rollout,) = make_group(size=1, lengths=[8]).rollouts
    nothing = replace(rollout, loss_mask=np.zeros(8, bool))
    model = tiny()
    loss = example(monkeypatch, "plain_loop").loss_of(
        model, rlbuffer.packing.pack([nothing], [1.0], row_tokens=16).to("cpu")
    )
    loss.backward()
    assert loss.item() == 0.0
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients, "DDP waits for a gradient of every rank"
    assert all(not gradient.any() for gradient in gradients)


def by_plain_loop(monkeypatch: pytest.MonkeyPatch, folder: Path, model: Any, micro_batch: rlbuffer.MicroBatch) -> None:
    example(monkeypatch, "plain_loop").loss_of(model, micro_batch.to("cpu")).backward()


def by_hf_trainer(monkeypatch: pytest.MonkeyPatch, folder: Path, model: Any, micro_batch: rlbuffer.MicroBatch) -> None:
    arguments = TrainingArguments(output_dir=str(folder), report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = example(monkeypatch, "hf_trainer").BufferTrainer(model, arguments)
    trainer.training_step(model, {"step": [micro_batch]})


def by_accelerate(monkeypatch: pytest.MonkeyPatch, folder: Path, model: Any, micro_batch: rlbuffer.MicroBatch) -> None:
    loop = example(monkeypatch, "accelerate_loop")
    accelerator = loop.Accelerator()
    accelerator.backward(loop.loss_of(accelerator.prepare(model), micro_batch.to(accelerator.device)))


Pass = Callable[[pytest.MonkeyPatch, Path, Any, rlbuffer.MicroBatch], None]
"""One micro-batch through an example's own forward and backward pass."""


@pytest.mark.parametrize(
    ("config", "trains"),
    [*((config, by_plain_loop) for config in WINDOWED), (GEMMA2, by_hf_trainer), (GEMMA2, by_accelerate)],
    ids=lambda value: value.__name__ if callable(value) else value["model_type"],
)
def test_an_examples_packed_row_has_the_logprobs_of_its_rollouts_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: Mapping[str, Any], trains: Pass
) -> None:
    """Logprobs as the model gave them inside the example, against a plain forward pass of each rollout."""
    if trains is not by_plain_loop:
        pytest.importorskip("accelerate", reason="accelerate comes with PEFT")
    torch.manual_seed(0)
    model = model_from_config({**config, "vocab_size": 256}).eval()
    rollouts = make_group(lengths=[20, 5, 13, 9]).rollouts
    micro_batch = rlbuffer.packing.pack(rollouts, [1.0, -1.0, 0.5, -0.5], row_tokens=64, pad_to_multiple_of=8)
    given: list[torch.Tensor] = []
    hook = model.register_forward_hook(lambda model, inputs, output: given.append(output.logits.detach()[0]))
    trains(monkeypatch, tmp_path, model, micro_batch)
    hook.remove()
    (packed,) = given
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        for rollout, logits in zip(rollouts, micro_batch.unpack(packed), strict=True):
            alone = model(input_ids=torch.tensor(rollout.tokens)[None].long(), use_cache=False).logits[0]
            assert float((alone.log_softmax(-1) - logits.log_softmax(-1)).abs().max()) < 1e-5


QWEN3_MOE = TINY_QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "vocab_size": 256,
}


def assert_trained_as_alone(
    url: str,
    groups: Sequence[rlbuffer.Group],
    model: torch.nn.Module,
    loss_of: Callable[[rlbuffer.MicroBatch], torch.Tensor],
) -> list[rlbuffer.MicroBatch]:
    """The gradient over a step of these groups on two ranks is that of each rollout by itself. -> its micro-batches."""
    name = f"examples-{uuid.uuid4().hex[:8]}"
    with ExitStack() as opened:
        writing, leads, *reading = (opened.enter_context(rlbuffer.connect(url, run=name)) for _ in range(4))
        opened.enter_context(leading(leads, rlbuffer.BatcherConfig(64, step_groups=len(groups), max_age=8)))
        writing.writer("w").push_many(groups)
        readers = [buffer.reader(rank, 2) for rank, buffer in enumerate(reading)]
        batches = [mb.to("cpu") for reader in readers for mb in next(iter(reader.steps()))]
    rollouts = {(g.group_id, r.rollout_id): r for g in groups for r in g.rollouts}
    samples = [sample for mb in batches for sample in mb.samples]
    assert len(samples) == len(rollouts)
    alone = [
        replace(
            rlbuffer.packing.pack([rollouts[sample.group_id, sample.rollout_id]], [sample.advantage], row_tokens=64),
            normalizers=batches[0].normalizers,
        ).to("cpu")
        for sample in samples
    ]
    assert apart(gradient(model, map(loss_of, batches)), gradient(model, map(loss_of, alone))) < 1e-4
    return batches


def gradient(model: torch.nn.Module, losses: Iterable[torch.Tensor]) -> torch.Tensor:
    """Of the sum of these losses, as one vector."""
    model.zero_grad()
    torch.stack(list(losses)).sum().backward()
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()])


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative distance."""
    return float((ours - theirs).norm() / theirs.norm())


def two_groups() -> list[rlbuffer.Group]:
    return [make_group(seed=seed, lengths=[9, 12, 7, 12], rewards=[0.0, 1.0, 0.5, 0.0]) for seed in range(2)]


def test_the_example_of_images_trains_each_token_with_the_images_of_its_own_rollout(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = example(monkeypatch, "images")
    rng = np.random.default_rng(1)

    def seeing(rollout: rlbuffer.Rollout, count: int) -> rlbuffer.Rollout:
        tokens = rollout.tokens.copy()
        tokens[tokens == images.IMAGE] = 0
        tokens[:count] = images.IMAGE
        pixels = {"pixels": rng.normal(size=(count, 4)).astype(np.float32)} if count else {}
        return replace(rollout, tokens=tokens, attachments=pixels)

    groups = [replace(group, rollouts=tuple(map(seeing, group.rollouts, (2, 1, 0, 3)))) for group in two_groups()]
    model = images.Sees(tiny(), 4)
    batches = assert_trained_as_alone(redis_url, groups, model, partial(images.loss_of, model))
    assert sum(len(mb.attachments["pixels"]) for mb in batches) == 12
    assert model.vision.weight.grad.any()


def of_turns(images: int, *turns: tuple[list[int], bool]) -> rlbuffer.Rollout:
    """Turns as (token ids, whether they were sampled), with so many images of 3 pixels."""
    told = [{"role": "r", "tokens": ids} | ({"logprobs": [-0.5] * len(ids)} if drawn else {}) for ids, drawn in turns]
    pixels = {"pixels": np.ones((images, 3), np.float32)} if images else {}
    return rlbuffer.Rollout.from_turns(told, reward=1.0, policy_version=0, attachments=pixels)


def of_two_sequences(image: int) -> rlbuffer.Rollout:
    """The second begins with what the first one sampled, which is masked there."""
    first, second = (
        of_turns(1, ([1, image], False), ([image, 3], True)),
        of_turns(1, ([1, image], False), ([image, 3], True), ([4], False), ([image], True)),
    )
    sequences = [
        rlbuffer.TokenSequence(
            tokens=r.tokens,
            loss_mask=r.loss_mask,
            logprobs=r.logprobs,
            version_spans=r.version_spans,
            attachments=r.attachments,
        )
        for r in (first, second)
    ]
    return rlbuffer.Rollout.from_sequences(sequences, reward=1.0)


SEEN: dict[str, tuple[Callable[[int], rlbuffer.Rollout], list[list[int]]]] = {
    "sampled as well": (lambda i: of_turns(1, ([1, i, 2], False), ([3, i, 4], True)), [[1]]),
    "sampled alone": (lambda i: of_turns(0, ([1, 2], False), ([i, i], True)), [[]]),
    "several": (lambda i: of_turns(3, ([i, 2, i, i], False), ([i], True)), [[0, 2, 3]]),
    "in a later turn": (lambda i: of_turns(2, ([i], False), ([i, 5], True), ([6, i], False), ([7], True)), [[0, 4]]),
    "a word of the prompt": (lambda i: of_turns(0, ([1, i], False), ([2], True)), [[]]),
    "two sequences": (of_two_sequences, [[1], [1]]),
}


@pytest.mark.parametrize("case", SEEN)
def test_images_stand_in_tokens_of_the_context_alone(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    images = example(monkeypatch, "images")
    make, expected = SEEN[case]
    beside = SEEN["several"]
    rollouts = [beside[0](images.IMAGE), make(images.IMAGE)]  # so that a micro-batch has images in any case
    mb = rlbuffer.packing.pack(rollouts, [1.0, 1.0], row_tokens=64).to("cpu")
    places = [piece.nonzero()[:, 0].tolist() for piece in mb.unpack(images.places_of(mb))]
    assert places == [*beside[1], *expected]
    assert torch.isfinite(images.loss_of(images.Sees(tiny(), 3), mb))


@pytest.mark.parametrize("count", [1, 3])
def test_images_that_are_not_as_many_as_their_places_are_named(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    images = example(monkeypatch, "images")
    rollout = of_turns(count, ([1, images.IMAGE, images.IMAGE], False), ([images.IMAGE], True))
    mb = rlbuffer.packing.pack([rollout], [1.0], row_tokens=64).to("cpu")
    with pytest.raises(ValueError, match=f"has {count} images, and 2 tokens {images.IMAGE} in its context"):
        images.places_of(mb)


def test_a_loop_of_ones_own_computes_with_the_experts_that_the_engine_took(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_of = example(monkeypatch, "plain_loop").loss_of
    torch.manual_seed(0)
    model = model_from_config(QWEN3_MOE).eval()
    engine = experts_of(model)
    rng = np.random.default_rng(1)

    def sampled(rollout: rlbuffer.Rollout, is_known: bool) -> rlbuffer.Rollout:
        """An engine's choice, which is not this model's; of the last token none is known."""
        shape = len(rollout.tokens), engine.layers
        experts = np.stack([rng.permutation(engine.num_experts)[:2] for _ in range(shape[0] * shape[1])]).reshape(
            *shape, 2
        )
        experts[-1] = -1
        return replace(rollout, columns={"routed_experts": experts.astype(np.int16)} if is_known else {})

    groups = [
        replace(group, rollouts=tuple(map(sampled, group.rollouts, (True, False, True, True))))
        for group in two_groups()
    ]

    def replayed(mb: rlbuffer.MicroBatch) -> torch.Tensor:
        with engine.replaying(mb.columns.get("routed_experts")):
            return loss_of(model, mb)

    batches = assert_trained_as_alone(redis_url, groups, model, replayed)
    assert (
        apart(gradient(model, map(replayed, batches)), gradient(model, [loss_of(model, mb) for mb in batches])) > 0.01
    )
    for mb in batches:
        with engine.replaying(mb.columns.get("routed_experts")), engine.recording() as recording:
            loss_of(model, mb)
        pairs = zip(mb.unpack(recording.rows()), mb.unpack(mb.columns["routed_experts"].short()), strict=True)
        for sample, (took, wanted) in zip(mb.samples, pairs, strict=True):
            assert torch.equal(took[:-1], wanted[:-1]) == (sample.rollout_id != f"{sample.group_id}/1")


def test_the_pages_loss_can_be_called_and_its_links_lead_somewhere() -> None:
    page = (EXAMPLES.parent / "guide" / "losses.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "losses.md", "exec"), names)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = TrainedTokens(
        logprobs=logprobs,
        entropy=torch.zeros(2),
        inference_logprobs=torch.tensor([-1.0, -2.0]),
        advantages=torch.tensor([1.0, -2.0]),
        rollout=torch.tensor([0, 0]),
    )
    names["loss"](tokens, {}).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 2.0]
    pages = [path.read_text() for path in EXAMPLES.parent.rglob("*.md")]
    links = {link for text in pages for link in re.findall(r"\]\(\.\./examples/([a-z_]+\.py)\)", text)}
    assert sorted(links) == sorted(path.name for path in EXAMPLES.glob("*.py"))
