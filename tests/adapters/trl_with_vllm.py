"""AsyncGRPO behind its door, with real vLLM on the CPU: the trainer samples nothing and publishes each version, and the
loop of another host loads it into vLLM's server. ``make trl-vllm`` calls it, in TRL's environment:
``python trl_with_vllm.py PYTHON [STEPS]`` with the Python of one that has vLLM.

Exit code 0 when every token is one of its version, nothing was lost or trained twice, and `verify` finds nothing.
"""

from __future__ import annotations

import sys
import time
from statistics import mean
from typing import Any

import numpy as np
import torch
from homes import a_home
from transformers import AutoModelForCausalLM
from trl_parts import CONTEXT
from trl_runs import RUN, TrlRun, check
from vllm_server import VllmServer

TOLERANCE = 1e-4
"""Of one logprob, in nats."""
RUN_SECONDS = 1800.0


class VllmRun(TrlRun):
    """The engine is a server of vLLM, with the port that the run has drawn."""

    python_with_vllm = ""

    def start_engine(self) -> None:
        self.server = VllmServer(
            self.home.path / "model", self.home.path / "vllm.log", context=CONTEXT, python=self.python_with_vllm
        )
        self.server.port = self.port
        self.server.start()


def differences(run: VllmRun) -> tuple[list[float], int]:
    """Of each sampled token of the run the difference of its logprob to that of a forward pass of its version, or of
    the next one, which may have been loaded while the answer was being sampled; and how many are of the next one."""
    models: dict[int, Any] = {}

    def logprobs(version: int, tokens: np.ndarray) -> np.ndarray | None:
        folder = next((run.home.path / "published").glob(f"v{version:08d}*"), None)
        if folder is None:
            return None
        if version not in models:
            models[version] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = models[version](torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1]
        drawn = torch.from_numpy(tokens[1:].astype(np.int64))
        out: np.ndarray = torch.log_softmax(logits, -1).gather(1, drawn[:, None])[:, 0].numpy()
        return out

    found, later, rollouts = [], 0, 0
    with run.home.connect(RUN) as buffer:
        for group in buffer.groups(limit=100_000):
            for member in buffer.group(group.group_id).members:
                rollout = member.rollout
                mask, version = rollout.loss_mask[1:], rollout.version_spans[0].policy_version
                apart = [
                    np.abs(theirs - rollout.logprobs[1:])[mask]
                    for number in (version, version + 1)
                    if (theirs := logprobs(number, rollout.tokens)) is not None
                ]
                rollouts += 1
                least = np.min(apart, axis=0)
                later += int((apart[0] > least + TOLERANCE).sum())
                found += least.tolist()
        assert rollouts == buffer.ledger().envs["trl"].pushed[0], "the server has let some of them go"
    return found, later


def main(python: str, steps: int = 20) -> int:
    VllmRun.python_with_vllm = python
    with a_home() as home:
        home.environment |= {"TRL_PUBLISHES": "1"}
        # Nothing is retired without a checkpoint, so that all tokens can be looked at when the run has ended.
        run = VllmRun(home, options=("max_inflight_tasks=0", 'save_strategy="no"'), samples=False)
        try:
            run.python("trl_host.py", run.port, run.url, RUN, "vllm", log="host")
            began = time.monotonic()
            (trainer,) = run.train(steps)
            if code := home.ended(trainer, RUN_SECONDS):
                print(f"the trainer ended with {code}\n{home.logs()}")
                return 1
            seconds = time.monotonic() - began
            check(run)
            apart, later = differences(run)
            trained = len(run.history())
            loaded = [line["version"] for line in run.lines("loaded")]
            rewards = [line["reward"] for line in run.lines("finished")[-1]["log"] if "reward" in line]
            with home.connect(RUN) as buffer:
                account, version, report = buffer.ledger().envs["trl"], buffer.policy.version, buffer.verify()
        finally:
            run.server.kill()
    print(f"{steps} steps in {seconds:.0f} s, the start of the trainer included")
    print(f"rewards {[round(reward, 3) for reward in rewards]}; of the first and last five {ends(rewards)}")
    print(f"versions: {version} is the last one; loaded {loaded}")
    print(f"account: pushed {account.pushed}, trained {account.trained}, dropped {dict(account.dropped)}")
    print(f"verify: {'clean' if report.ok else report.findings}")
    print(f"{trained} samples in the weights' history: each once, as they were scored")
    print(f"{len(apart)} sampled tokens, {later} of them by the version behind the one that the group was begun with;")
    print(f"largest difference of a logprob to a forward pass of the published weights: {max(apart):.1e}")
    return int(max(apart) > TOLERANCE)


def ends(rewards: list[float]) -> str:
    return f"{mean(rewards[:5]):.3f} and {mean(rewards[-5:]):.3f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:3])))
