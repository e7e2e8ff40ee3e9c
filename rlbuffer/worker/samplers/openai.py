"""Sampling with one or several OpenAI-compatible vLLM servers: the least loaded one gets the next group.

A server that fails is left out and asked for a token every few seconds; before it is used again it loads the version
that serves now, since a restarted server has the weights of its start. Each server's weights are changed by one worker,
which also resumes it when a load has left it paused: others that share it set ``updates_weights = false``.

Each load gives a server a seed of its own: servers that were started alike would draw alike, and a restarted one would
draw again what it has drawn before.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from rlbuffer.config.settings import WorkerSettings
from rlbuffer.config.table import Table, Url
from rlbuffer.errors import ConfigError, RequestFailed, SamplerBusy, SamplerUnavailable, WeightsError, clause
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.worker.samplers.base import (
    LEAST_TEMPERATURE,
    Completion,
    Opened,
    SamplerTraits,
    Sampling,
    opened,
    seeds_of,
    tell_record,
)

if TYPE_CHECKING:
    from rlbuffer.worker.samplers.endpoint import Endpoint

HEAL_SECONDS = 2.0
"""Seconds between two looks at a server that failed."""


def _listed(servers: Any) -> Any:
    if not servers:
        raise ValueError("must name a server, such as http://127.0.0.1:8000")
    return [servers] if isinstance(servers, str) else servers


class OpenAIOptions(Table):
    """``sampler_options`` of a worker that asks servers."""

    servers: Annotated[tuple[Annotated[Url, Field(min_length=1)], ...], BeforeValidator(_listed)]
    """URLs, or one."""
    timeout_seconds: float = Field(600.0, gt=0, strict=True)
    """Longest that one request may take; where it is not set: the worker's ``rollout_timeout_seconds``."""
    updates_weights: bool = Field(True, strict=True)
    """False: another worker changes the weights of these servers."""


class OpenAISampler:
    """See the module's docstring."""

    traits = SamplerTraits(
        extra="openai",
        needs=("aiohttp",),
        least_temperature=LEAST_TEMPERATURE,
        nucleus_at_any_temperature=False,
        records_experts=True,
        records_support=True,
    )
    Options = OpenAIOptions

    @classmethod
    def make(cls, settings: WorkerSettings, options: OpenAIOptions, *, seed: int) -> Self:
        given = {"timeout_seconds": settings.rollout_timeout_seconds} | options.model_dump(exclude_unset=True)
        return cls(OpenAIOptions(**given), seed=seed, top_k=settings.top_k, records_experts=settings.record_experts)

    def __init__(self, options: OpenAIOptions, *, seed: int = 0, top_k: int = 0, records_experts: bool = False) -> None:
        from rlbuffer.worker.samplers.endpoint import Endpoint

        self._updates = options.updates_weights
        self._seeds = seeds_of(seed)
        self._records_experts = records_experts
        self._endpoints = [
            Endpoint(url, timeout_seconds=options.timeout_seconds, top_k=top_k, records_experts=records_experts)
            for url in options.servers
        ]
        self._opened: Opened | None = None
        """The version that is served."""
        self._loading = asyncio.Lock()
        self._healer: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return -1 if self._opened is None else self._opened.policy.version

    @property
    def vocab_size(self) -> int:
        return 0 if self._opened is None else self._opened.vocab_size

    @property
    def context(self) -> int:
        return min((e.context for e in self._endpoints if e.context), default=0)

    async def load(self, policy: PolicyVersion) -> None:
        version = await asyncio.to_thread(opened, policy, self._opened)
        if self._records_experts and self._opened is None:
            tell_record(version.config)
        async with self._loading:
            outcomes = await asyncio.gather(
                *(self._bring_up(endpoint, version) for endpoint in self._endpoints), return_exceptions=True
            )
            for error in outcomes:
                if isinstance(error, BaseException) and not isinstance(error, SamplerUnavailable):
                    raise error
            if all(endpoint.trouble for endpoint in self._endpoints):
                raise SamplerUnavailable(self._nobody())
            self._opened = version
        self._heal_what_is_down()

    async def sample(self, prompt: NDArray[np.int32], *, n: int, sampling: Sampling) -> list[Completion]:
        if self._opened is None:
            raise ConfigError("the sampler has no weights yet: load a policy version first")
        tried: set[str] = set()
        busy: SamplerBusy | None = None
        while True:
            endpoint = self._least_loaded(tried, busy)
            tried.add(endpoint.url)
            endpoint.in_flight += n
            try:
                completions = await endpoint.sample(prompt, n=n, sampling=sampling)
            except SamplerBusy as error:
                busy = error
                continue
            except SamplerUnavailable as error:
                await self._tell_apart(endpoint, error)
                continue
            finally:
                endpoint.in_flight -= n
            if any(span.policy_version < 0 for c in completions for span in c.version_spans):
                # It was restarted behind our back: what it samples with is not a version of this run.
                self._take_down(endpoint, SamplerUnavailable("it has lost the version that was loaded into it"))
                continue
            return completions

    async def close(self) -> None:
        if self._healer is not None:
            self._healer.cancel()
            await asyncio.gather(self._healer, return_exceptions=True)
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))

    # -- servers -------------------------------------------------------------------------------------------------------
    def _least_loaded(self, tried: set[str], busy: SamplerBusy | None) -> Endpoint:
        able = [e for e in self._endpoints if not e.trouble and e.url not in tried]
        if not able:
            raise busy or SamplerUnavailable(self._nobody())
        return min(able, key=lambda e: e.in_flight)

    def _nobody(self) -> str:
        return "no server can sample: " + "; ".join(e.trouble for e in self._endpoints if e.trouble)

    async def _tell_apart(self, endpoint: Endpoint, error: SamplerUnavailable) -> None:
        """Takes a server down that failed, unless it answers another request.

        Raises:
            RequestFailed: it does; what failed is the request.
            SamplerBusy: it takes none now.
        """
        if endpoint.trouble:  # another request has told already
            return
        try:
            await endpoint.answers()
        except SamplerBusy:
            raise
        except (SamplerUnavailable, ConfigError):
            self._take_down(endpoint, error)
            return
        raise RequestFailed(f"{clause(error)}; the server answers others") from error

    def _take_down(self, endpoint: Endpoint, error: SamplerUnavailable) -> None:
        endpoint.version, endpoint.trouble = -1, str(error)
        self._heal_what_is_down()

    async def _bring_up(self, endpoint: Endpoint, version: Opened) -> None:
        """Makes a server serve `version`. Raises what is wrong with it, and leaves it out then."""
        try:
            if endpoint.trouble:
                await endpoint.probe(resumes=self._updates)
            if self._updates:
                await endpoint.load(version.directory, version.shapes, version.policy.version, seed=next(self._seeds))
            else:
                endpoint.version = version.policy.version
        except BaseException as error:
            if isinstance(error, SamplerUnavailable) or endpoint.version < 0:  # else it goes on with what it had
                endpoint.trouble = str(error) or "its load was broken off"
            raise
        endpoint.trouble = ""

    def _heal_what_is_down(self) -> None:
        if any(e.trouble for e in self._endpoints) and (self._healer is None or self._healer.done()):
            self._healer = asyncio.create_task(self._heal())

    async def _heal(self) -> None:
        while any(endpoint.trouble for endpoint in self._endpoints):
            await asyncio.sleep(HEAL_SECONDS)
            async with self._loading:
                if self._opened is None:
                    return
                for endpoint in self._endpoints:
                    if endpoint.trouble:
                        with contextlib.suppress(ConfigError, SamplerUnavailable, WeightsError):
                            await self._bring_up(endpoint, self._opened)
