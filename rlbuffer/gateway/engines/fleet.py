"""All engines of a gateway: which one answers a rollout, and how long others' troubles are waited for.

A rollout asks the same engine each time, which has its beginning in its prefix cache, unless that one is in trouble. An
engine that fails is left out for a while; the agent's call waits and is tried again, until its patience is over.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeVar

from rlbuffer.errors import ConfigError, PromptTooLong, RequestFailed, RlbufferError, SamplerBusy, SamplerUnavailable
from rlbuffer.gateway.engines.base import Engine
from rlbuffer.gateway.engines.sglang import SglangEngine
from rlbuffer.gateway.engines.vllm import VllmEngine
from rlbuffer.gateway.request import Refused
from rlbuffer.gateway.splice import Template, check_template
from rlbuffer.worker.samplers.endpoint import ENDPOINT_PROBE_SECONDS, Endpoint

T = TypeVar("T")
PATIENCE_SECONDS = 300.0
"""Longest that a call waits for engines that are away, full or paused; clients wait for ten minutes."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 10.0
"""Pause before an engine is asked again, doubled each time, with jitter."""
REFUSED_TRIES = 3
"""Times that an engine is asked for an answer that can be trained."""
RETRY_AFTER_SECONDS = 5.0
"""What an agent is told to wait after that."""
SETTING = "gateway.engines"
_RANDOM = random.Random()
_log = logging.getLogger(__name__)


NOT_ASKED = "it was not asked yet"
"""Why an engine is left out at first."""


@dataclass(slots=True, eq=False)
class _Place:
    """One engine's address, and how it is doing."""

    url: str
    engine: Engine | None = None
    """None: it was not reached yet."""
    template: Template | None = None
    """What the self-check found; None: it was not made yet."""
    trouble: str = NOT_ASKED
    """Why it is left out; "" when it is not."""
    ask_at: float = 0.0
    """Monotonic: not asked before."""
    pause: float = FIRST_PAUSE_SECONDS
    bringing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Fleet:
    """The engines at these addresses.

    Args:
        urls: of vLLM's or SGLang's servers.
        timeout_seconds: longest that one answer may take.
        patience_seconds: longest that a call waits for all of them.
    """

    def __init__(
        self, urls: Sequence[str], *, timeout_seconds: float, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self._places = [_Place(url.rstrip("/")) for url in urls]
        self._seconds, self._patience = timeout_seconds, patience_seconds

    async def start(self) -> None:
        """Looks at all of them. One that is away is looked at again by the calls.

        Raises:
            ConfigError: one was not started for this.
        """
        outcomes = await asyncio.gather(*(self._bring_up(place) for place in self._places), return_exceptions=True)
        for place, outcome in zip(self._places, outcomes, strict=True):
            if isinstance(outcome, ConfigError):
                raise outcome
            if isinstance(outcome, RlbufferError):
                self._note(place, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    @property
    def models(self) -> list[str]:
        """The models that they serve."""
        return list(dict.fromkeys(p.engine.model for p in self._places if p.engine is not None and p.engine.model))

    @property
    def troubles(self) -> list[str]:
        """A sentence for each that cannot be used."""
        return [place.trouble for place in self._places if place.trouble]

    async def ask(self, about: str, work: Callable[[Engine, Template], Awaitable[T]]) -> T:
        """Does `work` with an engine, again and again where that may help.

        Args:
            about: what the call belongs to: the same engine is asked for it each time.

        Raises:
            Refused: none can, for as long as the call waits; or the engine refuses the request itself.
        """
        deadline, refusals = time.monotonic() + self._patience, 0
        while True:
            place = self._choice(about)
            if (wait := place.ask_at - time.monotonic()) > 0:
                if time.monotonic() + wait > deadline:
                    raise self._nobody()
                await asyncio.sleep(wait)
            try:
                if place.engine is None or place.template is None:
                    await self._bring_up(place)
                if place.engine is None or place.template is None:
                    continue
                done = await work(place.engine, place.template)
            except PromptTooLong as error:
                raise Refused(str(error), code="context_length_exceeded") from error
            except (SamplerUnavailable, ConfigError) as error:
                self._note(place, error)
            except RequestFailed as error:
                refusals += 1
                if refusals >= REFUSED_TRIES:
                    raise _refused(error) from error
                await asyncio.sleep(FIRST_PAUSE_SECONDS)
            else:
                place.trouble, place.pause = "", FIRST_PAUSE_SECONDS
                return done

    async def close(self) -> None:
        """Closes all connections."""
        for place in self._places:
            if place.engine is not None:
                await place.engine.close()

    def _choice(self, about: str) -> _Place:
        """The rollout's own engine, by the highest digest of both, unless it is in trouble and another one is not."""

        def rank(place: _Place) -> tuple[float, bytes]:
            waits = max(0.0, place.ask_at - time.monotonic())
            return -waits, hashlib.sha256(f"{place.url} {about}".encode()).digest()

        return max(self._places, key=rank)

    def _note(self, place: _Place, error: RlbufferError) -> None:
        """Leaves an engine out for a while. The log has the beginning of the reason alone: an engine's own words may
        quote the agent."""
        asked = error.seconds if isinstance(error, SamplerBusy) else 0.0
        pause = min(max(place.pause, asked), LONGEST_PAUSE_SECONDS) * _RANDOM.uniform(0.7, 1.0)
        place.ask_at, place.pause = time.monotonic() + pause, min(2 * place.pause, LONGEST_PAUSE_SECONDS)
        if not place.trouble or place.trouble == NOT_ASKED:
            _log.warning("an engine cannot be used, and calls wait for it: %s", str(error).partition(": ")[0])
        place.trouble = str(error)

    def _nobody(self) -> Refused:
        why = self.troubles[0] if self.troubles else "none answers"
        return Refused(
            f"no engine can answer: {why}",
            status=HTTPStatus.SERVICE_UNAVAILABLE,
            code="engine_unavailable",
            retry_seconds=RETRY_AFTER_SECONDS,
        )

    async def _bring_up(self, place: _Place) -> None:
        """Finds out what serves at an address, and whether its template can be gone on from."""
        async with place.bringing:
            if place.template is not None:
                return
            engine = place.engine = place.engine or await self._found(place.url)
            await engine.probe()

            async def render(request: object, opens: bool) -> object:
                return (await engine.render(request, opens=opens)).tokens  # type: ignore[arg-type]

            place.template = await check_template(render)  # type: ignore[arg-type]
            place.trouble = ""
            if not place.template.is_append_only:
                _log.warning(
                    "engine %s: no turn can go on from the one before, since its chat template cannot be continued: "
                    "%s. Each turn is rendered whole, and is a sequence of its own",
                    place.url,
                    place.template.why,
                )

    async def _found(self, url: str) -> Engine:
        """The engine at an address: SGLang's answers where vLLM's has no page."""
        endpoint = Endpoint(url, timeout_seconds=self._seconds, setting=SETTING)
        try:
            await endpoint.call("GET", "/version", seconds=ENDPOINT_PROBE_SECONDS)
        except ConfigError:  # 404
            return SglangEngine(endpoint, timeout_seconds=self._seconds)
        except BaseException:
            await endpoint.close()
            raise
        return VllmEngine(endpoint, timeout_seconds=self._seconds)


def _refused(error: RequestFailed) -> Refused:
    told = str(error)
    if "context length" in told or "maximum model length" in told or "max_model_len" in told:
        return Refused(told, code="context_length_exceeded")
    return Refused(told, status=HTTPStatus.BAD_REQUEST, code="engine_refused")
