"""NeMo Gym's model servers record calls in open rollouts: its ``TokenSink`` and ``TokenSource``, on the same moves.

A Gym run has model servers of its own before the gateway's engines. What they sample they hand to a sink::

    token_id_capture: {enabled: true, rebuild_response: false, sink: "rlbuffer.gateway.nemo_gym:TokenSink"}

    harness                        Gym's model server              open rollout
    begin a group at the gateway   ------------------------------> BEGIN
    a row with `_ng_rollout_id`    begin_call: may be sampled?
                                   engine samples
                                   put ---------------------------> CALL, before the agent hears it
    reward at the end_url          ------------------------------> END; the gateway pushes the group

The rollout id is the `api_key` of an open rollout: whoever has it may record, and not end. A call goes on from the one
whose prompt and answer are the longest beginning of its prompt, token by token, as in :mod:`rlbuffer.traces.calls`.

An entry does not say which weights sampled it. So the engines are asked before and after, and it counts as sampled by
the oldest version that one has named. Nor does it say which calls are tries of one request: each is a call of its own.

Source: NVIDIA-NeMo/Gym @07d6b0d07 nemo_gym/token_id_capture (`protocols`, `records`, `sink`) and
nemo_gym/rollout_correlation.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbuffer.client.buffer import connect
from rlbuffer.errors import (
    ConfigError,
    InvalidRollout,
    NotFound,
    OpenRolloutEnded,
    OpenRolloutUnknown,
    SamplerUnavailable,
)
from rlbuffer.gateway.engines.logprobs import SETTING
from rlbuffer.gateway.run_server import RunServer
from rlbuffer.process.threads import in_thread
from rlbuffer.records.failure import Failure
from rlbuffer.records.rollout import check_logprobs
from rlbuffer.records.spans import VersionSpan
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.store.open_rollouts import OpenCall, OpenRollout, OpenState
from rlbuffer.worker.samplers.endpoint import ENDPOINT_PROBE_SECONDS, Endpoint, NoAnswer

RECORD_SECONDS = 300.0
"""Longest that a sampled call waits for a server that is away."""
RECORD_TRIES = 3
"""Times that a call is recorded anew where the server has lost what it goes on from."""
MOST_BEGUN = 16_384
"""Calls of which it is remembered what was seen before they were sampled; the oldest is forgotten first."""
MOST_KNOWN = 4_096
"""Open rollouts whose calls are known here; of one that was forgotten they are read again."""
INCOMPLETE = "incomplete"
"""Kind of the failure of an open rollout that lacks a call."""
ENTRY = "entry"
"""The detail of a call with what its entry holds beside token ids and logprobs."""
DIGEST = "digest"
"""The detail with a digest of those."""
PATIENCE_SECONDS, LOAD_POLL_SECONDS = 300.0, 0.1
"""Longest that an engine is waited for that names no version, before a call begins, and the pause between two looks."""
MAX_ID = 2**31 - 1
ARRAYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


@dataclass(slots=True)
class _Begun:
    """What was seen before a call was sampled."""

    line: int
    """The run's line of versions."""
    version: int
    """The oldest that an engine named."""


@dataclass(slots=True)
class _End:
    """Where a call ends: what a later one may go on from."""

    number: int
    id: str
    length: int
    """Tokens of prompt and answer."""
    digest: Any
    """Of them; goes on with those of a later call."""


@dataclass(slots=True)
class _Known:
    """The calls of an open rollout that this process knows."""

    ends: list[_End] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add(self, call: OpenCall) -> None:
        """A call more. Raises NotFound where the one that it goes on from is another one."""
        length, digest = 0, hashlib.sha256()
        if call.after:
            before = self.ends[call.after - 1] if call.after <= len(self.ends) else None
            if before is None or call.after_id not in ("", before.id):
                raise NotFound(f"call {call.number} goes on from one that is not there")
            length, digest = before.length, before.digest.copy()
        digest.update(call.prompt.tobytes() + call.tokens.tobytes())
        self.ends.append(_End(call.number, call.id, length + len(call.prompt) + len(call.tokens), digest))

    def longest(self, prompt: NDArray[np.int32]) -> _End | None:
        """The newest of the longest ones that a prompt begins with, and has something behind."""
        whole, digest, at, found = prompt.tobytes(), hashlib.sha256(), 0, None
        for end in sorted(self.ends, key=lambda end: (end.length, end.number)):
            if end.length >= len(prompt):
                break
            digest.update(whole[4 * at : 4 * end.length])
            at = end.length
            if digest.digest() == end.digest.digest():
                found = end
        return found


class TokenSink:
    """Gym's ``TokenSink``: one for each process of a model server.

    Args:
        config: path of the run's ``rlbuffer.toml``; "": as ``rlbuffer.connect()`` finds it. Its ``[gateway]`` names the
            engines, and how tokens are drawn: the rows of the Gym run must ask for that temperature, and for `top_p` 1.
        run: name of the run; "": that of the file.

    Raises:
        RlbufferError: no run server answers, or the settings name no engines.
    """

    def __init__(self, config: str = "", run: str = "") -> None:
        self._buffer = connect(config=config or None, **({"run": run} if run else {}))
        gateway = self._buffer.settings.gateway
        if not gateway.engines:
            self._buffer.close()
            raise ConfigError(
                "gateway.engines names no engine: it must have those that NeMo Gym's model servers ask", setting=SETTING
            )
        self._store = self._buffer.store.role(GatewayStore)
        self._run, self._temperature = RunServer(self._store), gateway.temperature
        self._engines = [
            Endpoint(url, timeout_seconds=ENDPOINT_PROBE_SECONDS, setting=SETTING) for url in gateway.engines
        ]
        self._begun = OrderedDict[tuple[str, str], _Begun]()
        self._known = OrderedDict[str, _Known]()

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """A call is about to be sampled. What this raises fails the call.

        Raises:
            Refused: nothing may be sampled for the open rollout: it has ended, is unknown, too old or full, or the
                server is away or full.
            SamplerUnavailable: no engine answers, or one has weights that are no version of the run.
        """
        found = await self._run.opened(partial(self._store.look_up, rollout_id))
        await self._run.check(found)
        await self._run.told(partial(self._store.touch, rollout_id))
        self._begun[rollout_id, model_call_id] = _Begun(found.line, await self._oldest())
        while len(self._begun) > MOST_BEGUN:
            self._begun.popitem(last=False)

    async def put(self, entry: Any) -> None:
        """CALL: a ``TokenEntry`` is part of its open rollout. Safe to repeat. One that sampled nothing is no call.

        Raises:
            InvalidRollout: the entry cannot be trained; another one has its call id; or nobody knows which weights
                sampled it: it was not begun here, and has no `policy_version` of its own.
            Refused: its open rollout takes no calls, or the server was away for too long.
            EpochChanged: the run has gone into another line of versions meanwhile.
        """
        if not len(entry.generation_token_ids):
            await self._run.opened(partial(self._store.look_up, entry.rollout_id))
            return
        call, rollout_id = _call_of(entry, self._temperature), entry.rollout_id
        for tries in range(1, RECORD_TRIES + 1):
            history = self._known.setdefault(rollout_id, _Known())
            self._known.move_to_end(rollout_id)
            while len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
            try:
                async with history.lock:  # of one rollout one call at a time: the next one may go on from it
                    await self._recorded(rollout_id, history, call, entry)
                return
            except NotFound:
                self._known.pop(rollout_id, None)
                if tries == RECORD_TRIES:
                    raise

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """END: a call of it is lost, so it is a failed attempt from now on.

        Raises:
            Refused: no open rollout has this id, or the server was away for too long.
        """
        until = time.monotonic() + RECORD_SECONDS
        found = await self._run.told(partial(self._store.look_up, rollout_id), until=until)
        why = Failure(INCOMPLETE, f"NeMo Gym did not capture call {model_call_id or 'of an unknown id'}"[:200])
        await self._run.told(partial(self._store.fail, found.rollout.name, why), until=until)

    async def close(self) -> None:
        """Closes the connections. Safe to repeat."""
        await asyncio.gather(*(engine.close() for engine in self._engines))
        self._run.close()
        await in_thread(self._buffer.close)

    async def _recorded(self, rollout_id: str, history: _Known, call: OpenCall, entry: Any) -> None:
        """Records a call with its whole prompt. Raises NotFound where the server has not what is known of it here."""
        until = time.monotonic() + RECORD_SECONDS
        found = await self._run.told(partial(self._store.look_up, rollout_id), until=until)
        read = partial(self._store.read_calls, found.rollout.name)
        missing = range(len(history.ends) + 1, found.rollout.calls + 1)
        for there in await self._run.told(partial(read, missing), until=until):
            history.add(there)
        if len(history.ends) != found.rollout.calls:
            raise NotFound(f"open rollout {found.rollout.name} has not all of its calls")
        same = [end.number for end in history.ends if end.id == call.id]
        if same:
            for there in await self._run.told(partial(read, same), until=until):
                if any(there.details.get(name) != call.details[name] for name in (DIGEST, ENTRY)):
                    raise InvalidRollout("a call with the same model_call_id is on the server, and is another one")
            return
        begun = self._begun.get((rollout_id, entry.model_call_id))
        version = await self._version_of(entry, begun)
        call = _behind(replace(call, version_spans=(VersionSpan(version, 0, len(call.tokens)),)), history)
        record = partial(
            self._store.record,
            rollout_id,
            call,
            request=f"gym {call.id}",
            seen=0,
            history=f"gym {call.id}",
            line=begun.line if begun is not None else found.line,
        )
        recorded = await self._run.told(record, until=until)
        if recorded.number == len(history.ends) + 1:  # else another process recorded one: the next look reads both
            history.add(replace(call, number=recorded.number))
        self._begun.pop((rollout_id, entry.model_call_id), None)

    async def _version_of(self, entry: Any, begun: _Begun | None) -> int:
        """The version that counts as the one that sampled an entry. Raises InvalidRollout, SamplerUnavailable."""
        given_version = getattr(entry, "policy_version", None)
        if given_version is not None:
            version = int(given_version)
        elif begun is not None:
            version = min([begun.version, *(one for one in await self._named() if one is not None)])
        else:
            raise InvalidRollout(
                "which policy version sampled the call is not known: it was not begun at this sink, and its entry has "
                "no policy_version"
            )
        if version < 0:
            raise InvalidRollout("an engine has weights that are no policy version of this run")
        return version

    async def _oldest(self) -> int:
        """The oldest version that an engine samples with; a load is waited for, and so is an engine that is too busy to
        say: it may sample the call.

        Raises:
            SamplerUnavailable: none answers, one names no version for long, or has weights that are none of the run.
        """
        until = time.monotonic() + PATIENCE_SECONDS
        while None in (named := await self._named()) and time.monotonic() < until:
            await asyncio.sleep(LOAD_POLL_SECONDS)
        if not named:
            raise SamplerUnavailable("no engine of gateway.engines answers")
        if None in named:
            raise SamplerUnavailable(
                f"an engine of gateway.engines names no version for {PATIENCE_SECONDS:g} s: it is in a load, or takes "
                "connections and does not answer GET /weight_info"
            )
        if min(one for one in named if one is not None) < 0:
            raise SamplerUnavailable(
                "an engine of gateway.engines has weights that are no policy version of this run: rlbuffer gateway "
                "loads one, or a worker; the trainer's own way of loading must name the version"
            )
        return min(one for one in named if one is not None)

    async def _named(self) -> list[int | None]:
        """What those engines name that can be reached; None: it is being loaded, or does not answer in time."""
        answers = await asyncio.gather(*(engine.named_version() for engine in self._engines), return_exceptions=True)
        named: list[int | None] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                if not isinstance(answer, SamplerUnavailable):
                    raise answer
                if isinstance(answer, NoAnswer):
                    named.append(None)
            else:
                named.append(answer)
        return named


class TokenSource:
    """Gym's ``TokenSource``: reads the calls of open rollouts as entries, until their group is pushed.

    Args:
        config, run: as of :class:`TokenSink`.
    """

    def __init__(self, config: str = "", run: str = "") -> None:
        self._buffer = connect(config=config or None, **({"run": run} if run else {}))
        self._store = self._buffer.store.role(GatewayStore)

    async def freeze(self, rollout_id: str) -> Any:
        """No call is recorded from now on. -> a ``TokenCaptureSnapshot`` of those that there are. Safe to repeat.

        Its entries are those that were put, and calls that a gateway has recorded, with their ids and text.

        Raises:
            OpenRolloutUnknown.
            NotFound: its group is pushed, so its calls are the group's; or the server has dropped or lost some.
        """
        return await in_thread(partial(self._frozen, rollout_id))

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """The snapshot has been used. -> whether it is still what the server has. The push of its group drops it."""

        def is_same() -> bool:
            try:
                found = self._store.look_up(rollout_id).rollout
            except OpenRolloutUnknown:
                return False
            return (_snapshot_id(found), found.calls) == (snapshot_id, version)

        return await in_thread(is_same)

    async def close(self) -> None:
        """Closes the connection. Safe to repeat."""
        await in_thread(self._buffer.close)

    def _frozen(self, rollout_id: str) -> Any:
        gym = importlib.import_module("nemo_gym.token_id_capture")
        with suppress(OpenRolloutEnded):
            self._store.freeze(rollout_id)
        found = self._store.look_up(rollout_id).rollout
        calls = self._store.read_calls(found.name)
        if found.state is OpenState.PUSHED or len(calls) != found.calls:
            raise NotFound(
                f"open rollout {found.name} is pushed, or lacks calls: {len(calls)} of {found.calls} are there"
            )
        return gym.TokenCaptureSnapshot(
            rollout_id=rollout_id,
            entries=tuple(gym.TokenEntry(**fields) for fields in _entries(rollout_id, calls)),
            incomplete=_has_failed(found),
            snapshot_id=_snapshot_id(found),
            version=found.calls,
        )


def _has_failed(rollout: OpenRollout) -> bool:
    return rollout.is_void or (rollout.end is not None and rollout.end.failure is not None)


def _snapshot_id(rollout: OpenRollout) -> str:
    """Tells what is frozen: other calls, or a failure, are another one; a reward is not."""
    parts = (rollout.name, rollout.begun_ms, rollout.calls, rollout.bytes, rollout.tokens, _has_failed(rollout))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _entries(rollout_id: str, calls: Sequence[OpenCall]) -> list[dict[str, Any]]:
    """The fields of each call's entry, with its whole prompt."""
    whole, found = dict[int, NDArray[np.int32]](), list[dict[str, Any]]()
    for call in calls:
        prompt = np.concatenate([*([whole[call.after]] if call.after else []), call.prompt])
        whole[call.number] = np.concatenate([prompt, call.tokens])
        message = {"type": "message", **dict(call.details.get("message") or {})}
        plain = {"model_call_id": call.id, "output_items": [message], "created_at": call.details.get("created", 0)}
        arrays = (prompt.tolist(), call.tokens.tolist(), call.logprobs.tolist())
        found.append(
            {
                **plain,
                **(call.details.get(ENTRY) or {}),
                **dict(zip(ARRAYS, arrays, strict=True)),
                "rollout_id": rollout_id,
            }
        )
    return found


def _call_of(entry: Any, temperature: float) -> OpenCall:
    """The call of an entry with its whole prompt, as if it went on from none. Raises InvalidRollout."""
    prompt, tokens = (_ids(name, getattr(entry, name)) for name in ARRAYS[:2])
    if not len(prompt):
        raise InvalidRollout("prompt_token_ids is empty: the first token of a sequence cannot be trained")
    try:
        logprobs = np.asarray(entry.generation_log_probs, np.float64).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidRollout(f"generation_log_probs holds what is no number ({type(error).__name__})") from None
    if logprobs.shape != tokens.shape:
        raise InvalidRollout(f"{len(logprobs)} logprobs for {len(tokens)} sampled tokens")
    if not np.isfinite(logprobs).all():
        raise InvalidRollout("column logprobs: not all are finite")
    check_logprobs("logprobs", logprobs)
    fields = {name: value for name, value in entry.model_dump(mode="json").items() if name not in ARRAYS}
    digest = hashlib.sha256(b"".join(part.tobytes() + b" " for part in (prompt, tokens, logprobs)))
    details = {
        "message": {"role": "assistant", "content": _text_of(fields.get("output_items"))},
        "role": "user",
        "temperature": temperature,
        DIGEST: digest.hexdigest(),
        ENTRY: fields,
    }
    return OpenCall(
        id=hashlib.sha256(entry.model_call_id.encode()).hexdigest()[:16],
        prompt=prompt,
        tokens=tokens,
        logprobs=logprobs,
        details=details,
    )


def _behind(call: OpenCall, history: _Known) -> OpenCall:
    """A call with its whole prompt as one that goes on from the call which that begins with."""
    end = history.longest(call.prompt)
    return call if end is None else replace(call, after=end.number, after_id=end.id, prompt=call.prompt[end.length :])


def _ids(name: str, values: Sequence[int]) -> NDArray[np.int32]:
    """Token ids. Raises InvalidRollout."""
    found = np.asarray(values)
    if len(found) and (found.ndim != 1 or found.dtype.kind not in "iu" or found.min() < 0 or found.max() > MAX_ID):
        raise InvalidRollout(f"{name} holds what is no token id")
    return found.astype(np.int32)


def _text_of(items: Any) -> str:
    """The text of an entry's output, for people."""
    parts = list[str]()
    for item in items if isinstance(items, list) else ():
        content = item.get("content") if isinstance(item, dict) else None
        texts = content if isinstance(content, list) else [{"text": content}]
        parts += [part["text"] for part in texts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if isinstance(item, dict) and item.get("type") == "function_call":
            parts.append(f"{item.get('name')} {item.get('arguments')}")
    return "\n".join(parts)
