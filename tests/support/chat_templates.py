"""Chat templates of five families, written by hand from their published form, over one small tokenizer.

Each shows a conversation as text, says what its model would write for an answer, and which token ends it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>"),
)
Messages = Sequence[Mapping[str, Any]]


@cache
def tokenizer(dropout: float | None = None) -> Tokenizer:
    """Byte pairs of a few words; with dropout another encoding of the same text each time, as a model writes it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    words = [
        "system user assistant tool think name arguments the answer is a tree look_up functions commentary\n\n"
    ] * 9
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        words,
        trainers.BpeTrainer(vocab_size=520, special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False),
    )
    if dropout is not None:
        spec = json.loads(made.to_str())
        spec["model"]["dropout"] = dropout
        made = Tokenizer.from_str(json.dumps(spec))
    return made


def encoded(text: str, *, dropout: float | None = None) -> NDArray[np.int32]:
    return np.array(tokenizer(dropout).encode(text, add_special_tokens=False).ids, np.int32)


def decoded(tokens: Sequence[int]) -> str:
    text: str = tokenizer().decode([int(token) for token in tokens], skip_special_tokens=False)
    return text


@dataclass(frozen=True)
class Family:
    """One family's ways."""

    name: str
    shown: Callable[[Messages, Messages, bool], str]
    """The conversation with these tools; True: with the beginning of the answer."""
    written: Callable[[Mapping[str, Any], str], str]
    """What the model writes for an answer with a thought, without the token that ends it."""
    end: Callable[[Mapping[str, Any]], str]
    """The token that ends an answer."""
    calls_at_once: int = 3
    splices: Callable[[Mapping[str, Any]], bool] = lambda answer: True
    """Answers that are gone on from."""
    keeps_thoughts: bool = True
    """Thoughts of earlier turns are shown again."""

    def text(self, messages: Messages, tools: Messages, opens: bool) -> str:
        return self.shown(messages, tools, opens)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _arguments(call: Mapping[str, Any]) -> Any:
    return json.loads(call["function"]["arguments"])


# -- Qwen ------------------------------------------------------------------------------------------------------------
def _qwen_head(messages: Messages, tools: Messages, default: str) -> str:
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else default
    if tools:
        listed = "\n".join(_json(tool) for tool in tools)
        return (
            f"<|im_start|>system\n{system}\n\n# Tools\n\nYou may call one or more functions to assist with the user "
            f"query.\n\n<tools>\n{listed}\n</tools>\n\nFor each function call, return a json object within <tool_call>"
            "</tool_call> XML tags.<|im_end|>\n"
        )
    return f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""


def _qwen_calls(message: Mapping[str, Any]) -> list[str]:
    return [
        f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {_json(_arguments(call))}}}\n</tool_call>'
        for call in message.get("tool_calls") or ()
    ]


def _qwen_answer(message: Mapping[str, Any]) -> str:
    return "\n".join([*([message["content"]] if message["content"] else []), *_qwen_calls(message)])


def _qwen_body(messages: Messages, answer: Callable[[int], str]) -> str:
    out = []
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "system":
            if i:
                out.append(f"<|im_start|>system\n{content}<|im_end|>\n")
        elif role == "assistant":
            out.append(f"<|im_start|>assistant\n{answer(i)}<|im_end|>\n")
        elif role == "tool":
            is_first = i == 0 or messages[i - 1]["role"] != "tool"
            is_last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            out.append("<|im_start|>user" if is_first else "")
            out.append(f"\n<tool_response>\n{content}\n</tool_response>" + ("<|im_end|>\n" if is_last else ""))
        else:
            out.append(f"<|im_start|>user\n{content}<|im_end|>\n")
    return "".join(out)


def _qwen25(messages: Messages, tools: Messages, opens: bool) -> str:
    default = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    body = _qwen_body(messages, lambda i: _qwen_answer(messages[i]))
    return _qwen_head(messages, tools, default) + body + ("<|im_start|>assistant\n" if opens else "")


def _qwen3(messages: Messages, tools: Messages, opens: bool) -> str:
    asked = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)

    def answer(i: int) -> str:
        thought = messages[i].get("reasoning_content") or ""
        shows = i > asked and (i + 1 == len(messages) or thought)
        return (f"<think>\n{thought}\n</think>\n\n" if shows else "") + _qwen_answer(messages[i])

    body = _qwen_body(messages, answer)
    return _qwen_head(messages, tools, "") + body + ("<|im_start|>assistant\n" if opens else "")


# -- Llama 3 ---------------------------------------------------------------------------------------------------------
def _llama3(messages: Messages, tools: Messages, opens: bool) -> str:
    def turn(role: str, text: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"

    system, rest = "", list(messages)
    if rest and rest[0]["role"] == "system":
        system = rest.pop(0)["content"].strip()
    out = ["<|begin_of_text|>", turn("system", f"{'Environment: ipython' if tools else ''}\n\n{system}")]
    left = "\n\n".join(_json(tool) for tool in tools)
    for message in rest:
        content = (message.get("content") or "").strip()
        if message["role"] == "user" and left:
            content = (
                f"Given the following functions, please respond with a JSON for a function call.\n\n{left}\n\n{content}"
            )
            left = ""
        if message["role"] == "assistant":
            out.append(turn("assistant", _llama_answer(message)))
        elif message["role"] == "tool":
            out.append(turn("ipython", _json(message["content"])))
        else:
            out.append(turn(message["role"], content))
    return "".join(out) + ("<|start_header_id|>assistant<|end_header_id|>\n\n" if opens else "")


def _llama_answer(message: Mapping[str, Any]) -> str:
    if calls := message.get("tool_calls"):
        return f'{{"name": "{calls[0]["function"]["name"]}", "parameters": {_json(_arguments(calls[0]))}}}'
    return message["content"].strip()


# -- GLM-4.5 ---------------------------------------------------------------------------------------------------------
def _glm(messages: Messages, tools: Messages, opens: bool) -> str:
    out = ["[gMASK]<sop>"]
    if tools:
        listed = "\n".join(_json(tool) for tool in tools)
        out.append(f"<|system|>\n# Tools\n\nYou may call one or more functions.\n\n<tools>\n{listed}\n</tools>")
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "assistant":
            out.append(f"<|assistant|>{_glm_answer(message, '')}")
        elif role == "tool":
            out.append("<|observation|>" if messages[i - 1]["role"] != "tool" else "")
            out.append(f"\n<tool_response>\n{content}\n</tool_response>")
        else:
            out.append(f"<|{role}|>\n{content}")
    return "".join(out) + ("<|assistant|>" if opens else "")


def _glm_answer(message: Mapping[str, Any], thought: str) -> str:
    out = [f"\n<think>{thought}</think>"]
    if message["content"].strip():
        out.append(f"\n{message['content'].strip()}")
    for call in message.get("tool_calls") or ():
        out.append(f"\n<tool_call>{call['function']['name']}")
        for key, value in _arguments(call).items():
            out.append(f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>")
        out.append("\n</tool_call>")
    return "".join(out)


# -- gpt-oss ---------------------------------------------------------------------------------------------------------
def _gpt_oss(messages: Messages, tools: Messages, opens: bool) -> str:
    out = ["<|start|>system<|message|>You are a large language model.\n\nReasoning: medium<|end|>"]
    rest = list(messages)
    developer = rest.pop(0)["content"] if rest and rest[0]["role"] == "system" else ""
    if developer or tools:
        listed = "".join(f"\ntype {tool['function']['name']} = (_: any) => any;" for tool in tools)
        out.append(f"<|start|>developer<|message|># Instructions\n\n{developer}\n\n# Tools{listed}<|end|>")
    name = ""
    for i, message in enumerate(rest):
        if message["role"] == "assistant":
            is_last = i + 1 == len(rest) and not opens
            ending = "<|call|>" if message.get("tool_calls") else "<|return|>" if is_last else "<|end|>"
            out.append(f"<|start|>assistant{_gpt_oss_answer(message)}{ending}")
            name = message["tool_calls"][0]["function"]["name"] if message.get("tool_calls") else name
        elif message["role"] == "tool":
            result = _json(message["content"])
            out.append(f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{result}<|end|>")
        else:
            out.append(f"<|start|>{message['role']}<|message|>{message['content']}<|end|>")
    return "".join(out) + ("<|start|>assistant" if opens else "")


def _gpt_oss_answer(message: Mapping[str, Any]) -> str:
    if calls := message.get("tool_calls"):
        function = calls[0]["function"]
        return f" to=functions.{function['name']}<|channel|>commentary json<|message|>{function['arguments']}"
    return f"<|channel|>final<|message|>{message['content']}"


def _later(answer: Mapping[str, Any]) -> str:
    return "<|observation|>" if answer.get("tool_calls") else "<|user|>"


FAMILIES = (
    Family("qwen2.5", _qwen25, lambda m, t: _qwen_answer(m), lambda m: "<|im_end|>"),
    Family(
        "qwen3",
        _qwen3,
        lambda m, t: f"<think>\n{t}\n</think>\n\n" + _qwen_answer(m),
        lambda m: "<|im_end|>",
        keeps_thoughts=False,
    ),
    Family("llama3", _llama3, lambda m, t: _llama_answer(m), lambda m: "<|eot_id|>", calls_at_once=1),
    Family("glm", _glm, _glm_answer, _later, keeps_thoughts=False),
    Family(
        "gpt-oss",
        _gpt_oss,
        lambda m, t: _gpt_oss_answer(m),
        lambda m: "<|call|>" if m.get("tool_calls") else "<|return|>",
        calls_at_once=1,
        splices=lambda m: bool(m.get("tool_calls")),  # <|return|> ends an answer, and is not shown again
    ),
)
