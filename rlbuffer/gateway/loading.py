"""New weights for the engines, where nobody else loads any: no worker with ``sampler = "openai"``, and no trainer that
announces versions without files.

One gateway of a run loads, by a lease: two that see a new version at once would both pause an engine, and the first one
that is ready would resume it under the other's load, which kills vLLM's engine. A gateway that dies is followed within
seconds, and the load that it has left half done is done again.

It loads the newest version into each engine once, since an engine may have that of another run, or of a line of
versions that has ended, by the same number. Then it looks which version each engine names, and loads where that is
another one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec

from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError, RlbufferError, SamplerUnavailable, WeightsError, installed_by
from rlbuffer.process.threads import in_thread
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.weights.cache import VersionCache
from rlbuffer.weights.layout import is_adapter
from rlbuffer.worker.samplers.base import Opened, opened, seeds_of
from rlbuffer.worker.samplers.endpoint import Endpoint

LOOK_SECONDS = 1.0
"""Seconds between two looks at the newest version, about: gateways that look at once would load at once."""
LEASE_SECONDS, RENEW_SECONDS = 15.0, 5.0
"""A gateway that has not renewed its lease for so long is followed; a load takes longer."""
_RANDOM = random.Random()
_log = logging.getLogger(__name__)


def loads_weights(settings: RunSettings) -> bool:
    """Whether gateways of this run load weights: the engines are theirs alone."""
    return not any(worker.sampler == "openai" for worker in settings.worker.values())


class Loader:
    """Loads until it is closed.

    Args:
        store: the run.
        urls: of vLLM's servers; one of another kind takes no weights, and is left alone.
        cache: where versions of other hosts are put.
        timeout_seconds: longest that one request may take.
    """

    def __init__(
        self, store: GatewayStore, urls: Sequence[str], cache: VersionCache, *, timeout_seconds: float
    ) -> None:
        self._store, self._cache, self._owner = store, cache, secrets.token_hex(16)
        self._endpoints = [Endpoint(url, timeout_seconds=timeout_seconds, setting="gateway.engines") for url in urls]
        self._seeds = seeds_of(secrets.randbits(32))
        self._opened: Opened | None = None
        self._loaded = dict[str, PolicyVersion]()
        """Engine -> what it has got by this process since that has the lease."""
        self.trouble = ""
        """Why the engines have not the newest version, as a sentence; "" for nothing."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins, on the running loop."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stops, resumes an engine that it has paused, and gives the lease back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))
        with suppress(RlbufferError):
            await in_thread(partial(self._store.release_loading, self._owner))

    async def _run(self) -> None:
        while True:
            try:
                await self._load_new()
                self.trouble = ""
            except Exception as error:
                told = str(error) if isinstance(error, RlbufferError) else type(error).__name__
                if told != self.trouble:
                    _log.warning("weights are not loaded, and the next look tries again: %s", told)
                self.trouble = told
            await asyncio.sleep(LOOK_SECONDS * _RANDOM.uniform(0.5, 1.5))

    async def _load_new(self) -> None:
        policy = await in_thread(self._store.policy)
        if policy.version < 0 or not policy.location:
            return
        if not await self._claimed():
            self._loaded.clear()
            return
        named = {endpoint: await _served(endpoint) for endpoint in self._endpoints}
        behind = [
            endpoint
            for endpoint, version in named.items()
            if version is not None and (version != policy.version or self._loaded.get(endpoint.url) != policy)
        ]
        if not behind:
            return
        if find_spec("torch") is None:
            raise ConfigError(
                f"the engines need version {policy.version}, and this gateway cannot read weights, since torch is not "
                f'installed here: {installed_by("train")}, or let a worker with sampler = "openai" load them'
            )
        renewing = asyncio.create_task(self._renewed())
        try:
            await self._load_all(behind, policy)
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    async def _claimed(self) -> bool:
        """This process has the lease, for a while longer."""
        claim = partial(self._store.claim_loading, self._owner, ttl_seconds=LEASE_SECONDS)
        has_it: bool = await in_thread(claim)
        return has_it

    async def _renewed(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            with suppress(RlbufferError):
                await self._claimed()

    async def _load_all(self, behind: Sequence[Endpoint], policy: PolicyVersion) -> None:
        try:
            local = await asyncio.to_thread(self._cache.localized, policy)
            if self._opened is None or self._opened.policy != local:
                self._opened = await asyncio.to_thread(opened, local, self._opened)
        except WeightsError:
            await asyncio.to_thread(self._cache.recheck, policy)
            raise
        if is_adapter(self._opened.directory):
            raise ConfigError(
                f"policy version {policy.version} is a LoRA adapter, and agents are answered by whole weights alone: "
                "the engines would sample from the adapter's base model. Train without trainer.lora"
            )
        loads = [self._load(endpoint, policy, self._opened) for endpoint in behind]
        for error in await asyncio.gather(*loads, return_exceptions=True):
            if error is not None:
                raise error

    async def _load(self, endpoint: Endpoint, policy: PolicyVersion, version: Opened) -> None:
        with suppress(SamplerUnavailable):  # it is away, or somebody else loads it: the next look sees
            await endpoint.load(version.directory, version.shapes, policy.version, seed=next(self._seeds))
            self._loaded[endpoint.url] = policy
            _log.info("%s has version %d", endpoint.url, policy.version)


async def _served(endpoint: Endpoint) -> int | None:
    """The version that an engine names, -1 where it names none of a run; None while it cannot be asked."""
    try:
        return await endpoint.named_version()
    except SamplerUnavailable:
        return None
