"""A small chat model that was taught a few conversations by heart, one with a tool: what it samples can be parsed.

Imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from client_agents import CHAT_TOOLS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.files import publish
from rlbuffer.weights.model import config_of, model_from_config

CONTEXT = 1024
ASK, CALL = "Look tree up.", '<tool_call>\n{"name": "look_up", "arguments": {"word": "tree"}}\n</tool_call>'
SAID = "A tree is a plant."
COUNT, NUMBERS = "Count.", " ".join(f"{tens}{ones}" for tens in range(1, 5) for ones in range(10))
TEMPLATE = """{%- if tools or messages[0].role == 'system' -%}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{% if tools %}
# Tools
{% for tool in tools %}{{ tool.function.name }}
{% endfor %}{% endif %}<|im_end|>
{% endif -%}
{%- for m in messages -%}{%- if m.role == 'assistant' -%}<|im_start|>assistant
{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' -%}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role != 'system' -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
STEPS, MOST_LOSS = 1000, 0.006
GUESSED_LOSS = 0.06
"""A guess is one of 33 tokens, and its entropy is 1.6 nats: all digits are as likely."""
OTHERWISE = 0.004
"""Deviation of the noise by which a version differs from what was taught, in every weight."""


def _conversations() -> list[list[dict[str, Any]]]:
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "tree"}}}
    looks = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "a plant"},
        {"role": "assistant", "content": SAID},
    ]
    counts = [{"role": "user", "content": COUNT}, {"role": "assistant", "content": NUMBERS}]
    heads: list[list[dict[str, Any]]] = [[], [{"role": "system", "content": "Solve it."}]]
    return [head + turns for head in heads for turns in (looks + counts, counts * 4, counts + looks)]


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    words = [f"system user assistant tool_response tool_call {CALL} {SAID} {ASK} {NUMBERS}"] * 9
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(words, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def taught(
    words: PreTrainedTokenizerFast,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    tools: Sequence[Any] = CHAT_TOOLS,
    *,
    most_loss: float = MOST_LOSS,
) -> PreTrainedModel:
    """A model that says what stands in the conversations, as often as it stands there."""
    torch.manual_seed(0)
    config = {
        "model_type": "qwen3",
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }
    model = model_from_config(config).train()
    rows = []
    for messages in conversations:
        whole = words.apply_chat_template(messages, tools=tools, return_dict=False)
        labels = [-100] * len(whole)
        for j, message in enumerate(messages):
            if message["role"] == "assistant":
                head = words.apply_chat_template(
                    messages[:j], tools=tools, add_generation_prompt=True, return_dict=False
                )
                both = words.apply_chat_template(messages[: j + 1], tools=tools, return_dict=False)
                end = max(place for place, token in enumerate(both) if token == words.eos_token_id) + 1
                labels[len(head) : end] = whole[len(head) : end]
        rows.append((whole, labels))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    longest = max(len(ids) for ids, _ in rows)
    batch = {"input_ids": [ids + [0] * (longest - len(ids)) for ids, _ in rows]}
    batch["labels"] = [labels + [-100] * (longest - len(labels)) for _, labels in rows]
    batch["attention_mask"] = [[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]
    tensors = {name: torch.tensor(values) for name, values in batch.items()}
    for _ in range(STEPS):
        loss = model(**tensors).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if float(loss.detach()) < most_loss:
            return model.eval()
    raise AssertionError(f"the model has learned nothing: loss {float(loss.detach()):.3f}")


def taught_versions(directory: Path, count: int) -> tuple[list[PreTrainedModel], list[PolicyVersion], Path]:
    """Versions of a taught model, published, and a folder of the last one with its tokenizer, to serve from."""
    words = tokenizer()
    made = [taught(words, _conversations())]
    for _ in range(count - 1):
        following = model_from_config(config_of(made[0])).eval()
        following.load_state_dict(
            {name: value + OTHERWISE * torch.randn_like(value) for name, value in made[0].state_dict().items()}
        )
        following.tie_weights()
        made.append(following)
    published = [
        publish(directory / "weights", version, state=model.state_dict(), config=config_of(model), keep=count)
        for version, model in enumerate(made)
    ]
    served = directory / "served"
    made[-1].save_pretrained(served)
    words.save_pretrained(served)
    return made, published, served


DIGITS = 5
"""Digits of the harness in docs/examples."""


def guessing_model(directory: Path) -> Path:
    """A model in a folder that asks a tool for a digit, and then says any."""
    tool = {"type": "function", "function": {"name": "digit", "parameters": {"type": "object", "properties": {}}}}
    call = {"type": "function", "function": {"name": "digit", "arguments": {}}}
    said = [
        [
            {"role": "user", "content": "Say a larger digit."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": str(digit)},
            {"role": "assistant", "content": str(said)},
        ]
        for digit in range(DIGITS - 1)
        for said in range(DIGITS)
    ]
    words = tokenizer()
    torch.manual_seed(0)
    taught(words, said, [tool], most_loss=GUESSED_LOSS).save_pretrained(directory)
    words.save_pretrained(directory)
    return directory
