"""`rlbuffer run` with vLLM as its sampler learns a task from nothing."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_server import FEW_PROCESSES

if TYPE_CHECKING:
    from homes import Home

STEPS_AVERAGED = 5
RISE = 0.3
"""The mean reward of five steps rises so much over that of the first five."""

CONFIG = """
run = "learns"

[server]
appendfsync = "no"

[batcher]
row_tokens = 4096
step_groups = 32
advantage = "grpo"

[model.config]
model_type = "qwen3"
vocab_size = 13
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 4
head_dim = 32
initializer_range = 0.1
tie_word_embeddings = true
max_position_embeddings = 128
eos_token_id = 12

[trainer]
device = "cpu"
steps = {steps}
timeout_seconds = 300.0

[trainer.optimizer]
learning_rate = 2e-3

[trainer.loss]
name = "dapo"
entropy_bonus = 0.01

[trainer.checkpoint]
every = 1000

[worker.vcopy]
env = "vcopy"
group_size = 16
groups_in_flight = 32
sampler = "vllm"
python = {python}

[worker.vcopy.sampler_options]
dtype = "float32"
enforce_eager = true
max_model_len = 16
max_num_seqs = 512
"""


def write_config(folder: Path, *, steps: int) -> Path:
    """The run's rlbuffer.toml."""
    path = folder / "rlbuffer.toml"
    path.write_text(CONFIG.format(steps=steps, python=json.dumps(sys.executable)))
    return path


def test_a_run_that_samples_with_vllm_learns_to_copy(home: Home) -> None:
    home.environment |= FEW_PROCESSES
    run = home.start("run", write_config(home.path, steps=400), "--display", "plain", log="run")

    def rewards() -> list[float]:
        return [record["reward"] for record in home.metrics("learns")]

    def rise() -> float:
        means = [sum(rewards()[i : i + STEPS_AVERAGED]) / STEPS_AVERAGED for i in range(len(rewards()) - 4)]
        return means[-1] - means[0] if means else 0.0

    home.wait_until(lambda: rise() >= RISE or run.poll() is not None, seconds=480, why=f"a reward {RISE} higher")
    assert run.poll() is None, home.logs()
    print(f"{len(rewards())} steps; rewards {[round(r, 3) for r in rewards()]}")
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=120) == 130
    log = (home.path / "run.log").read_text()
    assert re.search("worker vcopy .*stopped after", log), home.logs()
    checked = home.call("verify", "--run", "learns")
    assert checked.returncode == 0, checked.stdout + checked.stderr
