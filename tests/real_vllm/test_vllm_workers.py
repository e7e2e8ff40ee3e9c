"""Workers with vLLM push groups while versions change: every token is from the version that its span names."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from samplers_conformance import CONTEXT, TOLERANCE, expected_logprobs, policies
from vllm_server import ENGINE, VllmServer, with_tokenizer

from rlbuffer.client import connect
from rlbuffer.settings import WorkerSettings
from rlbuffer.wire import decode_rollout
from rlbuffer.worker.envs.vcopy import VCopy
from rlbuffer.worker.loop import run_worker
from rlbuffer.worker.samplers import Sampling

LONG = 200
"""New tokens of a completion: long enough to live through several versions."""
VERSIONS = 4


class Endless(VCopy):
    """Nothing ends a completion but its limit: every one lives as long as it can."""

    def __init__(self) -> None:
        super().__init__()
        self.eos_token_ids = ()  # type: ignore[assignment]


@pytest.fixture(scope="module")
def served(runner: asyncio.Runner, folder: Path) -> Iterator[VllmServer]:
    _, published = policies(folder / "served-weights", 1)
    server = VllmServer(with_tokenizer(published[0].location, folder / "served"), folder / "log", context=CONTEXT)
    stack = AsyncExitStack()
    runner.run(stack.enter_async_context(server.ready()))
    yield server
    runner.run(stack.aclose())


@pytest.mark.parametrize("sampler", ["vllm", "openai"])
def test_every_token_is_from_the_version_that_its_span_names(
    sampler: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if sampler == "vllm":
        options: dict[str, Any] = {**ENGINE, "max_model_len": CONTEXT}
    else:
        options = {"servers": [request.getfixturevalue("served").url]}
    settings = WorkerSettings(
        env="vcopy",
        env_options={},
        sampler=sampler,
        sampler_options=options,
        group_size=4,
        groups_per_batch=6,
        max_new_tokens=LONG,
        temperature=0.8,
    )
    models, published = policies(tmp_path, VERSIONS)
    stop, events, raised = threading.Event(), [], []
    with connect("memory://") as buffer:
        store: Any = buffer.store
        store.open_run()
        token = store.lease("batcher", ttl_seconds=600).token
        attempt = store.attempt(uuid=uuid.uuid4().hex, world_size=1, resume_step=0).number
        store.set_allowances(token, {"vcopy": 10_000})
        store.announce(attempt, published[0])

        def work() -> None:
            try:
                run_worker(buffer, "w-0", settings, stop=stop, on_event=events.append, env=Endless())
            except BaseException as error:
                raised.append(error)

        def told(kind: str) -> list[dict[str, Any]]:
            return [event for event in list(events) if event["event"] == kind]

        thread = threading.Thread(target=work)
        thread.start()
        try:
            until(lambda: raised or told("group"), 400)
            for version in range(1, VERSIONS):
                store.announce(attempt, published[version])
                until(lambda v=version: raised or any(e["version"] == v for e in told("version")), 60)
                seen = len(told("group"))
                until(lambda n=seen: raised or len(told("group")) >= n + 3, 60)
        finally:
            stop.set()
            thread.join(120)
        assert not raised, raised
        assert told("checked")[0]["difference"] < TOLERANCE
        assert [e["error"] for e in told("trouble")] == []

        spanning, versions, tokens, worst = 0, set(), 0, 0.0
        for entry in store.read_pool():
            payloads = store.client.hgetall(entry.payload_key)
            for index, info in enumerate(entry.info.rollouts):
                rollout = decode_rollout(payloads[str(index).encode()], expected=info)
                first = int(rollout.prompt_tokens)
                sampling = Sampling(max_new_tokens=LONG, temperature=0.8)
                spanning += len(rollout.version_spans) > 1
                for version, start, end in rollout.version_spans:
                    expected = expected_logprobs(
                        models[version], rollout.tokens[:first], rollout.tokens[first:], sampling
                    )
                    worst = max(
                        worst, float(abs(rollout.logprobs[start:end] - expected[start - first : end - first]).max())
                    )
                    versions.add(version)
                    tokens += end - start
        print(
            f"{sampler}: {tokens} tokens of versions {sorted(versions)}, {spanning} rollouts span several; {worst:.1e}"
        )
        assert versions == set(range(VERSIONS))
        assert spanning > 0
        assert worst < TOLERANCE


def until(fact: Any, seconds: float) -> None:
    """Waits until `fact` holds."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.02)
