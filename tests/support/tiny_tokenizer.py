"""A tokenizer of single characters, made on the spot: text envs are tested without a download."""

from __future__ import annotations

import string
from pathlib import Path

CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
SPECIAL = (
    *("<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<think>", "</think>"),
    *("<tool_response>", "</tool_response>"),
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(directory: Path, *, template: str | None = TEMPLATE) -> Path:
    """Writes the tokenizer into `directory`; `template` None: without a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL[1:2]),
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    # Special in name, but kept in what rewards see, as Qwen's are.
    fast.add_tokens(list(SPECIAL[4:]))
    fast.save_pretrained(directory)
    return directory
