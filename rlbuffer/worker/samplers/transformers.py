"""Sampling with a Hugging Face model in this process, batch after batch."""

from __future__ import annotations

from typing import Self

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.config.table import Table
from rlbuffer.worker.samplers.base import SamplerTraits
from rlbuffer.worker.samplers.batched import Batched


class TransformersSampler(Batched):
    """:class:`rlbuffer.worker.samplers.decoding.Decoder`, in a thread of its own."""

    traits = SamplerTraits(
        extra="train",
        needs=("torch", "transformers"),
        is_exact=True,
        is_reproducible=True,
        takes_batches=True,
    )
    Options = Table

    @classmethod
    def make(cls, settings: WorkerSettings, options: Table, *, seed: int) -> Self:
        from rlbuffer.worker.samplers.decoding import Decoder

        return cls(Decoder(seed=seed, device=settings.device))
