"""A worker in a thread, with a batcher's and a trainer's hand on its run, all in memory."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from every_role import EveryRole
from logged import Logged

from rlbuffer.client.buffer import Buffer, connect
from rlbuffer.config.settings import RunSettings, WorkerSettings
from rlbuffer.errors import WeightsError
from rlbuffer.process import heartbeat
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import VersionSpan
from rlbuffer.wire.payload import decode_rollout
from rlbuffer.worker import groups_in_flight, loop, versions
from rlbuffer.worker import heartbeat as worker_heartbeat
from rlbuffer.worker.envs import Prompt, Score
from rlbuffer.worker.loop import run_worker
from rlbuffer.worker.samplers import Completion
from rlbuffer.worker.samplers.transformers import Batched

PATIENCE_SECONDS = 240.0


class FakeSampler:
    """Answers with one digit and the end token; remembers what it was asked."""

    vocab_size = 13
    context = 0

    def __init__(self) -> None:
        self.version = -1
        self.bad_versions: set[int] = set()
        self.loads: list[int] = []
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        """While it is not set, sampling waits until told to stop."""
        self.gate.set()
        self.sampling = threading.Event()

    def load(self, policy: PolicyVersion) -> None:
        self.loads.append(policy.version)
        if policy.version in self.bad_versions:
            raise WeightsError(f"version {policy.version}: bad")
        self.version = policy.version

    def sample(
        self, prompts: Sequence[np.ndarray], *, n: int, stopped: Callable[[], bool], **rest: Any
    ) -> list[list[Completion]]:
        self.batches.append(["".join(map(str, prompt)) for prompt in prompts])
        self.sampling.set()
        while not self.gate.wait(0.01):
            if stopped():
                return [[self._completion("abort")] * n for _ in prompts]
        return [[self._completion("stop")] * n for _ in prompts]

    def _completion(self, reason: str) -> Completion:
        return Completion(
            tokens=np.array([3, 12], np.int32),
            logprobs=np.array([-1.0, -0.5], np.float32),
            finish_reason=reason,
            version_spans=(VersionSpan(self.version, 0, 2),),
        )


class Counting:
    """An env whose n-th prompt is n; what it does with some numbers is up to the test."""

    name = "counting"
    vocab_size = 13
    eos_token_ids = (12,)
    max_new_tokens = 4

    def __init__(self) -> None:
        self.scores: dict[str, list[float | Exception]] = {}
        """Prompt id -> what the next groups of it earn; 1.0 when nothing is left."""
        self.bad_prompts: set[int] = set()

    def prompt(self, number: int) -> Prompt:
        if number in self.bad_prompts:
            raise KeyError(number)
        return Prompt(prompt_id=str(number), tokens=np.array([number], np.int32), answer=number)

    def score(self, prompt: Prompt, tokens: np.ndarray, *, finish_reason: str) -> Score:
        planned = self.scores.get(prompt.prompt_id)
        outcome = planned.pop(0) if planned else 1.0
        if isinstance(outcome, Exception):
            raise outcome
        return Score(reward=outcome, successes={"exact": outcome == 1.0})

    def render(self, tokens: np.ndarray) -> str:
        return " ".join(map(str, tokens.tolist()))


class Stage:
    """A run, in memory unless told otherwise, with a batcher's and a trainer's hand on it; one worker in a thread."""

    def __init__(self, url: str = "memory://", *, config: RunSettings | None = None) -> None:
        self.buffer: Buffer = connect(url, run=f"t{uuid.uuid4().hex[:12]}", config=config)
        self.store: Any = self.buffer.store.role(EveryRole)
        self.store.open_run()
        self.store.lease("batcher", ttl_seconds=600)
        self.attempt = self.store.attempt(uuid=uuid.uuid4().hex, world_size=1, resume_step=0).number
        self.stop = threading.Event()
        self.logged = Logged("rlbuffer.worker")
        self.told = self.logged.told
        self.sampler, self.env = FakeSampler(), Counting()
        self.raised: BaseException | None = None
        self.thread: threading.Thread | None = None

    def allow(self, tickets: int, env: str = "counting") -> None:
        self.store.set_allowances({env: tickets})

    def announce(self, policy: PolicyVersion | int) -> None:
        announced = PolicyVersion(version=policy, location="w", size=1) if isinstance(policy, int) else policy
        assert self.store.announce(self.attempt, announced)

    def start(self, **changes: Any) -> None:
        settings = WorkerSettings(**{"env": "vcopy", "group_size": 2, "groups_in_flight": 3, **changes})

        def work() -> None:
            try:
                run_worker(
                    self.buffer,
                    "w-0",
                    settings,
                    stop=self.stop,
                    env=self.env if changes.get("env") is None else None,
                    sampler=Batched(self.sampler) if changes.get("env") is None else None,
                )
            except BaseException as error:
                self.raised = error

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def finish(self) -> None:
        self.stop.set()
        if self.thread is not None:
            self.thread.join(PATIENCE_SECONDS)
            assert not self.thread.is_alive()
        self.logged.close()

    def groups(self) -> list[str]:
        """Ids of what the pool holds, sorted: each group is scored in a thread of its own, and pushed when it is."""
        return sorted(entry.group_id for entry in self.store.read_pool())

    def rollouts(self) -> list[list[Rollout]]:
        """The pool's rollouts, decoded from their payloads, in the order of :meth:`groups`."""
        out = []
        for entry in sorted(self.store.read_pool(), key=lambda entry: entry.group_id):
            payloads = self.store.client.hgetall(entry.payload_key)
            infos = enumerate(entry.info.rollouts)
            out.append([decode_rollout(payloads[str(i).encode()], expected=info) for i, info in infos])
        return out

    def troubles(self) -> list[str]:
        """Reported troubles, without the places in files."""
        return [without_place(line.text.partition("\n")[0]) for line in self.told("trouble")]

    def heartbeat(self) -> dict[str, Any]:
        eventually(lambda: "w-0" in self.store.heartbeats("worker"))
        return dict(self.store.heartbeats("worker")["w-0"])


def without_place(sentence: str) -> str:
    """A trouble without the file and line that it names."""
    return re.sub(r" \([^()]+\.py:\d+ in \w+\)", "", sentence)


def eventually(fact: Callable[[], object]) -> None:
    """Waits until `fact` holds: the worker runs in a thread of its own."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not fact():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.005)


def hurry(monkeypatch: Any) -> None:
    """Shortens what a worker waits for."""
    for module in (loop, groups_in_flight):
        monkeypatch.setattr(module, "WORKER_POLL_SECONDS", 0.01)
    monkeypatch.setattr(worker_heartbeat, "SAY_WAITING_SECONDS", 0.1)
    monkeypatch.setattr(versions, "RELOAD_SECONDS", 0.1)
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)
