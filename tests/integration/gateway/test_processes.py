"""Gateways as processes on one port: killed, and without their server for a while. Agents lose nothing they heard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_stage import Agent, Stage, engine_samples, trained_samples
from own_server import OwnServer, free_port

from rlbuffer.config.settings import GatewaySettings, RunSettings
from rlbuffer.run.supervisor import Supervisor

TURNS = 5


class Processes:
    """Two gateways at one address."""

    def __init__(self, stage: Stage, logs: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._stage, self._logs = stage, logs
        self.running = [self._start(0), self._start(1)]

    def _log(self, which: int) -> Path:
        return self._logs / f"gateway-{which}.log"

    def _start(self, which: int) -> subprocess.Popen[bytes]:
        listen, engine = f"127.0.0.1:{self.port}", self._stage.engine.url
        command = [sys.executable, "-m", "rlbuffer_cli", "gateway", "--engine", engine, "--listen", listen]
        command += ["--redis", self._stage.server, "--run", self._stage.run, "--display", "plain"]
        environment = {name: text for name, text in os.environ.items() if not name.startswith("RLBUFFER_")}
        with self._log(which).open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self._logs)

    def wait(self) -> None:
        """Until both have said that they listen: one that is told to end before has no end of its own."""
        self._stage.wait_for(lambda: all("listens at" in self._log(which).read_text() for which in range(2)))

    def kill(self, which: int) -> None:
        """kill -9, and another one in its place."""
        self.running[which].kill()
        self.running[which].wait()
        self.running[which] = self._start(which)

    def close(self) -> None:
        for process in self.running:
            process.send_signal(signal.SIGTERM)
        for process in self.running:
            assert process.wait(120) == 0


def asked(agent: Agent, content: str) -> str:
    """One turn by an agent that retries as clients do. -> id of the answer."""
    for retry in range(200):
        with suppress(httpx.HTTPError):
            response = agent.post(content, retry=retry, timeout=60)
            if response.status_code == 200:
                answer = response.json()
                agent.messages += [{"role": "user", "content": content}, answer["choices"][0]["message"]]
                return str(answer["id"])
            assert response.status_code == 503, response.text
        time.sleep(0.2)
    raise AssertionError("no answer")


def ended(agent: Agent) -> None:
    for _ in range(200):
        with suppress(httpx.HTTPError):
            if agent.end(reward=1.0).status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError("no end")


@pytest.mark.parametrize("trouble", ["kills", "server"])
def test_agents_hear_each_answer_once_and_all_of_it_is_trained(tmp_path: Path, trouble: str) -> None:
    with OwnServer(tmp_path / "server", options={"appendfsync": "always"}) as server:
        stage = Stage(server.url, "run", batcher={"max_age": 50})
        processes = None
        try:
            stage.engine.delay = 0.2
            processes = Processes(stage, tmp_path)
            processes.wait()
            agents = [Agent(stage, opened) for opened in stage.begin(6)["open_rollouts"]]
            agents = [at_url(agent, processes.url) for agent in agents]
            heard: dict[str, list[str]] = {agent.name: [] for agent in agents}

            def play(agent: Agent) -> None:
                for turn in range(TURNS):
                    heard[agent.name].append(asked(agent, f"say {agent.name} {turn}"))
                ended(agent)

            threads = [threading.Thread(target=play, args=(agent,)) for agent in agents]
            for thread in threads:
                thread.start()
            if trouble == "kills":
                for number in range(4):
                    time.sleep(1.0)
                    processes.kill(number % 2)
                processes.wait()
            else:
                time.sleep(1.0)
                server.kill()
                time.sleep(5.0)
                server.start()
            for thread in threads:
                thread.join()
            rollouts = {rollout.rollout_id: rollout for rollout in stage.rollouts(6)}
            trained = Counter(sample for rollout in rollouts.values() for sample in trained_samples(rollout))
            assert max(trained.values()) == 1
            assert trained.keys() <= Counter(engine_samples(stage.engine)).keys()
            for name, ids in heard.items():
                told = [f"chatcmpl-{call}" for call in rollouts[name].metadata["calls"]]
                assert set(ids) <= set(told)
                assert len(trained_samples(rollouts[name])) == len(told) == len(set(told))
                assert len(rollouts[name].sequences) == 1
            if trouble == "server":  # what was sampled before is not sampled again
                assert sum(trained.values()) == len(stage.engine.samples)
            assert stage.buffer.verify().ok
        finally:
            if processes is not None:
                processes.close()
            stage.close()


def at_url(agent: Agent, url: str) -> Agent:
    base = agent.opened["base_url"].partition("/r/")[0]
    moved: dict[str, Any] = {name: value.replace(base, url) for name, value in agent.opened.items()}
    return Agent(agent.stage, moved)


def test_a_run_starts_the_gateways_of_its_settings_and_ends_them_with_itself(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLBUFFER_GATEWAY_TOKEN", raising=False)
    monkeypatch.delenv("RLBUFFER_GATEWAY_TOKEN_FILE", raising=False)
    stage, stack = Stage(redis_url, run_name), ExitStack()
    try:
        gateway = GatewaySettings(engines=(stage.engine.url,), listen=f"127.0.0.1:{free_port()}", replicas=2)
        settings = RunSettings(run=run_name, redis_url=redis_url, gateway=gateway, home=tmp_path)
        supervisor = Supervisor(settings, say=lambda *_: None)
        stack.callback(supervisor.log.close)
        supervisor.log.open()
        children = [child for child in supervisor._children() if child.name.startswith("gateway")]
        names = [child.name for child in children]
        assert names == ["gateway-0", "gateway-1"]
        process = children[0].start()
        assert isinstance(process, subprocess.Popen)
        assert process.stdin is not None

        def answers() -> bool:
            with suppress(httpx.HTTPError):
                return httpx.get(f"http://{gateway.listen}/health", timeout=5).status_code == 200
            return False

        def models() -> Any:
            return stage.buffer.store.heartbeats("gateway").get(names[0], {}).get("models")

        stage.wait_for(answers)
        assert stage.wait_for(models) == ["tiny"]
        file = settings.run_dir / "gateway.token"
        assert file.stat().st_mode & 0o077 == 0
        for token, status in (("", 401), ("other", 401), (file.read_text().strip(), 200)):
            right = {"Authorization": f"Bearer {token}"} if token else {}
            url, body = f"http://{gateway.listen}/v1/open_rollouts", {"env": "agents", "wait": 30}
            assert httpx.post(url, json=body, headers=right, timeout=60).status_code == status
        process.stdin.close()  # as when its supervisor is gone
        process.wait(120)
    finally:
        stack.close()
        stage.close()
