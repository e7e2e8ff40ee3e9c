"""Envs by name: the built-in ones, or ``package.module:factory`` for the user's own.

numpy only: what an env needs beyond that is imported when it is made.
Open first: `base`, then `arithmetic`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from rlbuffer.config.imports import place_of, target
from rlbuffer.errors import ConfigError, Skip
from rlbuffer.records.info import ENV_NAME
from rlbuffer.state.text import did_you_mean, no_such_option
from rlbuffer.worker.envs.arithmetic import Arithmetic
from rlbuffer.worker.envs.base import Env, MultiTurnEnv, PolicyAccess, SingleTurnEnv, WholeRolloutEnv
from rlbuffer.worker.envs.digits import Repeat, VCopy
from rlbuffer.worker.envs.prompt import Prompt, Score

__all__ = [
    "ADAPTERS",
    "BUILT_IN",
    "Env",
    "MultiTurnEnv",
    "PolicyAccess",
    "Prompt",
    "Score",
    "SingleTurnEnv",
    "Skip",
    "WholeRolloutEnv",
    "close_env",
    "make_env",
]

_log = logging.getLogger(__name__)

BUILT_IN: Mapping[str, Callable[..., Env]] = MappingProxyType(
    {"vcopy": VCopy, "repeat": Repeat, "arithmetic": Arithmetic}
)
"""Envs that need nothing, not even options."""
ADAPTERS: Mapping[str, str] = MappingProxyType(
    {
        "jsonl": "rlbuffer.worker.envs.jsonl:JsonLines",
        "reasoning_gym": "rlbuffer.worker.envs.reasoning:ReasoningGym",
        "verifiers": "rlbuffer.worker.envs.verifiers:Verifiers",
    }
)
"""Envs of what lies in files or in other packages."""

_MEMBERS = ("name", "vocab_size", "eos_token_ids", "max_new_tokens", "prompt", "render")
_WAYS = ("score", "play", "rollout")


def make_env(name: str, /, **options: Any) -> Env:
    """Makes an env: a built-in one, or what the factory named ``package.module:factory`` returns.

    `options` go to the factory as keywords. Built-in envs take ``name`` (so that one kind can serve under two names)
    and ``seed`` (another order of prompts).

    Raises:
        ConfigError: no such env or factory; the factory refuses the options; its result is not an env.
    """
    factory = factory_of(name)
    if refused := refused_options(name, factory, options):
        raise ConfigError(refused, setting="env_options")
    try:
        env = factory(**options)
    except TypeError as error:
        raise ConfigError(f"env {name}: its factory refused the options {options}: {error}", setting="env") from error
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # it is the user's code
        if name in BUILT_IN:
            raise
        raised = f"{type(error).__name__}: {error}{place_of(error)}"
        raise ConfigError(f"env {name}: its factory raised {raised}", setting="env") from error
    missing = [member for member in _MEMBERS if not hasattr(env, member)]
    if not any(hasattr(env, way) for way in _WAYS):
        missing.append("score (or play, for several turns)")
    if missing:
        raise ConfigError(
            f"env {name}: its factory returned {type(env).__name__}, which lacks {', '.join(missing)}", setting="env"
        )
    if not isinstance(env.name, str) or not ENV_NAME.match(env.name):
        raise ConfigError(f"env {name}: its name {env.name!r} does not match {ENV_NAME.pattern[:-2]}", setting="env")
    return env


async def close_env(env: Env) -> None:
    """Lets an env free what it holds, if it knows how to; an env that cannot costs a warning."""
    close = getattr(env, "close", None)
    if close is None:
        return
    try:
        closing = close()
        if inspect.isawaitable(closing):
            await closing
    except Exception:  # the env is the user's code
        _log.warning("env %s could not be closed", env.name, exc_info=True)


def refused_options(name: str, factory: Callable[..., Env], options: Mapping[str, Any]) -> str:
    """Why a factory would refuse options; "" where it takes them, or does not say."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return ""
    parameters = signature.parameters.values()
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        known = [parameter.name for parameter in parameters if parameter.kind in named]
        if unknown := no_such_option(f"env {name}", options, known):
            return unknown
    try:
        signature.bind(**options)
    except TypeError as error:
        return f"env {name}: its factory refuses the options {dict(options)}: {error}"
    return ""


def factory_of(name: str) -> Callable[..., Env]:
    """What makes an env of that name.

    Raises:
        ConfigError: there is none, or its module cannot be imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name and name not in ADAPTERS:
        names = [*BUILT_IN, *ADAPTERS]
        hint = did_you_mean(name, names, otherwise=" Your own env is named as package.module:factory.")
        raise ConfigError(f"env {name!r} is not one of {', '.join(names)}.{hint}", setting="env")
    try:
        return target(ADAPTERS.get(name, name))
    except ImportError as error:
        raise ConfigError(f"env {name}: {error}", setting="env") from error
