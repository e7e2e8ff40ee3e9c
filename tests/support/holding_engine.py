"""A fake of vLLM's server that holds its state as the real one does: paused, labelled, loaded, dead.

It is a process or thread of its own, so it outlives a worker. As in vLLM's engine (read in 0.32) control calls are made
one after the other, a paused engine answers no request, a load without a pause kills it, and what it writes beside a
token is the label that it was given. Its tokens are the number of the weights that it really has.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

REQUEST_SECONDS = 0.02
PATIENCE_SECONDS = 120.0
"""Longest that a request waits for a paused engine."""


class Server(ThreadingHTTPServer):
    """Of clients that may be killed."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class HoldingEngine:
    """The server; used as a context.

    Args:
        control_seconds, load_seconds: time that a control call and a load take.
    """

    def __init__(self, *, control_seconds: float = 0.0, load_seconds: float = 0.0) -> None:
        self.control_seconds, self.load_seconds = control_seconds, load_seconds
        self.request_seconds = REQUEST_SECONDS
        self._closed = threading.Event()
        self.runs = threading.Event()
        self.runs.set()
        self.label, self.weights, self.is_dead = "default", 0, False
        self.asked: list[str] = []
        """Paths, in the order in which they came."""
        self.under_way: Counter[str] = Counter()
        """Paths that are being answered."""
        self.refuses: Counter[str] = Counter()
        """Path -> times that it is answered with 500 from now on, and nothing done."""
        self.finish_reason: str | None = "length"
        """What it says of each completion; "short": null, and it has two tokens."""
        self.finish_reasons: dict[tuple[int, ...], str | None] = {}
        """Prompt -> what it says of completions of that one."""
        self._core = threading.Lock()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}"))

            def _answer(self, body: dict[str, Any]) -> None:
                path = self.path.partition("?")[0]
                engine.asked.append(path)
                engine.under_way[path] += 1
                try:
                    status, answer = engine.answer(self.command, self.path, body)
                finally:
                    engine.under_way[path] -= 1
                data = json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    self.close_connection = True  # whoever asked is gone

            def log_message(self, *_: object) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> HoldingEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self.runs.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # -- answers -------------------------------------------------------------------------------------------------------
    def answer(self, method: str, target: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Does what is asked. -> status and content."""
        path = target.partition("?")[0]
        if self.refuses[path] > 0:
            self.refuses[path] -= 1
            return 500, {"error": "refused"}
        if path == "/v1/models":
            return 200, {"data": [{"id": "m", "max_model_len": 4096}]}
        if path == "/inference/v1/generate":
            parameters, prompt = body["sampling_params"], tuple(body["token_ids"])
            reason = self.finish_reasons.get(prompt, self.finish_reason)
            return self._generate(int(parameters["n"]), int(parameters["max_tokens"]), reason)
        with self._core:
            return self._control(path, body)

    def _control(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/is_paused":
            return 200, {"is_paused": not self.runs.is_set()}
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        time.sleep(self.control_seconds)
        if path == "/pause":
            self.runs.clear()
        elif path == "/resume":
            self.runs.set()
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/collective_rpc":
            self._load(Path(body["args"][0]))
            return 200, {"results": [""]}
        elif path != "/reset_prefix_cache":
            return 404, {}
        return 200, {}

    def _load(self, directory: Path) -> None:
        if self.runs.is_set():
            self.is_dead = True
        self.weights = -1  # half of it
        end = time.monotonic() + self.load_seconds
        while time.monotonic() < end and not self._closed.wait(0.005):
            self.is_dead |= self.runs.is_set()
        self.weights = int(load_file(directory / "model.safetensors")["number"][0])

    def _generate(self, n: int, most: int, reason: str | None) -> tuple[int, dict[str, Any]]:
        if not self.runs.wait(PATIENCE_SECONDS) or self.is_dead:
            return 500, {"error": "engine dead"}
        if most > 1:  # not the one token by which a worker tries it
            self._closed.wait(self.request_seconds)
        size = 2 if reason == "short" else most
        choice = {
            "token_ids": [max(0, self.weights) % 10] * size,
            "logprobs": {"token_logprobs": [-1.0] * size},
            "finish_reason": None if reason == "short" else reason,
            "weight_versions": [{"version": self.label, "start": 0, "end": size}],
        }
        return 200, {"choices": [choice | {"index": i} for i in range(n)]}
