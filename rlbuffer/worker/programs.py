"""The worker of an env of programs: it takes tickets, begins their rollouts, starts a process for each, and ends them.

    take a ticket -> BEGIN -> a process per rollout, which asks the gateway -> END of each -> a gateway pushes the group

It samples nothing and needs no weights: engines are the gateway's. A worker that dies leaves open rollouts, which fail
as abandoned.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from rlbuffer.config.addresses import NOWHERE, parse_listen
from rlbuffer.config.settings import GatewaySettings, WorkerSettings
from rlbuffer.errors import (
    ConfigError,
    EnvDone,
    OpenRolloutUnknown,
    OtherEnd,
    RunGone,
    ServerRefused,
    ServerUnreachable,
    TicketGone,
)
from rlbuffer.process.logs import fields
from rlbuffer.process.threads import in_thread
from rlbuffer.records.failure import Failure, kind_of
from rlbuffer.records.group import Ticket
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.store.gateway import GRACE_SECONDS, GatewayStore
from rlbuffer.store.open_rollouts import Begun, End
from rlbuffer.worker.envs import factory_of
from rlbuffer.worker.envs.command import Command, failed
from rlbuffer.worker.heartbeat import WorkerHeartbeat

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer

ASK_SECONDS = 0.5
"""Seconds between two asks for a ticket, and between two looks at the wish to stop."""
TOUCH_SECONDS = 30.0
"""Longest time between two touches of an open rollout whose program runs."""
DRAIN_SECONDS = 15.0
"""Time that programs have when their worker ends."""
_log = logging.getLogger(__name__)


def run_programs(
    buffer: Buffer, name: str, settings: WorkerSettings, *, stop: threading.Event, section: str = ""
) -> bool:
    """Runs one worker of ``env = "command"`` until `stop` is set, or the env is done (-> True).

    Raises:
        ConfigError: the program's options, or no gateway is named.
    """
    env = factory_of("command", settings.env_options)(**settings.env_options)
    if not isinstance(env, Command):
        raise ConfigError("env command is another one here", setting="env")
    base = env.gateway or gateway_url(buffer.settings.gateway)
    store = buffer.store.role(GatewayStore)
    store.open_run()
    idle = buffer.settings.gateway.idle_seconds
    return asyncio.run(_Programs(store, name, settings, env, base, section, idle, stop).run())


def gateway_url(settings: GatewaySettings) -> str:
    """The address at which this host reaches the gateway of these settings. Raises ConfigError."""
    if settings.url:
        return settings.url.rstrip("/")
    host, port = parse_listen(settings.listen) if settings.listen else ("", 0)
    if not port:
        raise ConfigError(
            'env command: no gateway is named. Set [gateway] listen, or env_options.gateway = "http://host:8400"',
            setting="env_options",
        )
    host = "127.0.0.1" if host in ("", *NOWHERE) else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Programs:
    def __init__(
        self,
        store: GatewayStore,
        name: str,
        settings: WorkerSettings,
        env: Command,
        base: str,
        section: str,
        idle_seconds: float,
        stop: threading.Event,
    ) -> None:
        self._store, self._name, self._settings, self._env = store, name, settings, env
        self._base, self._section, self._idle, self._stop = base, section, idle_seconds, stop
        self._heartbeat = WorkerHeartbeat(store, name, env.name)

    async def run(self) -> bool:
        """Returns True when the env is done."""
        groups, is_done = set[asyncio.Task[None]](), False
        self._heartbeat.start()
        _log.info("programs ask %s", self._base, extra=fields("ready", url=self._base))
        try:
            while not (self._stop.is_set() or (is_done and not groups)):
                groups = {group for group in groups if not group.done()}
                begun = None
                if not is_done and len(groups) < self._settings.groups_in_flight:
                    try:
                        begun = await in_thread(self._begin)
                        self._heartbeat.error = ""
                    except EnvDone:
                        is_done = True
                    except (ServerRefused, ServerUnreachable, RunGone) as error:
                        self._heartbeat.error = str(error)
                if begun is not None:
                    groups.add(asyncio.create_task(self._played(begun)))
                    continue
                self._heartbeat.waiting = None if groups else Waiting(kind=Wait.TICKET, env=self._env.name)
                await asyncio.sleep(ASK_SECONDS)
            if groups:
                await asyncio.wait(groups, timeout=DRAIN_SECONDS)
        finally:
            for group in groups:
                group.cancel()
            await asyncio.gather(*groups, return_exceptions=True)
            await asyncio.to_thread(self._heartbeat.close)
        return is_done

    def _begin(self) -> Begun | None:
        """A ticket's rollouts; None while none is out."""
        store, env, section = self._store, self._env, self._section
        self._heartbeat.version = store.policy().version
        numbers = store.take_tickets(env.name, 1, ttl_seconds=GRACE_SECONDS, size=env.tickets, section=section)
        if not numbers:
            return None
        ticket = Ticket(env=env.name, number=numbers[0], group_id=f"{env.name}.{numbers[0]}")
        about = {"prompt_id": str(ticket.number)}
        try:
            key, size = secrets.token_urlsafe(32), self._settings.group_size
            return store.begin(key, ticket, size=size, about=about, idle_seconds=self._idle)
        except TicketGone:
            return None
        except BaseException:
            with suppress(ServerUnreachable, ServerRefused):
                store.release_tickets(env.name, numbers)
            raise

    async def _played(self, begun: Begun) -> None:
        """Runs the programs of a group. What goes wrong with one ends no other."""
        runs = (self._rollout(begun, index, one) for index, one in enumerate(begun.capabilities))
        for found in await asyncio.gather(*runs, return_exceptions=True):
            if isinstance(found, Exception):
                _log.warning("the end of an open rollout of %s is lost", begun.group_id, exc_info=found)
        self._heartbeat.groups += 1

    async def _rollout(self, begun: Begun, index: int, capability: str) -> None:
        """Runs one program, and ends its rollout, whatever becomes of it."""
        end = End(failure=Failure("stopped", "its worker ended"))
        touching = asyncio.create_task(self._touched(capability))
        try:
            environment = self._env.environment_of(self._base, capability, begun.number, index)
            end = await self._env.end_of(environment, self._settings.rollout_timeout_seconds)
        except Exception as error:  # of this host: of no program, and of no other rollout
            end = failed(kind_of(type(error).__name__), str(error))
            _log.warning("the program of open rollout %s could not be run", begun.names[index], exc_info=error)
        finally:
            touching.cancel()
            await asyncio.shield(asyncio.ensure_future(self._ended(begun.names[index], capability, end)))

    async def _touched(self, capability: str) -> None:
        """Keeps an open rollout from being abandoned while its program runs, whether that asks anything or not."""
        while True:
            await asyncio.sleep(min(TOUCH_SECONDS, self._idle / 3))
            with suppress(ServerUnreachable, ServerRefused, RunGone):
                await in_thread(partial(self._store.touch, capability))

    async def _ended(self, name: str, capability: str, end: End) -> None:
        """A server that is away or full is waited for, until the rollout is abandoned there."""
        deadline = time.monotonic() + GRACE_SECONDS
        while True:
            try:
                await in_thread(partial(self._store.end, capability, end))
            except OtherEnd:  # it was stale or abandoned, or somebody else has ended it
                _log.warning("open rollout %s had ended before its program did: the first end stands", name)
            except OpenRolloutUnknown:
                _log.warning("open rollout %s is not on the server any more: its end is passed over", name)
            except (ServerUnreachable, ServerRefused, RunGone) as error:
                self._heartbeat.error = str(error)
                if time.monotonic() < deadline and not isinstance(error, RunGone):
                    await asyncio.sleep(ASK_SECONDS)
                    continue
            self._heartbeat.rollouts += 1
            if end.failure is not None:
                _log.debug("open rollout %s has failed: %s", name, end.failure.kind)
            return
