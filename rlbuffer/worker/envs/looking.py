"""What can be said of an env before anything samples: by its options, its files and, of a built-in one, its prompts.

An env of the user's own is imported and not made: that may load a data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

from rlbuffer.errors import ConfigError
from rlbuffer.state.text import plural
from rlbuffer.worker.envs import BUILT_IN, factory_of, make_env, refused_options

Wrong = tuple[str, str, bool]
"""(setting below the section, what is wrong, is it fatal)"""
PROMPTS = 16
"""Prompts of a built-in env whose length is looked at; a rollout has at least one token more than its prompt."""
MOST_LINES = 8
"""Lines of a file that are named."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")
"""Files of which a tokenizer's directory has one."""


def wrong_env(
    name: str,
    options: Mapping[str, Any],
    *,
    vocab_size: int,
    lengths: Mapping[str, int],
    sampling: Mapping[str, float],
) -> Iterator[Wrong]:
    """Everything about an env that would stop its worker, or skip its prompts.

    Args:
        name: of the env.
        options: env_options.
        vocab_size: of the model; 0: not known.
        lengths: what bounds a rollout -> tokens.
        sampling: temperature and top_p.
    """
    try:
        factory = factory_of(name)
    except ConfigError as error:
        yield "env", str(error), True
        return
    if iscoroutinefunction(factory):
        yield "env", f"env {name} is async: the factory is called, and what it returns is the env", True
    if name in BUILT_IN:
        yield from _built_in(name, options, vocab_size, lengths)
    elif why := refused_options(name, factory, options):
        yield "env_options", why, True
    elif name == "jsonl":
        yield from _file(options, lengths)
    elif name == "verifiers":
        yield from _requests(options, sampling)
    if name not in BUILT_IN and ":" not in name and (tokenizer := options.get("tokenizer")):
        folder = Path(str(tokenizer)).expanduser()
        if not any(next(folder.glob(pattern), None) for pattern in TOKENIZER):
            setting = "env_options.tokenizer"
            yield setting, f"{setting} = {tokenizer!r} is no directory with a tokenizer in it (tokenizer.json)", True


def _built_in(name: str, options: Mapping[str, Any], vocab_size: int, lengths: Mapping[str, int]) -> Iterator[Wrong]:
    try:
        env = make_env(name, **options)
        shortest = 1 + min(len(env.prompt(number).tokens) for number in range(PROMPTS))
    except (ConfigError, TypeError, ValueError) as error:
        yield "env_options", f"env {name} cannot be made with {dict(options)}: {error}", True
        return
    if 0 < vocab_size < env.vocab_size:
        yield "env", f"env {name} uses {env.vocab_size} token ids, the model knows {vocab_size}", True
    for what, length in lengths.items():
        if shortest > length:
            yield "env", f"{what} is {length}, but the shortest rollout of {name} has {plural(shortest, 'token')}", True


def _file(options: Mapping[str, Any], lengths: Mapping[str, int]) -> Iterator[Wrong]:
    """A data set in a file: its lines, its rewards, and prompts that leave no room for a completion."""
    from rlbuffer.worker.envs.jsonl import mistakes, too_long

    path = options.get("path")
    if path is not None and not (isinstance(path, str) and Path(path).expanduser().is_file()):
        yield "env_options.path", f"env_options.path = {path!r}: there is no such file", True
    for error in mistakes(options):
        yield error.setting, str(error), True
    limit, what = min((length, what) for what, length in lengths.items())
    lines, count = too_long(options, limit)
    if lines:
        shown = ", ".join(map(str, lines[:MOST_LINES])) + ", ..." * (len(lines) > MOST_LINES)
        text = (
            f"{len(lines)} of {plural(count, 'prompt')} of {options.get('path')} leave no room for a completion and "
            f"are skipped: {what} is {limit} tokens (lines {shown})"
        )
        yield "env_options.path", text, len(lines) == count


def _requests(options: Mapping[str, Any], sampling: Mapping[str, float]) -> Iterator[Wrong]:
    """Requests of a verifiers env's agents that the worker's sampler would refuse in every rollout."""
    from rlbuffer.worker.envs.gateway import refusal

    agents = options.get("agents")
    named = agents.items() if isinstance(agents, Mapping) else ()
    for name, given in (("agent", options.get("agent")), *((f"agents.{n}", a) for n, a in named)):
        asked = given.get("sampling") if isinstance(given, Mapping) else None
        if isinstance(asked, Mapping):
            extra = asked.get("extra_body")
            request = {**(extra if isinstance(extra, Mapping) else {}), **asked}
            lengths = ("extra_body", "max_completion_tokens")
            request = {key: value for key, value in request.items() if value is not None and key not in lengths}
            if text := refusal(request, temperature=sampling["temperature"], top_p=sampling["top_p"]):
                yield f"env_options.{name}.sampling", f"{name}.sampling: {text}", True
