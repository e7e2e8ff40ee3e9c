"""Envs by name: the built-in ones, or ``package.module:factory`` for the user's own.

numpy only: what an env needs beyond that is imported when it is made.
Open first: `base`, then `digits`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from rlbuffer.config.imports import defined_at, place_of, target
from rlbuffer.config.refusal import refusal
from rlbuffer.errors import ConfigError, Skip, installed_by
from rlbuffer.records.info import ENV_NAME
from rlbuffer.state.text import did_you_mean, no_such_option
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
    "with_tokenizer",
    "wrong_env",
]

_log = logging.getLogger(__name__)

BUILT_IN: Mapping[str, Callable[..., Env]] = MappingProxyType({"vcopy": VCopy, "repeat": Repeat})
"""Envs that need nothing, not even options."""
ADAPTERS: Mapping[str, str] = MappingProxyType(
    {
        "command": "rlbuffer.worker.envs.command:Command",
        "jsonl": "rlbuffer.worker.envs.jsonl:JsonLines",
        "reasoning_gym": "rlbuffer.worker.envs.reasoning:ReasoningGym",
        "verifiers": "rlbuffer.worker.envs.verifiers:Verifiers",
    }
)
"""Envs of what lies in files or in other packages."""
EXTRAS: Mapping[str, str] = MappingProxyType({"reasoning_gym": "envs", "verifiers": "verifiers"})
"""Envs of a package, which has their name -> the extra that brings it."""

MADE = (*BUILT_IN, "jsonl")
"""Envs that are made here. Others may load a data set, and are looked at by their options alone."""
_MEMBERS = ("name", "vocab_size", "eos_token_ids", "max_new_tokens", "prompt", "render")
_WAYS = ("score", "play", "rollout")


def make_env(name: str, /, **options: Any) -> Env:
    """Makes an env: a built-in one, or what the factory named ``package.module:factory`` returns.

    `options` go to the factory as keywords. Built-in envs take ``name`` (so that one kind can serve under two names)
    and ``seed`` (another order of prompts).

    Raises:
        ConfigError: no such env or factory; the factory refuses the options; its result is not an env.
    """
    factory = factory_of(name, options)
    try:
        env = factory(**options)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # it is the user's code
        if isinstance(error, ValidationError) and ":" not in name:
            fields = tuple(inspect.signature(factory).parameters)
            raise refusal(error, section="env_options", fields=fields) from None
        raised = f"{type(error).__name__}: {error}{place_of(error)}"
        raise ConfigError(f"env {name}: its factory raised {raised}", setting="env") from error
    missing = [member for member in _MEMBERS if not hasattr(env, member)]
    if not any(hasattr(env, way) for way in _WAYS):
        missing.append("score (or play, for several turns)")
    if missing:
        what = f"its factory returned {type(env).__name__}, which lacks {', '.join(missing)}"
        raise ConfigError(f"env {name}: {what}{defined_at(factory)}", setting="env")
    if not isinstance(env.name, str) or not ENV_NAME.match(env.name):
        what = f"its name {env.name!r} does not match {ENV_NAME.pattern[:-2]}"
        raise ConfigError(f"env {name}: {what}{defined_at(factory)}", setting="env")
    return env


def with_tokenizer(name: str, options: Mapping[str, Any], model_path: str) -> Mapping[str, Any]:
    """The options, with the model's own tokenizer where the env takes a `tokenizer` and has none: it is not named, the
    factory has no default but "", and no `vocab_size` says that prompts are token ids."""
    if not model_path or options.get("tokenizer") or options.get("vocab_size"):
        return options
    try:
        taken = inspect.signature(_found(name)).parameters.get("tokenizer")
    except (ConfigError, TypeError, ValueError):  # said when it is made; it tells no signature
        return options
    is_lacking = taken is not None and taken.default in (inspect.Parameter.empty, "")
    return {**options, "tokenizer": model_path} if is_lacking else options


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


def factory_of(name: str, options: Mapping[str, Any]) -> Callable[..., Env]:
    """What makes an env of that name with these options.

    Raises:
        ConfigError: there is none, its module is not there, it is async, or it does not take the options.
    """
    factory = _found(name)
    if inspect.iscoroutinefunction(factory):
        raise ConfigError(f"env {name} is async: the factory is called, and what it returns is the env", setting="env")
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # it tells no signature, or none that can be read
        return factory
    try:
        signature.bind(**options)
    except TypeError as error:
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        unknown = "" if takes_any else no_such_option(f"env {name}", options, signature.parameters)
        why = unknown or f"env {name}: {error}, given {dict(options)}"
        raise ConfigError(why, setting="env_options") from error
    return factory


def _found(name: str) -> Callable[..., Any]:
    """The factory of that name. Raises ConfigError."""
    if ":" not in name and name not in (names := [*BUILT_IN, *ADAPTERS]):
        hint = did_you_mean(name, names, otherwise=" Your own env is named as package.module:factory.")
        raise ConfigError(f"env {name!r} is not one of {', '.join(names)}.{hint}", setting="env")
    if name in EXTRAS and find_spec(name) is None:
        raise ConfigError(f"env {name} needs the module {name}: {installed_by(EXTRAS[name])}", setting="env")
    try:
        factory = BUILT_IN[name] if name in BUILT_IN else target(ADAPTERS.get(name, name))
    except ImportError as error:
        raise ConfigError(f"env {name}: {error}", setting="env") from error
    return factory


def wrong_env(
    name: str, options: Mapping[str, Any], *, vocab_size: int, model_path: str = ""
) -> Iterator[tuple[str, str, bool]]:
    """What would stop an env's worker. -> (setting of the section, what is wrong, True: it is fatal), as
    :mod:`rlbuffer.checks.imports` tells it from a process of its own.

    Args:
        name: of the env.
        options: env_options.
        vocab_size: of the model; 0: not known.
        model_path: the model's directory, whose tokenizer an env takes that has none.

    Raises:
        ConfigError: it cannot be made.
    """
    options = with_tokenizer(name, options, model_path)
    factory_of(name, options)
    if name in MADE:
        env = make_env(name, **options)
        if 0 < vocab_size < env.vocab_size:
            yield "env", f"env {name} uses {env.vocab_size} token ids, the model knows {vocab_size}", True
