"""The gateway's routes.

    POST /v1/open_rollouts {"env", "size", "key"}                    takes a ticket -> a base URL for each rollout
    POST /r/CAPABILITY/v1/chat/completions | messages | responses    what the agent's own client sends
    POST /r/CAPABILITY/touch                                         the rollout is at work: it is not abandoned yet
    POST /r/END_KEY/end {"reward" | "rewards" | "failure"}           the rollout has ended
    GET  /health, /v1/models

The capability may stand in the path, or be the agent's key (``Authorization: Bearer``, ``x-api-key``) at the same paths
without ``/r/CAPABILITY``. It is no right to end: an agent would reward itself. Beginning and ending need
RLBUFFER_GATEWAY_TOKEN where it is set. A body must say that it is JSON, as no page of the web can without being asked.

Nothing of a request reaches a log: not its text, not its capability. What nobody foresaw is said by its type and place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rlbuffer.config.addresses import NOWHERE, parse_listen
from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import (
    ConfigError,
    EnvDone,
    InvalidRollout,
    OpenRolloutUnknown,
    OtherEnd,
    RlbufferError,
    RunGone,
    ServerRefused,
    ServerUnreachable,
    TicketGone,
)
from rlbuffer.gateway.answering import Answering, told_of
from rlbuffer.gateway.dialects.base import Dialect, openai_error
from rlbuffer.gateway.dialects.chat import CHAT
from rlbuffer.gateway.dialects.messages import MESSAGES
from rlbuffer.gateway.dialects.responses import RESPONSES
from rlbuffer.gateway.engines.fleet import Fleet
from rlbuffer.gateway.experts import counts_of
from rlbuffer.gateway.heartbeat import GatewayHeartbeat
from rlbuffer.gateway.loading import Loader, loads_weights
from rlbuffer.gateway.opening import Opening
from rlbuffer.gateway.request import AgentRequest, Refused, fields_of, loaded, mapping, required, text, whole_text
from rlbuffer.gateway.rollouts import checked_about
from rlbuffer.gateway.run_server import RETRY_SECONDS, ended_refusal, unknown_refusal
from rlbuffer.gateway.sweeping import Sweeper
from rlbuffer.gateway.tokens import TOKEN_FILE, bearer_of, is_authorized, token_for
from rlbuffer.process.logs import fields
from rlbuffer.process.threads import in_thread
from rlbuffer.process.web_servers import listen
from rlbuffer.records.failure import Failure
from rlbuffer.records.info import ENV_NAME
from rlbuffer.records.support import support_words
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.store.open_rollouts import (
    MOST_ROLLOUTS,
    Begun,
    End,
    OpenRollout,
    OpenState,
    capability_of,
    checked_end,
    name_of,
)
from rlbuffer.weights.cache import VersionCache

if TYPE_CHECKING:
    from rlbuffer.client.buffer import Buffer

MOST_BODY = 32 * 2**20
"""Bytes of a request."""
READ_OF_ANYBODY = 2**20
"""Bytes of a request that are read before it is known whether its sender has a right."""
PING_SECONDS = 10.0
"""Silence in a stream after which a ping is sent; before the first one a refusal has a status of its own."""
LONGEST_WAIT_SECONDS = 60.0
"""Longest that beginning waits for a ticket."""
TICKET_POLL_SECONDS = 0.25
DRAIN_SECONDS = 15.0
"""Time that calls under way have when the gateway stops."""
STOP_POLL_SECONDS = 0.2
JSON = "application/json"
EPOCH = "1970-01-01T00:00:00Z"
"""When a model was made: nobody has said it."""
HOST = re.compile(r"[A-Za-z0-9._-]{1,253}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
"""The header of that name, from which an address can be made."""
DIALECTS: Mapping[str, Dialect] = {"chat/completions": CHAT, "messages": MESSAGES, "responses": RESPONSES}
ABOUT_FIELDS = ("prompt_id", "answer", "metadata")
"""Of a request that begins a group: what is pushed with it."""
OPENING_FIELDS = ("env", "size", "key", "wait", "tickets", *ABOUT_FIELDS)
END_FIELDS = ("reward", "rewards", "failure")
FAILURE_FIELDS = ("kind", "message")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = logging.getLogger(__name__)


def run_gateway(buffer: Buffer, name: str, settings: RunSettings, *, stop: threading.Event) -> None:
    """Serves until `stop` is set.

    Raises:
        ConfigError: an engine was not started for it, the address cannot be listened at, or has no token.
    """
    asyncio.run(_serve(buffer, name, settings, stop))


async def _serve(buffer: Buffer, name: str, settings: RunSettings, stop: threading.Event) -> None:
    if not settings.gateway.engines:
        raise ConfigError('gateway.engines names no engine: add [gateway] engines = ["http://host:8000"]')
    token = token_for(settings.gateway.listen)
    store = buffer.store.role(GatewayStore)
    await in_thread(store.open_run)
    heartbeat = GatewayHeartbeat(store, name)
    given = settings.gateway
    experts = counts_of(settings)
    if experts is not None:
        _log.info("experts are recorded: %s", experts.words, extra=fields("record", experts=experts.words))
    if given.top_k:
        words = support_words(given.top_k)
        _log.info("what top_k leaves is recorded: %s", words, extra=fields("record", support=words))
    fleet = Fleet(
        given.engines,
        timeout_seconds=given.timeout_seconds,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        experts=experts,
    )
    gateway = Gateway(store, settings, fleet, name=name, token=token, heartbeat=heartbeat)
    loader = Loader(
        store,
        settings.gateway.engines,
        VersionCache.of(settings, stop=stop),
        timeout_seconds=settings.gateway.timeout_seconds,
    )
    try:
        await fleet.start()
        await gateway.start()
        if loads_weights(settings):
            heartbeat.loader = loader
            loader.start()
        heartbeat.start()
        _log.info("listens at %s", gateway.url, extra=fields("ready", url=gateway.url))
        while not stop.is_set():
            await asyncio.sleep(STOP_POLL_SECONDS)
    finally:
        await gateway.close()
        await loader.close()
        await fleet.close()
        if gateway.url:
            await asyncio.to_thread(heartbeat.close)
    tally = gateway.answering.tally
    _log.info("stopped: %d calls, %d groups", tally.calls, heartbeat.groups, extra=fields("stopped", calls=tally.calls))


class Gateway:
    """One process of the gateway: several listen at one address.

    Args:
        store: the run.
        settings: the run's.
        fleet: its engines.
        name: of this process, for people.
        token: of whoever begins and ends; "" for none.
        heartbeat: hears what it does.
    """

    def __init__(
        self,
        store: GatewayStore,
        settings: RunSettings,
        fleet: Fleet,
        *,
        name: str = "gateway",
        token: str = "",
        heartbeat: GatewayHeartbeat | None = None,
    ) -> None:
        self._store, self._settings, self._fleet, self._token = store, settings.gateway, fleet, token
        self.heartbeat = heartbeat or GatewayHeartbeat(store, name)
        self._is_free = settings.gateway.forced_choices == "auto"
        self.answering = Answering(store, fleet, settings.gateway)
        self.sweeper = Sweeper(store, settings, name, self.heartbeat.pushed)
        self.heartbeat.answering, self.heartbeat.sweeper, self.heartbeat.fleet = self.answering, self.sweeper, fleet
        self.url = ""
        """``http://HOST:PORT``, once it listens."""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listens, and sweeps. Raises ConfigError."""
        app = web.Application(client_max_size=MOST_BODY)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/open_rollouts", self._guarded(self._begin, openai_error))
        for prefix in ("", "/r/{capability}"):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._guarded(self._model, openai_error))
            app.router.add_post(f"{prefix}/touch", self._guarded(self._touch, openai_error))
            app.router.add_post(f"{prefix}/end", self._guarded(self._end, openai_error))
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._guarded(self._count, MESSAGES.error))
            for path, dialect in DIALECTS.items():
                app.router.add_post(f"{prefix}/v1/{path}", self._guarded(self._call_in(dialect), dialect.error))
        host, port = parse_listen(self._settings.listen)
        try:
            self._runner = await listen(
                app, host, port, refuse=_refuse_early, admit=self._refused_unread, is_shared=True
            )
        except OSError as error:
            raise ConfigError(
                f"gateway.listen = {self._settings.listen!r} cannot be listened at ({error.strerror or error}): choose "
                "another port, or stop what has it",
                setting="gateway.listen",
            ) from error
        host = "127.0.0.1" if host in ("", *NOWHERE) else host
        port = self._runner.addresses[0][1]
        self.url = self._settings.url.rstrip("/") or f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self.heartbeat.listens = self.url
        self.sweeper.start()

    async def close(self) -> None:
        """Lets calls under way be recorded, stops listening, pushes what has ended. Safe to repeat."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        await self.answering.drain(DRAIN_SECONDS)
        await runner.cleanup()
        self.answering.close()
        await self.sweeper.close()

    # -- answers -------------------------------------------------------------------------------------------------------
    def _guarded(self, handler: Handler, form: Callable[[Refused], dict[str, Any]]) -> Handler:
        """The handler, whose refusals have the form of its dialect, whatever happens."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except Refused as refused:
                return self._refusal(refused, form)
            except ConnectionError:
                raise
            except Exception as error:
                return self._refusal(_unforeseen(error), form)

        return guarded

    def _refusal(self, refused: Refused, form: Callable[[Refused], dict[str, Any]]) -> web.Response:
        refusals = self.answering.tally.refused
        refusals[refused.status] = refusals.get(refused.status, 0) + 1
        return _response(refused, form)

    async def _refused_unread(self, request: web.Request) -> web.StreamResponse | None:
        """The refusal of a large body whose sender has no right; None for what is read."""
        length, is_packed = request.content_length, "Content-Encoding" in request.headers
        if not request.body_exists or (length is not None and length <= READ_OF_ANYBODY and not is_packed):
            return None
        try:
            if request.path.endswith(("/open_rollouts", "/end")):
                self._authorize(request)
            else:
                await self.answering.check_unread(self._capability(request), tries=_tries(request), length=length)
        except Refused as refused:
            return self._refusal(refused, _form_at(request.path))
        return None

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "troubles": self._fleet.troubles})

    async def _models(self, request: web.Request) -> web.Response:
        models = [_model_of(model) for model in self._fleet.models or ["policy"]]
        return web.json_response({"object": "list", "data": models, "has_more": False})

    async def _model(self, request: web.Request) -> web.Response:
        model = whole_text(request.match_info["model"])
        self._check_model(model)
        return web.json_response(_model_of(model))

    # -- open rollouts -------------------------------------------------------------------------------------------------
    async def _begin(self, request: web.Request) -> web.Response:
        self._authorize(request)
        body = fields_of(await _body(request), "this request", OPENING_FIELDS)
        env, size, key = text(body.get("env"), "env"), body.get("size", 1), text(body.get("key"), "key")
        required(ENV_NAME.match(env), f"env must match {ENV_NAME.pattern[:-2]}")
        is_size = isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= MOST_ROLLOUTS
        required(is_size, f"size must be a whole number from 1 to {MOST_ROLLOUTS}")
        required(len(key) <= 512, "key may have 512 characters")
        wait = body.get("wait", 0)
        is_wait = isinstance(wait, int | float) and not isinstance(wait, bool) and 0 <= wait <= LONGEST_WAIT_SECONDS
        required(is_wait, f"wait must be seconds from 0 to {LONGEST_WAIT_SECONDS:g}")
        about = {name: body[name] for name in ABOUT_FIELDS if body.get(name) is not None}
        try:
            checked_about(f"{env}.0", env, about)
        except InvalidRollout as error:
            raise Refused(str(error), code="invalid_value") from error
        limit = body.get("tickets")
        is_limit = limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0)
        required(is_limit, "tickets must be a whole number: how many the env has in all")
        opening = Opening(
            self._store,
            env,
            size=size,
            key=key,
            about=about,
            tickets=limit,
            idle_seconds=self._settings.idle_seconds,
        )
        try:
            begun = await self._begun(opening, env, float(wait))
            response = web.json_response(_told_of(begun, self._base(request)))
            await response.prepare(request)
            await response.write_eof()
        except BaseException:  # it hangs up, or is refused
            await asyncio.shield(in_thread(opening.leave))
            raise
        return response

    def _base(self, request: web.Request) -> str:
        """The address of base URLs: that of the settings, else the one by which whoever begins has reached it."""
        host = request.headers.get("Host", "")
        return self.url if self._settings.url or not HOST.fullmatch(host) else f"http://{host}"

    async def _begun(self, opening: Opening, env: str, wait: float) -> Begun:
        """What an opening begins, once there is a ticket. Raises Refused."""
        deadline = time.monotonic() + wait
        while True:
            begun: Begun | None = await _on_server(opening.take)
            if begun is not None:
                return begun
            self.heartbeat.lacks_ticket(env)
            if time.monotonic() >= deadline:
                raise Refused(
                    f"no ticket of env {env} is out now: what is pending and under way is enough, so ask again. "
                    "`rlbuffer inspect` says what the run waits for",
                    status=HTTPStatus.SERVICE_UNAVAILABLE,
                    code="no_ticket",
                    retry_seconds=RETRY_SECONDS,
                )
            with self.heartbeat.waiting_for_ticket():
                await asyncio.sleep(TICKET_POLL_SECONDS)

    async def _touch(self, request: web.Request) -> web.Response:
        capability = self._capability(request)
        if request.body_exists:
            fields_of(await _body(request), "this request", ())

        def work() -> OpenRollout:
            found = self._store.look_up(capability).rollout
            self._store.touch(capability)
            return found

        found: OpenRollout = await _on_server(work)
        if found.state is not OpenState.OPEN:
            raise ended_refusal(found.name)
        return web.json_response({"state": "open", "idle_seconds": self._settings.idle_seconds})

    async def _end(self, request: web.Request) -> web.Response:
        self._authorize(request)
        end_key = self._capability(request)
        end = _end_of(await _body(request))
        try:
            status = await _on_server(lambda: self._ended(end_key, end))
        except Refused as refused:
            if refused.code == "other_end":
                self.heartbeat.other_ends += 1
                _log.warning("open rollout %s got another end than it has: the first one stands", name_of(end_key))
            raise
        group_id = end_key.rsplit(".", 2)[0]  # the store has found it
        self.sweeper.ended(group_id)
        return web.json_response({"state": "ended", "is_first": status == "ended"})

    def _ended(self, end_key: str, end: End) -> str:
        """Ends the rollout of an end key. Raises Refused for a key that may only call."""
        try:
            return self._store.end(capability_of(end_key), end)
        except OpenRolloutUnknown:
            self._store.look_up(end_key)  # raises it where nobody knows the key
            raise Refused(
                "this key may ask and not end: end the rollout at the end_url that beginning it has answered",
                status=HTTPStatus.FORBIDDEN,
                code="not_an_end_key",
            ) from None

    def _authorize(self, request: web.Request) -> None:
        if not is_authorized(request.headers.get("Authorization", ""), self._token):
            raise Refused(
                "beginning and ending rollouts need the gateway's token as bearer token: RLBUFFER_GATEWAY_TOKEN, else "
                f"what `rlbuffer run` has written to {TOKEN_FILE} in the run's folder",
                status=HTTPStatus.UNAUTHORIZED,
                code="invalid_token",
            )

    def _capability(self, request: web.Request) -> str:
        """The capability of a request. Raises Refused where it brings none."""
        found = request.match_info.get("capability", "") or request.headers.get("x-api-key", "")
        found = found or bearer_of(request.headers.get("Authorization", ""))
        if not found:
            raise Refused(
                "no key: use the base_url or the api_key that beginning the rollout has answered",
                status=HTTPStatus.UNAUTHORIZED,
                code="invalid_api_key",
            )
        return found

    # -- calls ---------------------------------------------------------------------------------------------------------
    def _call_in(self, dialect: Dialect) -> Handler:
        async def call(request: web.Request) -> web.StreamResponse:
            capability = self._capability(request)
            asked = dialect.parse(await _body(request), self._is_free)
            self._check_model(asked.model)
            tries, length = _tries(request), request.content_length
            async with self.answering.flight(capability, asked, dialect, tries=tries, length=length) as flight:
                if asked.is_streamed:
                    response = await self._streamed(request, dialect, asked, flight.task)
                else:
                    told = told_of(await asyncio.shield(flight.task))
                    response = web.json_response(dialect.answer(told), headers={"x-request-id": told.id})
                    await response.prepare(request)
                    await response.write_eof()
                if flight.task.done() and not flight.task.cancelled() and flight.task.exception() is None:
                    await self.answering.heard(flight)
            return response

        return call

    async def _streamed(
        self, request: web.Request, dialect: Dialect, asked: AgentRequest, task: asyncio.Task[Any]
    ) -> web.StreamResponse:
        """The answer as events. A refusal that comes before the first ping has a status of its own."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        while not task.done():
            await asyncio.wait({task}, timeout=PING_SECONDS)
            if not task.done():
                if not response.prepared:
                    await response.prepare(request)
                await response.write(dialect.ping)
        try:
            told = told_of(task.result())
        except (Refused, asyncio.CancelledError) as error:
            if not response.prepared:
                raise
            refused = error if isinstance(error, Refused) else _stopping()
            await response.write(_event(dialect.error_event, dialect.error(refused)))
        except Exception as error:
            if not response.prepared:
                raise
            await response.write(_event(dialect.error_event, dialect.error(_unforeseen(error))))
        else:
            response.headers["x-request-id"] = told.id
            if not response.prepared:
                await response.prepare(request)
            await response.write(b"".join(_event(name, data) for name, data in dialect.events(told, asked)))
        await response.write_eof()
        return response

    async def _count(self, request: web.Request) -> web.Response:
        await self.answering.check(self._capability(request))
        asked = MESSAGES.parse(await _body(request), self._is_free)
        return web.json_response({"input_tokens": await self.answering.count_tokens(asked)})

    def _check_model(self, model: str) -> None:
        models = [*self._fleet.models, "policy"]
        if self._settings.other_models == "refuse" and model not in models:
            raise Refused(
                f'that model is not served here, but {", ".join(models)} (gateway.other_models = "refuse")',
                status=HTTPStatus.NOT_FOUND,
                code="model_not_found",
            )


def _model_of(model: str) -> dict[str, Any]:
    """A model as the clients of both kinds know it."""
    named = {"id": model, "display_name": model}
    return {**named, "object": "model", "type": "model", "created": 0, "created_at": EPOCH, "owned_by": "rlbuffer"}


def _told_of(begun: Begun, base: str) -> dict[str, Any]:
    """What whoever begins a group hears of it; `base`: address of this gateway."""
    return {
        "group_id": begun.group_id,
        "env": begun.env,
        "number": begun.number,
        "open_rollouts": [
            {
                "name": name,
                "base_url": f"{base}/r/{capability}/v1",
                "anthropic_base_url": f"{base}/r/{capability}",
                "touch_url": f"{base}/r/{capability}/touch",
                "end_url": f"{base}/r/{end_key}/end",
                "api_key": capability,
            }
            for name, capability, end_key in zip(begun.names, begun.capabilities, begun.end_keys, strict=True)
        ],
    }


def _tries(request: web.Request) -> int:
    """How often its client has tried a request before."""
    told = request.headers.get("x-stainless-retry-count", "0")
    return int(told) if told.isdecimal() and len(told) < 4 else 0


async def _body(request: web.Request) -> Mapping[str, Any]:
    """The body of a request, a JSON object. Raises Refused.

    A page of the web may have its reader's browser send any other type to an address of this machine.
    """
    if request.content_type != JSON:
        raise Refused(f"the body must be JSON, with the header Content-Type: {JSON}", code="invalid_content_type")
    data = await request.read()
    try:
        return mapping(loaded(data.decode(json.detect_encoding(data), "replace")), "the body")
    except ValueError as error:
        raise Refused(f"the body cannot be read: {error}", code="invalid_json") from None


def _end_of(body: Mapping[str, Any]) -> End:
    """The end that a body tells of. Raises Refused."""
    fields_of(body, "this request", END_FIELDS)
    failure, rewards = body.get("failure"), mapping(body.get("rewards") or {}, "rewards")
    reward = body.get("reward")
    if isinstance(failure, Mapping):
        fields_of(failure, "failure", FAILURE_FIELDS)
        failure = [failure.get("kind"), failure.get("message") or ""]
    elif isinstance(failure, str):
        failure = ["failed", failure]
    if failure is None and reward is None and len(rewards) == 1:
        reward = next(iter(rewards.values()))
    try:
        kept = None if failure is None else Failure(*failure)
        numbers = {str(name): value for name, value in rewards.items()}
        return checked_end(End(reward=reward, rewards=numbers, failure=kept))
    except (InvalidRollout, TypeError) as error:
        told = (
            str(error) if isinstance(error, InvalidRollout) else "failure must be a text, or have a kind and a message"
        )
        raise Refused(told, code="invalid_value") from error


async def _on_server(work: Callable[[], Any]) -> Any:
    """What the server answers, from a thread of its own. Raises Refused."""
    try:
        return await in_thread(work)
    except OpenRolloutUnknown as error:
        raise unknown_refusal() from error
    except TicketGone as error:
        raise Refused(str(error), status=HTTPStatus.CONFLICT, code="key_used") from error
    except (OtherEnd, EnvDone, RunGone) as error:
        code = "other_end" if isinstance(error, OtherEnd) else "env_done" if isinstance(error, EnvDone) else "run_gone"
        raise Refused(str(error), status=HTTPStatus.CONFLICT, code=code) from error
    except (ServerRefused, ServerUnreachable) as error:
        raise Refused(
            f"the run's server takes nothing now ({type(error).__name__}): ask again",
            status=HTTPStatus.SERVICE_UNAVAILABLE,
            code="server_away",
            retry_seconds=RETRY_SECONDS,
        ) from error
    except RlbufferError as error:
        raise Refused(str(error), status=HTTPStatus.CONFLICT) from error


def _response(refused: Refused, form: Callable[[Refused], dict[str, Any]]) -> web.Response:
    """An error in the form that the dialect's clients know; they try again only what may pass."""
    headers = {"x-should-retry": "true" if refused.retry_seconds else "false"}
    if refused.retry_seconds:
        headers["Retry-After"] = f"{refused.retry_seconds:.0f}"
    return web.json_response(form(refused), status=refused.status, headers=headers)


def _refuse_early(request: web.Request, status: HTTPStatus, told: str) -> web.StreamResponse:
    """What is refused before a handler has it, in the form of the dialect at its path."""
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        told = f"a request has {MOST_BODY // 2**20} MiB at most"
    if status == HTTPStatus.NOT_FOUND:
        told = "the gateway has no such page: a base URL ends with /v1 for OpenAI's clients, for Anthropic's before it"
    retry_seconds = RETRY_SECONDS if status == HTTPStatus.REQUEST_TIMEOUT else 0.0
    return _response(Refused(told, status=status, retry_seconds=retry_seconds), _form_at(request.path))


def _form_at(path: str) -> Callable[[Refused], dict[str, Any]]:
    """The form of errors of the dialect at a path."""
    return next((d.error for name, d in DIALECTS.items() if path.endswith(f"/v1/{name}")), openai_error)


def _event(name: str, data: Any) -> bytes:
    body = data if isinstance(data, str) else json.dumps(data)  # in ASCII: clients split lines at U+2028, too
    return (f"event: {name}\n" if name else "").encode() + f"data: {body}\n\n".encode()


def _unforeseen(error: BaseException) -> Refused:
    """Says where something went wrong that nobody foresaw, and not its words: they may be an agent's."""
    places = traceback.extract_tb(error.__traceback__)
    place = f"{places[-1].filename.rpartition('/')[2]}:{places[-1].lineno}" if places else "?"
    _log.warning("a request could not be answered: %s at %s", type(error).__name__, place)
    return Refused(
        f"the gateway has failed ({type(error).__name__} at {place}): this is a defect of rlbuffer",
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        code="internal",
    )


def _stopping() -> Refused:
    return Refused(
        "the gateway stops: ask again, and another one answers",
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        code="stopping",
        retry_seconds=RETRY_SECONDS,
    )
