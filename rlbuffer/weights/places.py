"""The places of a run's weights: the folder, the address that is announced, and the server over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError, installed_by
from rlbuffer.process.variables import variable
from rlbuffer.weights.cache import VersionCache, weights_token


def load_serving() -> Any:
    """The module :mod:`rlbuffer.weights.serving`.

    Raises:
        ConfigError: what it needs is not installed.
    """
    try:
        from rlbuffer.weights import serving
    except ImportError as error:
        raise ConfigError(
            f"weights cannot be served ({error}): {installed_by('weights')}", setting="weights.listen"
        ) from error
    return serving


def default_cache() -> VersionCache:
    """A cache under ``RLBUFFER_HOME``, for programs that have no settings."""
    home = RunSettings(home=Path(variable("RLBUFFER_HOME") or "~/.rlbuffer")).home_dir
    return VersionCache(home / "weights-cache", token=weights_token())


def kept_versions(settings: RunSettings) -> int:
    """Published versions that stay on disk: those that a rollout which still trains may need, at least 4."""
    return max(4, settings.batcher.largest_max_age + 3)


def announced(settings: RunSettings, location: str) -> str:
    """The location that a trainer announces for a version in `location`: its URL where ``weights.url`` is set."""
    url = settings.weights.url
    return f"{url.rstrip('/')}/{Path(location).name}" if url else location
