"""One call of an agent, from its request to the answer that it hears.

    look up -> render what is new, splice -> sample -> RECORD -> tell the agent -> heard

An answer is on the server before the agent hears of it, and whatever breaks in between, the same request gets it again:

- Sampling goes on when its agent hangs up. The next request that is equal takes it over.
- A request that was recorded and never heard is answered with that.
- A client's own retry (``x-stainless-retry-count``) waits for its earlier try, or gets its answer again. An earlier try
  has a lower count; so eight agents that all try the same a second time are eight calls, as they were the first time.
- Two agents that ask the same at the same time are two calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rlbuffer.config.settings import GatewaySettings
from rlbuffer.errors import (
    EpochChanged,
    NotFound,
    OpenRolloutUnknown,
    PayloadError,
    RunGone,
    ServerRefused,
    ServerUnreachable,
)
from rlbuffer.gateway.dialects.base import Dialect, Told
from rlbuffer.gateway.engines.base import Answer, Engine, Rendering, shaped, sound
from rlbuffer.gateway.engines.fleet import Fleet
from rlbuffer.gateway.experts import kept_rows
from rlbuffer.gateway.history import answers_in, beginnings, following, request_digest
from rlbuffer.gateway.request import AgentRequest, Refused
from rlbuffer.gateway.run_server import RETRY_SECONDS, RunServer, full_refusal
from rlbuffer.gateway.splice import Template, spliced
from rlbuffer.records.rollout import MAX_SEQUENCES
from rlbuffer.records.support import SUPPORT
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.store.open_rollouts import (
    Found,
    OpenCall,
    OpenRollout,
)
from rlbuffer.worker.samplers.base import Sampling, fitted

MOST_OPEN_CALLS = 1000
"""Calls that one gateway process has open; more are told to come again, or meet another process."""
MOST_ROLLOUT_CALLS = 64
"""Calls that one open rollout has open in one process: so no agent takes the process from others."""
RETOLD_SECONDS = 30.0
"""For so long after an answer was heard a retry gets it again: it may have been lost on its way."""
TOUCH_SECONDS = 30.0
"""Longest between two touches of an open rollout whose engine is at work; a third of its idle limit where that is
shorter."""
SHORTEST_TOUCH_SECONDS = 0.2
LANDED_SECONDS = 10.0
"""Longer than the server is asked what it knows of a request: what was heard meanwhile it has not said."""
REFUSAL_SECONDS = 60.0
"""For so long it is known that a request was told to come again."""
RECORD_SECONDS = 300.0
"""Longest that a sampled answer waits for a server that is away."""
ANSWER_TRIES = 3
"""Times that an answer is begun anew where the server has lost what it goes on from."""
LONGEST_ANSWER = 8192
"""Tokens of an answer where neither the agent, the settings nor the engine's context limit it."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Flight:
    """A call that is being answered."""

    key: tuple[str, str]
    """Capability, and digest of the request."""
    counts: set[int]
    """How often each request that has waited for it was tried before."""
    task: asyncio.Task[OpenCall] = field(init=False)
    listeners: int = 0
    """Requests that wait for it, or are being told."""
    number: int = 0
    """Of the call, once it is recorded, or found."""
    recorded_behind: int | None = None
    """Newest call of its request when it went to the server, which may have it before this process hears so."""
    is_heard: bool = False
    """An agent has the answer."""

    @property
    def tries(self) -> int:
        """Most earlier tries of a request that has waited for it."""
        return max(self.counts)

    def may_be(self, number: int) -> bool:
        """It is this call of its request, or may be."""
        if self.number or self.recorded_behind is None:
            return self.number == number
        return number > self.recorded_behind

    def is_of_earlier(self, tries: int) -> bool:
        """It may be of an earlier try of a request that was tried so often: each of these has a count of its own."""
        return min(self.counts) < tries and tries not in self.counts


@dataclass(slots=True)
class GatewayCounts:
    """What this process has done."""

    calls: int = 0
    tokens: int = 0
    again: int = 0
    """Requests that got an answer that was there."""
    engine_seconds: float = 0.0
    own_seconds: float = 0.0
    """Of calls, without the engine's."""
    new_sequences: int = 0
    """Calls that began a sequence although the conversation had an answer in it."""
    refused: dict[int, int] = field(default_factory=dict)
    """HTTP status -> requests."""


class Answering:
    """Answers the calls of all open rollouts."""

    def __init__(self, store: GatewayStore, fleet: Fleet, settings: GatewaySettings) -> None:
        self._store, self._fleet, self._settings = store, fleet, settings
        self._run = RunServer(store)
        self.tally = GatewayCounts()
        self._flights: dict[tuple[str, str], list[Flight]] = {}
        self._refusals: dict[tuple[str, str], list[tuple[float, int]]] = {}
        """Request -> monotonic time and count of its tries that were told to come again."""
        self._landed: deque[tuple[float, Flight]] = deque()
        """Monotonic time and call of those that were heard a moment ago."""

    @property
    def open_calls(self) -> int:
        """Calls that are being answered."""
        return sum(map(len, self._flights.values()))

    @asynccontextmanager
    async def flight(
        self,
        capability: str,
        request: AgentRequest,
        dialect: Dialect,
        *,
        tries: int = 0,
        length: int | None = None,
    ) -> AsyncIterator[Flight]:
        """The call that answers a request, for as long as its agent is told of it.

        Leaving it early, because the agent hung up, leaves the call at work.

        Args:
            tries: how often its client has tried it before.
            length: bytes of its body; None: they were not announced.

        Raises:
            Refused: no open rollout has the capability, or too many calls are open.
        """
        chain = beginnings(request)
        key = capability, request_digest(request, chain[-1])
        if tries and (self._was_refused(key, tries) or self._was_refused(_unread(capability, length), tries)):
            tries = 0
        flight = None
        try:
            flight = await self._joined(key, request, dialect, chain, tries)
            yield flight
        except Refused as error:
            if error.retry_seconds:
                self._note_refusal(key, tries)
            raise
        finally:
            if flight is not None:
                flight.listeners -= 1
                if flight.task.done() and not flight.listeners:
                    self._land(flight)

    async def _joined(
        self, key: tuple[str, str], request: AgentRequest, dialect: Dialect, chain: list[str], tries: int
    ) -> Flight:
        """A call under way that answers a request, else one that is begun, with this request as a listener. Raises
        Refused."""
        found, flight = None, self._taken_over(key, tries)
        if flight is None:  # nothing is begun for a capability that nobody knows
            found = await self._look_up(key, request, chain)
            flight = self._taken_over(key, tries)  # another one may have come meanwhile
        if flight is None:
            self._check_open_calls(key[0])
            assert found is not None
            flight = self._begun(key, request, dialect, chain, found, tries)
        else:
            self.tally.again += 1
        flight.listeners += 1
        flight.counts.add(tries)
        return flight

    def _check_open_calls(self, capability: str) -> None:
        """Raises Refused where too many calls are open."""
        if self.open_calls >= MOST_OPEN_CALLS:
            raise Refused(
                f"this gateway has {MOST_OPEN_CALLS} calls open: ask again in a moment",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
                retry_seconds=RETRY_SECONDS,
            )
        opened = sum(len(flights) for (whose, _), flights in self._flights.items() if whose == capability)
        if opened >= MOST_ROLLOUT_CALLS:
            raise Refused(
                f"this open rollout has {MOST_ROLLOUT_CALLS} calls open here: ask again when one is answered",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                code="too_many_calls",
                retry_seconds=RETRY_SECONDS,
            )

    async def heard(self, flight: Flight) -> None:
        """The agent has the answer. What cannot be noted is told again to whoever asks the same."""
        (capability, digest), call, tries = flight.key, flight.task.result(), flight.tries
        flight.is_heard = True
        with suppress(OpenRolloutUnknown, ServerUnreachable, ServerRefused, RunGone, EpochChanged):
            await self._run.threads.do(
                lambda: self._store.heard(capability, digest, call.number, call_id=call.id, tries=tries)
            )

    async def check(self, capability: str) -> None:
        """Raises Refused where no open rollout that takes calls has the capability."""
        await self._run.opened(lambda: self._store.look_up(capability))

    async def check_unread(self, capability: str, *, tries: int, length: int | None) -> None:
        """As :meth:`check`, of a request whose body is not read: its length alone tells when it is tried again. `tries`
        and `length` are those of :meth:`flight`."""
        try:
            await self.check(capability)
        except Refused as error:
            if error.retry_seconds:
                self._note_refusal(_unread(capability, length), tries)
            raise

    async def count_tokens(self, request: AgentRequest) -> int:
        """Tokens of a whole rendering. Raises Refused."""

        async def work(engine: Engine, _: Template) -> int:
            return len((await engine.render(request, opens=True)).tokens)

        return await self._fleet.ask("", work)

    async def drain(self, seconds: float) -> None:
        """Waits until what is being sampled is recorded."""
        tasks = [flight.task for flights in self._flights.values() for flight in flights]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Ends what waits for more to do. Safe to repeat."""
        self._run.close()

    # -- flights -------------------------------------------------------------------------------------------------------
    def _taken_over(self, key: tuple[str, str], tries: int) -> Flight | None:
        """A call under way that this request waits for: one that nobody waits for any more, or that an earlier try of
        this request may still seem to wait for."""
        flights = self._flights.get(key, [])
        left = [flight for flight in flights if not flight.listeners]
        return next(iter([*left, *(flight for flight in flights if flight.is_of_earlier(tries))]), None)

    def _was_refused(self, key: tuple[str, str], tries: int) -> bool:
        """An earlier try was told to come again, so no call is its answer. Each refusal counts for one retry."""
        refusals = self._refusals.get(key, [])
        for refusal in refusals:
            if refusal[1] < tries:
                refusals.remove(refusal)
                return True
        return False

    def _note_refusal(self, key: tuple[str, str], tries: int) -> None:
        oldest = time.monotonic() - REFUSAL_SECONDS
        kept = {key: [one for one in refusals if one[0] > oldest] for key, refusals in self._refusals.items()}
        self._refusals = {key: refusals for key, refusals in kept.items() if refusals}
        if len(self._refusals) < MOST_OPEN_CALLS:
            self._refusals.setdefault(key, []).append((time.monotonic(), tries))

    def _begun(
        self,
        key: tuple[str, str],
        request: AgentRequest,
        dialect: Dialect,
        chain: list[str],
        found: Found,
        tries: int,
    ) -> Flight:
        flight = Flight(key, {tries})
        work = self._answer(flight, request, dialect, chain, found)
        flight.task = asyncio.get_running_loop().create_task(work)
        self._flights.setdefault(key, []).append(flight)

        def landed(task: asyncio.Task[OpenCall]) -> None:
            if not task.cancelled() and task.exception() is None:
                flight.number = task.result().number
            if not flight.listeners:
                self._land(flight)

        flight.task.add_done_callback(landed)
        return flight

    def _land(self, flight: Flight) -> None:
        flights = [other for other in self._flights.get(flight.key, []) if other is not flight]
        if flight.is_heard:
            self._landed.append((time.monotonic(), flight))
        while self._landed and time.monotonic() - self._landed[0][0] > LANDED_SECONDS:
            self._landed.popleft()
        if flights:
            self._flights[flight.key] = flights
        else:
            self._flights.pop(flight.key, None)

    # -- a call --------------------------------------------------------------------------------------------------------
    async def _answer(
        self, flight: Flight, request: AgentRequest, dialect: Dialect, chain: list[str], found: Found
    ) -> OpenCall:
        """The recorded call that answers a request. Raises Refused.

        A server that comes back without its newest writes may have lost what the answer goes on from while it was
        sampled. What was sampled then is of no use, and nobody has heard it: the answer is begun anew.
        """
        for _ in range(ANSWER_TRIES):
            try:
                return await self._answered(flight, request, dialect, chain, found)
            except NotFound:
                _log.warning("the server has lost the call that another one goes on from: that one is sampled again")
                found = await self._look_up(flight.key, request, chain)
        raise Refused(
            "the server has lost the call that this one goes on from: ask again",
            status=HTTPStatus.SERVICE_UNAVAILABLE,
            code="server_away",
            retry_seconds=RETRY_SECONDS,
        )

    async def _answered(
        self, flight: Flight, request: AgentRequest, dialect: Dialect, chain: list[str], found: Found
    ) -> OpenCall:
        """One try of :meth:`_answer`. Raises Refused, NotFound."""
        capability, digest = flight.key
        begun = time.monotonic()
        if await self._is_told_again(flight, found):
            flight.number = found.request_call  # from here on it is told here, and to no other that asks the same
            earlier = await self._run.told(lambda: self._kept(found.rollout.name, [found.request_call]))
            if earlier and earlier[0].details.get("request") == digest:
                self.tally.again += 1
                return earlier[0]
            flight.number = 0
        await self._run.check(found)
        at = chain.index(found.history) if found.history else 0
        engine_begun = time.monotonic()
        call = await self._sampled(capability, request, found, at)
        engine_seconds = time.monotonic() - engine_begun
        after = following(chain[-1], dialect.returned(call.details["message"]))
        about = {"request": digest, "history": after, "tries": flight.tries}
        call = replace(call, details={**call.details, **about})
        recorded = await self._recorded(capability, call, digest, after, found, flight)
        self.tally.calls += 1
        self.tally.tokens += len(call.tokens)
        self.tally.new_sequences += bool(answers_in(request.messages)) and not call.after
        self.tally.engine_seconds += engine_seconds
        self.tally.own_seconds += time.monotonic() - begun - engine_seconds
        return recorded

    async def _is_told_again(self, flight: Flight, found: Found) -> bool:
        """The newest call of a request is its answer: nobody has heard it, or an earlier try of this request has, and
        seconds ago. Raises Refused."""

        def is_told() -> bool:
            here = self._flights.get(flight.key, ())
            flights = [other for other in here if other is not flight and other.listeners]
            flights += [other for _, other in self._landed if other.key == flight.key]  # since the server was asked
            told = [other for other in flights if other.may_be(found.request_call)]
            return not all(other.is_of_earlier(flight.tries) for other in told)

        if not found.request_call or is_told():
            return False
        if found.is_heard:
            age = await self._run.seconds() - found.heard_ms / 1000
            return found.heard_tries < flight.tries and age < RETOLD_SECONDS and not is_told()
        return True

    async def _look_up(self, key: tuple[str, str], request: AgentRequest, chain: list[str]) -> Found:
        """What the server knows of a request. Raises Refused where its open rollout takes none."""
        capability, digest = key
        histories = [chain[j] for j in answers_in(request.messages)]
        return await self._run.opened(lambda: self._store.look_up(capability, request=digest, histories=histories))

    async def _sampled(self, capability: str, request: AgentRequest, found: Found, at: int) -> OpenCall:
        """Asks an engine. What it sees begins with exactly what it saw and sampled before."""
        kept = await self._history(found) if found.history_call else []
        touching = asyncio.create_task(self._touched(capability, found.rollout))
        try:

            async def work(engine: Engine, template: Template) -> OpenCall:
                return await self._asked(engine, template, request, found, kept, at)

            return await self._fleet.ask(found.rollout.name, work)
        finally:
            touching.cancel()
            await asyncio.gather(touching, return_exceptions=True)

    async def _asked(
        self, engine: Engine, template: Template, request: AgentRequest, found: Found, kept: list[OpenCall], at: int
    ) -> OpenCall:
        rendering, new = None, None
        if kept and template.goes_on(request) and kept[-1].details.get("is_ended"):
            seen = dict[bool, Rendering]()

            async def render(asked: AgentRequest, opens: bool) -> NDArray[np.int32]:
                seen[opens] = await engine.render(asked, opens=opens)
                return seen[opens].tokens

            new = await spliced(render, request, at, int(kept[-1].tokens[-1]))
            rendering = seen.get(True)
        if new is None or rendering is None:
            if found.rollout.sequences >= MAX_SEQUENCES:
                raise full_refusal(found.rollout)
            rendering = await engine.render(request, opens=True)
            kept, new = [], rendering.tokens
        prompt = np.concatenate([*(part for call in kept for part in (call.prompt, call.tokens)), new])
        sampling = fitted(self._sampling(request, engine.context, len(prompt)), len(prompt), engine.context)
        answer = sound(await engine.generate(request, rendering, prompt, sampling), engine.url)
        return self._call(shaped(answer, request), request, kept, new, len(prompt))

    def _sampling(self, request: AgentRequest, context: int, length: int) -> Sampling:
        """The run's own, up to the agent's limit."""
        limits = [n for n in (request.max_tokens, self._settings.max_new_tokens) if n]
        most = min(limits) if limits else max(1, context - length) if context else LONGEST_ANSWER
        given = self._settings
        return Sampling(
            max_new_tokens=most,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            min_p=given.min_p,
        )

    def _call(
        self, answer: Answer, request: AgentRequest, kept: list[OpenCall], new: NDArray[np.int32], length: int
    ) -> OpenCall:
        made, message = uuid.uuid4().hex[:16], dict(answer.message)
        if "tool_calls" in message:
            message["tool_calls"] = [
                {**call, "id": call["id"] or f"call_{made}_{i}"} for i, call in enumerate(message["tool_calls"])
            ]
        details = {
            "message": message,
            "stopped_by": answer.stopped_by,
            "is_ended": answer.is_ended,
            "engine_request": answer.request_id,
            "model": request.model,
            "role": request.messages[-1]["role"],
            "prompt_tokens": length,
            "created": int(time.time()),
            "temperature": self._settings.temperature,
            "path": [call.number for call in kept],
            **kept_rows(answer.completion.routed_experts, length - len(new) - bool(kept)),
        }
        if answer.completion.support is not None:
            details[SUPPORT] = answer.completion.support.astype("<i4").tobytes()
        return OpenCall(
            id=made,
            after=kept[-1].number if kept else 0,
            after_id=kept[-1].id if kept else "",
            prompt=new,
            tokens=answer.completion.tokens,
            logprobs=answer.completion.logprobs,
            version_spans=answer.completion.version_spans,
            finish_reason=answer.completion.finish_reason,
            details=details,
        )

    async def _history(self, found: Found) -> list[OpenCall]:
        """The calls from the beginning of the sequence to the one that is gone on from; none where one is damaged, or
        the server has lost it since it was looked up and gave its number to another one. Raises Refused."""
        name = found.rollout.name

        def read() -> list[OpenCall]:
            last = self._kept(name, [found.history_call])
            if not last or last[0].details.get("history") != found.history:
                return []
            path = last[0].details.get("path", [])
            calls = [*self._kept(name, path), *last]
            links = all(call.after_id == before.id for before, call in pairwise(calls))
            return calls if len(calls) == len(path) + 1 and links else []

        return await self._run.told(read)

    def _kept(self, name: str, numbers: list[int]) -> list[OpenCall]:
        """These calls as the server has them; none where one is damaged. In a thread."""
        try:
            return self._store.read_calls(name, numbers) if numbers else []
        except PayloadError:
            return []

    async def _recorded(
        self, capability: str, call: OpenCall, digest: str, history: str, found: Found, flight: Flight
    ) -> OpenCall:
        """What stands for the request on the server: this call, or the one that was faster.

        What was sampled is kept: it waits for a server that is away for much longer than anything else does.

        Raises:
            Refused.
            NotFound: the server has lost the call that it goes on from.
        """
        seen, deadline = found.request_call, time.monotonic() + RECORD_SECONDS
        record = partial(self._store.record, capability, call, request=digest, history=history, line=found.line)
        while True:
            flight.recorded_behind = seen
            try:
                recorded = await self._run.told(partial(record, seen=seen), until=deadline)
            except EpochChanged as error:
                raise Refused(
                    f"open rollout {found.rollout.name} cannot be trained any more: the run has gone into another line "
                    "of versions. Begin another one",
                    status=HTTPStatus.CONFLICT,
                    code="stale",
                ) from error
            is_earlier_try = int(recorded.call.details.get("tries", 0)) < flight.tries
            if recorded.call.id == call.id or is_earlier_try:
                return recorded.call
            seen = recorded.number  # another agent's, who asked the same at the same time: this is a call of its own

    async def _touched(self, capability: str, rollout: OpenRollout) -> None:
        """Keeps an open rollout from being abandoned while its engine is at work."""
        idle = (rollout.deadline_ms - rollout.heard_ms) / 1000
        pause = min(TOUCH_SECONDS, max(idle, 0.0) / 3)
        with suppress(Refused):  # the server is away: then the first touch comes at once
            left = rollout.deadline_ms / 1000 - await self._run.seconds()
            await asyncio.sleep(min(pause, max(0.0, left - 2 * pause)))
        while True:
            with suppress(OpenRolloutUnknown, ServerUnreachable, ServerRefused, RunGone, EpochChanged):
                await self._run.threads.do(lambda: self._store.touch(capability))
            await asyncio.sleep(max(pause, SHORTEST_TOUCH_SECONDS))


def told_of(call: OpenCall) -> Told:
    """A recorded call, to be told."""
    details = call.details
    return Told(
        id=call.id,
        message=details["message"],
        finish_reason=call.finish_reason,
        stopped_by=str(details["stopped_by"]),
        prompt_tokens=int(details["prompt_tokens"]),
        answer_tokens=len(call.tokens),
        created=int(details["created"]),
        model=str(details["model"]) or "policy",
    )


def _unread(capability: str, length: int | None) -> tuple[str, str]:
    """Stands for a request whose body was not read, in the place of its digest."""
    return capability, f"{length} bytes"
