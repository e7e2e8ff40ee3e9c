"""Samplers by name. A sampler's module, and torch with it, is imported only when it is made."""

from __future__ import annotations

from rlbuffer.errors import ConfigError
from rlbuffer.worker.samplers.base import Completion, Sampler

__all__ = ["Completion", "Sampler", "make_sampler"]


def make_sampler(name: str, *, seed: int, device: str = "cpu") -> Sampler:
    """Makes a sampler that has no weights yet.

    Args:
        name: ``transformers``.
        seed: of sampling.
        device: ``cpu``, ``cuda``, or ``auto`` (CUDA where there is one).

    Raises:
        ConfigError: no such sampler, or what it needs is not installed or not there.
    """
    if name != "transformers":
        raise ConfigError(f"sampler {name!r} is not one of transformers", setting="sampler")
    try:
        from rlbuffer.worker.samplers.transformers import TransformersSampler
    except ImportError as error:
        raise ConfigError(
            f"sampler transformers needs torch and transformers: pip install 'rlbuffer[train]' ({error})",
            setting="sampler",
        ) from error
    return TransformersSampler(seed=seed, device=device)
