"""A gateway on a run that gives tickets, before an engine of no weights; agents by plain HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
from daemon_runs import leading
from fake_engine import FakeEngine, logprobs_of

from rlbuffer.client.buffer import Buffer, connect
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.settings import GatewaySettings, RunSettings
from rlbuffer.gateway.engines.fleet import Fleet
from rlbuffer.gateway.experts import counts_of
from rlbuffer.gateway.service import Gateway
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import VersionSpan
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.store.open_rollouts import OpenCall

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


class Served:
    """One gateway process's worth, on a loop of its own."""

    def __init__(
        self,
        url: str,
        run: str,
        engines: list[str],
        *,
        token: str = "",
        model: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        given = {"listen": "127.0.0.1:0", "engines": engines, **settings}
        self.settings = RunSettings(
            run=run, redis_url=url, gateway=GatewaySettings(**given), model={"config": dict(model or {})}
        )
        experts = counts_of(self.settings)
        self.buffer = connect(url, run=run, config=self.settings)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        drawn: Any = {name: getattr(self.settings.gateway, name) for name in ("temperature", "top_p", "top_k")}
        self.fleet = Fleet(engines, timeout_seconds=60.0, patience_seconds=30.0, experts=experts, **drawn)
        try:
            self.gateway = Gateway(self.buffer.store.role(GatewayStore), self.settings, self.fleet, token=token)
            self.wait(self.fleet.start())
            self.wait(self.gateway.start())
        except BaseException:
            self._end()
            raise

    @property
    def url(self) -> str:
        return self.gateway.url

    def wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def stop(self) -> None:
        """As SIGTERM does."""
        self.wait(self.gateway.close())
        self._end()

    def kill(self) -> None:
        """Nothing more is done: what is under way is lost."""

        async def drop() -> None:
            runner, self.gateway._runner = self.gateway._runner, None
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if runner is not None:
                await runner.cleanup()
            self.gateway.answering.close()

        self.wait(drop())
        self._end()

    def _end(self) -> None:
        self.wait(self.fleet.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self.buffer.close()


class Stage:
    """A run with a trainer that has announced version 0, a batcher, an engine and a gateway."""

    def __init__(
        self,
        url: str,
        run: str,
        *,
        batcher: Mapping[str, Any] | None = None,
        engine: FakeEngine | None = None,
        engine_url: str = "",
        **settings: Any,
    ) -> None:
        self._stack = ExitStack()
        self.server, self.run = url, run
        self.buffer: Buffer = self._stack.enter_context(connect(url, run=run))
        given = {"row_tokens": 65536, "step_groups": 4, "max_age": 2, **(batcher or {})}
        self.config = BatcherConfig(**given)
        self.reader = self.buffer.reader(timeout_seconds=60.0)
        self.reader.start()
        self.buffer.policy.announce(0, location="", size=0, checksum="")
        self._stack.enter_context(leading(self.buffer, self.config))
        self.engine_url = engine_url
        """Of the engine that is asked; a real one where it is given."""
        if not engine_url:
            self.engine = (engine or FakeEngine()).start()
            self._stack.callback(self.engine.stop)
            self.engine_url = self.engine.url
        self.settings = settings
        self._served: list[Served] = []
        try:
            self.first = self.serve()
        except BaseException:
            self.close()
            raise

    def serve(self, **settings: Any) -> Served:
        """One gateway more."""
        made = Served(self.server, self.run, [self.engine_url], **{**self.settings, **settings})
        self._served.append(made)
        return made

    def drop(self, served: Served, *, kills: bool = False) -> None:
        self._served.remove(served)
        served.kill() if kills else served.stop()

    def close(self) -> None:
        for served in list(self._served):
            self.drop(served)
        self._stack.close()

    # -- agents --------------------------------------------------------------------------------------------------------
    def begin(self, size: int = 1, *, at: Served | None = None, headers: Any = None, **more: Any) -> dict[str, Any]:
        """Begins a group. -> what the gateway answers."""
        served = at or self.first
        body = {"env": "agents", "size": size, "wait": 30, **more}
        response = httpx.post(f"{served.url}/v1/open_rollouts", json=body, headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def agent(self, at: Served | None = None, **more: Any) -> Agent:
        """The agent of a group of one."""
        return Agent(self, self.begin(at=at, **more)["open_rollouts"][0])

    def rollouts(self, count: int = 1) -> list[Rollout]:
        """All rollouts of pushed groups, once there are so many."""
        return self.wait_for(lambda: found if len(found := self._pushed()) >= count else None)

    def _pushed(self) -> list[Rollout]:
        # One that is dropped while they are read is read twice.
        groups = dict.fromkeys(view.group_id for view in self.buffer.groups("env:agents", limit=1000))
        return [member.rollout for group in groups for member in self.buffer.group(group).members]

    def wait_for(self, what: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 120
        while not (found := what()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return found


class Agent:
    """Chat completions without a client: each request is what it is."""

    def __init__(self, stage: Stage, opened: Mapping[str, Any]) -> None:
        self.stage, self.opened = stage, opened
        self.name: str = opened["name"]
        self.messages: list[dict[str, Any]] = []

    def at(self, served: Served) -> Agent:
        """The same agent, that asks another gateway."""
        path = {
            name: value.replace(self.opened["base_url"].partition("/r/")[0], served.url)
            for name, value in self.opened.items()
        }
        made = Agent(self.stage, path)
        made.messages = self.messages
        return made

    def post(
        self, content: str | None = None, *, retry: int | None = 0, timeout: float = 60, **more: Any
    ) -> httpx.Response:
        messages = more.pop("messages", None) or [*self.messages, {"role": "user", "content": content}]
        headers = {} if retry is None else {"x-stainless-retry-count": str(retry)}
        body = {"model": "gpt-5", "messages": messages, **more}
        return httpx.post(f"{self.opened['base_url']}/chat/completions", json=body, headers=headers, timeout=timeout)

    def ask(self, content: str, **more: Any) -> dict[str, Any]:
        """One turn, after which the conversation holds both. -> the answer's message, with its id."""
        self.messages.append({"role": "user", "content": content})
        return self.go_on(**more)

    def go_on(self, **more: Any) -> dict[str, Any]:
        response = self.post(messages=self.messages, **more)
        assert response.status_code == 200, response.text
        answer = response.json()
        message = answer["choices"][0]["message"]
        self.messages.append(message)
        return {"completion": answer["id"], **message}

    def result(self, text: str) -> None:
        """The result of each call of the last answer."""
        for call in self.messages[-1]["tool_calls"]:
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    def end(self, *, headers: Any = None, **how: Any) -> httpx.Response:
        return httpx.post(self.opened["end_url"], json=how or {"reward": 1.0}, headers=headers, timeout=60)


def trained_samples(rollout: Rollout) -> list[tuple[bytes, bytes]]:
    """What is trained of a rollout, as (all before it, sampled); and whether its logprobs are the model's."""
    found = []
    for sequence in rollout.sequences:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], sequence.loss_mask.astype(np.int8), [0]])))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            expected = logprobs_of(sequence.tokens[:end].tolist(), start)
            assert np.array_equal(expected, sequence.logprobs[start:end])
            found.append((sequence.tokens[:start].tobytes(), sequence.tokens[start:end].tobytes()))
    return found


def engine_samples(engine: FakeEngine) -> list[tuple[bytes, bytes]]:
    return [
        (np.array(sample.prompt, np.int32).tobytes(), np.array(sample.tokens, np.int32).tobytes())
        for sample in engine.samples
    ]


def sampled(tokens: int) -> OpenCall:
    """A conversation of one call."""
    return OpenCall(
        prompt=np.array([1, 2], np.int32),
        tokens=np.full(tokens, 7, np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        version_spans=(VersionSpan(0, 0, tokens),),
        details={"message": {"role": "assistant", "content": ""}},
    )
