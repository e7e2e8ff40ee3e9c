"""Envs by name: the built-in ones, or ``package.module:factory`` for the user's own. numpy only, no torch."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from rlbuffer.errors import ConfigError
from rlbuffer.records import ENV_NAME
from rlbuffer.worker.envs.base import Env, Prompt, Score
from rlbuffer.worker.envs.repeat import Repeat
from rlbuffer.worker.envs.vcopy import VCopy

__all__ = ["BUILT_IN", "Env", "Prompt", "Score", "make_env"]

BUILT_IN: Mapping[str, Callable[..., Env]] = MappingProxyType({"vcopy": VCopy, "repeat": Repeat})
"""Envs that need no download."""

_MEMBERS = ("name", "vocab_size", "eos_token_ids", "max_new_tokens", "prompt", "score", "render")


def make_env(name: str, /, **options: Any) -> Env:
    """Makes an env: a built-in one, or what the factory named ``package.module:factory`` returns.

    `options` go to the factory as keywords. Built-in envs take ``name`` (so that one kind can serve under two names)
    and ``seed`` (another order of prompts).

    Raises:
        ConfigError: no such env or factory; the factory refuses the options; its result is not an env.
    """
    factory = _factory(name)
    try:
        env = factory(**options)
    except TypeError as error:
        raise ConfigError(f"env {name}: its factory refused the options {options}: {error}", setting="env") from error
    missing = [member for member in _MEMBERS if not hasattr(env, member)]
    if missing:
        raise ConfigError(
            f"env {name}: its factory returned {type(env).__name__}, which lacks {', '.join(missing)}", setting="env"
        )
    if not isinstance(env.name, str) or not ENV_NAME.match(env.name):
        raise ConfigError(f"env {name}: its name {env.name!r} does not match {ENV_NAME.pattern[:-2]}", setting="env")
    return env


def _factory(name: str) -> Callable[..., Env]:
    if ":" not in name:
        if name in BUILT_IN:
            return BUILT_IN[name]
        close = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f" Did you mean {close[0]}?" if close else " Your own env is named as package.module:factory."
        raise ConfigError(f"env {name!r} is not one of {', '.join(BUILT_IN)}.{hint}", setting="env")
    module_name, _, attribute = name.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"env {name}: cannot be imported: {error}", setting="env") from error
    if not callable(target):
        raise ConfigError(f"env {name}: {attribute} is not callable", setting="env")
    factory: Callable[..., Env] = target
    return factory
