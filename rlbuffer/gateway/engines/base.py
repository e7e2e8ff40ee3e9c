"""The interface of an engine, and what every engine's answer must hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import InvalidRollout, RequestFailed, SamplerUnavailable
from rlbuffer.gateway.request import AgentRequest, Message, whole_text
from rlbuffer.records.rollout import check_logprobs
from rlbuffer.worker.samplers.base import Completion, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """A conversation as an engine shows it to its model."""

    tokens: NDArray[np.int32]
    """[P] int32."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer beside the model's own."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """What the engine wants back with the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A sampled answer."""

    completion: Completion
    """Its tokens, as they were sampled."""
    message: Message
    """What they say: ``content``, ``tool_calls``, ``reasoning_content``."""
    stopped_by: str = ""
    """The text of the request's `stop` that ended it."""
    is_ended: bool = True
    """The model ended it: a later request can go on behind it. False where a limit or a text did."""
    request_id: str = ""
    """The engine's own id."""


class Engine(Protocol):
    """One server. Its methods raise what a :class:`rlbuffer.worker.samplers.endpoint.Endpoint` raises."""

    @property
    def url(self) -> str:
        """Its address."""

    @property
    def model(self) -> str:
        """The model that it serves."""

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together; 0: it does not say."""

    async def probe(self) -> None:
        """Looks whether it answers as it must.

        Raises:
            SamplerUnavailable: it does not, now.
            ConfigError: it was not started for it.
        """

    async def identify(self) -> None:
        """Looks again which model and which context it has, without sampling. Raises as :meth:`probe` does."""

    async def render(self, request: AgentRequest, *, opens: bool) -> Rendering:
        """Renders a conversation; with the beginning of the answer where it `opens` it."""

    async def generate(
        self, request: AgentRequest, rendering: Rendering, prompt: NDArray[np.int32], sampling: Sampling
    ) -> Answer:
        """Samples an answer behind a prompt.

        Args:
            request: what the agent asks; of it the stop texts and the tools count.
            rendering: the last one of this request.
            prompt: [P] int32.
            sampling: how tokens are drawn, within the context.
        """

    async def close(self) -> None:
        """Closes its connections."""


def stopped(text: str, stops: tuple[str, ...]) -> tuple[str, str]:
    """A text up to the first of the stop texts in it, and that one; "" for none."""
    found = re.search("|".join(map(re.escape, stops)), text) if stops else None
    return (text[: found.start()], found[0]) if found else (text, "")


def sound(answer: Answer, url: str) -> Answer:
    """The answer, where it can be trained.

    Raises:
        SamplerUnavailable: it is of weights that are no version of this run, or was broken off.
        RequestFailed: it has no tokens, or numbers that are no logprobs.
    """
    completion = answer.completion
    if not len(completion.tokens):
        raise RequestFailed(f"{url} answered without a token")
    if completion.finish_reason == "abort":
        raise SamplerUnavailable(f"{url} has broken the answer off")
    if any(span.policy_version < 0 for span in completion.version_spans):
        raise SamplerUnavailable(
            f"{url} samples with weights that are no policy version of this run. Nothing has loaded one into it yet. "
            'The gateway does once the trainer has published one, or a worker with sampler = "openai"; the trainer\'s '
            "own way of loading must name the version"
        )
    try:
        check_logprobs("logprobs", completion.logprobs)
        if not np.isfinite(completion.logprobs).all():
            raise InvalidRollout("column logprobs: not all are finite")
    except InvalidRollout as error:
        raise RequestFailed(f"{url}: {error}") from error
    covered = sum(span.end - span.start for span in completion.version_spans)
    if covered != len(completion.tokens) or completion.version_spans[-1].end != covered:
        raise RequestFailed(f"{url} names versions of {covered} tokens, and sampled {len(completion.tokens)}")
    return answer


def message_of(told: Any, url: str) -> dict[str, Any]:
    """The message that an engine has parsed, with what an agent needs of it. Raises RequestFailed."""
    if not isinstance(told, Mapping):
        raise RequestFailed(f"{url} answered with no message")
    content, thought = told.get("content"), told.get("reasoning") or told.get("reasoning_content")
    if not isinstance(content, str | None) or not isinstance(thought, str | None):
        raise RequestFailed(f"{url} answered with a message whose content is no text")
    message: dict[str, Any] = {"role": "assistant", "content": whole_text(content or "")}
    if thought:
        message["reasoning_content"] = whole_text(thought)
    calls = []
    for call in told.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestFailed(f"{url} answered with a tool call that names no function")
        call_id, arguments = call.get("id"), function.get("arguments")
        call_id = whole_text(call_id) if isinstance(call_id, str) else ""
        arguments = whole_text(arguments) if isinstance(arguments, str) else "{}"
        named = {"name": whole_text(function["name"]), "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": named})
    return {**message, **({"tool_calls": calls} if calls else {})}


def shaped(answer: Answer, request: AgentRequest) -> Answer:
    """The answer as the request wants it: cut at a stop text, with one call where it takes one."""
    message = dict(answer.message)
    message["content"], found = stopped(message["content"], request.stop)
    if request.takes_one_call and "tool_calls" in message:
        message["tool_calls"] = message["tool_calls"][:1]
    by = answer.stopped_by or found
    return replace(answer, message=message, stopped_by=by, is_ended=answer.is_ended and not by)
