"""verifiers through a real worker: groups in the pool, token-exact, a tool's answer masked out."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from every_role import EveryRole
from logged import Logged
from test_verifiers_env import CALL, RENDERER, Script

from rlbuffer.client.buffer import connect
from rlbuffer.config.settings import WorkerSettings
from rlbuffer.errors import SamplerUnavailable
from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer.wire.payload import decode_rollout
from rlbuffer.worker.envs import make_env
from rlbuffer.worker.loop import run_worker
from rlbuffer.worker.samplers import Completion, SamplerTraits, Sampling

PATIENCE_SECONDS = 120.0


class Sampler:
    """Calls the tool in a conversation's first turn and answers in its second; away for one request."""

    traits = SamplerTraits(is_exact=True)
    version, vocab_size, context = -1, 10_000, 0

    def __init__(self, tokenizer: Path) -> None:
        self.calls, self.answers = Script(tokenizer, CALL), Script(tokenizer, "3")
        self.is_away = True

    async def load(self, policy: PolicyVersion) -> None:
        self.version = policy.version

    async def sample(self, prompt: np.ndarray, *, n: int, sampling: Sampling) -> list[Completion]:
        if self.is_away:
            self.is_away = False
            raise SamplerUnavailable("the server is away")
        text = self.calls.tokenizer.decode(prompt.tolist())
        script = self.answers if "<tool_response>" in text else self.calls
        return [await script(prompt, sampling) for _ in range(n)]

    async def close(self) -> None: ...


def test_a_tool_env_of_verifiers_fills_the_pool_with_token_exact_groups(tokenizer: Path) -> None:
    options = {"taskset": "tiny_tools", "tokenizer": str(tokenizer), "renderer": RENDERER, "name": "tools"}
    settings = WorkerSettings(env="verifiers", env_options=options, group_size=2, groups_in_flight=2)
    env, sampler, stop = make_env("verifiers", **options), Sampler(tokenizer), threading.Event()
    logged = Logged("rlbuffer.worker")
    with connect("memory://") as buffer:
        store: Any = buffer.store.role(EveryRole)
        store.open_run()
        store.lease("batcher", ttl_seconds=600)
        attempt = store.attempt(uuid=uuid.uuid4().hex, world_size=1, resume_step=0).number
        store.set_allowances({"tools": 2})
        store.announce(attempt, PolicyVersion(version=0, location="w", size=1))

        def work() -> None:
            run_worker(buffer, "w-0", settings, stop=stop, env=env, sampler=sampler)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while len(store.read_pool()) < 2:
                assert time.monotonic() < deadline, logged.lines
                time.sleep(0.05)
        finally:
            stop.set()
            thread.join(PATIENCE_SECONDS)
        logged.close()
        (ended,) = logged.told("stopped")
        assert (ended.groups, ended.rollouts, ended.failed_groups) == (2, 4, 0)
        (trouble,) = (line.text for line in logged.told("trouble") if not hasattr(line, "kind"))
        assert trouble.startswith("the server is away")  # its ticket went back, and nothing else happened
        for entry in store.read_pool():
            payloads = store.client.hgetall(entry.payload_key)
            for index, info in enumerate(entry.info.rollouts):
                rollout = decode_rollout(payloads[str(index).encode()], expected=info)
                assert env.render(rollout.tokens[rollout.loss_mask]) == f"{CALL}<|im_end|>3<|im_end|>"
                (tool,) = [turn for turn in rollout.turns if turn.role == "tool"]
                assert "<tool_response>\n3\n</tool_response>" in env.render(rollout.tokens[tool.start : tool.end])
                assert not rollout.loss_mask[tool.start : tool.end].any()
                assert (rollout.reward, rollout.rewards) == (1.5, {"used_tool": 1.0, "tool_right": 1.0})
