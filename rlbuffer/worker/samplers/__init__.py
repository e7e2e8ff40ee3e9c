"""Samplers by name. A sampler's module, and torch or vLLM with it, is imported only when it is made.

Open first: `base`, then `transformers`.
"""

from __future__ import annotations

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import ConfigError
from rlbuffer.worker.samplers.base import BatchSampler, Completion, Sampler, Sampling
from rlbuffer.worker.samplers.options import check_options

__all__ = ["BatchSampler", "Completion", "Sampler", "Sampling", "make_sampler"]


def make_sampler(settings: WorkerSettings, *, seed: int = 0) -> Sampler:
    """Makes the sampler that a worker's settings name; it has no weights yet.

    Raises:
        ConfigError: what it needs is not installed or not there, or an option is not one of it.
    """
    try:
        return _make(settings, seed)
    except ImportError as error:
        extra = "train" if settings.sampler == "transformers" else settings.sampler
        raise ConfigError(
            f"sampler {settings.sampler} cannot be imported ({error}): pip install 'rlbuffer[{extra}]'",
            setting="sampler",
        ) from error


def _make(settings: WorkerSettings, seed: int) -> Sampler:
    if settings.sampler == "vllm":
        from rlbuffer.worker.samplers.vllm import VllmSampler

        return VllmSampler(seed=seed, top_p=settings.top_p, options=settings.sampler_options)
    if settings.sampler == "openai":
        from rlbuffer.worker.samplers.openai import OpenAISampler

        return OpenAISampler(settings.sampler_options)
    from rlbuffer.worker.samplers.batched import Batched
    from rlbuffer.worker.samplers.transformers import TransformersSampler

    check_options(settings.sampler, settings.sampler_options)
    return Batched(TransformersSampler(seed=seed, device=settings.device))
