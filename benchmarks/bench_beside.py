"""The buffer beside others: the same groups, from a sampler's arrays to arrays again, in one interleaved run.

Lists pickled into a stream, and JSON over HTTP, run everywhere. Reverb and TransferQueue are no dependencies: each runs
in an environment of its own, which ``--beside VENV`` names (``pip install dm-reverb "numpy<2" tensorflow-cpu==2.14.0``;
``pip install TransferQueue``). Each round measures everybody once, so a busy moment of the machine hits all.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import redis
from every_role import EveryRole

from benchmarks.apart import Apart
from benchmarks.moves import (
    GROUP_SIZE,
    Arrays,
    Clock,
    arrays,
    lengths_of,
    pull_step,
    pulls_of,
    push_arrays,
    sizes,
)
from benchmarks.report import Report
from rlbuffer.client.buffer import Buffer
from rlbuffer.client.writer import Writer
from rlbuffer.config.batcher import BatcherConfig
from rlbuffer.config.settings import RunSettings, ServerSettings
from rlbuffer.daemon import Daemon
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.store.server.connection import SOCKET_READ_BYTES
from rlbuffer.store.session import open_store

ROUNDS = 5
"""Timed rounds, after one that grows heaps and connections."""
RUN, RANKS = "beside", 8
PEER_SECONDS = 300.0
"""Time that a peer has to start, and for each round."""
PEERS = ("reverb", "transfer_queue")
OURS, UNLOGGED = "rlbuffer", "rlbuffer, its server writes no log file"
STREAM, HTTP = "lists pickled into a Redis stream", "JSON over HTTP"
LACKS = {
    OURS: "",
    UNLOGGED: "outlive its server's process",
    STREAM: "pack, balance, acknowledge, verify",
    HTTP: "pack, balance, acknowledge, verify, outlive its process",
    "reverb": "pack, balance over ranks, acknowledge, verify, outlive its process",
    "transfer_queue": "pack, verify, outlive its process",
}
"""What each does not do of push, batch and pull."""
TARGETS = {STREAM: 4.0, HTTP: 20.0, "reverb": 1.0}
"""Times their tokens per CPU second that rlbuffer makes, at least."""
Legs = dict[str, float]
"""CPU seconds of client and server: ``push``, ``batch`` where there is one, ``pull``."""


def run(report: Report) -> None:
    """Measures rlbuffer, the two stand-ins, and the peers that there are environments for."""
    lengths = sizes()["26 KB"]
    rng = np.random.default_rng(0)
    sampled = [arrays(rng, int(n)) for n in lengths]
    tokens = int(lengths.sum())
    report.begin(
        "beside others",
        measures=f"{len(sampled)} rollouts of workload a, {tokens:,} tokens in groups of {GROUP_SIZE}, from a "
        "sampler's arrays to arrays again; million tokens per CPU second of client and server; medians of "
        f"{ROUNDS} rounds in which everybody moves the same groups once; rlbuffer with push_many, its leader, and a "
        f"pull for {RANKS} ranks",
        not_measured="wall time, networks, several clients at once; what each does not do is beside it",
    )
    home = Path(tempfile.mkdtemp(prefix="rlb-bench-"))
    contenders: dict[str, Callable[[], Legs]] = {}
    closing: list[Callable[[], object]] = []
    try:
        names = _open(report, sampled, home, contenders, closing)
        rounds = [{key: contender() for key, contender in contenders.items()} for _ in range(1 + ROUNDS)][1:]
    finally:
        for close in reversed(closing):
            close()
        shutil.rmtree(home, ignore_errors=True)
    show(report, {key: [one[key] for one in rounds] for key in contenders}, names, tokens / 1e6)


def show(report: Report, legs: dict[str, list[Legs]], names: dict[str, str], megatokens: float) -> None:
    """Prints the table, and rlbuffer's rate against the others', round by round."""
    rows = []
    for key, rounds in legs.items():
        rates = [_rate(megatokens, [one[leg] for one in rounds if leg in one]) for leg in ("push", "batch", "pull")]
        rows.append([names[key], *rates, _rate(megatokens, [sum(one.values()) for one in rounds]), LACKS[key]])
    report.table(["Mtok per CPU second", "push", "batch", "pull", "all", "what it does not do"], rows)
    report.line()
    for key, least in TARGETS.items():
        if key in legs:
            times = statistics.median(
                sum(theirs.values()) / sum(ours.values()) for theirs, ours in zip(legs[key], legs[OURS], strict=True)
            )
            target = f"beside {names[key]}: {times:.2f} times, target {least:g}"
            report.line(f"{target}: {report.target(target, times >= least)}")


def _rate(megatokens: float, seconds: Sequence[float]) -> str:
    return f"{megatokens / statistics.median(seconds):.2f}" if seconds else ""


def _open(
    report: Report,
    sampled: Sequence[Arrays],
    home: Path,
    contenders: dict[str, Callable[[], Legs]],
    closing: list[Callable[[], object]],
) -> dict[str, str]:
    """Adds everybody that can run here, and how to end them. -> their names."""
    names = {name: name for name in (OURS, UNLOGGED, STREAM, HTTP)}
    server = ServerSettings(appendfsync="everysec")
    keeper = open_store(EveryRole, None, run="keeper", home=home, server=server)
    closing.append(keeper.close)
    ours = contenders[OURS] = Ours(home, server, sampled)
    closing.append(ours.close)
    unlogged = contenders[UNLOGGED] = Ours(home / "unlogged", server, sampled, is_logged=False)
    closing.append(unlogged.close)
    lists = [_lists(sampled[i : i + GROUP_SIZE]) for i in range(0, len(sampled), GROUP_SIZE)]
    path = str(keeper.connection.client.connection_pool.connection_kwargs["path"])
    clock, apart = Clock(keeper), Apart(Stream, path, lists)
    closing.append(apart.close)
    contenders[STREAM] = lambda: {leg: clock.apart(apart, leg).both for leg in ("push", "pull")}
    over_http = OverHttp(lists)
    contenders[HTTP] = over_http
    closing.append(over_http.close)
    file = home / "groups.npz"
    columns = zip(("tokens", "mask", "logprobs"), zip(*(rollout[:3] for rollout in sampled), strict=True), strict=True)
    lengths = np.array([len(rollout[0]) for rollout in sampled])
    np.savez(file, lengths=lengths, **{name: np.concatenate(values) for name, values in columns})  # type: ignore[arg-type]
    for key in PEERS:
        missing = ["--beside names no environment"]
        for environment in report.environments:
            peer = Peer(environment, file, key)
            closing.append(peer.close)
            missing.append(f"{environment.name}: {peer.missing}")
            if peer.name:
                contenders[key], names[key] = peer, peer.name
                break
        else:
            report.line(f"not beside it: {key} ({'; '.join(missing[1:] or missing)})")
    return names


class Ours:
    """rlbuffer: a round is a step of one run. Producer, leader and ranks are a process each, for all rounds."""

    def __init__(
        self, home: Path, server: ServerSettings, sampled: Sequence[Arrays], *, is_logged: bool = True
    ) -> None:
        self._store = store = open_store(EveryRole, None, run=RUN, home=home, server=server)
        if not is_logged:
            store.connection.client.config_set("appendonly", "no")
        self._clock, epoch = Clock(store), store.open_run().epoch
        self._attempt = store.attempt(uuid="bench", world_size=RANKS, resume_step=0).number
        self._producer = Apart(Producing, home, server, sampled, epoch)
        self._leader = Apart(Leading, home, server, len(sampled) // GROUP_SIZE, lengths_of(sampled))
        self._ranks = Apart(Pulling, home, server)
        self._epoch, self._step, self._digest = epoch, 0, ""

    def __call__(self) -> Legs:
        store, clock, leader = self._store, self._clock, self._leader
        store.announce(self._attempt, PolicyVersion(version=self._step))
        store.report(self._attempt, epoch=self._epoch, trained=self._step, digest=self._digest, oldest_kept=self._step)
        self._step = step = self._step + 1
        before = leader.cpu()
        push = clock.apart(self._producer, "push", step)
        batch = clock(lambda: leader("wait_for", step))
        spent = leader.cpu() - before  # it takes groups in while others are pushed
        pull = clock.apart(self._ranks, "pull", step)
        header = store.wait_step(step, block_seconds=0.0)
        self._digest = "" if header is None else header.digest
        return {"push": push.both, "batch": spent + batch.server, "pull": pull.both}

    def close(self) -> None:
        for process in (self._ranks, self._leader, self._producer):
            process.close()
        self._store.close()


class Producing:
    """The worker's side of rlbuffer."""

    def __init__(self, home: Path, server: ServerSettings, sampled: Sequence[Arrays], epoch: int) -> None:
        self._sampled = sampled
        self._writer = Writer(open_store(EveryRole, None, run=RUN, home=home, server=server), "bench", epoch=epoch)

    def push(self, step: int) -> None:
        """The groups of a step, from arrays."""
        push_arrays(self._writer, self._sampled, "arrays", step=step)


class Leading:
    """The real daemon, in a thread."""

    def __init__(self, home: Path, server: ServerSettings, groups: int, longest: int) -> None:
        self._store = open_store(EveryRole, None, run=RUN, home=home, server=server)
        config = BatcherConfig(
            row_tokens=max(16_384, longest), step_groups=groups, lookahead=1, budgets={"arrays": 1.0}
        )
        daemon = Daemon(Buffer(self._store, settings=RunSettings()), config)
        threading.Thread(target=daemon.run, args=(threading.Event(),), daemon=True).start()

    def wait_for(self, step: int) -> None:
        """Waits until the step is committed."""
        if self._store.wait_step(step, block_seconds=PEER_SECONDS) is None:
            raise RuntimeError(f"no step {step} in {PEER_SECONDS:g} s")


class Pulling:
    """Pulls for all ranks, one after the other."""

    def __init__(self, home: Path, server: ServerSettings) -> None:
        self._store = open_store(EveryRole, None, run=RUN, home=home, server=server)
        self._pulls = pulls_of(self._store, RANKS)

    def pull(self, step: int) -> list[object]:
        """The step of every rank."""
        return [pull_step(pull, self._store, step) for pull in self._pulls]


def _lists(rollouts: Sequence[Arrays]) -> list[dict[str, Any]]:
    """A group as trainers that keep Python lists have it."""
    return [
        {"input_ids": tokens.tolist(), "mask": mask.tolist(), "logprobs": logprobs.tolist(), "reward": 1.0}
        for tokens, mask, logprobs, _ in rollouts
    ]


class Stream:
    """Lists pickled into a stream by redis-py."""

    def __init__(self, path: str, lists: list[Any]) -> None:
        self._client = redis.Redis(unix_socket_path=path, protocol=3, socket_read_size=SOCKET_READ_BYTES)
        self._lists = lists

    def push(self) -> None:
        """An entry for each group."""
        for group in self._lists:
            self._client.xadd("pickled", {"group": pickle.dumps(group)})

    def pull(self) -> list[Any]:
        """Every group of the stream, which is gone then."""
        pages: Any = self._client.xread({"pickled": "0"})
        streams = pages.values() if isinstance(pages, dict) else (page for _, page in pages)
        entries = [e for stream in streams for page in stream for e in (page if isinstance(page, list) else [page])]
        groups = [pickle.loads(fields[b"group"]) for _, fields in entries]
        if len(groups) != len(self._lists):
            raise RuntimeError("the stream lost a group")
        self._client.delete("pickled")
        return groups


class OverHttp:
    """A server that takes groups as JSON and gives all that it has, and its client, in processes of their own."""

    def __init__(self, lists: list[Any]) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=serve_json, args=(theirs,), daemon=True)
        self._process.start()
        self._url = f"http://127.0.0.1:{ours.recv()}"
        self._client = Apart(JsonClient, self._url, lists)

    def __call__(self) -> Legs:
        legs = {}
        for leg in ("push", "pull"):
            before = asked(self._url, "/cpu")
            _, client = self._client(leg)
            legs[leg] = client + asked(self._url, "/cpu") - before
        return legs

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.join()


class JsonClient:
    """Sends and takes lists as JSON."""

    def __init__(self, url: str, lists: list[Any]) -> None:
        self._url, self._lists = url, lists

    def push(self) -> None:
        """A request for each group."""
        for group in self._lists:
            asked(self._url, "/groups", json.dumps(group).encode())

    def pull(self) -> list[Any]:
        """Every group that the server has, which it forgets."""
        groups: list[Any] = asked(self._url, "/groups")
        if len(groups) != len(self._lists):
            raise RuntimeError("the HTTP server lost a group")
        return groups


def asked(url: str, path: str, body: bytes | None = None) -> Any:
    """Asks the server of :class:`OverHttp`. -> its answer."""
    with urllib.request.urlopen(url + path, data=body) as answer:
        return json.loads(answer.read())


def serve_json(pipe: Connection) -> None:
    """POST adds a group, GET gives all and forgets them; ``/cpu`` gives this process's CPU seconds."""
    groups: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            groups.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer(len(groups))

        def do_GET(self) -> None:
            self._answer(time.process_time() if self.path == "/cpu" else groups)
            if self.path != "/cpu":
                groups.clear()

        def _answer(self, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    pipe.send(server.server_port)
    server.serve_forever()


class Peer:
    """A process of :mod:`benchmarks.beside.peer` in its environment; `name` is empty where that lacks the peer."""

    def __init__(self, environment: Path, groups: Path, key: str) -> None:
        script = Path(__file__).parent / "beside" / "peer.py"
        self.name = ""
        self._process = subprocess.Popen(
            [environment / "bin" / "python", script, groups, key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": ""},
        )
        first = self._answer()
        self.name, self.missing = str(first.get("name", "")), str(first.get("missing", ""))

    def __call__(self) -> Legs:
        print(file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """The next line of the process, within :data:`PEER_SECONDS`."""
        pipe = self._process.stdout
        ready = pipe is not None and select.select([pipe], [], [], PEER_SECONDS)[0]
        line = pipe.readline() if pipe is not None and ready else ""
        why = "it ended" if ready else f"no answer in {PEER_SECONDS:g} s"
        if not line and self.name:
            raise RuntimeError(f"{self.name}: {why}")
        answer: dict[str, Any] = json.loads(line) if line else {"missing": why}
        return answer

    def close(self) -> None:
        """Its input ends, and so it ends what it has started; what is left is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
