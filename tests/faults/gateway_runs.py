"""Agents with the real clients of OpenAI and Anthropic before two gateways, while those, the leading batcher and the
server are killed. It runs in the environment of ``make adapters-test``, which has the clients."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from fake_engine import FakeEngine
from gateway_windows import WINDOWS, Place, Windows
from homes import Home
from outcome import Outcome, Say
from own_server import OwnServer, free_port
from takeover_runs import LEADS, state_of

import rlbuffer
from rlbuffer.client.buffer import Buffer
from rlbuffer.records.micro_batch import WholeSample
from rlbuffer.store.gateway import GatewayStore

RUN, ENV = "agents", "tasks"
GATEWAYS, GROUP_SIZE, STEP_GROUPS = 2, 3, 4
ANSWER_SECONDS = 0.4
"""What the engine takes for an answer."""
CONFIG = f"""
run = "{RUN}"

[batcher]
row_tokens = 65536
step_groups = {STEP_GROUPS}
max_age = 100

[gateway]
idle_seconds = 300.0
"""
PATIENCE_SECONDS = 180.0
"""Without the next fault, or an end, for so long the run is stuck."""
CALL = 'call look_up {"word": "tree"}'
TRANSPORTS = [import_module(name).HTTPError for name in ("httpx", "httpx2") if find_spec(name)]
"""What a stream that breaks off raises through the clients."""
LEADER, SERVER = "leading batcher", "server"


@dataclass
class Harness:
    """The agents, and what they have heard."""

    url: str
    outcome: Outcome
    more: Callable[[int], bool]
    """Another group is to be begun, after so many."""
    heard: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Open rollout -> ids of the answers, in the order in which they came."""
    again: Counter[str] = field(default_factory=Counter)
    """Turns that an agent asked for once more, since its client had given up; by the error's name."""
    groups: int = 0
    ended: int = 0

    def __post_init__(self) -> None:
        self._left: list[tuple[dict[str, Any], int]] = []
        self._lock = threading.Lock()

    def work(self) -> None:
        """One agent: rollout after rollout."""
        while (task := self._next()) is not None:
            opened, number = task
            play(self, opened, number)
            self._post(opened["end_url"], {"reward": float(number % GROUP_SIZE)})
            with self._lock:
                self.ended += 1

    def _next(self) -> tuple[dict[str, Any], int] | None:
        with self._lock:
            if not self._left:
                if not self.more(self.groups):
                    return None
                body = {"env": ENV, "size": GROUP_SIZE, "wait": 10, "key": f"group {self.groups}"}
                opened = self._post(f"{self.url}/v1/open_rollouts", body)["open_rollouts"]
                self._left = [(one, self.groups * GROUP_SIZE + i) for i, one in enumerate(opened)]
                self.groups += 1
            return self._left.pop()

    def _post(self, url: str, body: dict[str, Any]) -> Any:
        """What the gateway answers; asked again until it does, as a harness must."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code != 503 or time.monotonic() > deadline:
                        raise RuntimeError(f"{error.code}: {error.read().decode()[:300]}") from error
            except OSError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.3)


def play(harness: Harness, opened: dict[str, Any], number: int) -> None:
    """A rollout: a tool whose result a helper finds, some turns, a compaction, and some turns after it."""
    import anthropic
    import openai
    from client_agents import KINDS, Heard

    kind, streams = (("chat", "messages")[number % 2], bool(number // 2 % 2))
    make, turn = KINDS[kind]
    broken = (openai.APIError, anthropic.APIError, *TRANSPORTS)

    def ask(messages: list[Any], **more: Any) -> Heard:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                heard: Heard = turn(client, messages, streams=streams, **more)
            except broken as error:  # a stream that broke off: clients try none of those again
                if time.monotonic() > deadline:
                    raise
                harness.again[type(error).__name__] += 1
                time.sleep(0.2)
            else:
                harness.heard[opened["name"]].append(heard.id)
                return heard

    def helper() -> str:
        return ask([{"role": "user", "content": f"say a plant of {number}"}]).text

    with make(opened, max_retries=12) as client:
        messages: list[Any] = [{"role": "user", "content": CALL}]
        heard = ask(messages, result=helper)
        for _ in range(3):
            if not heard.calls:
                break
            heard = ask(messages)
        messages.append({"role": "user", "content": f"say step {number}"})
        ask(messages)
        messages.append({"role": "user", "content": "say all so far"})
        summary = ask(messages).text
        messages = [{"role": "user", "content": f"say after {summary}"}]
        ask(messages)
        messages.append({"role": "user", "content": "say done"})
        ask(messages)


@dataclass
class Trainer:
    """Takes step after step, and gives the engine new weights each time."""

    buffer: Buffer
    engine: FakeEngine
    samples: list[WholeSample] = field(default_factory=list)
    is_over: bool = False
    error: BaseException | None = None

    def run(self) -> None:
        try:
            with self.buffer.reader(timeout_seconds=PATIENCE_SECONDS) as reader:
                self.buffer.policy.announce(0, location="", size=0, checksum="")
                for step in reader.steps(until=lambda: self.is_over):
                    self.samples += step.samples()
                    self.buffer.policy.announce(step.number, location="", size=0, checksum="")
                    self.engine.version = str(step.number)
                    reader.trained(step)
        except BaseException as error:
            self.error = error


def run_gateways(
    home: Home,
    *,
    seed: int,
    rollouts: int,
    agents: int,
    per_window: int,
    leader_kills: int,
    server_kills: int,
    say: Say,
) -> Outcome:
    """Kills a gateway `per_window` times in each window, the leading batcher and the server, while agents work.

    Args:
        rollouts: at least so many; the agents go on until all was killed.
    """
    outcome = Outcome(name=f"kill -9 of gateways under agents (seed {seed})")
    dice, began = random.Random(f"gateways {seed}"), time.monotonic()
    drawn = [*WINDOWS * per_window, *[LEADER] * leader_kills, *[SERVER] * server_kills]
    dice.shuffle(drawn)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # of the engine, whose callers die
    config = home.path / "agents.toml"
    config.write_text(CONFIG)
    with ExitStack() as ends:
        server = ends.enter_context(OwnServer(home.path / "tcp", options={"appendfsync": "always"}))
        home.url = server.url
        engine = FakeEngine(delay=ANSWER_SECONDS, seed=seed).start()
        ends.callback(engine.stop)
        buffer = ends.enter_context(rlbuffer.connect(server.url, run=RUN))
        store = buffer.store.role(GatewayStore)
        scripts = {name: store.script(name).sha for name in ("call", "push")}
        engine_port = int(engine.url.rpartition(":")[2])
        windows = ends.enter_context(
            Windows(GATEWAYS, store_port=server.port, engine_port=engine_port, scripts=scripts)
        )
        trainer = Trainer(ends.enter_context(rlbuffer.connect(server.url, run=RUN)), engine)
        training = threading.Thread(target=trainer.run)
        training.start()
        processes = Processes(home, config, server, windows)
        is_killed = threading.Event()

        def more(groups: int) -> bool:
            return groups * GROUP_SIZE < rollouts or not is_killed.is_set() or bool(groups % STEP_GROUPS)

        harness = Harness(processes.url, outcome, more)
        try:
            processes.wait()
            with ThreadPoolExecutor(agents) as pool:
                working = [pool.submit(harness.work) for _ in range(agents)]
                try:
                    for kind in drawn:
                        time.sleep(dice.uniform(0.2, 1.0))
                        struck = processes.strike(kind, dice)
                        outcome.faults[kind] += 1
                        say(f"  {time.monotonic() - began:5.0f} s  {harness.ended} ended: kill -9 {struck}")
                except TimeoutError as error:
                    outcome.findings.append(str(error))
                finally:
                    is_killed.set()
                for agent in working:
                    agent.result()
            wanted = harness.groups * GROUP_SIZE
            deadline = time.monotonic() + PATIENCE_SECONDS
            while buffer.ledger().total().trained[0] < wanted and time.monotonic() < deadline:
                time.sleep(0.2)
            outcome.findings += account(harness, engine, trainer, buffer, wanted)
        finally:
            trainer.is_over = True
            processes.close()
            training.join(60)
        outcome.facts |= {
            "rollouts": f"{harness.ended} of {agents} agents, {sum(map(len, harness.heard.values()))} answers heard",
            "samples": f"{len(engine.samples)} of the engine, {len(stretches(trainer.samples))} of them trained, "
            f"{crossings(trainer.samples)} across a change of weights",
            "packed tokens for each trained one": f"{packed(trainer.samples):.2f}; "
            f"{alone(engine):.2f} with a sequence for each answer",
            "asked again by agents": dict(harness.again),
        }
        outcome.seconds = time.monotonic() - began
    return outcome


class Processes:
    """Two gateways at one port, two batchers, and the server."""

    def __init__(self, home: Home, config: Any, server: OwnServer, windows: Windows) -> None:
        self._home, self._config, self._server, self._windows = home, config, server, windows
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._serving = {name: self._serve(name) for name in ("one", "two")}
        self._gateways = [self._gateway(place) for place in windows.places]

    def _serve(self, name: str) -> Any:
        where = ("--config", self._config, "--redis", self._server.url)
        return self._home.start("serve", *where, "--display", "plain", log=name)

    def _gateway(self, place: Place) -> Any:
        engine, store = f"http://127.0.0.1:{place.engine_port}", f"redis://127.0.0.1:{place.store_port}/0"
        listen = ("--listen", f"127.0.0.1:{self._port}", "--display", "plain")
        process = self._home.start(
            "gateway", "--config", self._config, "--redis", store, "--engine", engine, *listen, log="gateway"
        )
        place.pid = process.pid
        return process

    def _listening(self) -> int:
        return (self._home.path / "gateway.log").read_text().count("listens at")

    def wait(self) -> None:
        self._home.wait_until(lambda: self._listening() >= GATEWAYS, seconds=60, why="two gateways that listen")

    def strike(self, kind: str, dice: random.Random) -> str:
        """Kills one, and starts another in its place. -> what it was. Raises TimeoutError."""
        if kind == SERVER:
            self._server.kill()
            time.sleep(dice.uniform(0.5, 2.0))
            self._server.start()
            return "the server"
        if kind == LEADER:
            leads = lambda: [name for name in self._serving if state_of(self._home, name) == LEADS]  # noqa: E731
            (leader, *_) = self._home.wait_until(leads, seconds=60, why="a batcher that leads")
            self._serving[leader].kill()
            self._serving[leader].wait()
            self._serving[leader] = self._serve(leader)
            return f"batcher {leader}"
        before = self._listening()
        self._windows.arm(kind)
        try:
            place = self._windows.struck.get(timeout=PATIENCE_SECONDS)
        except Exception as error:
            raise TimeoutError(f"no gateway came into the window {kind!r}") from error
        number = self._windows.places.index(place)
        self._gateways[number].wait()
        self._gateways[number] = self._gateway(place)
        self._home.wait_until(lambda: self._listening() > before, seconds=60, why="another gateway that listens")
        return f"gateway {number}: {kind}"

    def close(self) -> None:
        everyone = [*self._gateways, *self._serving.values()]
        for process in everyone:
            process.terminate()
        for process in everyone:
            with suppress(TimeoutError):
                self._home.ended(process, 60)


# -- the account -------------------------------------------------------------------------------------------------------
Stretch = tuple[bytes, bytes, bytes, bytes]
"""Tokens before it, its tokens, their logprobs and versions."""


def runs_of(mask: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def stretches(samples: list[WholeSample]) -> Counter[Stretch]:
    """What was trained: each answer that was sampled, bit by bit."""
    return Counter(
        (
            sample.tokens[:start].tobytes(),
            sample.tokens[start:end].tobytes(),
            sample.logprobs[start:end].tobytes(),
            sample.token_versions[start:end].tobytes(),
        )
        for sample in samples
        for start, end in runs_of(sample.loss_mask)
    )


def crossings(samples: list[WholeSample]) -> int:
    return sum(
        len(set(sample.token_versions[start:end].tolist())) > 1
        for sample in samples
        for start, end in runs_of(sample.loss_mask)
    )


def packed(samples: list[WholeSample]) -> float:
    """Tokens of all sequences for each one that is trained."""
    return sum(len(sample.tokens) for sample in samples) / max(1, sum(int(s.loss_mask.sum()) for s in samples))


def alone(engine: FakeEngine) -> float:
    """The same, were each answer a sequence of its own."""
    samples = list(engine.samples)
    return sum(len(s.prompt) + len(s.tokens) for s in samples) / max(1, sum(len(s.tokens) for s in samples))


def sampled(engine: FakeEngine) -> Counter[Stretch]:
    """What the engine has answered."""
    found: Counter[Stretch] = Counter()
    for sample in list(engine.samples):
        versions = np.concatenate([np.full(end - start, version, np.int64) for version, start, end in sample.spans])
        key = (np.array(sample.prompt, np.int32).tobytes(), np.array(sample.tokens, np.int32).tobytes())
        found[(*key, sample.logprobs.tobytes(), versions.tobytes())] += 1
    return found


def differences(heard: Mapping[str, list[str]], answered: Counter[Stretch], samples: list[WholeSample]) -> list[str]:
    """Findings as sentences.

    Args:
        heard: open rollout -> ids of the answers that its agent has heard.
        answered: what the engine has sampled.
        samples: what was trained.
    """
    findings = []
    if extra := stretches(samples) - answered:
        findings.append(f"{sum(extra.values())} trained answers are not what the engine has sampled")
    uses = Counter((sample.rollout_id, sample.sequence) for sample in samples)
    findings += [f"{name}, sequence {number}, was trained {n} times" for (name, number), n in uses.items() if n > 1]
    trained, told = Counter[str](), dict[str, list[str]]()
    for sample in samples:
        trained[sample.rollout_id] += len(runs_of(sample.loss_mask))
        if sample.sequence == 0:
            told[sample.rollout_id] = list(sample.metadata.get("calls", ()))
    for name, ids in heard.items():
        calls = told.get(name, [])
        if sorted(ids) != sorted(calls):
            lost, unheard = set(ids) - set(calls), set(calls) - set(ids)
            findings.append(f"{name}: {len(lost)} heard answers are missing, {len(unheard)} were never heard")
        if trained[name] != len(calls):
            findings.append(f"{name}: {len(calls)} answers, {trained[name]} of them trained")
    return findings


def account(harness: Harness, engine: FakeEngine, trainer: Trainer, buffer: Buffer, wanted: int) -> list[str]:
    """Findings as sentences."""
    findings = [] if trainer.error is None else [f"the trainer ended: {trainer.error!r}"]
    findings += differences(harness.heard, sampled(engine), trainer.samples)
    total = buffer.ledger().total()
    if (total.pushed[0], total.trained[0], total.pending[0], total.packed[0]) != (wanted, wanted, 0, 0):
        findings.append(f"the ledger has {total}, and {wanted} rollouts have ended")
    return findings + [f"{finding.invariant}: {finding.message}" for finding in buffer.verify().findings]
