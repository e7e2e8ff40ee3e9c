"""New weights for the engines, where nobody else loads any: no worker with ``sampler = "openai"``, and no trainer that
announces versions without files.

Every gateway loads the newest version once, since an engine may have that of another run by the same number. Then it
looks which version each engine names, and loads where it is another. An engine that is being loaded says by whom, so
several gateways need no lease: whoever comes second waits, and finds the version there.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec

from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import ConfigError, RlbufferError, SamplerUnavailable
from rlbuffer.process.threads import in_thread
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.worker.samplers.base import Opened, opened, seeds_of
from rlbuffer.worker.samplers.endpoint import Endpoint

LOOK_SECONDS = 1.0
"""Seconds between two looks at the newest version, about: gateways that look at once would load at once."""
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
        timeout_seconds: longest that one request may take.
    """

    def __init__(self, store: GatewayStore, urls: Sequence[str], *, timeout_seconds: float) -> None:
        self._store = store
        self._endpoints = [Endpoint(url, timeout_seconds=timeout_seconds, setting="gateway.engines") for url in urls]
        self._seeds = seeds_of(secrets.randbits(32))
        self._opened: Opened | None = None
        self._known = set[str]()
        """Engines that have had a version of this run."""
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins, on the running loop."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stops, and resumes an engine that it has paused."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
                self._trouble = ""
            except Exception as error:
                told = str(error) if isinstance(error, RlbufferError) else type(error).__name__
                if told != self._trouble:
                    _log.warning("weights are not loaded, and the next look tries again: %s", told)
                self._trouble = told
            await asyncio.sleep(LOOK_SECONDS * _RANDOM.uniform(0.5, 1.5))

    async def _look(self) -> None:
        policy = await in_thread(self._store.policy)
        if policy.version < 0 or not policy.location:
            return
        named = {endpoint: await _served(endpoint) for endpoint in self._endpoints}
        behind = [
            endpoint
            for endpoint, version in named.items()
            if version is not None and (version != policy.version or endpoint.url not in self._known)
        ]
        if not behind:
            return
        if find_spec("torch") is None:
            raise ConfigError(
                "the engines need version "
                f"{policy.version}, and this gateway cannot read weights: install rlbuffer[train] beside it, or let a "
                'worker with sampler = "openai" load them'
            )
        if self._opened is None or self._opened.policy != policy:
            self._opened = await asyncio.to_thread(opened, policy, self._opened)
        version = self._opened
        outcomes = await asyncio.gather(*(self._load(endpoint, version) for endpoint in behind), return_exceptions=True)
        for error in outcomes:
            if error is not None:
                raise error

    async def _load(self, endpoint: Endpoint, version: Opened) -> None:
        with suppress(SamplerUnavailable):  # it is away, or somebody else loads it: the next look sees
            await endpoint.load(version.directory, version.shapes, version.policy.version, seed=next(self._seeds))
            self._known.add(endpoint.url)
            _log.info("%s has version %d", endpoint.url, version.policy.version)


async def _served(endpoint: Endpoint) -> int | None:
    """The version that an engine names, -1 where it names none of a run; None while it cannot be asked."""
    try:
        return await endpoint.named_version()
    except SamplerUnavailable:
        return None
