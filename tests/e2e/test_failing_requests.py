"""A run goes on to its end whatever single requests to its sampler meet: each costs its own group, and is counted."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest
from homes import Home, model_section

from rlbuffer.worker.samplers.endpoint import GENERATE

OF_THE_REQUEST = ("400", "413", "422", "500", "null", "lengths", "cut", "nothing")
OF_THE_SERVER = ("429", "503", "abort")
"""They pass: the second time the prompt is answered."""
KINDS = OF_THE_REQUEST + OF_THE_SERVER
LEAST_PAUSE = 0.09
ENV = """
import numpy as np
from rlbuffer.worker.envs import Prompt, Score


class Env:
    name, vocab_size, eos_token_ids, max_new_tokens = "digits", 13, (12,), 4

    def prompt(self, number):
        tokens = [1, number // 100, number // 10 % 10, number % 10]
        return Prompt(prompt_id=str(number), tokens=np.array(tokens, np.int32))

    def score(self, prompt, tokens, *, finish_reason):
        return Score(reward=float(tokens[0] % 2))

    def render(self, tokens):
        return " ".join(map(str, tokens))

"""
CONFIG = """
run = "requests"
[server]
appendfsync = "no"
[batcher]
row_tokens = 512
step_groups = 5
max_age = 8
[trainer]
steps = 25
world_size = 1
device = "cpu"
[worker.digits]
env = "digits_env:Env"
self_check = "never"
group_size = 2
groups_in_flight = 8
"""


class Engine(ThreadingHTTPServer):
    """A vLLM server that fails for the numbers that end in 3, one kind after the other."""

    daemon_threads = True

    def __init__(self) -> None:
        self.loads = 0
        self.version = "0"
        self.asked: dict[int, list[float]] = defaultdict(list)
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "m", "max_model_len": 64}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/update_weight_version":
            self.server.version = body["new_version"]
        if self.path == "/collective_rpc":
            self.server.loads += 1
        if self.path != GENERATE:
            return self.answer(200, {"results": [None]})
        prompt, n = body["token_ids"], body["sampling_params"]["n"]
        kind = ""
        if len(prompt) > 1:
            number = prompt[1] * 100 + prompt[2] * 10 + prompt[3]
            self.server.asked[number].append(time.monotonic())
            if number % 10 == 3:
                kind = KINDS[number // 10 % len(KINDS)]
        if kind in OF_THE_SERVER and len(self.server.asked[number]) > 1:
            kind = ""
        if kind.isdecimal():
            return self.answer(int(kind), {"error": "so it is"}, {"Retry-After": "1"} if kind == "429" else {})
        logprobs: list[Any] = [{"logprob": None if kind == "null" else -1.0}, {"logprob": -0.5}]
        choice = {
            "token_ids": [] if kind == "abort" else [3, 12],
            "logprobs": {"content": logprobs[: {"lengths": 1, "abort": 0}.get(kind, 2)]},
            "finish_reason": "abort" if kind == "abort" else "stop",
            "weight_versions": [{"version": self.server.version, "start": 0, "end": 2}],
        }
        choices = [choice | {"index": i} for i in range(n)]
        if not kind:
            for i, one in enumerate(choices):
                one["token_ids"] = [i, 12]
        return self.answer(200, {"choices": choices}, cut={"cut": 20, "nothing": 0}.get(kind))

    def answer(self, code: int, value: Any, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        data = json.dumps(value).encode()
        if cut != 0:
            self.send_response(code)
            for name, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(data[:cut])
        self.close_connection = self.close_connection or cut is not None


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def counted(home: Home) -> Counter[str]:
    """Kinds of the failures that the worker's last heartbeat counts."""
    with home.connect("requests") as buffer:
        (beat,) = buffer.store.heartbeats("worker").values()
    assert beat["env"] == "digits"
    return Counter(beat["failures"])


def test_requests_that_fail_in_any_way_cost_their_own_groups(home: Home, engine: Engine) -> None:
    url = f"http://127.0.0.1:{engine.server_address[1]}"
    (home.path / "digits_env.py").write_text(ENV)
    config = home.path / "requests.toml"
    sampler = f'sampler = "openai"\nsampler_options = {{ servers = ["{url}"] }}\n'
    config.write_text(CONFIG + sampler + model_section(vocab_size=13, eos_token_id=12))
    ended = home.call("run", config, "--display", "plain")
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    drawn = {KINDS[number // 10 % len(KINDS)] for number in engine.asked if number % 10 == 3}
    assert drawn == set(KINDS), "each kind was met"
    failures = counted(home)
    assert failures["RequestFailed"] >= len(OF_THE_REQUEST)
    assert failures["SamplerBusy"] == 2
    assert failures["Aborted"] == 1
    assert engine.loads <= 27, "no server was taken down for a request of its own"
    for number, times in engine.asked.items():
        pauses = [round(b - a, 3) for a, b in pairwise(times)]
        assert all(pause >= LEAST_PAUSE for pause in pauses), f"{number} was repeated without a pause: {pauses}"
