"""A model's directory as people have it: weights, tokenizer with a chat template, generation config, and what else lies
there."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rlbuffer.weights.model import model_from_config

WORDS = ["<unk>", "<|end|>", "<|user|>", "<|assistant|>", "Hi", "there", "you", "yes", "no", "a", "b", "c"]
CHAT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": None,
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GENERATION = {"do_sample": True, "temperature": 0.5, "eos_token_id": 1}
OF_THE_TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
COMPANIONS = {*OF_THE_TOKENIZER, "generation_config.json", "additional_chat_templates/tools.jinja", "modeling_own.py"}
STRAY = ("README.md", "optimizer.pt", "trainer_state.json", "training_args.bin", "train.json", "scheduler.pt")
MESSAGES = [{"role": "user", "content": "Hi there"}]
CHAT_IDS = [2, 4, 5, 1, 3]
"""`MESSAGES` by the template, with the beginning of an answer."""


def write_tokenizer(directory: Path, template: str = TEMPLATE) -> None:
    """A tokenizer of twelve words."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|end|>", chat_template=template
    )
    fast.save_pretrained(directory)


def write_chat_model(directory: Path, seed: int = 0) -> Path:
    """The directory of a small model, with its companions and with files that no version needs."""
    torch.manual_seed(seed)
    model_from_config(CHAT_CONFIG).save_pretrained(directory)
    write_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))
    (directory / "modeling_own.py").write_text("")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tools.jinja").write_text(TEMPLATE)
    (directory / "model.safetensors.index.json").write_text("{}")
    for name in STRAY:
        (directory / name).write_text("stray")
    return directory


def files_of(directory: Path) -> set[str]:
    """Names of all files in a directory, and below it."""
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def write_sft_adapter(directory: Path, base: Path, *, template: str = TEMPLATE, **options: Any) -> Path:
    """An adapter as an SFT run with PEFT leaves it: its own tokenizer beside it, and no weight of it is zero."""
    import peft

    model: Any = AutoModelForCausalLM.from_pretrained(base)
    chosen = {"r": 3, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about a name that PEFT uses
        adapted = peft.get_peft_model(model, peft.LoraConfig(**chosen))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(directory)
    write_tokenizer(directory, template)
    (directory / "optimizer.pt").write_text("stray")
    return directory
