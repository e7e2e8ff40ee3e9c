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
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import StringConstraints, validate_call

from rlbuffer.config.table import Count, PathText
from rlbuffer.errors import ConfigError, InvalidRollout
from rlbuffer.process.inputs import opened
from rlbuffer.records.checks import shown
from rlbuffer.worker.envs.order import Passes, PromptOrder
from rlbuffer.worker.envs.prompt import Prompt, Score
from rlbuffer.worker.envs.rewards import Answered, OnError, OptionalLength, make_rewards, not_comparable
from rlbuffer.worker.envs.text import Ids, Text, is_ids

Known = Literal["prompt", "answer", "id"]
FIELDS: tuple[Known, ...] = get_args(Known)
"""Fields of a line with a meaning of their own."""
PROMPT = "token ids, or with a tokenizer text or messages (role and content, the last one not the assistant's)"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the file, whatever its fields are called there."""

    number: int
    prompt: Any
    """Text, messages or token ids."""
    answer: Any
    """The reference answer; None where there is none."""
    prompt_id: str
    further: Mapping[str, Any]
    """The fields without a meaning of their own."""


class JsonLines:
    """Ticket n samples the prompt at place ``n mod N`` of epoch ``n div N``'s order.

    All workers of a run need the same file: `digest`, which goes along as metadata, tells whether they had it.

    Args:
        path: the file, which may be compressed (gzip, bzip2, xz).
        name: the env's name.
        fields: the names of ``prompt``, ``answer`` and ``id`` in the file, where they are others.
        tokenizer: directory of the model's tokenizer; a worker takes that of `model.path` where none is named. Without
            one prompts are token ids, and an answer that rewards compare is ids with spaces between them.
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

    @validate_call
    def __init__(
        self,
        *,
        path: PathText,
        name: str = "jsonl",
        fields: Mapping[Known, Annotated[str, StringConstraints(min_length=1)]] | None = None,
        tokenizer: PathText = "",
        chat: bool | None = None,
        system: str = "",
        rewards: Mapping[str, Any] | None = None,
        length: OptionalLength = None,
        on_error: OnError = "fail",
        max_new_tokens: Count = 1024,
        seed: int = 0,
        shuffle: bool = True,
        passes: Passes = 0,
        vocab_size: int = 0,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        if not tokenizer and not (vocab_size and eos_token_ids):
            raise ConfigError(
                "jsonl: without a tokenizer, its own or that of model.path, the env needs vocab_size and eos_token_ids",
                setting="env_options",
            )
        self._text = Text(tokenizer, chat=chat, system=system) if tokenizer else Ids(vocab_size, eos_token_ids)
        self.vocab_size = vocab_size or self._text.vocab_size
        self.eos_token_ids = eos_token_ids or self._text.eos_token_ids
        self.max_new_tokens = max_new_tokens
        self._rewards = make_rewards(rewards or {"exact": 1.0}, length=length, on_error=on_error)
        self._path, names = path, {field: (fields or {}).get(field, field) for field in FIELDS}
        self._lines, self.digest = _read(Path(path).expanduser(), names)
        for line in self._lines:
            if wrong := self._wrong(line, names):
                raise ConfigError(f"{path}:{line.number}: {wrong}", setting="env_options.path")
        self._text.prompt(self._lines[0].prompt)  # a template that cannot be used is refused at once
        self._order = PromptOrder(len(self._lines), seed=seed, shuffle=shuffle, passes=passes)
        self.tickets = self._order.tickets
        content = "\n".join(json.dumps([line.prompt_id, line.prompt], sort_keys=True) for line in self._lines)
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]  # not the file's: answers and layout move no prompt
        self.identity = {"env": "jsonl", "digest of its prompts": digest, **self._order.identity}

    def prompt(self, number: int) -> Prompt:
        epoch, index = self._order.place(number)
        line = self._lines[index]
        return Prompt(
            prompt_id=line.prompt_id,
            tokens=self._text.prompt(line.prompt),
            answer=line.answer,
            metadata={**line.further, "epoch": epoch, "data": self.digest},
            place=f"{self._path}:{line.number}",
        )

    def score(self, prompt: Prompt, tokens: NDArray[np.int32], *, finish_reason: str) -> Score:
        return self._rewards.score(
            Answered(prompt=prompt, tokens=tokens, finish_reason=finish_reason, render=self._text.answer)
        )

    def render(self, tokens: NDArray[np.int32]) -> str:
        return self._text.render(tokens)

    def _wrong(self, line: Line, names: Mapping[Known, str]) -> str:
        """The mistake in a line; "" when there is none."""
        prompt = line.prompt
        if is_ids(prompt):
            if not all(0 <= token < self.vocab_size for token in prompt):
                return f"token ids must be in 0-{self.vocab_size - 1}, got {shown(prompt)}"
        elif isinstance(self._text, Ids) or not (prompt and (isinstance(prompt, str) or _are_messages(prompt))):
            return f"{names['prompt']} must be {PROMPT}, got {shown(prompt)}"
        if self._rewards.compares and (why := not_comparable(line.answer)):
            return f"{names['answer']!r}: {why} (env_options.fields says which field it is)"
        return ""


def _are_messages(prompt: object) -> bool:
    return (
        isinstance(prompt, list)
        and all(isinstance(turn, Mapping) for turn in prompt)
        and all(isinstance(turn.get(name), str) for turn in prompt for name in ("role", "content"))
        and prompt[-1]["role"] != "assistant"
    )


def _read(path: Path, names: Mapping[Known, str]) -> tuple[list[Line], str]:
    """Returns every line that is not empty, and the digest of what the file holds, unpacked."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise InvalidRollout(f"{path} is a pipe or a device, and every worker reads the prompts from the beginning")
        with opened(path) as file:
            data = file.stream.read()
    except InvalidRollout as error:
        raise ConfigError(str(error), setting="env_options.path") from None
    lines = [_line(path, number, text, names) for number, text in enumerate(_texts(data), 1) if text.strip()]
    if not lines:
        raise ConfigError(f"{path} holds no prompt", setting="env_options.path")
    return lines, hashlib.sha256(data).hexdigest()[:12]


def _texts(data: bytes) -> Sequence[str | bytes]:
    """The lines, or the items of the list that the file is as a whole."""
    data = data.removeprefix(BOM_UTF8)
    if data.lstrip().startswith(b"["):
        with suppress(ValueError, RecursionError):  # then a line says what is wrong
            return [json.dumps(item) for item in json.loads(data)]
    return data.splitlines()


def _line(path: Path, number: int, text: str | bytes, names: Mapping[Known, str]) -> Line:
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:{number} is no JSON object: {error}", setting="env_options.path") from error
    for field, name in names.items():
        if name not in values and (field == "prompt" or name != field):
            has, which = ", ".join(map(repr, values)), f'env_options.fields = {{ {field} = "NAME" }} says which it is'
            why = f"{path}:{number}: there is no field {name!r}; the line has {has} ({which})"
            raise ConfigError(why, setting="env_options.path")
    return Line(
        number=number,
        prompt=values[names["prompt"]],
        answer=values.get(names["answer"]),
        prompt_id=str(values.get(names["id"], f"line-{number}")),
        further={key: value for key, value in values.items() if key not in names.values()},
    )
