"""Samplers by name: those of this project, or ``package.module:Class`` for the user's own.

What one can do says its class (:class:`rlbuffer.worker.samplers.base.SamplerTraits`); torch or vLLM are imported when
one is made. Open first: `base`, then `transformers`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from rlbuffer.config.imports import target
from rlbuffer.config.refusal import refusal
from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import ConfigError, installed_by
from rlbuffer.process.logs import fields
from rlbuffer.records.support import support_words
from rlbuffer.state.text import did_you_mean
from rlbuffer.worker.samplers.base import Completion, Sampler, SamplerTraits, Sampling

__all__ = ["Completion", "Sampler", "SamplerTraits", "Sampling", "make_sampler", "wrong_sampler"]

_log = logging.getLogger(__name__)

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "transformers": "rlbuffer.worker.samplers.transformers:TransformersSampler",
        "vllm": "rlbuffer.worker.samplers.vllm:VllmSampler",
        "openai": "rlbuffer.worker.samplers.openai:OpenAISampler",
    }
)
_MEMBERS = ("traits", "Options", "make", "load", "sample", "close")


def make_sampler(settings: WorkerSettings, *, seed: int = 0) -> Sampler:
    """Makes the sampler that a worker's settings name; it has no weights yet.

    Raises:
        ConfigError: it is not there, or cannot do what the settings ask for.
    """
    name, options = settings.sampler, settings.sampler_options
    for setting, text, _ in wrong_sampler(
        name,
        options,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        records_experts=settings.record_experts,
    ):
        raise ConfigError(text, setting=setting)
    sampler = _class_of(name)
    try:
        made: Sampler = sampler.make(settings, _options_of(sampler, options), seed=seed)
    except ImportError as error:
        raise ConfigError(f"sampler {name} cannot be imported: {error}", setting="sampler") from error
    if settings.top_k:
        words = support_words(settings.top_k)
        _log.info("what top_k leaves is recorded: %s", words, extra=fields("record", support=words))
    return made


def wrong_sampler(
    name: str,
    options: Mapping[str, Any],
    *,
    temperature: float,
    top_p: float,
    top_k: int = 0,
    records_experts: bool = False,
    is_deterministic: bool = False,
) -> Iterator[tuple[str, str, bool]]:
    """What a worker's settings ask of a sampler that it cannot do. -> (setting of the worker, what is wrong, True: it
    is fatal), as :mod:`rlbuffer.checks.imports` tells it from a process of its own.

    Raises:
        ConfigError: there is no such sampler, or it has no such options; behind all else.
    """
    sampler = _class_of(name)
    traits: SamplerTraits = sampler.traits
    if lacking := [module for module in traits.needs if find_spec(module) is None]:
        install = f": {installed_by(traits.extra)}" if traits.extra else ""
        yield "sampler", f"sampler {name} needs the module {', '.join(lacking)}{install}", True
    if top_k and not traits.records_support:
        yield "top_k", f"top_k = {top_k}: sampler {name} does not record the tokens that it leaves", True
    elif top_p < 1 and temperature != 1 and not top_k and not traits.nucleus_at_any_temperature:
        why = "its logprobs would be of what the nucleus leaves, and every ratio wrong by its mass"
        needs = "needs temperature = 1, or top_k above 0," if traits.records_support else "needs temperature = 1"
        yield "top_p", f"top_p = {top_p:g} {needs} with sampler {name}, not {temperature:g}: {why}", True
    if temperature < (least := traits.least_temperature):
        yield "temperature", f"temperature = {temperature:g}: sampler {name} samples at {least:g} at least", True
    if records_experts and not traits.records_experts:
        yield "record_experts", f"record_experts = true: sampler {name} does not say which experts it takes", True
    if is_deterministic and not traits.is_reproducible:
        yield "sampler", f"deterministic = true: sampler {name} gives other tokens for the same seed", True
    _options_of(sampler, options)


def _class_of(name: str) -> Any:
    """The class that settings name, with ``traits``, ``Options`` and ``make``.

    Raises:
        ConfigError: there is none, it cannot be imported, or it is no sampler.
    """
    if ":" not in name and name not in BUILT_IN:
        hint = did_you_mean(name, BUILT_IN, otherwise=" Your own sampler is named as package.module:Class.")
        raise ConfigError(f"sampler {name!r} is not one of {', '.join(BUILT_IN)}.{hint}", setting="sampler")
    try:
        found = target(BUILT_IN.get(name, name))
    except ImportError as error:
        raise ConfigError(f"sampler {name} {error}", setting="sampler") from error
    if missing := [member for member in _MEMBERS if not hasattr(found, member)]:
        raise ConfigError(f"sampler {name} lacks {', '.join(missing)}", setting="sampler")
    return found


def _options_of(sampler: Any, given: Mapping[str, Any]) -> Any:
    """A worker's ``sampler_options`` as the sampler's record.

    Raises:
        ConfigError: an option is not one of it.
    """
    try:
        return sampler.Options(**given)
    except ValidationError as error:
        raise refusal(error, section="sampler_options", fields=tuple(sampler.Options.model_fields)) from None
