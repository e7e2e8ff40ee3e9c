"""What the gateway adds to a call of an agent, in time, CPU and bytes, before an engine that answers at once.

Every part is a process of its own: the embedded server, the engine, one gateway, and the sessions. The same requests go
to the engine directly, and what is left of a call's time then is the gateway's and the server's.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]
from aiohttp import ClientSession, TCPConnector, web
from every_role import EveryRole

from benchmarks.report import Report
from rlbuffer.client.buffer import Buffer
from rlbuffer.config.settings import RunSettings, ServerSettings
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.session import open_store

SESSIONS = (1, 100, 1_000)
CALLS_A_SECOND = 10.0
"""Of all sessions together: between two calls of a session its tools are at work. One session calls on and on."""
MEASURED_CALLS = 400
FIRST_CHARACTERS, RESULT_CHARACTERS, ANSWER_TOKENS = 3_000, 300, 100
"""A token of this engine is a byte: a first prompt of about 3,000, and 300 more for each call's result."""
TURNS = 20
"""Calls of a rollout; then its session ends it, and begins another."""
AIM_MS = 5.0
"""p50 at 100 sessions."""
AIM_PACKED = 2.1
SPAWN = multiprocessing.get_context("spawn")
USER, ASSISTANT, SYSTEM, TOOL, END = range(256, 261)
ROLES = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM, "tool": TOOL}
START_SECONDS, LOOK_SECONDS = 240.0, 0.05
ENV = "bench"


def run(report: Report) -> None:
    """All numbers of sessions."""
    report.begin(
        "gateway",
        measures=f"calls of agents through one gateway process, {CALLS_A_SECOND:g} a second of all sessions together "
        "(one session calls on and on), beside the same requests to the engine itself; a rollout has "
        f"{TURNS} calls, the first prompt about {FIRST_CHARACTERS:,} tokens, each answer {ANSWER_TOKENS}, each tool's "
        f"result {RESULT_CHARACTERS}; CPU of gateway and server for a call, bytes on the server, packed tokens",
        not_measured="the network (all on one machine, whose cores the sessions share), TLS, streams, a real engine's "
        "time to render, several gateways",
    )
    rows = []
    with a_gateway() as place:
        for sessions in SESSIONS:
            figures = asyncio.run(measure(place, sessions))
            rows.append([f"{sessions:,}", *figures.row()])
            if sessions == 100:
                added = figures.added(0.5)
        report.table(
            [
                *("sessions", "calls", "a call, p50 ms", "p99", "the engine alone, p50 ms", " p99", "added, p50 ms"),
                *("  p99", "gateway CPU ms", "server CPU ms"),
            ],
            rows,
        )
        name = f"at 100 sessions the gateway adds {AIM_MS:g} ms at most, p50"
        report.line(f"{name}: {added:.1f} ms, met: {report.target(name, added <= AIM_MS)}")
        kept = [held(place, shape) for shape in SHAPES]
        report.table(
            [
                *("an agent that", "calls", "sequences", "bytes on the server for a call", "  for a token"),
                *("packed for each trained token", "  each token of a conversation once", "  each call by itself"),
            ],
            [row for _, row in kept],
        )
        name = f"an agent that writes more than it reads packs {AIM_PACKED:g} tokens at most for each trained one"
        report.line(f"{name}: {kept[-1][0]:.2f}, met: {report.target(name, kept[-1][0] <= AIM_PACKED)}")


@dataclass
class Place:
    """Where everything is."""

    url: str
    engine: str
    gateway: psutil.Process
    server: psutil.Process
    store: EveryRole

    def cpu(self) -> tuple[float, float]:
        """CPU seconds of gateway and server so far."""
        gateway, server = (sum(process.cpu_times()[:2]) for process in (self.gateway, self.server))
        return gateway, server


@dataclass
class Figures:
    """What one number of sessions took."""

    calls: list[float] = field(default_factory=list)
    """Seconds of each call through the gateway."""
    alone: list[float] = field(default_factory=list)
    """Of the same requests to the engine."""
    gateway_cpu: float = 0.0
    """Seconds of all calls."""
    server_cpu: float = 0.0

    def added(self, q: float) -> float:
        """Milliseconds."""
        return 1e3 * float(np.quantile(self.calls, q) - np.quantile(self.alone, q))

    def row(self) -> list[str]:
        through, alone = ([1e3 * float(np.quantile(s, q)) for q in (0.5, 0.99)] for s in (self.calls, self.alone))
        added = [self.added(q) for q in (0.5, 0.99)]
        cpu = [1e3 * seconds / MEASURED_CALLS for seconds in (self.gateway_cpu, self.server_cpu)]
        return [f"{len(self.calls):,}", *(f"{ms:.1f}" for ms in (*through, *alone, *added, *cpu))]


# -- sessions ----------------------------------------------------------------------------------------------------------
async def measure(place: Place, sessions: int) -> Figures:
    """Lets so many sessions call."""
    figures, over = Figures(), asyncio.Event()
    pause = sessions / CALLS_A_SECOND if sessions > 1 else 0.0
    rng = np.random.default_rng(sessions)
    async with ClientSession(connector=TCPConnector(limit=0)) as http:

        async def rests(seconds: float) -> None:
            """Until then, or the end."""
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), seconds)

        async def session(number: int, opened: Any) -> None:
            await rests(rng.uniform(0, pause))
            while not over.is_set():
                messages: list[Any] = [
                    {"role": "system", "content": "s" * FIRST_CHARACTERS},
                    {"role": "user", "content": f"task {number}"},
                ]
                for _ in range(TURNS):
                    if over.is_set():
                        break
                    seconds, message = await called(http, f"{opened['base_url']}/chat/completions", messages)
                    figures.calls.append(seconds)
                    if len(figures.calls) == MEASURED_CALLS:
                        over.set()
                        figures.gateway_cpu, figures.server_cpu = (
                            after - before for after, before in zip(place.cpu(), at_first, strict=True)
                        )
                    messages += [message, {"role": "user", "content": "r" * RESULT_CHARACTERS}]
                    await rests(rng.uniform(0, 2 * pause) if pause else 0.0)
                await ended(http, opened)
                if not over.is_set():
                    opened = await begun(http, place)

        opened = [await begun(http, place) for _ in range(sessions)]
        at_first = place.cpu()
        await asyncio.gather(*(session(number, one) for number, one in enumerate(opened)))
        body = {"token_ids": [7] * (FIRST_CHARACTERS + TURNS // 2 * 400), "sampling_params": {"max_tokens": 1000}}
        for _ in range(MEASURED_CALLS // 2):
            begun_at = time.perf_counter()
            async with http.post(f"{place.engine}/inference/v1/generate", json=body) as response:
                await response.read()
            figures.alone.append(time.perf_counter() - begun_at)
            await asyncio.sleep(1 / CALLS_A_SECOND if pause else 0.0)
    return figures


async def begun(http: ClientSession, place: Place) -> Any:
    body = {"env": ENV, "size": 1, "wait": 30}
    async with http.post(f"{place.url}/v1/open_rollouts", json=body) as response:
        response.raise_for_status()
        return (await response.json())["open_rollouts"][0]


async def ended(http: ClientSession, opened: Any) -> None:
    async with http.post(opened["end_url"], json={"reward": 1.0}) as response:
        response.raise_for_status()


async def called(http: ClientSession, url: str, messages: list[Any]) -> tuple[float, Any]:
    begun_at = time.perf_counter()
    async with http.post(url, json={"model": "policy", "messages": messages}) as response:
        answer = await response.json()
    seconds = time.perf_counter() - begun_at
    if response.status != 200:
        raise RuntimeError(f"the gateway answered {response.status}: {answer}")
    return seconds, answer["choices"][0]["message"]


# -- what is held, and what is packed ----------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Shape:
    """An agent, by the tokens that it reads. What it writes is the engine's: ANSWER_TOKENS each time."""

    name: str
    first: int
    """Tokens of its system message."""
    result: int
    """Tokens of what it reads before each answer."""
    is_compacted: bool = False
    """Half-way it asks a helper, and goes on from a summary alone."""


SHAPES = (
    Shape(name="reads more than it writes", first=FIRST_CHARACTERS, result=RESULT_CHARACTERS),
    Shape(name="writes more than it reads; a helper, a compaction", first=400, result=30, is_compacted=True),
)
Call = Callable[[list[Any]], Awaitable[Any]]
"""Asks for an answer to messages."""


async def played(shape: Shape, call: Call) -> None:
    """A rollout of such an agent."""
    system = {"role": "system", "content": "s" * shape.first}
    messages: list[Any] = [system]
    for turn in range(TURNS):
        if shape.is_compacted and turn == TURNS // 2:
            await call([{"role": "system", "content": "You are a helper."}, {"role": "user", "content": "q" * 30}])
            summary = await call([*messages, {"role": "user", "content": "Summarise the conversation so far."}])
            messages = [system, {"role": "user", "content": f"So far: {summary['content']}"}]
        messages.append({"role": "user", "content": "r" * shape.result})
        messages.append(await call(messages))


def held(place: Place, shape: Shape) -> tuple[float, list[str]]:
    """Packed tokens for each trained one of a rollout that an agent of that shape makes, and a row of the table.

    What stands in the conversations is counted by what the agent is told of each call, what is packed by what a trainer
    gets.
    """
    usages: list[Mapping[str, int]] = []
    """Of each call; those that another one goes on from are a part of it."""
    ends: dict[str, int] = {}
    """Tokens of each conversation, by all that was said in it."""

    async def play() -> tuple[str, str]:
        async with ClientSession() as http:
            opened = await begun(http, place)

            async def call(messages: list[Any]) -> Any:
                url = f"{opened['base_url']}/chat/completions"
                async with http.post(url, json={"model": "policy", "messages": messages}) as response:
                    response.raise_for_status()
                    answer = await response.json()
                message = answer["choices"][0]["message"]
                usages.append(answer["usage"])
                said = json.dumps(messages)[:-1]
                for earlier in [text for text in ends if said.startswith(text)]:
                    del ends[earlier]
                ends[f"{said}, {json.dumps(message)}"] = answer["usage"]["total_tokens"]
                return message

            await played(shape, call)
            return opened["name"], opened["end_url"]

    name, end_url = asyncio.run(play())
    client, key = place.store.connection.client, place.store.keys.open_rollout(name)
    size = int(client.memory_usage(key, samples=0) or 0)
    httpx.post(end_url, json={"reward": 1.0}).raise_for_status()
    group, buffer = name.rpartition("/")[0], Buffer(place.store, settings=RunSettings())
    deadline = time.monotonic() + START_SECONDS
    while not any(view.group_id == group for view in buffer.groups(f"env:{ENV}", limit=10_000)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"group {group} was not pushed within {START_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)
    (member,) = buffer.group(group).members
    packed = sum(len(sequence.tokens) for sequence in member.rollout.sequences)
    trained = member.rollout.loss_tokens
    if trained != sum(usage["completion_tokens"] for usage in usages):
        raise RuntimeError(f"{trained} tokens of {name} are trained, and others were sampled")
    alone = sum(usage["total_tokens"] for usage in usages)
    cells = [f"{size / len(usages):,.0f}", f"{size / sum(ends.values()):.1f}"]
    cells += [f"{tokens / trained:.2f}" for tokens in (packed, sum(ends.values()), alone)]
    return packed / trained, [shape.name, f"{len(usages)}", f"{len(member.rollout.sequences)}", *cells]


# -- processes ---------------------------------------------------------------------------------------------------------
@contextmanager
def a_gateway() -> Iterator[Place]:
    """A server that gives tickets, an engine, and a gateway of both."""
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, home, ignore_errors=True)
        store = open_store(EveryRole, None, run="bench", home=home, server=ServerSettings(appendfsync="everysec"))
        ends.callback(store.close)
        store.open_run()
        store.lease("batcher", ttl_seconds=3_600)
        attempt = store.attempt(uuid="bench", world_size=1, resume_step=0).number
        store.announce(attempt, PolicyVersion(version=0))
        store.set_allowances({ENV: 10**6})
        port = SPAWN.Value("i", 0)
        engine = SPAWN.Process(target=serve_engine, args=(port,), daemon=True)
        engine.start()
        ends.callback(engine.join)
        ends.callback(engine.kill)
        engine_url = f"http://127.0.0.1:{until(lambda: port.value)}"
        command = [sys.executable, "-m", "rlbuffer_cli", "gateway", "--engine", engine_url, "--listen", "127.0.0.1:0"]
        command += ["--run", "bench", "--display", "plain"]
        log = home / "gateway.log"
        with log.open("wb") as out:
            environment = {**os.environ, "RLBUFFER_HOME": str(home)}
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=home)
        ends.callback(process.wait)
        ends.callback(process.send_signal, signal.SIGTERM)
        found = until(lambda: re.search(r"listens at (\S+)", log.read_text()))
        server = psutil.Process(store.connection.client.info("server")["process_id"])
        yield Place(found[1], engine_url, psutil.Process(process.pid), server, store)


def until(what: Callable[[], Any]) -> Any:
    """The first true answer."""
    deadline = time.monotonic() + START_SECONDS
    while not (found := what()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no engine or gateway within {START_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)
    return found


def serve_engine(port: Any) -> None:
    """An engine of vLLM 0.33's kind that answers at once: its tokens are bytes, and it always says the same."""
    said = "a" * (ANSWER_TOKENS - 1)
    answer = [*said.encode(), END]

    def shown(message: Any) -> list[int]:
        calls = json.dumps(message["tool_calls"], sort_keys=True) if message.get("tool_calls") else ""
        return [ROLES[message["role"]], *f"{message.get('content') or ''}{calls}".encode(), END]

    async def render(request: web.Request) -> web.Response:
        body = await request.json()
        tokens = [token for message in body["messages"] for token in shown(message)]
        tokens += [ASSISTANT] if body["add_generation_prompt"] else []
        return web.json_response({"token_ids": tokens, "sampling_params": {}, "parse_context": {}})

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        tokens = answer[-body["sampling_params"]["max_tokens"] :]
        choice = {
            "finish_reason": "stop",
            "token_ids": tokens,
            "weight_versions": [{"version": "0", "start": 0, "end": len(tokens)}],
            "logprobs": {"content": [{"token": "", "logprob": -0.5} for _ in tokens]},
            "message": {"role": "assistant", "content": said},
        }
        return web.json_response({"request_id": "r", "choices": [choice]})

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"version": "0.33.0"})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "bench", "max_model_len": 100_000}]})

    async def work() -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/version", version)
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/chat/completions/render", render)
        app.router.add_post("/inference/v1/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.value = runner.addresses[0][1]
        await asyncio.Event().wait()

    asyncio.run(work())
