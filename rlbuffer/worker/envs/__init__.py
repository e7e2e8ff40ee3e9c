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

from rlbuffer.errors import ConfigError, Skip
from rlbuffer.records.info import ENV_NAME
from rlbuffer.state.text import did_you_mean, no_such_option
from rlbuffer.worker.envs.arithmetic import Arithmetic
from rlbuffer.worker.envs.base import Env, MultiTurnEnv, PolicyAccess, SingleTurnEnv, WholeRolloutEnv
from rlbuffer.worker.envs.lookup import target
from rlbuffer.worker.envs.prompt import Prompt, Score
from rlbuffer.worker.envs.repeat import Repeat
from rlbuffer.worker.envs.vcopy import VCopy
from rlbuffer.worker.failures import place_of

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
    factory = _factory(name)
    known = _keywords(factory)
    unknown = "" if known is None else no_such_option(f"env {name}", options, known)
    if unknown:
        raise ConfigError(unknown, setting="env_options")
    try:
        env = factory(**options)
    except TypeError as error:
        raise ConfigError(f"env {name}: its factory refused the options {options}: {error}", setting="env") from error
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # it is the user's code
        if name in BUILT_IN:
            raise
        place = place_of(error, None, "")
        raised = f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")
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


def _keywords(factory: Callable[..., Env]) -> list[str] | None:
    """Options that a factory knows; None where it takes any, or does not say."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in named]


def _factory(name: str) -> Callable[..., Env]:
    check_name(name)
    if name in BUILT_IN:
        return BUILT_IN[name]
    return target(ADAPTERS.get(name, name), what=f"env {name}")


def check_name(name: str) -> None:
    """Raises ConfigError unless `name` is that of an env here, or a path to one of the user's own."""
    if ":" in name or name in BUILT_IN or name in ADAPTERS:
        return
    names = [*BUILT_IN, *ADAPTERS]
    hint = did_you_mean(name, names, otherwise=" Your own env is named as package.module:factory.")
    raise ConfigError(f"env {name!r} is not one of {', '.join(names)}.{hint}", setting="env")
