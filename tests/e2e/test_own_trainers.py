"""The trainers of docs/trainers.md with a real `serve` and a real worker: the reward rises, also after a kill."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from homes import Home, tree
from transformers import AutoConfig, AutoModelForCausalLM

import rlbuffer
from rlbuffer.weights.model import TINY_QWEN3

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STEPS, KILLED_AFTER = 40, 12
FIRST, LAST = 0.2, 0.4
"""Mean rewards of the env: what fresh weights get at most, and what the run must get to."""

CONFIG = """
run = "own"

[server]
appendfsync = "no"

[batcher]
row_tokens = 64
step_groups = 6
max_age = 1
advantage = "grpo"

[worker.parity]
env = "parity:Parity"
group_size = 8
groups_per_batch = 6
"""


def rewards(buffer: rlbuffer.Buffer) -> list[float]:
    """Mean reward of each committed step."""
    return [record["reward"] for record in reversed(buffer.store.history()) if record["event"] == "step"]


@pytest.mark.parametrize(
    ("example", "launcher"), [("plain_loop", TORCHRUN), ("hf_trainer", ()), ("accelerate_loop", ())]
)
def test_a_documented_trainer_learns_with_a_real_worker_and_goes_on_after_a_kill(
    home: Home, example: str, launcher: tuple[str, ...]
) -> None:
    if example == "accelerate_loop":
        pytest.importorskip("accelerate", reason="accelerate comes with PEFT")
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, home.path)
    config = home.path / "own.toml"
    config.write_text(CONFIG)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_QWEN3))
    model.save_pretrained(home.path / "model")
    home.start("serve", "--config", config, "--display", "plain", log="serve")
    home.start("worker", "parity", "--config", config, "--display", "plain", log="worker")
    with home.connect("own") as buffer:
        store = buffer.store

        def train() -> Any:
            places = store.server()["address"], "own", home.path / "model", home.path / "out", STEPS
            return home.start_python(*launcher, str(home.path / f"{example}.py"), *map(str, places), log=example)

        trainer = train()
        home.wait_until(lambda: store.trainer().trained >= KILLED_AFTER, seconds=100, why=f"step {KILLED_AFTER}")
        for pid in tree(trainer.pid):
            os.kill(pid, signal.SIGKILL)
        trainer.wait()
        assert home.ended(train(), 100) == 0, home.logs()
        attempt = store.trainer()
        assert attempt.trained == STEPS
        assert attempt.resume_step >= KILLED_AFTER // 10 * 10, "it went on from its checkpoint"
        assert buffer.policy().current().version == STEPS
        assert buffer.verify().ok, buffer.verify()
        earned = rewards(buffer)
        first, last = (sum(part) / len(part) for part in (earned[:5], earned[-5:]))
        assert first < FIRST
        assert last > LAST, earned
