"""Who said what: chats of several templates, by a tokenizer's special tokens, and by the text that was pushed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from byte_tokenizer import ids, save_byte_tokenizer

from rlbuffer.client.spoken import in_line, marks_in, question_among, spoken
from rlbuffer.client.texts import Texts
from rlbuffer.records.rollout import Rollout

BAR = "\uff5c"
SHORT, ASKED, ANSWER = ("system", "Be short."), ("user", "What is 3 + 4?"), "It is 7, I think."


class Chat(NamedTuple):
    """A prompt and a completion as a template writes them."""

    prompt: str
    completion: str
    special: tuple[str, ...]
    turns: list[tuple[str, str]]
    """Of the prompt."""
    answer: str = ANSWER


CHATS = {
    "ChatML": Chat(
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n",
        f"{ANSWER}<|im_end|>",
        ("<|im_start|>", "<|im_end|>"),
        [SHORT, ASKED],
    ),
    "Qwen, thinking and tools": Chat(
        "<|im_start|>system\nBe short.\n\n# Tools\n<tools>\n{}\n</tools><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>\n{}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n7\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
        f"hm\n</think>\n\n{ANSWER}<|im_end|>",
        ("<|im_start|>", "<|im_end|>"),
        [
            ("system", "Be short.\n\n# Tools\n<tools>\n{}\n</tools>"),
            ("user", "Hi"),
            ("assistant", "<tool_call>\n{}\n</tool_call>"),
            ("user", "<tool_response>\n7\n</tool_response>"),
            ("assistant", "<think>"),
        ],
        f"hm\n</think>\n\n{ANSWER}",
    ),
    "Llama 3": Chat(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe short.<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nWhat is 3 + 4?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        f"{ANSWER}<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        [SHORT, ASKED],
    ),
    "Gemma": Chat(
        "<bos><start_of_turn>user\nWhat is 3 + 4?<end_of_turn>\n<start_of_turn>model\n",
        f"{ANSWER}<end_of_turn>",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        [ASKED],
    ),
    "Mistral, marks are tokens": Chat(
        "<s>[SYSTEM_PROMPT]Be short.[/SYSTEM_PROMPT][INST]What is 3 + 4?[/INST]",
        f" {ANSWER}</s>",
        ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        [SHORT, ASKED],
    ),
    "Llama 2, marks are letters": Chat(
        "<s>[INST] <<SYS>>\nBe short.\n<</SYS>>\n\nWhat is 3 + 4? [/INST]",
        f" {ANSWER}</s>",
        ("<s>", "</s>"),
        [SHORT, ASKED],
    ),
    "DeepSeek": Chat(
        f"<{BAR}begin of sentence{BAR}><{BAR}User{BAR}>What is 3 + 4?<{BAR}Assistant{BAR}>".replace(" of ", "_of_"),
        f"{ANSWER}<{BAR}end{BAR}>",
        (f"<{BAR}begin_of_sentence{BAR}>", f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>", f"<{BAR}end{BAR}>"),
        [ASKED],
    ),
    "a role alone in its mark": Chat(
        "<|user|>\nWhat is 3 + 4?<|end|>\n<|assistant|>\n",
        f"{ANSWER}<|end|>",
        ("<|user|>", "<|assistant|>", "<|end|>"),
        [ASKED],
    ),
}


def rollout(tokens: np.ndarray, prompt: int, text: str | None) -> Rollout:
    zeros = np.zeros(len(tokens) - prompt)
    return Rollout.from_completion(
        prompt_ids=tokens[:prompt], token_ids=tokens[prompt:], logprobs=zeros, reward=None, policy_version=0, text=text
    )


@pytest.mark.parametrize("name", CHATS)
def test_a_tokenizer_tells_turns_by_its_special_tokens(tmp_path: Path, name: str) -> None:
    chat = CHATS[name]
    tokenizer = save_byte_tokenizer(tmp_path, chat.special)
    prompt = len(ids(tokenizer, chat.prompt))
    texts, made = Texts(tmp_path), rollout(ids(tokenizer, chat.prompt + chat.completion), prompt, None)
    assert [tuple(turn) for turn in texts.prompt(made)] == chat.turns
    assert [turn.text for turn in texts.answer(made)] == [chat.answer]
    assert [turn.text for turn in texts.answer(made, 5)] == [chat.answer[: 5 - chat.completion.startswith(" ")]]
    asked = question_among(texts.prompt(made))
    assert asked is not None
    assert in_line(texts.prompt(made)).startswith(asked.text)


@pytest.mark.parametrize("name", CHATS)
def test_the_frame_is_what_nobody_said(tmp_path: Path, name: str) -> None:
    chat = CHATS[name]
    tokenizer = save_byte_tokenizer(tmp_path, chat.special)
    prompt = len(ids(tokenizer, chat.prompt))
    texts, made = Texts(tmp_path), rollout(ids(tokenizer, chat.prompt + chat.completion), prompt, None)
    pieces = zip(texts.pieces(made, 0, made.length), texts.frame(made), strict=True)
    kept = "".join(piece for piece, is_frame in pieces if not is_frame)
    said = "".join(text for _, text in [*chat.turns, ("assistant", chat.answer)])
    assert "".join(kept.split()) == "".join(said.split())


@pytest.mark.parametrize("name", CHATS)
def test_without_a_tokenizer_the_pushed_text_tells_the_turns(name: str) -> None:
    chat = CHATS[name]
    made = rollout(np.arange(40, dtype=np.int32), 30, chat.prompt + chat.completion)
    prompt, answer = Texts().prompt(made), Texts().answer(made)
    begun = [text for role, text in chat.turns if role == "assistant" and "<think>" in text]
    assert [tuple(turn) for turn in prompt] == [turn for turn in chat.turns if turn[1] not in begun]
    assert [turn.text for turn in answer] == ["".join([*(f"{text}\n" for text in begun), chat.answer])]


def test_a_text_without_marks_is_one_turn_of_nobody(tmp_path: Path) -> None:
    tokenizer = save_byte_tokenizer(tmp_path)
    made = rollout(ids(tokenizer, "Q: 3 + 4?\nA: 7<|end|>"), 13, None)
    assert [turn.text for turn in Texts(tmp_path).prompt(made)] == ["Q: 3 + 4?\nA:"]
    assert [turn.text for turn in Texts(tmp_path).answer(made)] == ["7"]
    assert spoken("", []) == []
    assert [turn.text for turn in Texts().answer(rollout(np.arange(9, dtype=np.int32), 4, "user\nis a word"))] == [
        "user\nis a word"
    ]


@pytest.mark.parametrize("text", ["a [TODO] and an [IMPORTANT_NOTE]", "<s>old</s> new", "look at <|x|> here", "[INST"])
def test_what_looks_like_a_mark_is_text_where_nobody_is_named(text: str) -> None:
    made = rollout(np.arange(9, dtype=np.int32), 4, text)
    assert Texts().answer(made) == [("", text)]
    assert Texts().prompt(made) == []


def test_a_bracket_of_ones_own_is_text_in_a_conversation_too() -> None:
    chat = CHATS["Mistral, marks are tokens"]
    made = rollout(np.arange(40, dtype=np.int32), 30, chat.prompt + " a [TODO] is left</s>")
    assert [turn.text for turn in Texts().answer(made)] == ["a [TODO] is left"]


def test_words_that_look_like_a_mark_end_no_turn_where_a_tokenizer_knows_better(tmp_path: Path) -> None:
    chat = CHATS["ChatML"]
    tokenizer = save_byte_tokenizer(tmp_path, chat.special)
    said = chat.prompt.replace("What is 3 + 4?", "What does [INST] mean? And </s>?")
    made = rollout(ids(tokenizer, said + chat.completion), len(ids(tokenizer, said)), None)
    assert Texts(tmp_path).prompt(made)[-1] == ("user", "What does [INST] mean? And </s>?")
    assert len(marks_in(said)) > 2
