"""The run's server, as calls of open rollouts ask it: what it knows of one, and whether anything may be sampled for it.

What goes wrong there is a :class:`rlbuffer.gateway.request.Refused`, with a sentence for the agent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, TypeVar

from rlbuffer.errors import (
    EpochChanged,
    OpenRolloutEnded,
    OpenRolloutFull,
    OpenRolloutUnknown,
    PayloadError,
    RunGone,
    ServerRefused,
    ServerUnreachable,
)
from rlbuffer.gateway.request import Refused
from rlbuffer.process.threads import KeptThreads
from rlbuffer.records.failure import Failure
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.store.open_rollouts import MOST_BYTES, MOST_CALLS, Found, OpenRollout, OpenState, full_message

T = TypeVar("T")
CLOCK_SECONDS = 5.0
"""For so long the difference between the server's clock and this one counts."""
POLICY_SECONDS = 0.5
"""For so long the newest policy version counts."""
CONFIG_SECONDS = 5.0
"""For so long the run's `max_age` counts."""
RETRY_SECONDS = 2.0
"""What an agent is told to wait."""


class RunServer:
    """The server of one run."""

    def __init__(self, store: GatewayStore) -> None:
        self._store = store
        self.threads = KeptThreads("gateway-store")
        """What is asked of the server is done in them."""
        self._clock: tuple[float, float] = (float("-inf"), 0.0)
        self._policy: tuple[float, int] = (float("-inf"), -1)
        self._max_age: tuple[float, int | None] = (float("-inf"), None)

    def close(self) -> None:
        """Ends what waits for more to do. Safe to repeat."""
        self.threads.close()

    async def opened(self, look_up: Callable[[], Found]) -> Found:
        """What `look_up` finds. Raises Refused where its open rollout takes no calls."""
        found = await self.told(look_up)
        if found.rollout.state is not OpenState.OPEN or found.rollout.is_frozen:
            raise ended_refusal(found.rollout.name)
        return found

    async def check(self, found: Found) -> None:
        """Raises Refused where nothing may be sampled for an open rollout."""
        rollout = found.rollout
        if rollout.calls >= MOST_CALLS or rollout.bytes >= MOST_BYTES:
            raise full_refusal(rollout)
        why = "the run has gone into another line of versions" if rollout.is_void else ""
        if not why and rollout.oldest_version is not None:
            age, most = await self._current() - rollout.oldest_version, await self._most_age()
            if most is not None and age > most:
                why = f"its oldest token is {age} policy versions old, and max_age is {most}"
        if why:
            await self.told(lambda: self._store.fail(rollout.name, Failure("stale", why)))
            raise Refused(
                f"open rollout {rollout.name} cannot be trained any more: {why}. Begin another one",
                status=HTTPStatus.CONFLICT,
                code="stale",
            )
        if not await self.told(self._store.may_sample):
            raise Refused(
                "the server's memory is nearly full, so nothing is sampled until steps retire: ask again",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
                code="server_full",
                retry_seconds=RETRY_SECONDS,
            )

    async def told(self, ask: Callable[[], T], *, until: float = 0.0) -> T:
        """The server's answer, in a thread of its own: no call waits for another one's.

        Args:
            until: monotonic; asked again until then while the server is away.

        Raises:
            Refused.
            EpochChanged, NotFound: of what is recorded.
        """
        while True:
            try:
                return await self.threads.do(ask)
            except (ServerUnreachable, ServerRefused) as error:
                if time.monotonic() < until:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                raise Refused(
                    f"the run's server does not answer ({type(error).__name__}): ask again",
                    status=HTTPStatus.SERVICE_UNAVAILABLE,
                    code="server_away",
                    retry_seconds=RETRY_SECONDS,
                ) from error
            except OpenRolloutUnknown as error:
                raise unknown_refusal() from error
            except OpenRolloutEnded as error:
                raise Refused(
                    "this open rollout has ended: it takes no calls any more",
                    status=HTTPStatus.CONFLICT,
                    code="rollout_ended",
                ) from error
            except OpenRolloutFull as error:
                raise Refused(f"{error}. End it", status=HTTPStatus.CONFLICT, code="rollout_full") from error
            except EpochChanged:
                raise
            except (RunGone, PayloadError) as error:
                raise Refused(
                    f"what the server has of this open rollout cannot be used ({type(error).__name__}): begin another",
                    status=HTTPStatus.CONFLICT,
                    code="rollout_lost",
                ) from error

    async def seconds(self) -> float:
        """The server's clock, seconds. Raises Refused."""
        at, ahead = self._clock
        if time.monotonic() - at > CLOCK_SECONDS:
            now = await self.told(self._store.now)
            ahead = now - time.monotonic()
            self._clock = time.monotonic(), ahead
        return time.monotonic() + ahead

    async def _current(self) -> int:
        """The newest policy version."""
        at, version = self._policy
        if time.monotonic() - at > POLICY_SECONDS:
            version = (await self.told(self._store.policy)).version
            self._policy = time.monotonic(), version
        return version

    async def _most_age(self) -> int | None:
        """`max_age` of the run; None while no batcher has served it."""
        at, most = self._max_age
        if time.monotonic() - at > CONFIG_SECONDS:
            config: dict[str, Any] = dict((await self.told(self._store.meta)).config or {})
            most = config.get("max_age")
            self._max_age = time.monotonic(), most
        return most


def full_refusal(rollout: OpenRollout) -> Refused:
    """An open rollout has as much as one may have."""
    told = full_message(rollout.name, rollout.calls, rollout.bytes, rollout.sequences)
    return Refused(f"{told}. End it", status=HTTPStatus.CONFLICT, code="rollout_full")


def unknown_refusal() -> Refused:
    """No open rollout has the capability that a request brings."""
    return Refused(
        "no open rollout has this address or key: it was never begun, was pushed a while ago, or is of another run",
        status=HTTPStatus.NOT_FOUND,
        code="rollout_unknown",
    )


def ended_refusal(name: str) -> Refused:
    """An open rollout has ended."""
    return Refused(
        f"open rollout {name} has ended: it takes no calls any more", status=HTTPStatus.CONFLICT, code="rollout_ended"
    )
