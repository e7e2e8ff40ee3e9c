"""vLLM's server: it renders conversations to token ids, samples behind ids, and parses what was sampled.

Started with ``--enable-scale-out``, ``--logprobs-mode processed_logprobs``, and for tools with
``--enable-auto-tool-choice --tool-call-parser NAME`` (``--reasoning-parser NAME`` for thoughts). 0.33 parses in the
answer of ``/inference/v1/generate``; 0.32 is asked once more for it.

What of a rendering goes back: everything but its sampling parameters, which would be the model's own. Of those the stop
tokens and what decides how tokens become text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import ConfigError, RequestFailed
from rlbuffer.gateway.engines.base import Answer, Rendering, message_of
from rlbuffer.gateway.request import AgentRequest
from rlbuffer.worker.samplers.base import Completion, Sampling
from rlbuffer.worker.samplers.endpoint import ENDPOINT_PROBE_SECONDS, GENERATE, Endpoint, sampling_parameters

RENDER = "/v1/chat/completions/render"
DERENDER = "/v1/chat/completions/derender"
RENDER_SECONDS = 60.0
"""Longest that rendering or parsing may take."""
KEPT = ("stop_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
"""Sampling parameters of a rendering that decide nothing of what is drawn but its end."""
PARSED_BEHIND = 8
"""Tokens of the prompt's end that parsing needs: whether a thought was begun there."""


class VllmEngine:
    """One server."""

    def __init__(self, endpoint: Endpoint, *, timeout_seconds: float) -> None:
        self.endpoint = endpoint
        self._seconds = timeout_seconds
        self._derenders = True
        """Parsing is part of generating: vLLM 0.33 on."""
        self._version = -1
        """Policy version of its newest answer: whoever loads another one may load an adapter."""

    @property
    def url(self) -> str:
        return self.endpoint.url

    @property
    def model(self) -> str:
        return self.endpoint.model

    @property
    def context(self) -> int:
        return self.endpoint.context

    async def probe(self) -> None:
        told = await self.endpoint.call("GET", "/version", seconds=ENDPOINT_PROBE_SECONDS)
        numbers = re.match(r"(\d+)\.(\d+)", str(told.get("version", "")) if isinstance(told, Mapping) else "")
        self._derenders = numbers is None or (int(numbers[1]), int(numbers[2])) >= (0, 33)
        await self.endpoint.probe(resumes=False)
        self._check_weights()

    async def identify(self) -> None:
        await self.endpoint.identify()
        self._check_weights()

    def _check_weights(self) -> None:
        """Raises ConfigError where its base model would answer, and another one is trained."""
        if self.endpoint.has_adapter:
            raise ConfigError(
                f"{self.url} has a LoRA adapter that a worker has loaded, and its base model would answer agents: they "
                "are answered by whole weights alone. Train without trainer.lora; start an engine anew that has its "
                "adapter of an earlier run",
                setting="gateway.engines",
            )

    async def render(self, request: AgentRequest, *, opens: bool) -> Rendering:
        body = {"model": self.model, **request.body(), "add_generation_prompt": opens}
        told = await self.endpoint.call("POST", RENDER, body, seconds=RENDER_SECONDS)
        try:
            given = {name: value for name, value in told.items() if name not in ("token_ids", "sampling_params")}
            parameters = told.get("sampling_params") or {}
            given["kept"] = {name: parameters[name] for name in KEPT if parameters.get(name) is not None}
            stops = tuple(int(token) for token in parameters.get("stop_token_ids") or ())
            return Rendering(tokens=np.asarray(told["token_ids"], np.int32), stop_token_ids=stops, given=given)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            why = f"{type(error).__name__}: {error}"
            raise RequestFailed(f"{self.url}{RENDER} answered with what is no rendering ({why})") from error

    async def generate(
        self, request: AgentRequest, rendering: Rendering, prompt: NDArray[np.int32], sampling: Sampling
    ) -> Answer:
        given = dict(rendering.given)
        kept, context = given.pop("kept", {}), given.pop("parse_context", None)
        body = {
            **given,
            "token_ids": prompt.tolist(),
            "stream": False,
            "sampling_params": {
                **kept,
                **sampling_parameters(sampling),
                "stop_token_ids": list(rendering.stop_token_ids),
                "detokenize": True,
                **({"stop": list(request.stop)} if request.stop else {}),
            },
        }
        if self._derenders:  # without reasoning there would be no logprobs either
            body |= {"output_mode": "derender", "parse_context": {**(context or {}), "include_reasoning": True}}
        told = await self.endpoint.call("POST", GENERATE, body, seconds=self._seconds)
        try:
            (choice,) = told["choices"]
            completion = self.endpoint.completion(choice, sampling, len(prompt))
            await self._check_version(completion)
            stop = choice.get("stop_reason")
            by_text = isinstance(stop, str) or (bool(request.stop) and "stop_reason" not in choice)
            is_ended = completion.finish_reason == "stop" and not by_text
            if self._derenders:
                message = choice.get("message")
            else:
                message = await self._parsed(request, told, prompt, completion.tokens[: -1 if is_ended else None])
            return Answer(
                completion=completion,
                message=message_of(message, self.url),
                stopped_by=stop if isinstance(stop, str) else "",
                is_ended=is_ended,
                request_id=str(told.get("request_id") or ""),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            why = f"{type(error).__name__}: {error}"
            raise RequestFailed(f"{self.url}{GENERATE} answered with what is no answer ({why})") from error

    async def _check_version(self, completion: Completion) -> None:
        """Looks at it again where an answer is of other weights than the one before. Raises as :meth:`look` does."""
        version = max((span.policy_version for span in completion.version_spans), default=-1)
        if version != self._version:
            await self.identify()
            self._version = version

    async def _parsed(
        self, request: AgentRequest, told: Mapping[str, Any], prompt: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> Any:
        """vLLM 0.32: the tools decide how an answer is parsed, what was said before does not. With a parser it shows
        special tokens as text, so `tokens` are without the one that ended the answer."""
        if not len(tokens):
            return {"role": "assistant", "content": ""}
        choice = {**told["choices"][0], "token_ids": tokens.tolist(), "logprobs": None}
        asked = {"model": self.model, "messages": [{"role": "user", "content": "x"}]}
        if request.tools:
            asked["tools"] = [dict(tool) for tool in request.tools]
        tail = prompt[-PARSED_BEHIND:].tolist()
        body = {
            "generate_response": {**told, "choices": [choice]},
            "prompt_token_ids": tail,
            "chat_request": {**asked, **request.template},
        }
        parsed = await self.endpoint.call("POST", DERENDER, body, seconds=RENDER_SECONDS)
        return parsed["choices"][0].get("message")

    async def close(self) -> None:
        await self.endpoint.close()
