"""Options of samplers, and where the servers are that one asks. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbuffer.config.addresses import wrong_url
from rlbuffer.config.sampling import refused_option
from rlbuffer.errors import ConfigError

OPENAI_OPTIONS = ("servers", "timeout_seconds", "updates_weights")
VLLM_OWN = ("model", "logprobs_mode", "worker_extension_cls", "skip_tokenizer_init")
"""Engine arguments that the sampler sets itself."""


def check_options(sampler: str, options: Mapping[str, Any]) -> None:
    """Refuses options that a sampler does not have, or that would bend what it draws from. Imports nothing.

    Raises:
        ConfigError: says which.
    """
    refused = refused_option(options)
    if refused:
        raise ConfigError(refused, setting="sampler_options")
    if sampler == "vllm":
        taken = sorted(set(options) & set(VLLM_OWN))
        if taken:
            raise ConfigError(f"sampler_options.{taken[0]} is set by the sampler itself", setting="sampler_options")
    elif sampler == "openai":
        unknown = [name for name in options if name not in OPENAI_OPTIONS]
        if unknown:
            raise ConfigError(
                f"sampler_options.{unknown[0]} is not an option of the openai sampler: {', '.join(OPENAI_OPTIONS)}",
                setting="sampler_options",
            )
        servers_of(options)
        seconds, updates = options.get("timeout_seconds", 1), options.get("updates_weights", True)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
            raise ConfigError(
                f"sampler_options.timeout_seconds = {seconds!r} must be a positive number of seconds",
                setting="sampler_options.timeout_seconds",
            )
        if not isinstance(updates, bool):
            raise ConfigError(
                f"sampler_options.updates_weights = {updates!r} must be true or false",
                setting="sampler_options.updates_weights",
            )
    elif options:
        raise ConfigError(
            f"sampler_options: {', '.join(sorted(options))}: the transformers sampler has no options",
            setting="sampler_options",
        )


def servers_of(options: Mapping[str, Any]) -> list[str]:
    """URLs of the servers that the openai sampler asks.

    Raises:
        ConfigError: there is none, or one is no URL.
    """
    servers = options.get("servers", ())
    urls = [servers] if isinstance(servers, str) else list(servers) if isinstance(servers, list | tuple) else []
    if not urls or not all(isinstance(url, str) and url.startswith(("http://", "https://")) for url in urls):
        raise ConfigError(
            'sampler_options.servers: name at least one server, e.g. ["http://127.0.0.1:8000"]',
            setting="sampler_options.servers",
        )
    for url in urls:
        if wrong_url(url):
            raise ConfigError(f"sampler_options.servers: {url!r} {wrong_url(url)}", setting="sampler_options.servers")
    return urls
