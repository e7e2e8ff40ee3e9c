"""A worker that is killed while it pauses, loads and resumes a server that is not its own; the next one goes on.

On a fake that holds its state (``python tests/faults workers``), or on a real vLLM server, in its environment::

    PYTHONPATH=tests/support:tests/real_vllm python -W default tests/faults/worker_kills.py --kills 10
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from every_role import EveryRole
from forked import Parent
from holding_engine import HoldingEngine
from homes import Home, a_home
from outcome import Outcome, Say

from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.weights.files import publish
from rlbuffer.wire.payload import decode_rollout

BOUND_SECONDS = 30.0
"""Longest from a kill until a group of the next worker is stored. Processes are forked from one that has imported
torch, so that the figure is not that of the imports."""
PATIENCE_SECONDS = 240.0
"""Longest until a first group, and a load, on a machine that is busy with others: what lasts longer ends the run."""
MOST_LOADS = 20
"""Loads in which a moment is looked for."""
CONTROL_SECONDS, LOAD_SECONDS = 0.15, 0.8
"""Time that a call to the fake, and a load, take."""
CONTROL_CALLS = ("/pause", "/update_weight_version", "/collective_rpc", "/reset_prefix_cache", "/resume")
WORKER = """
run = "tiny"
[worker.w]
env = "vcopy"
sampler = "openai"
sampler_options = {{ servers = ["{url}"] }}
self_check = "never"
group_size = 4
groups_in_flight = 2
"""


class SlowedServer(HoldingEngine):
    """Stands before a real server and draws its control calls out: those are so short that no kill would meet them."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.client = httpx.Client(base_url=url, timeout=600)

    def answer(self, method: str, target: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Passes on what is asked, also of a worker that is gone by then."""
        seconds = CONTROL_SECONDS if target.partition("?")[0] in CONTROL_CALLS else 0.0
        time.sleep(seconds)
        response = self.client.request(method, target, json=body if method == "POST" else None)
        time.sleep(seconds)
        return response.status_code, response.json() if response.content else {}


def call_under_way(engine: HoldingEngine) -> str:
    """The control call that the server is at; "" for none."""
    return next((f"was at {call}" for call in CONTROL_CALLS if engine.under_way[call]), "")


class Killed:
    """The run of a worker that is started again and again, with a trainer's and a batcher's hand on it."""

    def __init__(self, home: Home, url: str, versions: Callable[[int], PolicyVersion]) -> None:
        self._home, self._versions = home, versions
        self._config = home.path / "worker.toml"
        self._config.write_text(WORKER.format(url=url))
        self.buffer = home.connect()
        self.store: Any = self.buffer.store.role(EveryRole)
        self.store.open_run()
        self.store.lease("batcher", ttl_seconds=36_000)
        self._attempt = self.store.attempt(uuid=uuid.uuid4().hex, world_size=1, resume_step=0).number
        self.store.set_allowances({"vcopy": 100_000})
        self.version = -1
        self.announce()

    def announce(self) -> None:
        """A new version, as after a step."""
        self.version += 1
        self.store.announce(self._attempt, self._versions(self.version))

    def start(self, replica: int = 0) -> Any:
        """The worker, as a process of its own; another `replica` has another name."""
        return self._home.start("worker", "w", "--config", self._config, "--replica", str(replica), log="worker")

    @property
    def rollouts(self) -> int:
        """All that were pushed."""
        return int(self.store.ledger().total().pushed[0])

    def until(self, fact: Callable[[], Any], why: str) -> float:
        """Waits for it. -> seconds."""
        began = time.monotonic()
        while not fact():
            if time.monotonic() - began > PATIENCE_SECONDS:
                log = (self._home.path / "worker.log").read_text()[-3000:]
                raise TimeoutError(f"{why} did not happen within {PATIENCE_SECONDS:g} s\n{log}")
            time.sleep(0.005)
        return time.monotonic() - began

    def pushed(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[int, int, int]]]]:
        """Prompt, completion, logprobs and version spans of every rollout that is there."""
        found = []
        for entry in self.store.read_pool(count=100_000):
            payloads = self.store.client.hgetall(entry.payload_key)
            for index, info in enumerate(entry.info.rollouts):
                rollout = decode_rollout(payloads[str(index).encode()], expected=info)
                first = int(rollout.prompt_tokens)
                spans = [(span.policy_version, span.start - first, span.end - first) for span in rollout.version_spans]
                found.append((rollout.tokens[:first], rollout.tokens[first:], rollout.logprobs[first:], spans))
        return found


def watched_load(run: Killed, state: Callable[[], str]) -> tuple[float, list[str]]:
    """Announces a version and watches its load. -> how long it takes, and what the server is meanwhile."""
    seen = set[str]()
    run.announce()
    run.until(lambda: state() != "runs", "a load")
    seconds = run.until(lambda: seen.add(now := state()) or now == "runs", "the end of a load")
    return seconds, sorted(seen - {"runs"})


def reached(run: Killed, state: Callable[[], str], moment: str) -> bool:
    """Announces a version. -> whether the server was seen at this moment of its load; a short one can be missed."""
    run.announce()
    run.until(lambda: state() != "runs", f"a load of version {run.version}")
    now = ""

    def is_there() -> bool:
        nonlocal now
        now = state()
        return now in (moment, "runs")

    run.until(is_there, f"an end of the load of version {run.version}")
    return now == moment


def kill_all(run: Killed, outcome: Outcome, *, seed: int, kills: int, say: Say, state: Callable[[], str]) -> None:
    """Kills the worker `kills` times in a load; `state` says where the server is then."""
    draw, longest = random.Random(f"worker kills {seed}"), 0.0
    worker = run.start()
    run.until(lambda: run.rollouts, "a first group")
    seconds, moments = watched_load(run, state)
    for number in range(1, kills + 1):
        moment = draw.choice(moments)
        for _ in range(MOST_LOADS):
            if reached(run, state, moment):
                break
        time.sleep(draw.uniform(0.0, seconds / len(moments)))
        worker.kill()
        worker.wait()
        struck, before = state(), run.rollouts
        outcome.faults[struck] += 1
        worker = run.start(replica=number % 2)
        seconds = run.until(lambda before=before: run.rollouts > before, "a group of the next worker")
        longest = max(longest, seconds)
        say(f"  kill {number}: the server {struck}; a group {seconds:.1f} s later")
        if seconds > BOUND_SECONDS:
            outcome.findings.append(f"after kill {number} a group came only after {seconds:.1f} s")
    worker.terminate()
    worker.wait()
    outcome.facts["longest until a group, s"] = round(longest, 1)
    if state() != "runs":
        outcome.findings.append(f"the server {state()} when the last worker has ended")


def run_worker_kills(home: Home, *, seed: int, kills: int, say: Say) -> Outcome:
    """On the fake: each token must be the number of the version that it names."""
    outcome, began = Outcome(name=f"kill -9 of a worker that loads (seed {seed})"), time.monotonic()
    if home.parent is None:
        home.parent = parent = Parent()
        try:
            return run_worker_kills(home, seed=seed, kills=kills, say=say)
        finally:
            parent.close()

    def version(number: int) -> PolicyVersion:
        state = {"number": torch.full((2,), float(number))}
        return publish(home.path / "weights", number, state=state, config={"vocab_size": 13}, keep=1000)

    with HoldingEngine(control_seconds=CONTROL_SECONDS, load_seconds=LOAD_SECONDS) as engine:

        def state() -> str:
            return call_under_way(engine) or ("runs" if engine.runs.is_set() else "was paused")

        run = Killed(home, engine.url, version)
        with run.buffer:
            kill_all(run, outcome, seed=seed, kills=kills, say=say, state=state)
            if engine.is_dead:
                outcome.findings.append("the engine was loaded without a pause")
            for _, tokens, _, spans in run.pushed():
                named = {v for v, _, _ in spans}
                if len(named) != 1 or set(tokens.tolist()) != {named.copy().pop() % 10}:
                    outcome.findings.append(f"tokens {tokens.tolist()} are said to be of {spans}")
            outcome.facts["rollouts compared"] = len(run.pushed())
    outcome.seconds = time.monotonic() - began
    return outcome


def run_on_vllm(folder: Path, home: Home, *, seed: int, kills: int, say: Say) -> Outcome:
    """On vLLM's server: each logprob must be that of the version that its token names."""
    from vllm_server import VllmServer

    from rlbuffer.worker.samplers import Sampling
    from rlbuffer.worker.samplers.conformance import CONTEXT, TOLERANCE, policies
    from rlbuffer.worker.samplers.selfcheck import logprobs_of

    outcome, began = Outcome(name=f"kill -9 of a worker that loads vLLM (seed {seed})"), time.monotonic()
    models, published = policies(folder)
    with (
        VllmServer(Path(published[0].location), folder / "vllm.log", context=CONTEXT) as server,
        SlowedServer(server.url) as slowed,
    ):
        asyncio.run(server.until_ready())

        def state() -> str:
            return call_under_way(slowed) or (
                "was paused" if slowed.client.get("/is_paused").json()["is_paused"] else "runs"
            )

        run = Killed(home, slowed.url, lambda number: replace(published[number % 4], version=number))
        with run.buffer, slowed.client:
            kill_all(run, outcome, seed=seed, kills=kills, say=say, state=state)
            pushed, worst = run.pushed(), 0.0
            for prompt, tokens, logprobs, spans in pushed:
                for version, start, end in spans:
                    if not 0 <= version <= run.version:
                        outcome.findings.append(f"tokens are said to be of version {version}")
                        continue
                    expected = logprobs_of(models[version % 4], prompt, tokens, Sampling(max_new_tokens=CONTEXT))
                    worst = max(worst, float(np.abs(logprobs[start:end] - expected[start:end]).max()))
            if worst > TOLERANCE:
                outcome.findings.append(f"a logprob is {worst:.1e} off that of the version that its token names")
            outcome.facts |= {"rollouts compared": len(pushed), "largest difference of a logprob": f"{worst:.1e}"}
    outcome.seconds = time.monotonic() - began
    return outcome


def main() -> int:
    """On real vLLM. Returns the exit code."""
    parser = argparse.ArgumentParser(description="A worker that is killed while it loads a vLLM server.")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6, help="of the moments")
    parser.add_argument("--kills", type=int, default=10, help="kills of the worker (default 10)")
    args = parser.parse_args()
    print(f"again with  --kills {args.kills} --seed {args.seed}", flush=True)
    say = lambda line: print(line, flush=True)  # noqa: E731
    parent = Parent()
    with closing(parent), tempfile.TemporaryDirectory(prefix="rlb-vllm-") as folder, a_home(parent) as home:
        outcome = run_on_vllm(Path(folder), home, seed=args.seed, kills=args.kills, say=say)
    print("\n".join(outcome.lines()))
    return int(bool(outcome.findings))


if __name__ == "__main__":
    sys.exit(main())
