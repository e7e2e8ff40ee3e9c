"""The policy version that a worker's sampler serves: found, loaded, and kept when a newer one cannot be loaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from rlbuffer.config.addresses import is_url
from rlbuffer.errors import ConfigError, SamplerUnavailable, WeightsError, clause
from rlbuffer.process.stages import Stages
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.weights.cache import VersionCache
from rlbuffer.worker.envs import Env
from rlbuffer.worker.heartbeat import WorkerHeartbeat
from rlbuffer.worker.samplers import Sampler

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Policy

RELOAD_SECONDS = 5.0
"""Seconds before weights that could not be loaded are tried again."""


class Versions:
    """Follows the announced versions.

    Args:
        policy: what is announced.
        sampler: what loads it.
        env: must fit the model.
        heartbeat: takes what happens.
        check: called with the first version that is loaded, before it serves; what this raises ends the worker.
        on_load: called when a version serves.
        cache: downloads versions that were announced under a URL.
        max_age: of the env, in versions: while a newer version is downloaded, one at most so old goes on sampling.
    """

    def __init__(
        self,
        policy: Policy,
        sampler: Sampler,
        env: Env,
        heartbeat: WorkerHeartbeat,
        *,
        check: Callable[[PolicyVersion], Awaitable[None]],
        on_load: Callable[[], None],
        cache: VersionCache,
        max_age: int,
    ) -> None:
        self._policy, self._sampler, self._env, self._heartbeat = policy, sampler, env, heartbeat
        self._check, self._on_load = check, on_load
        self._cache, self._max_age = cache, max_age
        self._download: tuple[PolicyVersion, asyncio.Task[PolicyVersion], Stages] | None = None
        self._served: PolicyVersion | None = None
        self._refused: tuple[PolicyVersion, float] | None = None
        """Weights that could not be loaded, and when (monotonic) they may be tried again."""
        self._lock = asyncio.Lock()

    @property
    def is_serving(self) -> bool:
        """Any version can be sampled from."""
        return self._served is not None

    @property
    def is_current(self) -> bool:
        """No newer version is waiting to be loaded after a failure."""
        return self._refused is None

    def serves(self, policy: PolicyVersion) -> bool:
        """`policy` is loaded."""
        return policy == self._served

    def held(self) -> asyncio.Lock:
        """While it is entered, no newer version is loaded."""
        return self._lock

    def forget(self) -> None:
        """Version numbers mean something else from now on."""
        self._served = self._refused = None

    async def refresh(self) -> bool:
        """Loads the current version unless it serves already. -> whether any version can be sampled from.

        Raises:
            ConfigError: the env does not fit the model.
        """
        if await asyncio.to_thread(self._policy.current) == self._served:
            return True  # whoever holds the lock, there is nothing to load
        async with self._lock:
            current = await asyncio.to_thread(self._policy.current)
            if current.version < 0:
                if self._served is not None:
                    self._served = None  # the run was reset: what served belongs to no version of it
                    self._heartbeat.loaded(-1, Stages())
                self._heartbeat.waits(Waiting(kind=Wait.WEIGHTS))
                return False
            if current != self._served and not self._is_refused(current):
                await self._load(current)
            if self._served is None:
                self._heartbeat.waits(Waiting(kind=Wait.WEIGHTS, version=current.version))
            return self._served is not None

    def _is_refused(self, current: PolicyVersion) -> bool:
        return self._refused is not None and self._refused[0] == current and time.monotonic() < self._refused[1]

    async def _load(self, current: PolicyVersion) -> None:
        try:
            found = await self._localized(current)
            if found is None:
                return
            local, took = found
            with self._heartbeat.loading(current.version), took.measure("load"):
                await self._sampler.load(local)
                self._require_vocabulary(current)
                await self._check(local)
        except (WeightsError, SamplerUnavailable) as error:
            self._refused = (current, time.monotonic() + RELOAD_SECONDS)
            going_on = f"version {self._served.version} goes on sampling" if self._served else "nothing to sample with"
            self._heartbeat.trouble(f"{clause(error)}; {going_on}")
            if isinstance(error, WeightsError):
                await asyncio.to_thread(self._cache.recheck, current)
            return
        self._served, self._refused = current, None
        self._heartbeat.loaded(current.version, took, size=current.size)
        self._on_load()

    def _require_vocabulary(self, current: PolicyVersion) -> None:
        if self._sampler.vocab_size < self._env.vocab_size:
            raise ConfigError(
                f"env {self._env.name} uses {self._env.vocab_size} token ids, "
                f"the model of version {current.version} knows {self._sampler.vocab_size}",
                setting="model",
            )

    async def _localized(self, current: PolicyVersion) -> tuple[PolicyVersion, Stages] | None:
        """`current` on this host's disk, and what that took; None while it is downloaded and what serves is young
        enough to go on."""
        if not is_url(current.location):
            return current, Stages()
        if self._download is None or (self._download[0] != current and self._download[1].done()):
            took = Stages()
            task = asyncio.create_task(asyncio.to_thread(self._cache.localized, current, took))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may come to ask
            self._download = current, task, took
        target, task, took = self._download
        is_young = self._served is not None and current.version - self._served.version <= self._max_age
        if not task.done() and is_young:
            return None
        if self._served is None:
            self._heartbeat.waits(Waiting(kind=Wait.WEIGHTS, version=current.version, detail=current.location))
        await asyncio.wait([task])
        if target != current:
            return await self._localized(current)
        self._download = None
        return task.result(), took
