"""All engines of a gateway: which one answers a rollout, and how long others' troubles are waited for.

A rollout asks the same engine each time, which has its beginning in its prefix cache, unless that one is in trouble. An
engine that fails is left out for a while; the agent's call waits and is tried again, until its patience is over.

An engine may be started anew at any time, as another kind, with another model, context or template. So it is found out
again after each trouble, and looked at every LOOK_SECONDS: what it shows of a made conversation tells.
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
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlbuffer.config.models import ExpertCounts
from rlbuffer.errors import ConfigError, PromptTooLong, RequestFailed, RlbufferError, SamplerBusy, SamplerUnavailable
from rlbuffer.gateway.engines.base import Engine
from rlbuffer.gateway.engines.logprobs import SETTING, SIMPLEST, check_logprobs
from rlbuffer.gateway.engines.sglang import SglangEngine
from rlbuffer.gateway.engines.vllm import VllmEngine
from rlbuffer.gateway.request import AgentRequest, Refused
from rlbuffer.gateway.splice import Render, Template, check_template, shown
from rlbuffer.worker.samplers.endpoint import ENDPOINT_PROBE_SECONDS, Endpoint, NoSuchPage

T = TypeVar("T")
PATIENCE_SECONDS = 300.0
"""Longest that a call waits for engines that are away, full or paused; clients wait for ten minutes."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 10.0
"""Pause before an engine is asked again, doubled each time, with jitter."""
WATCH_SECONDS = 5.0
"""Seconds between two looks at engines that are down, also while nobody calls."""
RECENT_SECONDS = 60.0
"""A call that failed says for so long that its engine is in trouble: who waits for one asks it more often."""
LOOK_SECONDS = 15.0
"""A look at an engine counts for so long."""
REFUSED_TRIES = 3
"""Times that an engine is asked for an answer that can be trained."""
RETRY_AFTER_SECONDS = 5.0
"""What an agent is told to wait after that."""
ODD_ANSWERS = (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError)
"""What reading an answer raises that has another form than an engine's."""
_RANDOM = random.Random()
_log = logging.getLogger(__name__)


NOT_ASKED = "it was not asked yet"
"""Why an engine is left out at first."""


@dataclass(slots=True, eq=False)
class _Place:
    """One engine's address, and how it is doing."""

    url: str
    endpoint: Endpoint
    engine: Engine | None = None
    """None: it was not reached yet."""
    template: Template | None = None
    """What the self-check found; None: what serves there must be found out first."""
    shown: str = ""
    """Digest of what that engine shows of the made conversation."""
    look_at: float = 0.0
    """Monotonic time of the next look."""
    trouble: str = NOT_ASKED
    """Why it is left out, without the engine's own words, which may quote an agent; "" when it is not."""
    is_down: bool = True
    """It could not be found out. Else it is a call that failed."""
    failing_since: float = 0.0
    """Monotonic time of the first failure since it worked."""
    failed_at: float = 0.0
    """Monotonic time of the last one."""
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
        temperature, top_p: the run's. Logprobs must be with the one and without the other; with `top_k` they must be of
            the tokens that are left.
        top_k: the run's.
        experts: of the model, whose choice answers must say; None: they need not.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_seconds: float,
        patience_seconds: float = PATIENCE_SECONDS,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        experts: ExpertCounts | None = None,
    ) -> None:
        self._experts = experts
        self._temperature, self._top_p, self._top_k = temperature, top_p, top_k
        self._seconds, self._patience = timeout_seconds, patience_seconds
        self._watching: asyncio.Task[None] | None = None
        told: dict[str, Any] = {"setting": SETTING, "top_k": top_k, "records_experts": experts is not None}
        self._places = [_Place(url.rstrip("/"), Endpoint(url, timeout_seconds=timeout_seconds, **told)) for url in urls]

    async def start(self) -> None:
        """Looks at all of them. One that is away is looked at again by the calls.

        Raises:
            ConfigError: one was not started for this.
        """
        self._watching = asyncio.create_task(self._watch())
        outcomes = await asyncio.gather(*(self._bring_up(place) for place in self._places), return_exceptions=True)
        for place, outcome in zip(self._places, outcomes, strict=True):
            if isinstance(outcome, ConfigError):
                raise outcome
            if isinstance(outcome, RlbufferError):
                self._note(place, outcome, is_down=True)
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

    def lasting(self, seconds: float) -> list[str]:
        """A sentence for each that has been in trouble for so long, and still is."""
        now = time.monotonic()
        return [
            place.trouble
            for place in self._places
            if place.trouble not in ("", NOT_ASKED)
            and now - place.failing_since >= seconds
            and (place.is_down or now - place.failed_at < RECENT_SECONDS)
        ]

    def __len__(self) -> int:
        return len(self._places)

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
            is_down = True
            try:
                await self._bring_up(place)
                is_down = False
                if place.engine is None or place.template is None:
                    continue
                done = await work(place.engine, place.template)
            except PromptTooLong as error:
                raise Refused(str(error), code="context_length_exceeded") from error
            except (SamplerUnavailable, ConfigError) as error:
                self._note(place, error, is_down=is_down)
            except RequestFailed as error:
                refusals += 1
                place.look_at = 0.0  # it may be another engine than the one that was asked before
                if refusals >= REFUSED_TRIES:
                    raise _refused(error) from error
                await asyncio.sleep(FIRST_PAUSE_SECONDS)
            else:
                place.trouble, place.pause = "", FIRST_PAUSE_SECONDS
                return done

    async def close(self) -> None:
        """Closes all connections."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for place in self._places:
            await place.endpoint.close()

    async def _watch(self) -> None:
        """Looks at engines that are down: whether one is there again is known before somebody calls."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            down = [place for place in self._places if place.is_down and time.monotonic() >= place.ask_at]
            await asyncio.gather(*map(self._looked_at, down))

    async def _looked_at(self, place: _Place) -> None:
        try:
            await self._bring_up(place)
        except RlbufferError as error:
            self._note(place, error, is_down=True)

    def _choice(self, about: str) -> _Place:
        """The rollout's own engine, by the highest digest of both, unless it is in trouble and another one is not."""

        def rank(place: _Place) -> tuple[float, bytes]:
            waits = max(0.0, place.ask_at - time.monotonic())
            return -waits, hashlib.sha256(f"{place.url} {about}".encode()).digest()

        return max(self._places, key=rank)

    def _note(self, place: _Place, error: RlbufferError, *, is_down: bool) -> None:
        """Leaves an engine out for a while, and has it looked at before it is asked again."""
        asked = error.seconds if isinstance(error, SamplerBusy) else 0.0
        pause = min(max(place.pause, asked), LONGEST_PAUSE_SECONDS) * _RANDOM.uniform(0.7, 1.0)
        place.ask_at, place.pause = time.monotonic() + pause, min(2 * place.pause, LONGEST_PAUSE_SECONDS)
        place.look_at = 0.0
        if not isinstance(error, SamplerBusy):
            place.template = None
        told, place.is_down, place.failed_at = str(error).partition(": ")[0], is_down, time.monotonic()
        if place.trouble in ("", NOT_ASKED):
            place.failing_since = place.failed_at
        if not place.trouble or place.trouble == NOT_ASKED:
            _log.warning("an engine cannot be used, and calls wait for it: %s", told)
        place.trouble = told

    def _nobody(self) -> Refused:
        why = self.troubles[0] if self.troubles else "none answers"
        return Refused(
            f"no engine can answer: {why}",
            status=HTTPStatus.SERVICE_UNAVAILABLE,
            code="engine_unavailable",
            retry_seconds=RETRY_AFTER_SECONDS,
        )

    async def _bring_up(self, place: _Place) -> None:
        """Finds out what serves at an address, and whether its template can be gone on from, where that is not known.

        Raises:
            SamplerUnavailable, ConfigError: it is in trouble. No request of an agent is at fault here.
        """
        if place.template is not None and time.monotonic() < place.look_at:
            return
        async with place.bringing:
            if place.template is not None and time.monotonic() < place.look_at:
                return
            place.look_at = time.monotonic() + LOOK_SECONDS  # a call that looks holds no other one up
            try:
                if not await self._is_as_before(place):
                    await self._find_out(place)
            except BaseException as error:
                place.look_at = 0.0
                if isinstance(error, RequestFailed):
                    raise SamplerUnavailable(str(error)) from error
                if isinstance(error, RlbufferError) or not isinstance(error, ODD_ANSWERS):
                    raise
                raise SamplerUnavailable(f"{place.url} answers as no engine does ({type(error).__name__})") from error

    async def _is_as_before(self, place: _Place) -> bool:
        """An engine that was found out has the same template still; its model and context are known anew."""
        if place.template is None or place.engine is None:
            return False
        await place.engine.identify()
        return await shown(_rendering(place.engine)) == place.shown

    async def _find_out(self, place: _Place) -> None:
        place.template = None
        engine = place.engine = await self._found(place)
        await engine.probe()
        await check_logprobs(engine, temperature=self._temperature, top_p=self._top_p, top_k=self._top_k)
        place.shown = await shown(_rendering(engine))
        place.template = await check_template(_rendering(engine))
        if place.is_down:  # what a call has failed of, only a call can show to be over
            place.trouble, place.is_down = "", False
        if not place.template.is_append_only:
            _log.warning(
                "engine %s: no turn can go on from the one before, since its chat template cannot be continued: "
                "%s. Each turn is rendered whole, and is a sequence of its own",
                place.url,
                place.template.why,
            )

    async def _found(self, place: _Place) -> Engine:
        """The engine at an address: SGLang's answers where vLLM's has no page."""
        endpoint = place.endpoint
        try:
            await endpoint.call("GET", "/version", seconds=ENDPOINT_PROBE_SECONDS)
        except NoSuchPage:
            try:
                await endpoint.identify()
            except NoSuchPage:
                raise SamplerUnavailable(
                    f"{place.url} answers 404 to /version and /v1/models. It is no engine, or the engine behind it is "
                    "not there yet"
                ) from None
            return SglangEngine(endpoint, timeout_seconds=self._seconds, experts=self._experts)
        return VllmEngine(endpoint, timeout_seconds=self._seconds)


def _rendering(engine: Engine) -> Render:
    """How an engine shows a made conversation. One that fails at it alone, and not at the simplest, refuses it."""

    async def render(request: AgentRequest, opens: bool) -> NDArray[np.int32]:
        try:
            return (await engine.render(request, opens=opens)).tokens
        except SamplerBusy:
            raise
        except SamplerUnavailable:
            await engine.render(SIMPLEST, opens=True)
        try:
            return (await engine.render(request, opens=opens)).tokens
        except SamplerBusy:
            raise
        except SamplerUnavailable as error:
            await engine.render(SIMPLEST, opens=True)
            raise RequestFailed(str(error)) from error

    return render


def _refused(error: RequestFailed) -> Refused:
    told = str(error)
    if "context length" in told or "maximum model length" in told or "max_model_len" in told:
        return Refused(told, code="context_length_exceeded")
    return Refused(told, status=HTTPStatus.BAD_REQUEST, code="engine_refused")
