"""Sampling with a Hugging Face model in this process, batch after batch: what is asked for together is sampled so.

Imports torch only where a sampler is made.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.config.table import Table
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.worker.samplers.base import Completion, SamplerTraits, Sampling, fitted

if TYPE_CHECKING:
    from rlbuffer.worker.samplers.decoding import Decoder


@dataclass(slots=True)
class _Request:
    prompt: NDArray[np.int32]
    n: int
    sampling: Sampling
    answer: asyncio.Future[list[Completion]]


class Batched:
    """Collects what is asked for until the event loop is idle, and samples it as one batch in a thread of its own.

    A version is loaded between two batches: every completion is of one version. A sampler of this kind is a subclass
    with an ``Options`` and a ``make`` of its own.
    """

    traits = SamplerTraits(is_exact=True, takes_batches=True)

    def __init__(self, sampler: Decoder) -> None:
        self._sampler = sampler
        # One thread for all calls: torch keeps its thread settings, and nothing overlaps.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampler")
        self._queue: list[_Request] = []
        self._runner: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._sampler.version

    @property
    def vocab_size(self) -> int:
        return self._sampler.vocab_size

    @property
    def context(self) -> int:
        return self._sampler.context

    async def load(self, policy: PolicyVersion) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._sampler.load, policy)

    async def sample(self, prompt: NDArray[np.int32], *, n: int, sampling: Sampling) -> list[Completion]:
        sampling = fitted(sampling, len(prompt), self._sampler.context)
        request = _Request(prompt, n, sampling, asyncio.get_running_loop().create_future())
        self._queue.append(request)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        return await request.answer

    async def close(self) -> None:
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        self._thread.shutdown(wait=True)

    async def _run(self) -> None:
        while self._queue:
            await asyncio.sleep(0)  # whoever asks in this turn of the loop is in the batch
            first = self._queue[0]
            batch = [r for r in self._queue if (r.n, r.sampling) == (first.n, first.sampling)]
            self._queue = [r for r in self._queue if (r.n, r.sampling) != (first.n, first.sampling)]
            batch = [r for r in batch if not r.answer.done()]
            if batch:
                await self._sample(batch)

    async def _sample(self, batch: Sequence[_Request]) -> None:
        over = threading.Event()

        def stopped() -> bool:
            return over.is_set() or all(request.answer.done() for request in batch)  # all were cancelled

        def sample() -> list[list[Completion]]:
            prompts = [request.prompt for request in batch]
            return self._sampler.sample(prompts, n=batch[0].n, sampling=batch[0].sampling, stopped=stopped)

        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, sample)
        except BaseException as error:
            over.set()
            if isinstance(error, Exception) and len(batch) > 1:  # it costs the request alone that brought it about
                for alone in batch:
                    await self._sample([alone])
                return
            for request in batch:
                if not request.answer.done():
                    if isinstance(error, asyncio.CancelledError):
                        request.answer.cancel()
                    else:
                        request.answer.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for request, answer in zip(batch, answers, strict=True):
            if not request.answer.done():
                request.answer.set_result(answer)


class TransformersSampler(Batched):
    """:class:`rlbuffer.worker.samplers.decoding.Decoder`, in a thread of its own."""

    traits = SamplerTraits(
        extra="train",
        needs=("torch", "transformers"),
        is_exact=True,
        is_reproducible=True,
        records_experts=True,
        takes_batches=True,
        records_support=True,
    )
    Options = Table

    @classmethod
    def make(cls, settings: WorkerSettings, options: Table, *, seed: int) -> Self:
        from rlbuffer.worker.samplers.decoding import Decoder

        return cls(Decoder(seed=seed, device=settings.device, records_experts=settings.record_experts))
