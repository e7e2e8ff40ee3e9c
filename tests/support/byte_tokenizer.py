"""A tokenizer of single bytes, as ``tokenizer.json``: made without transformers; a character may be several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"


def save_byte_tokenizer(directory: Path, special: Sequence[str] = (END,)) -> Tokenizer:
    """Writes it into `directory`. Its last tokens are special."""
    vocabulary = {text: number for number, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def ids(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    return np.array(tokenizer.encode(text).ids, np.int32)
