"""Checks of a model that look at its files alone: its config, its weights, its tokenizer. Nothing is imported."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlbuffer.state.text import did_you_mean, nearest, plural

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
"""Files of which a model's directory has one."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")
"""Files of which a tokenizer's directory has one."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
"""Keys of a model's config that must be whole numbers from 1 on."""
EXAMPLE = "the file that `rlbuffer config example` prints"
LARGEST_HEAD = 2**27
"""Bytes of the list of tensors at the head of a safetensors file."""
NO_MODEL_TYPE = 'model.config: model_type is missing, e.g. "qwen3"'
_POINTER = b"version https://git-lfs"
_WORD = re.compile(r"[A-Za-z_]\w+")
_FIELD = re.compile(r"^    ([a-z]\w+)\s*:", re.MULTILINE)
_CAUSAL = re.compile(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = (.*?)^\)", re.MULTILINE | re.DOTALL)


def model_modules(config: Mapping[str, Any]) -> list[str]:
    """The module that makes a model of this config, to be imported before processes are forked that all need it."""
    kind = config.get("model_type")
    return [f"transformers.models.{kind}.modeling_{kind}"] if kind and isinstance(kind, str) else []


def config_of(directory: Path) -> dict[str, Any]:
    """``config.json``; {} where there is none that can be read."""
    try:
        read = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def context_of(config: Mapping[str, Any]) -> int:
    """Tokens that prompt and completion may have together, by a model's config; 0 where it does not say."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        if isinstance(tokens := part.get("max_position_embeddings"), int):
            return tokens
    return 0


def wrong_directory(directory: Path) -> Iterator[str]:
    """Every reason why a Hugging Face model cannot be loaded from `directory`."""
    if not directory.is_dir():
        hint = "" if directory.exists() or len(directory.parts) != 2 else f". {NOT_THE_HUB}"
        yield f"{directory} is not a directory{hint}"
        return
    file = directory / "config.json"
    if not file.is_file():
        yield f"{directory} has no config.json: it is no Hugging Face model"
    else:
        try:
            read = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            yield f"{file} cannot be read: {error}"
        else:
            kind = read.get("model_type") if isinstance(read, dict) else None
            if not isinstance(kind, str):
                yield f"{file} names no model_type"
            elif unknown_type(kind):
                yield f"{file}: model_type {kind!r} {unknown_type(kind)}"
    if not any(next(directory.glob(pattern), None) for pattern in WEIGHTS):
        pickled = ". pytorch_model.bin may hold code and is not read: save the model again with save_pretrained"
        hint = pickled if next(directory.glob("pytorch_model*.bin"), None) else ""
        yield f"{directory} has no weights (model.safetensors){hint}"
    yield from _wrong_weights(directory)


NOT_THE_HUB = (
    "Nothing is downloaded: fetch the model first (`hf download NAME --local-dir DIR`) and give the directory's path"
)
"""Remedy for a name on the Hugging Face hub where a directory is wanted."""


def _wrong_weights(directory: Path) -> Iterator[str]:
    for index in sorted(directory.glob("*.index.json")):
        try:
            named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            yield f"{index} cannot be read"
            continue
        missing = [name for name in named if not (directory / str(name)).is_file()]
        if missing:
            files = plural(len(named), "file")
            yield f"{index} names {missing[0]}, which is not there ({len(missing)} of {files} missing)"
    for file in sorted(directory.glob("*.safetensors")):
        try:
            size = file.stat().st_size
            with file.open("rb") as opened:
                start = opened.read(len(_POINTER))
                opened.seek(8)
                head = int.from_bytes(start[:8], "little")
                tensors = json.loads(opened.read(head)) if head < min(LARGEST_HEAD, size) else None
        except (OSError, ValueError):
            tensors = None
        if start == _POINTER:
            yield f"{file} is a pointer of Git LFS and holds no weights: `git lfs pull` fetches them"
        elif not isinstance(tensors, dict):
            yield f"{file} is no safetensors file"
        else:
            ends = [t["data_offsets"][1] for n, t in tensors.items() if n != "__metadata__" and "data_offsets" in t]
            if 8 + head + max(ends, default=0) > size:
                yield f"{file} is cut short: it has {size} bytes of {8 + head + max(ends)}"


def wrong_config(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, why) of what cannot be right in the config of a fresh model; the key is "" for all of it."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        yield "model_type", NO_MODEL_TYPE
        return
    why = unknown_type(kind)
    if why:
        yield "model_type", f"model.config.model_type = {kind!r} {why}"
        return
    for key in SIZES:
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            yield key, f"model.config.{key} = {value!r} must be a whole number of at least 1"
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        yield (
            "num_key_value_heads",
            f"model.config.num_key_value_heads = {shared} does not divide num_attention_heads = {heads}",
        )
    vocabulary, ends = config.get("vocab_size"), config.get("eos_token_id")
    for end in ends if isinstance(ends, list) else [ends]:
        if isinstance(end, int) and isinstance(vocabulary, int) and not 0 <= end < vocabulary:
            yield "eos_token_id", f"model.config.eos_token_id = {end} is no token id: vocab_size is {vocabulary}"
    folder = _folder_of(kind)
    if folder is None:
        return
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("configuration_*.py")]
    shared_file = folder.parents[1] / "configuration_utils.py"
    if not texts or not shared_file.is_file():
        return
    texts.append(shared_file.read_text(encoding="utf-8", errors="replace"))
    words = {word for text in texts for word in _WORD.findall(text)}
    fields = {field for text in texts for field in _FIELD.findall(text)}
    for key in config:
        near = nearest(key, fields, cutoff=0.8) if key not in words else ""
        if near:  # anything else may be meant for code of the model's own
            yield key, f"model.config.{key} is nothing that {kind} knows. Did you mean {near}?"


def _models() -> Path | None:
    """The folder in which transformers keeps its models; None when it is not installed."""
    there = sys.modules.get("transformers")
    spec = None if there is not None else find_spec("transformers")
    where = list(getattr(there, "__path__", ())) if spec is None else list(spec.submodule_search_locations or ())
    models = Path(where[0]) / "models" if where else None
    return models if models is not None and models.is_dir() else None


def _folder_of(kind: str) -> Path | None:
    models = _models()
    folder = None if models is None else models / kind.replace("-", "_")
    return folder if folder is not None and folder.is_dir() else None


def unknown_type(kind: str) -> str:
    """The end of a sentence when transformers has no such language model; "" when it has, or cannot be asked."""
    models = _models()
    if models is None:
        return ""
    known = [path.name for path in models.iterdir() if path.is_dir()]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in models.glob("auto/*.py")]
    if not known or not texts:
        return ""
    if kind not in known and kind.replace("-", "_") not in known and not any(f'"{kind}"' in text for text in texts):
        return f"is not a model that transformers knows.{did_you_mean(kind, known)}"
    causal = next((match[1] for text in texts if (match := _CAUSAL.search(text))), "")
    if causal and f'("{kind}"' not in causal:
        return "is not a causal language model of transformers: it cannot be sampled from and trained"
    return ""


def wrong_tokenizer(directory: Path) -> str:
    """The reason why no tokenizer can be loaded from `directory`, as the end of a sentence; "" when there is none."""
    if not directory.is_dir():
        return "is not a directory"
    if not any(next(directory.glob(pattern), None) for pattern in TOKENIZER):
        return "has no tokenizer in it (tokenizer.json)"
    return ""


def which_model(path: str) -> str:
    """The sentence for when neither or both of path and config are set."""
    how = "both are set" if path else "neither is set"
    return (
        f"model: exactly one of path and config is needed; {how}. Give [model] path = a Hugging Face model's "
        f"directory, or [model.config] for a fresh model ({EXAMPLE} has one)"
    )


def router_loss(config: Mapping[str, Any]) -> str:
    """The reason why a model with this Hugging Face config is not trained as it asks; "" where it does not ask.

    The loss is a product of means over a batch, so no sum over micro-batches and ranks gives it.
    """
    text = config.get("text_config")
    where = next((c for c in (config, text) if isinstance(c, Mapping) and c.get("output_router_logits")), None)
    if where is None:
        return ""
    return (
        f"model: output_router_logits = true asks for the router auxiliary loss of experts (router_aux_loss_coef = "
        f"{where.get('router_aux_loss_coef')}), which rlbuffer train does not compute: set it to false in the model's "
        "config to train without that loss, or compute it in a trainer of your own"
    )
