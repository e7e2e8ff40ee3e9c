"""Text for envs whose prompts are written, not numbered: a tokenizer for prompts, and for people who read rollouts.

Only a prompt is ever tokenised, before anything is sampled. Sampled tokens are decoded for rewards and for people,
and never encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import ConfigError


class Text:
    """A tokenizer from a local directory.

    Args:
        tokenizer: directory as `save_pretrained` writes it; the model's own.
        chat: prompts are rendered with the tokenizer's chat template, as a user's turn; None: when it has one.
        system: a system turn before every prompt; only with a chat template.
        setting: what the directory is called in messages.

    Raises:
        ConfigError: there is no tokenizer, no chat template, or no end token.
    """

    def __init__(
        self, tokenizer: str, *, chat: bool | None = None, system: str = "", setting: str = "env_options.tokenizer"
    ) -> None:
        directory = Path(tokenizer).expanduser()
        if not directory.is_dir():
            raise ConfigError(f"tokenizer = {tokenizer!r} is not a directory", setting=setting)
        try:
            from transformers import AutoTokenizer

            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except ImportError as error:
            raise ConfigError(f"a tokenizer needs transformers: pip install 'rlbuffer[train]' ({error})") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"tokenizer = {tokenizer!r} cannot be loaded: {error}", setting=setting) from error
        has_template = bool(getattr(self._tokenizer, "chat_template", None))
        if chat and not has_template:
            raise ConfigError(f"tokenizer = {tokenizer!r} has no chat template", setting=setting)
        self._chat = has_template if chat is None else chat
        if system and not self._chat:
            raise ConfigError("a system prompt needs a chat template", setting="env_options.system")
        self._system = system
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(f"tokenizer = {tokenizer!r} names no end token (eos_token)", setting=setting)
        self.eos_token_ids: tuple[int, ...] = (int(self._tokenizer.eos_token_id),)
        """Sampling one of these ends a completion."""
        self.vocab_size = len(self._tokenizer)
        """Token ids are below this."""

    def prompt(self, text: str) -> NDArray[np.int32]:
        """A prompt as token ids [P] int32, with the chat template's frame around it when there is one."""
        if not self._chat:
            return np.asarray(self._tokenizer.encode(text), np.int32)
        turns = [{"role": "system", "content": self._system}] if self._system else []
        rendered = self._tokenizer.apply_chat_template(
            [*turns, {"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        # The template has written the special tokens already.
        return np.asarray(self._tokenizer.encode(rendered, add_special_tokens=False), np.int32)

    def render(self, tokens: NDArray[np.int32]) -> str:
        """Tokens as text for people, special tokens included."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    def answer(self, tokens: NDArray[np.int32]) -> str:
        """A completion as text for rewards, without special tokens."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


def ids_as_text(tokens: NDArray[np.int32] | Sequence[int]) -> str:
    """Token ids as text where there is no tokenizer: the numbers with spaces between them."""
    return " ".join(str(int(token)) for token in tokens)
