"""Training begins with the adapter of an SFT run: its rank, scale, modules and weights, and no version is without."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from chat_model import (
    CHAT_IDS,
    COMPANIONS,
    MESSAGES,
    OF_THE_TOKENIZER,
    files_of,
    write_chat_model,
    write_sft_adapter,
)
from safetensors.torch import load_file, save_file
from test_model_families import published, run, settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlbuffer.config.settings import RunSettings, ScoreSettings
from rlbuffer.config.trainer import LoraSettings
from rlbuffer.errors import ConfigError
from rlbuffer.records.rollout import Rollout
from rlbuffer.scorer.reference import make_reference
from rlbuffer.trainer.model.lora import add_adapter
from rlbuffer.weights.model import build_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TEMPLATE = "{{ messages[0].content }} <|assistant|>"
IDS = torch.tensor([[*CHAT_IDS, 6, 7]])


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """(base, adapter)."""
    base = write_chat_model(tmp_path / "base")
    return base, write_sft_adapter(tmp_path / "sft", base, template=TEMPLATE)


def begun(output: Path, base: Path, adapter: Path, **trainer: Any) -> RunSettings:
    return settings(output, {}, lora={"path": str(adapter)}, **trainer).model_copy(
        update={"model": RunSettings(model={"path": str(base)}).model}
    )


def by_peft(base: str | Path, adapter: Path) -> torch.Tensor:
    """Logits of an adapter, as the library and PEFT compute them."""
    model: Any = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(IDS).logits
    return logits


@pytest.mark.parametrize("is_scaled_by_root", [False, True], ids=["plain", "rslora"])
def test_version_0_is_the_adapter_and_the_versions_after_it_train_it(tmp_path: Path, is_scaled_by_root: bool) -> None:
    base = write_chat_model(tmp_path / "base")
    adapter = write_sft_adapter(tmp_path / "sft", base, template=TEMPLATE, use_rslora=is_scaled_by_root)
    run(begun(tmp_path / "out", base, adapter))
    first, last = (published(tmp_path / "out", version) for version in (0, 3))
    sft, ours, trained = (load_file(path / "adapter_model.safetensors") for path in (adapter, first, last))
    assert sft.keys() == ours.keys() == trained.keys()
    assert all(torch.equal(sft[name], ours[name]) for name in sft)
    assert not any(torch.equal(sft[name], trained[name]) for name in sft)

    config = json.loads((last / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (3, 12, is_scaled_by_root)
    assert sorted(config["target_modules"]) == ["down_proj", "q_proj"]
    torch.testing.assert_close(by_peft(config["base_model_name_or_path"], first), by_peft(base, adapter))


def test_versions_of_an_adapter_open_with_its_own_template(tmp_path: Path, places: tuple[Path, Path]) -> None:
    run(begun(tmp_path / "out", *places, steps=1))
    version, (base,) = published(tmp_path / "out", 1), (tmp_path / "out" / "weights").glob("base-*")
    own = {"adapter_config.json", "adapter_model.safetensors", "base.json", "files.json"}
    assert files_of(version) == own | OF_THE_TOKENIZER | {"generation_config.json", "modeling_own.py"}
    assert files_of(base) == COMPANIONS | {"model.safetensors", "config.json", "files.json"}
    assert AutoTokenizer.from_pretrained(version).chat_template == TEMPLATE
    assert AutoTokenizer.from_pretrained(base).apply_chat_template(MESSAGES, tokenize=False) != "Hi there <|assistant|>"
    whole = AutoModelForCausalLM.from_pretrained(version).eval()  # by the base that its config names
    with torch.no_grad():
        logits = whole(IDS).logits
    torch.testing.assert_close(logits, by_peft(base, version))


def test_a_run_goes_on_from_its_checkpoint_and_not_from_the_adapter(tmp_path: Path, places: tuple[Path, Path]) -> None:
    whole = run(begun(tmp_path / "whole", *places))
    run(begun(tmp_path / "halves", *places, steps=2))
    file = places[1] / "adapter_model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    halves = run(begun(tmp_path / "halves", *places))
    assert [record["loss"] for record in halves] == [record["loss"] for record in whole]


def test_the_initial_model_of_a_scorer_has_the_adapter(tmp_path: Path, places: tuple[Path, Path]) -> None:
    reference = make_reference(begun(tmp_path, *places), ScoreSettings(model="initial", device="cpu"))
    rollout = Rollout.from_completion(
        prompt_ids=CHAT_IDS, token_ids=[6, 7], logprobs=[-1.0, -1.0], reward=0.0, policy_version=0
    )
    (found,) = reference.logprobs([rollout])
    expected = torch.log_softmax(by_peft(*places)[0], -1)
    by_hand = [expected[4, 6], expected[5, 7]]  # at t: of token t + 1
    torch.testing.assert_close(torch.from_numpy(found[5:]), torch.stack(by_hand))


def config(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(directory: Path) -> None:
        tensors = load_file(directory / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, directory / "adapter_model.safetensors")

    return changed


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def pickled(directory: Path) -> None:
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "has no adapter_config.json"),
    "torn config": (lambda d: (d / "adapter_config.json").write_text("{"), "adapter_config.json cannot be read"),
    "a list": (lambda d: (d / "adapter_config.json").write_text("[]"), "adapter_config.json cannot be read"),
    "another type": (config(peft_type="IA3"), "is an adapter of type IA3"),
    "no type": (config(peft_type=None), "is an adapter of type None"),
    "no rank": (config(r=None), "says no rank"),
    "rank 0": (config(r=0), "says no rank"),
    "a rank that is text": (config(r="8"), "says no rank"),
    "no alpha": (config(lora_alpha=None), "says no alpha"),
    "no targets": (config(target_modules=None), "says no targets"),
    "dora": (config(use_dora=True), "use_dora = True"),
    "modules to save": (config(modules_to_save=["lm_head"]), "modules_to_save = ['lm_head']"),
    "rank pattern": (config(rank_pattern={"q_proj": 8}), "rank_pattern = {'q_proj': 8}"),
    "alpha pattern": (config(alpha_pattern={"q_proj": 8}), "alpha_pattern = {'q_proj': 8}"),
    "bias": (config(bias="all"), "bias = 'all'"),
    "bias of its own": (config(lora_bias=True), "lora_bias = True"),
    "pissa": (config(init_lora_weights="pissa"), "init_lora_weights = 'pissa'"),
    "pickled": (pickled, "has no adapter_model.safetensors; a pickled one"),
    "empty file": (lambda d: (d / "adapter_model.safetensors").write_bytes(b""), "header"),
    "a tensor is missing": (weights(lambda t: t.pop(A)), f"they lack {A}"),
    "a tensor too many": (weights(lambda t: t.update({"x": torch.ones(1)})), "have unknown x"),
    "another shape": (weights(lambda t: t.update({A: torch.ones(3, 5)})), f"{A} has shape [3, 5]"),
    "not finite": (weights(lambda t: t[A].fill_(float("nan"))), f"not finite: {A}"),
    "other modules": (config(target_modules=["v_proj"]), "have unknown base_model"),
    "modules that are not there": (config(target_modules=["nothing"]), "nothing"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_adapter_that_training_cannot_begin_with_is_refused_in_one_sentence(
    tmp_path: Path, places: tuple[Path, Path], case: str
) -> None:
    base, adapter = places
    change, reason = WRONG[case]
    change(adapter)
    model = build_model(RunSettings(model={"path": str(base)}).model, seed=0)
    with pytest.raises(ConfigError) as refused:
        add_adapter(model, LoraSettings(path=str(adapter)), seed=0)
    print(refused.value)
    assert reason in str(refused.value)
    assert refused.value.setting == "trainer.lora.path"


def test_a_whole_model_is_no_adapter_and_an_adapter_no_model(places: tuple[Path, Path]) -> None:
    base, adapter = places
    model = build_model(RunSettings(model={"path": str(base)}).model, seed=0)
    with pytest.raises(ConfigError, match="is a whole model: give it as"):
        add_adapter(model, LoraSettings(path=str(base)), seed=0)
    with pytest.raises(ConfigError) as refused:
        build_model(RunSettings(model={"path": str(adapter)}).model, seed=0)
    assert str(refused.value) == (
        f"model.path: {adapter} is a LoRA adapter of {base}, not a whole model. "
        f'Set model.path = "{base}" and trainer.lora.path = "{adapter}"'
    )
