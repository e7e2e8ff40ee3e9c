"""SGLang's server (0.5.23): chat completions that take token ids beside the messages, and parse what was sampled.

It renders no conversation alone. A rendering is the prompt of an answer of one token, which the prefix cache makes
cheap; the beginning of the answer is always behind it. It names one version of weights for a whole answer.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.config.models import ExpertCounts
from rlbuffer.errors import ConfigError, RequestFailed
from rlbuffer.gateway.engines.base import Answer, Rendering, message_of
from rlbuffer.gateway.request import AgentRequest
from rlbuffer.records.spans import VersionSpan
from rlbuffer.worker.samplers.base import Completion, Sampling, finish_reason, support_told, with_record
from rlbuffer.worker.samplers.endpoint import ENDPOINT_PROBE_SECONDS, Endpoint

CHAT = "/v1/chat/completions"
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sent with every request: where they are missing the model's own count."""


class SglangEngine:
    """One server."""

    def __init__(self, endpoint: Endpoint, *, timeout_seconds: float, experts: ExpertCounts | None = None) -> None:
        self.endpoint = endpoint
        self._experts = experts
        self._seconds = timeout_seconds
        self.model = ""
        self.context = 0

    @property
    def url(self) -> str:
        return self.endpoint.url

    async def probe(self) -> None:
        await self.identify()
        request = AgentRequest(messages=({"role": "user", "content": "x"},))
        rendering = await self.render(request, opens=True)
        if self._experts is not None:
            try:
                await self.generate(request, rendering, rendering.tokens, Sampling(max_new_tokens=1))
            except RequestFailed as error:  # what it lacks in the simplest answer, it lacks in all
                raise ConfigError(str(error), setting="gateway.record_experts") from error

    async def identify(self) -> None:
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
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            **({"return_sampling_mask": True} if sampling.top_k else {}),
            "max_tokens": sampling.max_new_tokens,
            "logprobs": True,
            "return_meta_info": True,
            **({} if self._experts is None else {"return_routed_experts": True}),
            **({"stop": list(request.stop)} if request.stop else {}),
        }
        told = await self.endpoint.call("POST", CHAT, body, seconds=self._seconds)
        try:
            choice = told["choices"][0]
            meta: dict[str, Any] = choice["meta_info"]
            rows = meta["output_token_logprobs"]
            tokens, logprobs = np.array([row[1] for row in rows], np.int32), [row[0] for row in rows]
            support = support_told(meta.get("output_token_sampling_mask"), len(tokens), sampling)
            if support is not None:  # those before are of the whole vocabulary
                logprobs = meta["output_token_sampling_logprobs"]
                if len(logprobs) != len(tokens):
                    raise RequestFailed(f"{self.url}: {len(logprobs)} logprobs came for {len(tokens)} tokens")
            version = str(meta.get("weight_version"))
            number = int(version) if version.isdigit() else -1
            matched = choice.get("matched_stop")
            told_reason = choice.get("finish_reason")
            reason = finish_reason("stop" if told_reason == "tool_calls" else told_reason, tokens, sampling)
            completion = Completion(
                tokens=tokens,
                logprobs=np.array(logprobs, np.float32),
                finish_reason=reason,
                version_spans=(VersionSpan(number, 0, len(tokens)),),
                support=support,
            )
            if self._experts is not None:
                completion = with_record(completion, len(prompt), self._record(meta.get("routed_experts")))
            return Answer(
                completion=completion,
                message=message_of(choice.get("message"), self.url),
                stopped_by=matched if isinstance(matched, str) else "",
                is_ended=reason == "stop" and not isinstance(matched, str),
                request_id=str(told.get("id") or ""),
            )
        except (KeyError, TypeError, IndexError, ValueError, OverflowError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise RequestFailed(f"{self.url}{CHAT} answered with what is no answer ({why})") from error

    def _record(self, told: Any) -> Any:
        """[T - 1, layers, K] of what it says: int32 in base64, row behind row. Raises RequestFailed, ValueError."""
        if told is None or self._experts is None:
            raise RequestFailed(
                f"{self.url}{CHAT} does not say which experts it took (meta_info.routed_experts): start SGLang's "
                "server with --enable-return-routed-experts"
            )
        numbers = np.frombuffer(base64.b64decode(told, validate=True), np.dtype("<i4"))
        return numbers.reshape(-1, self._experts.layers, self._experts.taken)

    async def close(self) -> None:
        await self.endpoint.close()
