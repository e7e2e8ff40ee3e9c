"""A LoRA adapter as its ``adapter_config.json`` tells of it. Nothing is imported.

Source: PEFT's ``LoraConfig`` (0.21).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlbuffer.config.trainer import LoraSettings

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PLAIN: Mapping[str, Any] = {
    "bias": "none",
    "lora_bias": False,
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "target_parameters": None,
    "modules_to_save": None,
    "trainable_token_indices": None,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "velora_config": None,
    "monteclora_config": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Options of PEFT at the values that mean LoRA and nothing else."""
_FIRST_WEIGHTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the base as it is; others, such as pissa, take something out of it."""


def adapter_config(path: str | Path) -> Mapping[str, Any] | None:
    """The ``adapter_config.json`` of a directory; None where it has none, {} where it cannot be read."""
    file = Path(path).expanduser() / _CONFIG
    if not file.is_file():
        return None
    try:
        read = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def beyond_lora(config: Mapping[str, Any]) -> str:
    """Finds an option of an ``adapter_config.json`` that no sampler serves. -> ``name = value``, or ""."""
    more = [name for name, plain in _PLAIN.items() if (config.get(name) or plain) != plain]
    more += ["init_lora_weights"] * (config.get("init_lora_weights") not in _FIRST_WEIGHTS)
    return f"{more[0]} = {config[more[0]]!r}" if more else ""


def instead_of_a_model(setting: str, path: str) -> tuple[str, str]:
    """What to say where a model's directory was wanted, and an adapter's was given: what it is, and what to do.

    ("", "") where `path` is no adapter's directory.
    """
    config = adapter_config(path)
    if config is None:
        return "", ""
    kind = "a LoRA adapter" if config.get("peft_type") == "LORA" else f"an adapter ({config.get('peft_type')})"
    base = config.get("base_model_name_or_path")
    what = f"{setting}: {Path(path).expanduser()} is {kind} of {base or 'some model'}, not a whole model"
    if kind == "a LoRA adapter" and setting == "model.path":
        set_base = f'model.path = "{base}"' if base else "model.path to the model that it was trained on"
        return what, f'Set {set_base} and trainer.lora.path = "{path}"'
    return what, "Merge it into its base (PEFT's merge_and_unload), and give the directory of that"


def wrong_start(settings: LoraSettings, given: Collection[str] = ()) -> tuple[str, str]:
    """The reason why training cannot begin with ``trainer.lora.path``, and the setting that it concerns.

    Args:
        given: names of the settings that somebody has set, such as ``trainer.lora.rank``: they must be the adapter's.

    Returns:
        ("", "") where it can, or no such path is set.
    """
    if not settings.path:
        return "", ""
    setting, directory, config = "trainer.lora.path", Path(settings.path).expanduser(), adapter_config(settings.path)
    if config is None:
        is_model = (directory / "config.json").is_file()
        what = "is a whole model: give it as model.path" if is_model else f"has no {_CONFIG}, as PEFT saves it"
        return f"{setting}: {directory} {what}", setting
    if not config:
        return f"{setting}: {directory / _CONFIG} cannot be read", setting
    if config.get("peft_type") != "LORA":
        return f"{setting}: {directory} is an adapter of type {config.get('peft_type')}, and LORA is trained", setting
    if more := beyond_lora(config):
        return f"{setting}: {directory} has {more}, which is more than LoRA: no sampler serves it", setting
    adapter: dict[str, Any] = {
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "targets": config.get("target_modules"),
    }
    for name, kinds in (("rank", int), ("alpha", int | float), ("targets", str | list)):
        if not isinstance(adapter[name], kinds) or not adapter[name]:
            return f"{setting}: {directory / _CONFIG} says no {name} that could be ({adapter[name]!r})", setting
    if not (directory / _WEIGHTS).is_file():
        return f"{setting}: {directory} has no {_WEIGHTS}; a pickled one (.bin) is not read", setting
    targets = [adapter["targets"]] if isinstance(adapter["targets"], str) else adapter["targets"]
    asked = {"rank": settings.rank, "alpha": settings.alpha, "targets": sorted(settings.targets)}
    for name, value in (adapter | {"targets": sorted(targets)}).items():
        if f"trainer.lora.{name}" in given and asked[name] != value:
            text = f"trainer.lora.{name} = {asked[name]}, but the adapter at {directory} has {value}"
            return f"{text}: leave the setting out", f"trainer.lora.{name}"
    return "", ""
