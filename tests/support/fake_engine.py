"""A server of vLLM's kind over a model of no weights: it renders, samples behind token ids, and parses.

What it writes is told by the last message; the logprob of each token is computed from all tokens before it, so that
whoever has a sequence can compute it again. It speaks as vLLM 0.33 does, as 0.32, or as SGLang.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import re
import struct
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web
from chat_templates import FAMILIES, Family, decoded, encoded

from rlbuffer.worker.samplers.base import ADAPTER_NAME

WORDS = ("a", "tree", "the", "answer", "is", "user", "look_up", "think", "of", "name")
QWEN3 = next(family for family in FAMILIES if family.name == "qwen3")
SGLANG = "sglang"
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.S)
THOUGHT = re.compile(r"\s*<think>\n?(.*?)\n?</think>\n*", re.S)


def logprobs_of(tokens: Sequence[int], start: int) -> np.ndarray:
    """[T - start] float32: of each token from `start` on, by all before it."""
    state, found = 0, []
    for place, token in enumerate(tokens):
        state = zlib.crc32(struct.pack("<i", int(token)), state)
        if place >= start:
            found.append(-0.01 - (state % 4096) / 512)
    return np.array(found, np.float32)


EXPERTS = {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 200, "num_experts_per_tok": 3}
"""Config of what it would be with experts."""


def experts_of(tokens: Sequence[int]) -> np.ndarray:
    """[T, 2, 3] uint8: the experts that take each token in, by its id and place."""
    places = np.arange(len(tokens))[:, None, None] * 7 + np.asarray(tokens)[:, None, None]
    rows: np.ndarray = (places + np.array([[0, 1, 2], [50, 60, 70]])) % 200
    return rows.astype(np.uint8)


@dataclass
class Sample:
    """One answer of the engine."""

    prompt: list[int]
    tokens: list[int]
    logprobs: np.ndarray
    spans: list[tuple[int, int, int]]
    parameters: dict[str, Any]


@dataclass
class FakeEngine:
    """Its settings may be changed at any time, from any thread."""

    family: Family = QWEN3
    speaks: str = "0.33.0"
    context: int = 8192
    version: str = "0"
    delay: float = 0.0
    status: int = 200
    """What it answers to be asked for an answer."""
    spoil: Any = None
    """Changes an answer before it is sent."""
    holds: bool = False
    """Answers wait."""
    unanswered_looks: int = 0
    """Questions for its version that get no answer, as of an engine that is too busy."""
    refuses: Callable[[dict[str, Any]], int] = lambda body: 0
    """Status for a conversation that the template raises at; 0: it takes it."""
    model: str = "tiny"
    has_adapter: bool = False
    """A worker has loaded a LoRA adapter into it."""
    records_experts: bool = False
    """It was started with ``--enable-return-routed-experts``; SGLang wants to be asked, too."""
    heeds: tuple[str, ...] = ("temperature",)
    """What its logprobs heed, of ``temperature``, ``top_p`` and ``top_k``."""
    tells: bool = False
    """It tells the tokens that it leaves, and refuses what is not restricted: vLLM's `--return-sampling-mask`."""
    complaint: str = "no"
    """What it says where it does not answer."""
    is_gone: bool = False
    """A proxy stands there alone, and answers 404."""
    is_paused: bool = False
    loads: list[str] = field(default_factory=list)
    """Folders of weights that were loaded."""
    load_seconds: float = 0.0
    is_dead: bool = False
    """It was asked to load while it was not paused, which kills vLLM's engine."""
    samples: list[Sample] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the requests to render."""
    exchanges: list[tuple[str, Any, Any]] | None = None
    """Page, body and answer of what had a body, where a list is given."""
    url: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    # -- serving -----------------------------------------------------------------------------------------------------
    def start(self, port: int = 0) -> FakeEngine:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(port), self._loop).result()
        return self

    async def _listen(self, port: int) -> None:
        @web.middleware
        async def proxied(request: web.Request, handler: Any) -> web.StreamResponse:
            if self.is_gone:
                return web.Response(status=404, text="not here")
            answer: web.StreamResponse = await handler(request)
            if self.exchanges is not None and isinstance(answer, web.Response) and await request.read():
                self.exchanges.append((request.path, await request.json(), json.loads(answer.text or "null")))
            return answer

        app = web.Application(client_max_size=2**28, middlewares=[proxied])
        if self.speaks == SGLANG:
            app.router.add_post("/v1/chat/completions", self._chat)
        else:
            app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions/render", self._render)
        app.router.add_post("/v1/chat/completions/derender", self._derender)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_get("/is_paused", self._is_paused)
        for path in ("pause", "resume", "reset_prefix_cache", "update_weight_version", "collective_rpc"):
            app.router.add_post(f"/{path}", self._controlled)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def stop(self) -> None:
        self.holds = False
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- SGLang ------------------------------------------------------------------------------------------------------
    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.status != 200:
            return web.json_response({"error": {"message": self.complaint}}, status=self.status)
        prompt = body.get("input_ids")
        if prompt is None:
            prompt = encoded(self.family.text(body["messages"], body.get("tools") or [], True)).tolist()
            given = {"prompt_token_ids": prompt if body.get("return_prompt_token_ids") else None}
            return web.json_response({"choices": [{"message": {"content": "a"}, "finish_reason": "length", **given}]})
        tokens = [
            *encoded(self._written(decoded(prompt)), dropout=0.3).tolist(),
            *encoded(self.family.end({})).tolist(),
        ]
        finish = "length" if len(tokens) > body["max_tokens"] else "stop"
        tokens = tokens[: body["max_tokens"]]
        logprobs = logprobs_of([*prompt, *tokens], len(prompt))
        if likeliest := self._likeliest(prompt, body):
            tokens, logprobs = likeliest
        version, left = int(self.version) if self.version.isdigit() else -1, {}
        whole = logprobs
        if body.get("return_sampling_mask") and self.tells:
            logprobs = logprobs * np.float32(0.0 if body["top_k"] == 1 else 0.5)
            left = {
                "output_token_sampling_mask": self.left(tokens, body["top_k"]),
                "output_token_sampling_logprobs": [float(value) for value in logprobs],
            }
        if len(prompt) > 1:
            self.samples.append(Sample(list(prompt), tokens, logprobs, [(version, 0, len(tokens))], body))
        rows = [[float(value), token, None] for value, token in zip(whole, tokens, strict=True)]
        message = self.parsed(tokens)
        meta: dict[str, Any] = {"output_token_logprobs": rows, "weight_version": self.version, **left}
        if self.records_experts and body.get("return_routed_experts"):
            record = experts_of([*prompt, *tokens])[:-1].astype("<i4")
            meta["routed_experts"] = base64.b64encode(record.tobytes()).decode()
        reason = "tool_calls" if message.get("tool_calls") and finish == "stop" else finish
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": reason,
            "matched_stop": tokens[-1],
            "meta_info": meta,
        }
        answer: Any = {"id": "s", "choices": [choice]}
        return web.json_response(self.spoil(answer) if self.spoil else answer)

    # -- vLLM --------------------------------------------------------------------------------------------------------
    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.speaks})

    async def _weight_info(self, request: web.Request) -> web.Response:
        if self.unanswered_looks:
            self.unanswered_looks -= 1
            await asyncio.Event().wait()
        return web.json_response({"weight_version": self.version})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.is_paused})

    async def _controlled(self, request: web.Request) -> web.Response:
        """What changes weights."""
        match request.path:
            case "/pause":
                self.is_paused = True
            case "/resume":
                self.is_paused = False
            case "/update_weight_version":
                self.version = str((await request.json())["new_version"])
            case "/collective_rpc":
                body = await request.json()
                self.is_dead |= not self.is_paused
                await asyncio.sleep(self.load_seconds)
                self.is_dead |= not self.is_paused
                self.loads.append(body["args"][0])
                return web.json_response({"results": [""]})
        return web.json_response({})

    async def _models(self, request: web.Request) -> web.Response:
        models = [{"id": self.model, "max_model_len": self.context}, *[{"id": ADAPTER_NAME}] * self.has_adapter]
        return web.json_response({"data": models})

    async def _render(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        if body["model"] != self.model:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        if status := self.refuses(body):
            return web.json_response({"error": {"message": "the template raises"}}, status=status)
        tokens = encoded(self.family.text(body["messages"], body.get("tools") or [], body["add_generation_prompt"]))
        context = {"tools": body.get("tools"), "tool_choice": "auto", "include_reasoning": True}
        parameters = {"temperature": 0.3, "top_p": 0.5, "top_k": 20, "skip_special_tokens": False, "max_tokens": 7}
        given = {"request_id": "r", "token_ids": tokens.tolist(), "model": self.model, "sampling_params": parameters}
        return web.json_response(given | ({"parse_context": context} if self.speaks >= "0.33" else {}))

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.status != 200:
            return web.json_response({"error": {"message": self.complaint}}, status=self.status)
        prompt, parameters = body["token_ids"], body["sampling_params"]
        if self.tells and parameters["top_k"] < 1:
            refusal = {"message": "sampling distribution replay requires top_k > 0"}
            return web.json_response({"error": refusal}, status=400)
        text = self._written(decoded(prompt))
        tokens = [
            *encoded(text, dropout=0.3).tolist(),
            *encoded(self.family.end({}) if text is not None else "").tolist(),
        ]
        finish, stop_reason = "stop", None
        for stop in parameters.get("stop") or ():
            for end in range(1, len(tokens)):
                if stop in decoded(tokens[:end]):
                    tokens, stop_reason = tokens[:end], stop
                    break
        if len(tokens) > parameters["max_tokens"]:
            tokens, finish, stop_reason = tokens[: parameters["max_tokens"]], "length", None
        before = self.version
        await asyncio.sleep(self.delay)
        while self.holds or self.is_paused:
            await asyncio.sleep(0.01)
        after, half = self.version, max(1, len(tokens) // 2)
        spans = [(before, 0, half), (after, half, len(tokens))] if before != after and len(tokens) > 1 else []
        spans = spans or [(after, 0, len(tokens))]
        logprobs = logprobs_of([*prompt, *tokens], len(prompt))
        if likeliest := self._likeliest(prompt, parameters):
            tokens, logprobs = likeliest
            spans = [(after, 0, 1)]
        numbers = [(int(v) if v.isdigit() else -1, a, b) for v, a, b in spans]
        if len(prompt) > 1:  # a probe is of one token
            self.samples.append(Sample(list(prompt), tokens, logprobs, numbers, parameters))
        choice = {
            "index": 0,
            "finish_reason": finish,
            "stop_reason": stop_reason,
            "token_ids": tokens,
            "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans],
            "sampling_mask": self.left(tokens, parameters["top_k"]) if self.tells else None,
        }
        if self.records_experts:
            file = io.BytesIO()
            np.save(file, experts_of([*prompt, *tokens])[:-1])
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        answer: Any = {"request_id": body.get("request_id", ""), "choices": [choice]}
        if body.get("output_mode") == "derender":
            choice["logprobs"] = {"content": [{"token": "", "logprob": float(value)} for value in logprobs]}
            choice["message"] = self.parsed(tokens)
            answer["output_mode"] = "derender"
        else:
            pairs = zip(tokens, logprobs, strict=True)
            choice["logprobs"] = {"content": [{"token_id": token, "logprob": float(value)} for token, value in pairs]}
        return web.json_response(self.spoil(answer) if self.spoil else answer)

    async def _derender(self, request: web.Request) -> web.Response:
        body = await request.json()
        choice = body["generate_response"]["choices"][0]
        return web.json_response({"choices": [{"message": self.parsed(choice["token_ids"], shows_end=True)}]})

    def parsed(self, tokens: Sequence[int], *, shows_end: bool = False) -> dict[str, Any]:
        """Its parsers show an end as text where they are given one, as vLLM 0.32 does."""
        text = decoded(tokens)
        if not shows_end:
            text = text.replace(self.family.end({}), "")
        message: dict[str, Any] = {"role": "assistant", "content": None}
        if thought := THOUGHT.match(text):
            message["reasoning"], text = thought[1], text[thought.end() :]
        calls = []
        for found in CALL.findall(text):
            call = json.loads(found)
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            calls.append({"id": f"call-{self._random.getrandbits(64):x}", "type": "function", "function": function})
        if calls:
            message["tool_calls"] = calls
        message["content"] = re.split(r"\n?<tool_call>", text)[0] or None
        return message

    @staticmethod
    def left(tokens: Sequence[int], top_k: int) -> list[list[int]]:
        """Each token and those behind it; of every fifth far more than `top_k`."""
        return [[*range(token, token + (top_k + 40 if i % 5 == 4 else top_k))] for i, token in enumerate(tokens)]

    def _likeliest(self, prompt: Sequence[int], parameters: Mapping[str, Any]) -> tuple[list[int], np.ndarray] | None:
        """What it says where nothing is left to chance: one token, and its logprob."""
        temperature, top_p = parameters.get("temperature", 1.0), parameters.get("top_p", 1.0)
        top_k = parameters.get("top_k", 0)
        if temperature > 0.1 and top_p > 0.001 and top_k != 1:
            return None
        scale = temperature if temperature <= 0.1 and "temperature" in self.heeds else 1.0
        scale *= 0.0 if top_p <= 0.001 and "top_p" in self.heeds else 1.0
        scale *= 0.0 if top_k == 1 and "top_k" in self.heeds else 1.0
        return [prompt[0]], logprobs_of([*prompt, prompt[0]], len(prompt)) * np.float32(scale)

    # -- the policy --------------------------------------------------------------------------------------------------
    def _written(self, prompt: str) -> str:
        """What it writes: ``say X``, ``call NAME {...}``, ``empty``, else words."""
        turns = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.S)
        asked = turns[-1] if turns else ""
        thought = f"<think>\n{self._words(3)}\n</think>\n\n"
        if asked == "empty":
            return ""
        if said := re.match(r"say (.*)", asked, re.S):
            return thought + said[1]
        if call := re.match(r"call (\w+) (.*)", asked, re.S):
            return thought + self._call(call[1], json.loads(call[2]))
        if "<tools>" in prompt and "tool_response" not in asked and self._random.random() < 0.6:
            return thought + "I look\n" + self._call("look_up", {"word": self._words(1)})
        return thought + self._words(6)

    def _words(self, count: int) -> str:
        return " ".join(self._random.choice(WORDS) for _ in range(count))

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
