"""What can be said of an env before anything samples, in a process of its own (:mod:`rlbuffer.checks.imports`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import iscoroutinefunction
from typing import Any

from rlbuffer.errors import ConfigError
from rlbuffer.state.text import plural
from rlbuffer.worker.envs import BUILT_IN, factory_of, make_env, refused_options

Wrong = tuple[str, str, bool]
"""(setting below the section, what is wrong, is it fatal)"""
MADE = (*BUILT_IN, "jsonl")
"""Envs that are made here. Others may load a data set, and are looked at by their options alone."""
PROMPTS = 256
"""Tickets whose prompts are looked at."""
MOST_NAMED = 8
"""Prompts that are named."""


def wrong_env(name: str, options: Mapping[str, Any], *, vocab_size: int, lengths: Mapping[str, int]) -> Iterator[Wrong]:
    """Everything about an env that would stop its worker, or skip its prompts.

    Args:
        name: of the env.
        options: env_options.
        vocab_size: of the model; 0: not known.
        lengths: what bounds a rollout -> tokens.
    """
    try:
        factory = factory_of(name)
    except ConfigError as error:
        yield "env", str(error), True
        return
    if iscoroutinefunction(factory):
        yield "env", f"env {name} is async: the factory is called, and what it returns is the env", True
    if name not in MADE:
        if why := refused_options(name, factory, options):
            yield "env_options", why, True
        return
    try:
        env = make_env(name, **options)
        prompts = [env.prompt(ticket) for ticket in range(min(PROMPTS, getattr(env, "tickets", None) or PROMPTS))]
    except ConfigError as error:
        yield error.setting or "env_options", str(error), True
        return
    except (TypeError, ValueError) as error:
        yield "env_options", f"env {name} cannot be made with {dict(options)}: {error}", True
        return
    if 0 < vocab_size < env.vocab_size:
        yield "env", f"env {name} uses {env.vocab_size} token ids, the model knows {vocab_size}", True
    sizes = {prompt.place or prompt.prompt_id: len(prompt.tokens) for prompt in prompts}
    limit, what = min((length, what) for what, length in lengths.items())
    if long := [place for place, size in sizes.items() if size >= limit]:
        shown = ", ".join(long[:MOST_NAMED]) + ", ..." * (len(long) > MOST_NAMED)
        text = f"{len(long)} of {plural(len(sizes), 'prompt')} leave no room for a completion: {what} is {limit} tokens"
        yield "env", f"env {name}: {text} ({shown})", len(long) == len(sizes)
