"""SGLang's server (0.5.23): chat completions that take token ids beside the messages, and parse what was sampled.

It renders no conversation alone. A rendering is the prompt of an answer of one token, which the prefix cache makes
cheap; the beginning of the answer is always behind it. It names one version of weights for a whole answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import RequestFailed
from rlbuffer.gateway.engines.base import Answer, Rendering, message_of
from rlbuffer.gateway.request import AgentRequest
from rlbuffer.records.spans import VersionSpan
from rlbuffer.worker.samplers.base import Completion, Sampling, finish_reason
from rlbuffer.worker.samplers.endpoint import ENDPOINT_PROBE_SECONDS, Endpoint

CHAT = "/v1/chat/completions"
NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sent with every request: where they are missing the model's own count."""


class SglangEngine:
    """One server."""

    def __init__(self, endpoint: Endpoint, *, timeout_seconds: float) -> None:
        self.endpoint = endpoint
        self._seconds = timeout_seconds
        self.model = ""
        self.context = 0

    @property
    def url(self) -> str:
        return self.endpoint.url

    async def probe(self) -> None:
        await self.look()
        await self.render(AgentRequest(messages=({"role": "user", "content": "x"},)), opens=True)

    async def look(self) -> None:
        told = await self.endpoint.call("GET", "/v1/models", seconds=ENDPOINT_PROBE_SECONDS)
        try:
            model = (told.get("data") or [{}])[0]
            self.model, self.context = str(model.get("id", "")), int(model.get("max_model_len") or 0)
        except (AttributeError, TypeError, ValueError) as error:
            raise RequestFailed(f"{self.url}/v1/models answered with no list of models") from error

    async def render(self, request: AgentRequest, *, opens: bool) -> Rendering:
        body = {"model": self.model, **request.body(), "max_tokens": 1, "return_prompt_token_ids": True}
        told = await self.endpoint.call("POST", CHAT, body, seconds=self._seconds)
        try:
            return Rendering(tokens=np.asarray(told["choices"][0]["prompt_token_ids"], np.int32))
        except (KeyError, TypeError, IndexError, ValueError, OverflowError) as error:
            raise RequestFailed(f"{self.url}{CHAT} tells no ids of a prompt: take SGLang 0.5.23 or newer") from error

    async def generate(
        self, request: AgentRequest, rendering: Rendering, prompt: NDArray[np.int32], sampling: Sampling
    ) -> Answer:
        body = {
            "model": self.model,
            **request.body(),
            **NEUTRAL,
            "input_ids": prompt.tolist(),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "logprobs": True,
            "return_meta_info": True,
            **({"stop": list(request.stop)} if request.stop else {}),
        }
        told = await self.endpoint.call("POST", CHAT, body, seconds=self._seconds)
        try:
            choice = told["choices"][0]
            meta: dict[str, Any] = choice["meta_info"]
            rows = meta["output_token_logprobs"]
            tokens = np.array([row[1] for row in rows], np.int32)
            version = str(meta.get("weight_version"))
            number = int(version) if version.isdigit() else -1
            matched = choice.get("matched_stop")
            told_reason = choice.get("finish_reason")
            reason = finish_reason("stop" if told_reason == "tool_calls" else told_reason, tokens, sampling)
            return Answer(
                completion=Completion(
                    tokens=tokens,
                    logprobs=np.array([row[0] for row in rows], np.float32),
                    finish_reason=reason,
                    version_spans=(VersionSpan(number, 0, len(tokens)),),
                ),
                message=message_of(choice.get("message"), self.url),
                stopped_by=matched if isinstance(matched, str) else "",
                is_ended=reason == "stop" and not isinstance(matched, str),
                request_id=str(told.get("id") or ""),
            )
        except (KeyError, TypeError, IndexError, ValueError, OverflowError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise RequestFailed(f"{self.url}{CHAT} answered with what is no answer ({why})") from error

    async def close(self) -> None:
        await self.endpoint.close()
