"""``jsonl``: a data set from a file, one JSON object per line, every prompt once an epoch.

    {"prompt": "What is 3 + 4?", "answer": "7", "id": "sum-1", "target_length": 40}
    {"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}
    {"prompt": [11, 4, 8], "answer": "7"}

A prompt is text or a list of messages, which need a tokenizer, or token ids. ``id`` names it to people (else its line
does), ``target_length`` is for length rewards; any further field goes along as metadata. A file whose fields have other
names is read with ``fields = { prompt = "question", answer = "solution" }``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import ConfigError
from rlbuffer.state.text import no_such_option
from rlbuffer.worker.envs.order import PromptOrder
from rlbuffer.worker.envs.prompt import Prompt, Score
from rlbuffer.worker.envs.rewards import Answered, make_rewards, not_comparable
from rlbuffer.worker.envs.text import Text, ids_as_text

NO_TOKENIZER = "jsonl: without a tokenizer the env needs vocab_size and eos_token_ids"
FIELDS = ("prompt", "answer", "id")
"""Fields of a line with a meaning of their own."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the file, whatever its fields are called there."""

    number: int
    values: Mapping[str, Any]
    names: Mapping[str, str]
    """Each of :data:`FIELDS` -> its name in the file."""

    @property
    def prompt(self) -> Any:
        """Text, messages or token ids."""
        return self.values.get(self.names["prompt"])

    @property
    def answer(self) -> Any:
        """The reference answer; None where there is none."""
        return self.values.get(self.names["answer"])

    @property
    def prompt_id(self) -> str:
        """The prompt's name for people."""
        return str(self.values.get(self.names["id"], f"line-{self.number}"))

    @property
    def further(self) -> dict[str, Any]:
        """The fields without a meaning of their own."""
        own = self.names.values()
        return {key: value for key, value in self.values.items() if key not in own}

    def wrong(self, vocab_size: int, *, is_text: bool, compares: bool) -> str:
        """The mistake in it; "" when there is none. `compares`: a reward needs the answer."""
        for field, name in self.names.items():
            if name not in self.values and (field == "prompt" or name != field):
                return f"there is no field {name!r}; {self._say_which(field)}"
        wrong = _wrong_prompt(self.prompt, vocab_size, is_text=is_text)
        if not wrong and compares and (why := not_comparable(self.answer)):
            wrong = f"{why}: field {self.names['answer']!r}; {self._say_which('answer')}"
        return wrong

    def _say_which(self, field: str) -> str:
        return (
            f'the line has {", ".join(map(repr, self.values))} (env_options.fields = {{ {field} = "NAME" }} says which)'
        )


class JsonLines:
    """Ticket n samples the prompt at place ``n mod N`` of epoch ``n div N``'s order.

    All workers of a run need the same file: `digest`, which goes along as metadata, tells whether they had it.

    Args:
        path: the file.
        name: the env's name.
        fields: the names of ``prompt``, ``answer`` and ``id`` in the file, where they are others.
        tokenizer: directory of the model's tokenizer; without one prompts are token ids, and an answer that rewards
            compare is ids with spaces between them.
        chat, system: how text becomes a prompt, see :class:`rlbuffer.worker.envs.text.Text`.
        rewards: see :func:`rlbuffer.worker.envs.rewards.make_rewards`.
        length: a length reward: ``form``, ``target``, ``coefficient``, ``slack``.
        on_error: what an exception in a reward function costs: ``fail`` (the rollout) | ``zero``.
        max_new_tokens: longest completion.
        seed, shuffle: the order of prompts.
        passes: how often every prompt is sampled before the env is done; 0: it has no end.
        vocab_size, eos_token_ids: of the model; with a tokenizer its own.

    Raises:
        ConfigError: the file or an option is not as it must be; a bad line is named with its number.
    """

    def __init__(
        self,
        *,
        path: str,
        name: str = "jsonl",
        fields: Mapping[str, str] | None = None,
        tokenizer: str = "",
        chat: bool | None = None,
        system: str = "",
        rewards: Mapping[str, Any] | None = None,
        length: Mapping[str, Any] | None = None,
        on_error: str = "fail",
        max_new_tokens: int = 1024,
        seed: int = 0,
        shuffle: bool = True,
        passes: int = 0,
        vocab_size: int = 0,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._text = Text(tokenizer, chat=chat, system=system) if tokenizer else None
        if self._text is None and not (vocab_size and eos_token_ids):
            raise ConfigError(NO_TOKENIZER, setting="env_options")
        self.vocab_size = vocab_size or (self._text.vocab_size if self._text else 0)
        self.eos_token_ids = tuple(eos_token_ids) or (self._text.eos_token_ids if self._text else ())
        self.max_new_tokens = max_new_tokens
        self._rewards = make_rewards(rewards or {"exact": 1.0}, length=length, on_error=on_error)
        self._path = path
        self._lines, self.digest = _read(Path(path).expanduser(), fields)
        for line in self._lines:
            wrong = line.wrong(self.vocab_size, is_text=self._text is not None, compares=self._rewards.compares)
            if wrong:
                raise ConfigError(f"{path}:{line.number}: {wrong}", setting="env_options.path")
        self._tokens(self._lines[0].prompt)  # a template that cannot be used is refused at once
        self._order = PromptOrder(len(self._lines), seed=seed, shuffle=shuffle, passes=passes)
        self.tickets = self._order.tickets

    def prompt(self, number: int) -> Prompt:
        epoch, index = self._order.place(number)
        line = self._lines[index]
        return Prompt(
            prompt_id=line.prompt_id,
            tokens=self._tokens(line.prompt),
            answer=line.answer,
            metadata={**line.further, "epoch": epoch, "data": self.digest},
            place=f"{self._path}:{line.number}",
        )

    def score(self, prompt: Prompt, tokens: NDArray[np.int32], *, finish_reason: str) -> Score:
        return self._rewards.score(
            Answered(prompt=prompt, tokens=tokens, finish_reason=finish_reason, render=self._answer)
        )

    def render(self, tokens: NDArray[np.int32]) -> str:
        return self._text.render(tokens) if self._text else ids_as_text(tokens)

    def _answer(self, tokens: NDArray[np.int32]) -> str:
        if self._text:
            return self._text.answer(tokens)
        return ids_as_text([token for token in tokens.tolist() if token not in self.eos_token_ids])

    def _tokens(self, prompt: str | list[Any]) -> NDArray[np.int32]:
        return np.asarray(prompt, np.int32) if _is_ids(prompt) else cast(Text, self._text).prompt(prompt)


def _wrong_prompt(prompt: object, vocab_size: int, *, is_text: bool) -> str:
    """The mistake in a line's prompt; "" when there is none."""
    if _is_ids(prompt):
        outside = [token for token in prompt if not 0 <= token < vocab_size]
        return f"token id {outside[0]} is not in 0-{vocab_size - 1}" if outside else ""
    is_messages = isinstance(prompt, list) and prompt and all(isinstance(message, Mapping) for message in prompt)
    if not isinstance(prompt, str) and not is_messages:
        return f"prompt must be text, messages or token ids, got {str(prompt)[:40]!r}"
    if not is_text:
        return f"a prompt of {'messages' if is_messages else 'text'} needs a tokenizer"
    if is_messages:
        return _wrong_messages(cast(list[Mapping[str, Any]], prompt))
    return "" if prompt else "an empty prompt"


def _wrong_messages(messages: Sequence[Mapping[str, Any]]) -> str:
    for message in messages:
        if not all(isinstance(message.get(name), str) for name in ("role", "content")):
            return f"a message has role and content, both text, got {str(dict(message))[:60]!r}"
    if messages[-1]["role"] == "assistant":
        return "the prompt's last message is the assistant's, which the policy shall write: is it the answer?"
    return ""


def _is_ids(prompt: object) -> TypeGuard[list[int]]:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def _names(fields: object) -> Mapping[str, str]:
    """Each of :data:`FIELDS` -> its name in the file."""
    given = {} if fields is None else fields
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given.values()):
        raise ConfigError(f'fields = {fields!r} is a table: {{ answer = "NAME" }}', setting="env_options.fields")
    if unknown := no_such_option("fields", given, FIELDS):
        raise ConfigError(unknown, setting="env_options.fields")
    return {field: given.get(field, field) for field in FIELDS}


def _read(path: Path, fields: object) -> tuple[list[Line], str]:
    """Returns every line that is not empty, and the digest of the file."""
    names = _names(fields)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", setting="env_options.path") from error
    lines: list[Line] = []
    for number, text in enumerate(data.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}", setting="env_options.path") from error
        if not isinstance(line, dict):
            raise ConfigError(f"{path}:{number}: not a JSON object", setting="env_options.path")
        lines.append(Line(number, line, names))
    if not lines:
        raise ConfigError(f"{path} holds no prompt", setting="env_options.path")
    return lines, hashlib.sha256(data).hexdigest()[:12]
