"""One vLLM server behind its HTTP interface: tokens in, tokens out; weights changed under running requests.

``/inference/v1/generate`` (``--enable-scale-out``) says which version sampled which token. Weights need the server's
development endpoints (``VLLM_SERVER_DEV_MODE=1``) and rlbuffer's extension::

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model DIR --skip-tokenizer-init \\
        --enable-scale-out --logprobs-mode processed_logprobs \\
        --worker-extension-cls rlbuffer.worker.samplers.vllm_extension.WeightsExtension

A worker with a nucleus alone (``top_p`` below 1, no ``top_k``) needs ``--logprobs-mode raw_logprobs`` there. One with
``top_k`` needs ``--return-sampling-mask``: such a server tells the tokens that it leaves, and refuses requests without
``top_k``.

A load pauses the server, and a load without a pause kills vLLM's engine. So the pause belongs to the process that
loads: it labels the server's weights with a note of itself instead of a version. Whoever brings the server up later
resumes it, unless that process is still there. Tokens of weights that were half loaded carry the note, and no version.

To record experts it needs ``--enable-return-routed-experts`` as well.

For LoRA adapters: DIR is their base model, and the server needs ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` and
``--enable-lora --max-loras 1 --max-lora-rank R``.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from rlbuffer.errors import ConfigError, RequestFailed, RlbufferError, SamplerUnavailable, WeightsError
from rlbuffer.process.identity import identity, may_live, named
from rlbuffer.process.web_servers import is_own
from rlbuffer.records.spans import VersionSpan
from rlbuffer.weights.layout import is_adapter
from rlbuffer.worker.faults import error_of_status
from rlbuffer.worker.samplers.base import (
    ADAPTER_NAME,
    Completion,
    Sampling,
    finish_reason,
    fitted,
    of_an_engine,
    support_told,
    with_record,
)

CONNECT_SECONDS = 5.0
"""Longest that connecting may take."""
CONTROL_SECONDS = 60.0
"""Longest that pausing, resuming and labelling may take each."""
LOAD_SECONDS = 600.0
"""Longest that loading a version may take."""
ENDPOINT_PROBE_SECONDS = 30.0
"""Longest that a server may take for one token before it counts as broken: `/health` says 200 for a dead engine."""
LAST_RESUME_SECONDS = 2.0
"""Longest that resuming may take a worker that ends."""
PAUSE_LOOK_SECONDS = 1.0
"""Seconds between two looks at a paused server that nobody has noted to load: whoever pauses it notes that next."""

KEEP_SECONDS = 2.0
"""Longest that an idle connection is kept: vLLM's server closes one after 5 s."""
AGAIN_SECONDS = 0.1
"""Seconds before a request whose connection broke is sent once more."""
BROKEN = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionResetError)
"""Errors of a request whose connection the server closes before it answers."""
JSON = {"Content-Type": "application/json"}

GENERATE = "/inference/v1/generate"
NAME_ADAPTER = "/v1/load_lora_adapter"
NEUTRAL = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "watermarking": False,
}
"""Sent with every request: where they are missing a server takes its model's own, or its own, and tokens are drawn from
another distribution than the one that the trainer computes."""
_LOADS: set[str] = set()
"""Notes of the loads that are under way in this process."""


def sampling_parameters(sampling: Sampling) -> dict[str, Any]:
    """The sampling parameters of a request for one completion, with the logprob of each sampled token alone."""
    sampling = of_an_engine(sampling)
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        **NEUTRAL,
        "logprobs": 0,
    }


class NoSuchPage(ConfigError):
    """The server answers 404: it was not started for this, or is another one."""


class NoAnswer(SamplerUnavailable):
    """The server takes connections, and did not answer in time: it may be at work for others."""


@dataclass(frozen=True, slots=True)
class Response:
    """A server's answer, whole."""

    status: int
    retry_after: str
    content: bytes

    def told(self) -> str:
        """What it says, in a line that is not too long."""
        text = " ".join(self.content.decode(errors="replace").split())
        return text if len(text) <= 300 else f"{text[:300]}..."

    def field(self, name: str) -> Any:
        """A field of it; None where the server does not know the question, or answers with something else."""
        try:
            answer = json.loads(self.content) if self.status < HTTPStatus.MULTIPLE_CHOICES else None
        except ValueError:
            return None
        return answer.get(name) if isinstance(answer, dict) else None


class Endpoint:
    """One server, asked on one event loop. Errors of the network and of the server itself are SamplerUnavailable.

    Args:
        url: ``http://host:port``.
        timeout_seconds: longest that one request may take.
        setting: the one that names it.
        top_k: of what it is asked for.
        records_experts: completions say which experts took each token in; the server needs
            ``--enable-return-routed-experts``.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float,
        setting: str = "sampler_options.servers",
        top_k: int = 0,
        records_experts: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self._setting = setting
        self._simplest = Sampling(max_new_tokens=1, top_k=top_k)
        self._records_experts = records_experts
        self.in_flight = 0
        """Rollouts that are being sampled there."""
        self.version = -1
        """Policy version that it serves; -1 when it must be loaded before it is used."""
        self.trouble = "it was not asked yet"
        """Why it may not be used; "" when it may."""
        self.model = ""
        """What requests name."""
        self.has_adapter = False
        """A LoRA adapter was loaded into it."""
        self._has_paused = False
        """It was asked to pause, and has not confirmed that it was resumed."""
        self.context = 0
        """Tokens that prompt and completion may have together."""
        self.timeout_seconds = timeout_seconds
        """Longest that one request may take."""
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Resumes a server that a load has left paused, and closes the connections."""
        if self._has_paused:
            with suppress(RlbufferError):
                await self._resume(LAST_RESUME_SECONDS)
        if self._session is not None:
            await self._session.close()

    async def probe(self, *, resumes: bool = True) -> None:
        """Learns what the server is, and asks it for one token once it is not paused.

        Args:
            resumes: this worker changes the weights, so it resumes what a load has left paused.

        Raises:
            SamplerUnavailable: it gives none in time, or stays paused.
            ConfigError: it refuses, or does not answer as the worker needs it: no token ids, no versions.
        """
        await self.identify()
        await self._release(resumes=resumes)
        await self.answers()

    async def identify(self) -> None:
        """Learns which model and which context it has. Raises as :meth:`probe` does."""
        answer = await self.call("GET", "/v1/models", seconds=ENDPOINT_PROBE_SECONDS)
        models = answer.get("data") or [{}]
        self.model = str(models[0].get("id", ""))
        self.has_adapter = any(model.get("id") == ADAPTER_NAME for model in models)
        self.context = int(models[0].get("max_model_len") or 0)

    async def answers(self) -> None:
        """Asks for one token. Raises as :meth:`probe` does."""
        try:
            token = np.zeros(1, np.int32)
            await self.sample(token, n=1, sampling=self._simplest, seconds=ENDPOINT_PROBE_SECONDS)
        except RequestFailed as error:  # what it makes of the simplest request, it makes of all
            raise ConfigError(str(error), setting=self._setting) from error

    async def sample(
        self,
        prompt: NDArray[np.int32],
        *,
        n: int,
        sampling: Sampling,
        seconds: float | None = None,
    ) -> list[Completion]:
        """Samples `n` completions."""
        sampling = fitted(sampling, len(prompt), self.context)
        # The stop tokens are those that were asked for, not the model's own.
        parameters = {**sampling_parameters(sampling), "n": n, "ignore_eos": True}
        body = {"token_ids": prompt.tolist(), "model": self.model, "sampling_params": parameters}
        answer = await self.call("POST", GENERATE, body, seconds=seconds or self.timeout_seconds)
        try:
            choices = sorted(answer.get("choices") or [], key=lambda choice: int(choice.get("index", 0)))
            if len(choices) != n:
                raise RequestFailed(f"{self.url}: {len(choices)} completions came instead of {n}")
            return [self.completion(choice, sampling, len(prompt)) for choice in choices]
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            why = f"{type(error).__name__}: {error}"
            raise RequestFailed(f"{self.url}{GENERATE} answered with what is no completion ({why})") from error

    async def load(self, directory: Path, shapes: Mapping[str, Sequence[int]], version: int, *, seed: int) -> None:
        """Changes the weights, or the adapter, and draws from `seed` on; what is in flight goes on.

        Raises:
            WeightsError: they do not fit; the server goes on with what it had.
            ConfigError: the server was not started for what is asked of it.
            SamplerUnavailable: the server is away, or nobody knows what it serves now; `version` is then -1.
        """
        try:
            await self._change(directory, shapes, version, seed)
        except RequestFailed as error:  # of every load, then
            raise ConfigError(str(error), setting=self._setting) from error

    async def _change(self, directory: Path, shapes: Mapping[str, Sequence[int]], version: int, seed: int) -> None:
        await self._release(resumes=True)
        before, self.version = self.version, -1
        note = json.dumps({"loads": version, "at": round(time.time()), "load": uuid.uuid4().hex} | identity())
        _LOADS.add(note)
        self._has_paused = True
        try:
            await self.call("POST", "/pause?mode=keep")
            await self._label(note)
            method = "rlbuffer_load"
            if is_adapter(directory):
                method = "rlbuffer_load_adapter"
                await self._name_adapter(directory)
            body = {"method": method, "args": [str(directory), dict(shapes), seed], "timeout": LOAD_SECONDS}
            answer = await self.call("POST", "/collective_rpc", body, seconds=LOAD_SECONDS + CONTROL_SECONDS)
            refusals = [text for text in answer.get("results", ()) if text]
            if refusals:
                if before >= 0:
                    await self._label(str(before))
                self.version = before
                raise WeightsError(f"{self.url}: {refusals[0]}")
            await self.call("POST", "/reset_prefix_cache")
            await self._label(str(version))
        finally:
            _LOADS.discard(note)
            await self._resume(CONTROL_SECONDS)
        self.version = version

    async def named_version(self) -> int | None:
        """The version that the server names as its weights'; -1 for another name; None where it names none, or is
        being loaded. Raises SamplerUnavailable; NoAnswer where it is there, and says nothing."""
        name = (await self._respond("GET", "/weight_info", seconds=ENDPOINT_PROBE_SECONDS)).field("weight_version")
        if not isinstance(name, str | int):
            return None
        if str(name).isdigit():
            return int(name)
        return -1 if await self._loader() is None else None

    async def _label(self, label: str) -> None:
        """Says what the weights are: the engine writes it beside every token."""
        await self.call("POST", "/update_weight_version", {"new_version": label})

    # -- paused --------------------------------------------------------------------------------------------------------
    async def _release(self, *, resumes: bool) -> None:
        """Resumes a server that nobody loads any more: a worker that died in a load has left it paused, and a paused
        server answers no request.

        Raises:
            SamplerUnavailable: it is paused and stays so.
        """
        for is_last in (False, True):
            is_paused = await self._is_paused()
            if is_paused is None and resumes:  # it does not say; to resume one that runs changes nothing
                with suppress(RlbufferError):
                    await self._resume(CONTROL_SECONDS)
            if not is_paused:
                return
            loader = await self._loader()
            if loader is not None:
                raise SamplerUnavailable(
                    f"{self.url} is paused: {named(loader)} loads version {loader['loads']} into it. Where two workers "
                    "share a server, set sampler_options.updates_weights = false for all but one"
                )
            if not is_last:
                await asyncio.sleep(PAUSE_LOOK_SECONDS)
        if not resumes:
            raise SamplerUnavailable(
                f"{self.url} is paused, and this worker does not change its weights (updates_weights = false): the "
                f"worker that does resumes it when it starts. By hand: curl -X POST {self.url}/resume"
            )
        await self._resume(CONTROL_SECONDS)
        if await self._is_paused():
            raise SamplerUnavailable(f"{self.url} is paused again at once: find out who else sends it POST /pause")

    async def _is_paused(self) -> bool | None:
        """None of a server that does not say."""
        told = (await self._respond("GET", "/is_paused", seconds=ENDPOINT_PROBE_SECONDS)).field("is_paused")
        return told if isinstance(told, bool) else None

    async def _loader(self) -> Mapping[str, Any] | None:
        """The process that loads a version into it, by its note; None where none does, or it is gone."""
        note = (await self._respond("GET", "/weight_info", seconds=ENDPOINT_PROBE_SECONDS)).field("weight_version")
        if note in _LOADS:
            return identity() | {"loads": json.loads(note)["loads"]}
        try:
            loader = json.loads(note)
            is_there = may_live({**loader, "seconds_ago": time.time() - loader["at"]}) and "loads" in loader
        except (TypeError, ValueError, KeyError):  # a version, or what somebody else has written there
            return None
        return loader if is_there else None

    async def _resume(self, seconds: float) -> None:
        try:
            await self.call("POST", "/resume", seconds=seconds)
        except (SamplerUnavailable, RequestFailed) as error:
            raise SamplerUnavailable(
                f"{self.url} is paused and cannot be resumed ({error}). It is tried again; if that does not help, "
                "start the server anew"
            ) from error
        self._has_paused = False

    async def _name_adapter(self, directory: Path) -> None:
        """Makes the adapter known to the server by name, once; it is changed in place afterwards."""
        if not self.has_adapter:
            body = {"lora_name": ADAPTER_NAME, "lora_path": str(directory)}
            response = await self._respond("POST", NAME_ADAPTER, body, seconds=CONTROL_SECONDS)
            if response.status != HTTPStatus.OK:
                raise ConfigError(
                    f"{self.url} takes no LoRA adapter ({response.status}: {response.told()}): start vLLM's "
                    "server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora, --max-loras 1 and a "
                    "--max-lora-rank that is large enough, on the adapter's base model",
                    setting=self._setting,
                )
            self.has_adapter = True
        self.model = ADAPTER_NAME

    # -- HTTP ----------------------------------------------------------------------------------------------------------
    async def call(self, method: str, path: str, body: Any = None, *, seconds: float = CONTROL_SECONDS) -> Any:
        """The JSON that it answers. Raises what :func:`rlbuffer.worker.faults.error_of_status` makes of a status, and
        SamplerUnavailable where no answer comes."""
        response = await self._respond(method, path, body, seconds=seconds)
        if response.status == HTTPStatus.NOT_FOUND:
            raise NoSuchPage(
                f"{self.url} has no {path.partition('?')[0]}: start vLLM's server with VLLM_SERVER_DEV_MODE=1, "
                "--enable-scale-out and --worker-extension-cls "
                "rlbuffer.worker.samplers.vllm_extension.WeightsExtension",
                setting=self._setting,
            )
        if response.status >= HTTPStatus.BAD_REQUEST:
            sentence = f"{self.url}{path} answers {response.status}: {response.told()}"
            raise error_of_status(response.status, sentence, response.retry_after)
        try:
            return json.loads(response.content) if response.content else {}
        except ValueError as error:
            raise SamplerUnavailable(f"{self.url}{path} answered with something that is not JSON") from error

    async def _respond(self, method: str, path: str, body: Any = None, *, seconds: float) -> Response:
        data = None if body is None else encoded(body)
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            try:
                return await self._asked(method, path, data, timeout)
            except aiohttp.ClientConnectorError:
                raise
            except BROKEN:
                # A kept connection can be closed just as it is used again. Everything asked here may be asked twice;
                # a server that died refuses the second connection.
                await asyncio.sleep(AGAIN_SECONDS)
                return await self._asked(method, path, data, timeout)
        except aiohttp.ConnectionTimeoutError as error:
            reason = f"no connection within {min(CONNECT_SECONDS, seconds):g} s"
            raise SamplerUnavailable(f"{self.url}{path} cannot be reached: {reason}") from error
        except TimeoutError as error:
            raise NoAnswer(f"{self.url}{path} did not answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise SamplerUnavailable(f"{self.url}{path} cannot be reached: {reason}") from error

    async def _asked(self, method: str, path: str, data: bytes | None, timeout: aiohttp.ClientTimeout) -> Response:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_SECONDS, use_dns_cache=False),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=not is_own(urlsplit(self.url).netloc),  # a proxy cannot reach this host's own servers
            )
        asked = self._session.request(
            method,
            self.url + path,
            data=None if data is None else BytesIO(data),  # written in pieces
            headers=None if data is None else JSON,
            timeout=timeout,
            allow_redirects=False,
        )
        async with asked as response:
            return Response(response.status, response.headers.get("Retry-After", ""), await response.read())

    def completion(self, choice: Mapping[str, Any], sampling: Sampling, prompt: int) -> Completion:
        """The completion, behind so many tokens of a prompt, that a choice of the generate endpoint holds.

        Raises:
            RequestFailed: it lacks token ids, logprobs, versions, the tokens that `top_k` left, or experts that were
                asked for.
        """
        ids = choice.get("token_ids")
        if ids is None:
            raise RequestFailed(
                f"{self.url} returns no token ids: its text would have to be tokenised again, and a logprob would then "
                "belong to a token that was never sampled"
            )
        tokens = np.asarray(ids, np.int32)
        is_greedy = sampling.temperature == 0
        logprobs = np.zeros(len(tokens), np.float32) if is_greedy else np.array(_logprobs(choice), np.float32)
        if logprobs.shape != tokens.shape:
            raise RequestFailed(f"{self.url}: {len(logprobs)} logprobs came for {len(tokens)} tokens")
        spans = choice.get("weight_versions")
        if len(tokens) and not spans:
            raise RequestFailed(
                f"{self.url}{GENERATE} does not say which version sampled which token (weight_versions): take vLLM "
                "0.32 or newer"
            )
        completion = Completion(
            tokens=tokens,
            logprobs=logprobs,
            finish_reason=finish_reason(choice.get("finish_reason"), tokens, sampling),
            version_spans=_spans(spans or ()),
            support=support_told(choice.get("sampling_mask"), len(tokens), sampling),
        )
        if not self._records_experts:
            return completion
        if choice.get("routed_experts") is None:
            raise RequestFailed(
                f"{self.url}{GENERATE} does not say which experts it took (routed_experts): start vLLM's server with "
                "--enable-return-routed-experts, which takes a GPU"
            )
        return with_record(completion, prompt, _npy(choice["routed_experts"]))


def _logprobs(choice: Mapping[str, Any]) -> list[float]:
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:
        return [float(token["logprob"]) for token in logprobs["content"] or ()]
    return [float(value) for value in logprobs.get("token_logprobs") or ()]


def _spans(entries: Sequence[Mapping[str, Any]]) -> tuple[VersionSpan, ...]:
    spans = []
    for span in entries:
        # A server that was not loaded yet calls its weights "default": nothing that may be trained on.
        version = int(span["version"]) if str(span["version"]).isdigit() else -1
        spans.append(VersionSpan(version, int(span["start"]), int(span["end"])))
    return tuple(spans)


def _npy(text: str) -> NDArray[Any]:
    """An array as vLLM writes it into JSON: numpy's file format in base64. Raises ValueError, TypeError."""
    array: NDArray[Any] = np.load(BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    return array


def encoded(body: Any) -> bytes:
    """`body` as JSON. msgspec takes a fourth of the time for a prompt's ids, and no integer of more than 64 bits, such
    as a tool's schema may have."""
    try:
        return msgspec.json.encode(body)
    except OverflowError:
        return json.dumps(body).encode()
