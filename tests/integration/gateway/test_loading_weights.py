"""Gateways that load announced versions into the engines: one of them does it, whoever dies, and agents go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch
from fake_engine import FakeEngine
from gateway_stage import Agent, Stage
from own_server import free_port

from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.gateway import GatewayStore
from rlbuffer.weights.files import publish


class Loading:
    """A run with two gateway processes that load weights, before an engine that has none of this run."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self.stage, self.folder = stage, folder
        self.url = f"http://127.0.0.1:{free_port()}"
        self.processes = [self._start(), self._start()]

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rlbuffer_cli", "gateway", "--engine", self.stage.engine.url]
        command += ["--listen", self.url.partition("//")[2], "--redis", self.stage.server, "--run", self.stage.run]
        environment = {name: text for name, text in os.environ.items() if not name.startswith("RLBUFFER_")}
        environment |= {"RLBUFFER_HOME": str(self.folder / "home")}
        with (self.folder / "gateways.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.folder)

    def publish(self, number: int) -> PolicyVersion:
        """A version that the trainer has made."""
        state = {"number": torch.full((2,), float(number))}
        made = publish(self.folder / "weights", number, state=state, config={"vocab_size": 13}, keep=9)
        self.stage.buffer.policy.announce(number, location=made.location, size=made.size, checksum=made.checksum)
        return made

    def agent(self) -> Agent:
        """An agent of these gateways."""
        opened = self.stage.begin()["open_rollouts"][0]
        base = self.stage.first.url
        return Agent(self.stage, {name: text.replace(base, self.url) for name, text in opened.items()})

    def close(self) -> None:
        self.stage.engine.load_seconds = 0.0
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            assert process.wait(120) == 0, (self.folder / "gateways.log").read_text()


def asked(agent: Agent, content: str) -> None:
    """One turn by an agent that retries as clients do: the process that it has asked may be the one that dies."""
    for retry in range(200):
        with suppress(httpx.HTTPError):
            response = agent.post(content, retry=retry)
            if response.status_code == 200:
                agent.messages += [{"role": "user", "content": content}, response.json()["choices"][0]["message"]]
                return
        time.sleep(0.1)


@pytest.fixture
def loading(redis_url: str, run_name: str, tmp_path: Path) -> Iterator[Loading]:
    stage = Stage(redis_url, run_name, engine=FakeEngine(version="default"))
    made = Loading(stage, tmp_path)
    yield made
    made.close()
    stage.close()


def test_one_of_the_gateways_loads_each_version_and_one_that_dies_in_a_load_is_followed(loading: Loading) -> None:
    stage, engine = loading.stage, loading.stage.engine
    versions = [loading.publish(1)]
    stage.wait_for(lambda: engine.version == "1" and not engine.is_paused)
    assert engine.loads == [versions[0].location]
    agent = loading.agent()
    agent.ask("say one")
    # The next one comes while a call is under way; whoever loads it is killed.
    engine.load_seconds = 3600.0
    versions.append(loading.publish(2))
    stage.wait_for(lambda: engine.is_paused and engine.version.startswith("{"))
    asking = threading.Thread(target=asked, args=(agent, "say two"))
    asking.start()
    loader = next(process for process in loading.processes if process.pid == json.loads(engine.version)["pid"])
    engine.load_seconds = 0.0
    loader.kill()
    loader.wait()
    loading.processes.remove(loader)
    stage.wait_for(lambda: engine.version == "2" and not engine.is_paused)
    asking.join()
    assert engine.loads[-1] == versions[-1].location
    # An engine that is started anew has the weights of its start.
    before = len(engine.loads)
    engine.version = "default"
    stage.wait_for(lambda: engine.version == "2" and len(engine.loads) > before)
    assert not engine.is_dead
    agent.end()
    (rollout,) = stage.rollouts()
    assert [span.policy_version for span in rollout.version_spans] == [1, 2]
    assert stage.buffer.verify().ok


def test_the_lease_is_one_gateway_s_until_it_gives_it_back_or_is_silent(redis_url: str, run_name: str) -> None:
    stage = Stage(redis_url, run_name)
    try:
        store = stage.buffer.store.role(GatewayStore)
        assert store.claim_loading("a", ttl_seconds=60.0)
        assert store.claim_loading("a", ttl_seconds=60.0)
        assert not store.claim_loading("b", ttl_seconds=60.0)
        store.release_loading("b")
        assert not store.claim_loading("b", ttl_seconds=60.0)
        store.release_loading("a")
        assert store.claim_loading("b", ttl_seconds=0.05)
        stage.wait_for(lambda: store.claim_loading("a", ttl_seconds=60.0))
        assert stage.buffer.verify().ok
    finally:
        stage.close()
