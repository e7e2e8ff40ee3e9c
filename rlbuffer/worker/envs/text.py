"""Text for envs whose prompts are written, not numbered: a tokenizer for prompts, and for people who read rollouts.

Only a prompt is ever tokenised, before anything is sampled. Sampled tokens are decoded for rewards and for people,
and never encoded again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import ConfigError, installed_by

SETTING = "env_options.tokenizer"


class Text:
    """A tokenizer from a local directory.

    Args:
        tokenizer: directory as `save_pretrained` writes it; the model's own.
        chat: prompts are rendered with the tokenizer's chat template, as a user's turn; None: when it has one.
        system: a system turn before every prompt; only with a chat template.

    Raises:
        ConfigError: there is no tokenizer, no chat template, or no end token.
    """

    def __init__(
        self,
        tokenizer: str | Path,
        *,
        chat: bool | None = None,
        system: str = "",
    ) -> None:
        directory = Path(tokenizer).expanduser()
        if not directory.is_dir():
            raise ConfigError(f"tokenizer = {str(tokenizer)!r} is not a directory", setting=SETTING)
        try:
            from transformers import AutoTokenizer

            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except ImportError as error:
            raise ConfigError(f"a tokenizer needs transformers: {installed_by('train')} ({error})") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"tokenizer = {str(tokenizer)!r} cannot be loaded: {error}", setting=SETTING) from error
        has_template = bool(getattr(self._tokenizer, "chat_template", None))
        if chat and not has_template:
            raise ConfigError(f"tokenizer = {str(tokenizer)!r} has no chat template", setting=SETTING)
        self._chat = has_template if chat is None else chat
        if system and not self._chat:
            raise ConfigError("a system prompt needs a chat template", setting="env_options.system")
        self._system = system
        eos_token = self._tokenizer.eos_token_id
        ends = dict.fromkeys([*[eos_token] * (eos_token is not None), *_generation_ends(directory)])
        if not ends:
            raise ConfigError(f"tokenizer = {str(tokenizer)!r} names no end token (eos_token)", setting=SETTING)
        self.eos_token_ids: tuple[int, ...] = tuple(map(int, ends))
        """Sampling one of these ends a completion: the tokenizer's, and those of ``generation_config.json``."""
        self.vocab_size = len(self._tokenizer)
        """Token ids are below this."""

    def prompt(self, prompt: str | Sequence[Mapping[str, Any]] | list[int]) -> NDArray[np.int32]:
        """A prompt, text or messages, as token ids [P] int32, with the chat template's frame around it when there is
        one; ids as they are. Raises ConfigError for messages without a template, or with a system turn beside that of
        the settings."""
        if is_ids(prompt):
            return np.asarray(prompt, np.int32)
        if not self._chat:
            if not isinstance(prompt, str):
                raise ConfigError("a prompt of messages needs a chat template", setting="env_options.chat")
            return np.asarray(self._tokenizer.encode(prompt), np.int32)
        messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self._system:
            if messages[0]["role"] == "system":
                raise ConfigError(
                    "the prompt has a system turn, and so have the settings", setting="env_options.system"
                )
            messages.insert(0, {"role": "system", "content": self._system})
        rendered = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        # The template has written the special tokens already.
        return np.asarray(self._tokenizer.encode(rendered, add_special_tokens=False), np.int32)

    def render(self, tokens: NDArray[np.int32]) -> str:
        """Tokens as text for people, special tokens included."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    def answer(self, tokens: NDArray[np.int32]) -> str:
        """A completion as text for rewards, without special tokens and ends."""
        kept = [token for token in tokens.tolist() if token not in self.eos_token_ids]
        return str(self._tokenizer.decode(kept, skip_special_tokens=True))


def _generation_ends(directory: Path) -> list[int]:
    """The end tokens that ``generation_config.json`` lists: a model may end a turn with others than its tokenizer's."""
    file = directory / "generation_config.json"
    if not file.is_file():
        return []
    try:
        ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        if not all(type(end) is int for end in ends):
            raise ValueError(f"eos_token_id must be token ids, got {ends}")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", setting=SETTING) from error
    return ends


class Ids:
    """The ways of :class:`Text` where there is no tokenizer: prompts are ids, and text is ids with spaces between."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size, self.eos_token_ids = vocab_size, tuple(eos_token_ids)

    def prompt(self, prompt: Any) -> NDArray[np.int32]:
        return np.asarray(prompt, np.int32)

    def render(self, tokens: NDArray[np.int32]) -> str:
        return " ".join(map(str, tokens.tolist()))

    def answer(self, tokens: NDArray[np.int32]) -> str:
        return " ".join(str(token) for token in tokens.tolist() if token not in self.eos_token_ids)


def is_ids(prompt: object) -> TypeGuard[list[int]]:
    """A prompt is token ids."""
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
