"""The worker's own sampler behind a local HTTP address, for frameworks that talk to a server of vLLM's kind.

Only ``/inference/v1/generate`` and ``/v1/models``: token ids in, token ids and logprobs out. So what a framework plays
is sampled by whatever sampler the worker has, with the versions, the routing and the patience that the worker has; and
every completion is remembered under its session, with the exact version of each token.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

import numpy as np

from rlbuffer.errors import PromptTooLong, UnknownParameter
from rlbuffer.process.web_servers import listen
from rlbuffer.worker.envs.base import PolicyAccess
from rlbuffer.worker.samplers.base import Completion, Sampling

SESSION_HEADER = "X-Session-ID"
"""Names the trace that a request belongs to."""
MODEL = "policy"
"""Name of the sampler there."""
CONTEXT_FULL = "the context is full"
"""Begins the refusal of a request that the model's context has no room for."""
KNOWN = {
    *("temperature", "top_k", "top_p", "min_p", "n"),
    *("max_tokens", "stop_token_ids", "logprobs", "skip_special_tokens"),
}
"""Sampling parameters with a meaning here, or without one for token ids."""
HARMLESS = {"routed_experts_prompt_start", "cache_salt", "priority"}
"""Sampling parameters about a server's own ways."""


@dataclass(slots=True)
class TraceSession:
    """The tokens that were sampled for one trace."""

    policy: PolicyAccess
    completions: list[Completion] = field(default_factory=list)
    error: Exception | None = None
    """Exception that the sampler raised: the framework only sees a failed request."""


class LocalEngine:
    """Serves while it is entered; `url` is known from then on."""

    def __init__(self) -> None:
        self.url = ""
        """``http://127.0.0.1:PORT``."""
        self._sessions: dict[str, TraceSession] = {}
        self._runner: Any = None

    async def start(self) -> None:
        """Listens on a free port of this machine only."""
        from aiohttp import web

        app = web.Application(client_max_size=2**28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/generate", self._generate)
        self._runner = await listen(app, "127.0.0.1", 0)
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        """Stops listening. Safe to repeat."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def open(self, session: str, policy: PolicyAccess) -> TraceSession:
        """Samples requests of `session` by `policy` from now on."""
        self._sessions[session] = TraceSession(policy)
        return self._sessions[session]

    def forget(self, session: str) -> None:
        """Ends a session; what asks for it is refused."""
        self._sessions.pop(session, None)

    # -- HTTP ----------------------------------------------------------------------------------------------------------
    async def _models(self, request: Any) -> Any:
        from aiohttp import web

        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _generate(self, request: Any) -> Any:
        from aiohttp import web

        def refuse(status: HTTPStatus, message: str) -> Any:
            return web.json_response({"error": {"message": message, "code": int(status)}}, status=int(status))

        session = self._sessions.get(request.headers.get(SESSION_HEADER, ""))
        if session is None:
            return refuse(HTTPStatus.NOT_FOUND, f"no rollout is open under this {SESSION_HEADER}")
        body = await request.json()
        try:
            sampling = _sampling(session.policy.sampling, body.get("sampling_params") or {})
            prompt = np.asarray(body["token_ids"], np.int32)
            completion = await session.policy.ask(prompt, sampling)
        except PromptTooLong as error:
            return refuse(HTTPStatus.BAD_REQUEST, f"{CONTEXT_FULL}: {error}")
        except UnknownParameter as error:
            session.error = error
            return refuse(HTTPStatus.BAD_REQUEST, str(error))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # it reaches the worker by way of the session
            session.error = error
            return refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        session.completions.append(completion)
        return web.json_response(_answer(completion, number=len(session.completions)))


def _sampling(configured: Sampling, asked: Mapping[str, Any]) -> Sampling:
    """The worker's sampling with what a request changes of it.

    Raises:
        UnknownParameter: a parameter has no meaning here, or is another than the worker's own: the trainer divides by
            the temperature that the worker records.
    """
    configured_values = {"temperature": configured.temperature, "top_k": configured.top_k, "top_p": configured.top_p}
    configured_values |= {"min_p": configured.min_p, "n": 1}
    for name, value in asked.items():
        if name not in KNOWN | HARMLESS:
            raise UnknownParameter(f"sampling parameter {name} = {value!r}: no sampler of a worker knows it")
        if (
            value is not None
            and name in configured_values
            and not (isinstance(value, int | float) and math.isclose(value, configured_values[name]))
        ):
            raise UnknownParameter(
                f"sampling parameter {name} = {value!r} is not the worker's own, {configured_values[name]:g}"
            )
    limit = asked.get("max_tokens")
    return replace(
        configured,
        max_new_tokens=min(configured.max_new_tokens, int(limit)) if limit else configured.max_new_tokens,
        stop_token_ids=tuple(dict.fromkeys((*configured.stop_token_ids, *(asked.get("stop_token_ids") or ())))),
    )


def _answer(completion: Completion, *, number: int) -> dict[str, Any]:
    """The answer in the form of vLLM's generate endpoint; each token also as text, which some readers ask for."""
    ids = completion.tokens.tolist()
    content = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob}
        for token, logprob in zip(ids, completion.logprobs.tolist(), strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": completion.finish_reason,
    }
    return {"request_id": str(number), "choices": [choice]}
