"""Gateways that load weights into their engines, where nobody else does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapter_versions import adapters
from fake_engine import FakeEngine
from weights_places import place

from rlbuffer.client.buffer import connect
from rlbuffer.client.run_state import read_run_state
from rlbuffer.config.settings import ModelSettings, RunSettings
from rlbuffer.gateway.heartbeat import GatewayHeartbeat
from rlbuffer.gateway.loading import Loader, loads_weights
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.waiting import Trouble
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.weights.cache import VersionCache
from rlbuffer.weights.files import publish
from rlbuffer.weights.model import TINY_QWEN3, build_model, config_of


async def until(fact: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.fixture
def engines() -> Any:
    made = [FakeEngine(version=name).start() for name in ("default", "0")]
    yield made
    for engine in made:
        engine.stop()


def test_each_new_version_is_loaded_into_each_engine_and_again_into_one_that_was_restarted(
    redis_url: str, run_name: str, tmp_path: Path, engines: list[FakeEngine]
) -> None:
    model = build_model(ModelSettings(config=dict(TINY_QWEN3)), seed=0)
    first, second = (
        publish(tmp_path / "weights", version, state=model.state_dict(), config=config_of(model), keep=2)
        for version in (0, 1)
    )

    async def play() -> None:
        with connect(redis_url, run=run_name) as buffer, buffer.reader(timeout_seconds=60) as reader:
            reader.start()
            store = buffer.store.role(GatewayStore)
            cache = VersionCache.of(RunSettings(run=run_name, home=tmp_path))
            urls = [engine.url for engine in engines]
            loaders = [Loader(store, urls, cache, timeout_seconds=20.0) for _ in range(2)]
            try:
                reader.announce(first)
                for loader in loaders:
                    loader.start()
                # The second engine names version 0 already, which may be another run's.
                await until(lambda: all(engine.loads and engine.version == "0" for engine in engines))
                with place(tmp_path / "weights") as host:  # as one of another host
                    reader.announce(replace(second, location=f"{host.url}/{Path(second.location).name}"))
                    await until(lambda: all(engine.version == "1" and not engine.is_paused for engine in engines))
                loaded = {Path(folder) for engine in engines for folder in engine.loads}
                assert {path.name for path in loaded} == {Path(v.location).name for v in (first, second)}
                assert Path(second.location) not in loaded
                assert not any(engine.is_dead for engine in engines)
                loads = len(engines[0].loads)
                engines[0].version = "default"
                await until(lambda: engines[0].version == "1")
                assert len(engines[0].loads) > loads
            finally:
                for loader in loaders:
                    await loader.close()

    asyncio.run(play())


def test_weights_are_somebody_elses_where_a_worker_loads_them_or_they_have_no_files(
    redis_url: str, run_name: str, tmp_path: Path, engines: list[FakeEngine]
) -> None:
    def settings(**workers: Any) -> RunSettings:
        return RunSettings(worker=workers)

    assert loads_weights(settings())
    assert loads_weights(settings(a={"env": "command", "env_options": {"command": "x"}}))
    assert not loads_weights(settings(a={"env": "vcopy", "sampler": "openai"}))

    async def play() -> None:
        with connect(redis_url, run=run_name) as buffer, buffer.reader(timeout_seconds=60) as reader:
            reader.start()
            buffer.policy.announce(3, location="", size=0, checksum="")
            cache = VersionCache.of(RunSettings(run=run_name, home=tmp_path))
            loader = Loader(buffer.store.role(GatewayStore), [engines[0].url], cache, timeout_seconds=20.0)
            await loader._load_new()
            await loader.close()
            assert engines[0].loads == []

    asyncio.run(play())


@pytest.mark.parametrize("wrong", ["nowhere", "LoRA adapter"])
def test_weights_that_cannot_be_served_are_something_to_cure_at_the_gateway(
    redis_url: str, run_name: str, tmp_path: Path, engines: list[FakeEngine], wrong: str
) -> None:
    if wrong == "nowhere":
        made = PolicyVersion(version=0, location=str(tmp_path / "nowhere"), size=1, checksum="0" * 64)
    else:
        _, (made,) = adapters(tmp_path / "weights", 1)

    async def play() -> None:
        with connect(redis_url, run=run_name) as buffer, buffer.reader(timeout_seconds=60) as reader:
            reader.start()
            reader.announce(made)
            store = buffer.store.role(GatewayStore)
            cache = VersionCache.of(RunSettings(run=run_name, home=tmp_path))
            heartbeat = GatewayHeartbeat(store, "gateway")
            heartbeat.loader = Loader(store, [engines[0].url], cache, timeout_seconds=20.0)
            heartbeat.loader.start()
            heartbeat.start()
            try:
                await until(lambda: store.heartbeats("gateway").get("gateway", {}).get("problems"))
                (problem,) = read_run_state(store).problems
                assert (problem.kind, problem.worker) == (Trouble.GATEWAY_STUCK, "gateway")
                assert wrong in str(problem)
                assert engines[0].loads == []
            finally:
                await asyncio.to_thread(heartbeat.close)
                await heartbeat.loader.close()

    asyncio.run(play())
