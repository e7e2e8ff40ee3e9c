"""The page docs/tutorial/your_trainer.md with a real `serve` and a real worker: the reward rises, also after a kill."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from homes import Home
from own_ranks import started
from tiny_tokenizer import save_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import rlbuffer
from rlbuffer.weights.model import TINY_QWEN3

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
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
groups_in_flight = 6
"""


def rewards(buffer: rlbuffer.Buffer) -> list[float]:
    """Mean reward of each committed step."""
    return [record["reward"] for record in reversed(buffer.store.history()) if record["event"] == "step"]


def begin(home: Home, settings: str = CONFIG) -> None:
    """The examples, a fresh model, a batcher and a worker."""
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, home.path)
    config = home.path / "own.toml"
    config.write_text(settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_QWEN3))
    model.save_pretrained(home.path / "model")
    home.start("serve", "--config", config, "--display", "plain", log="serve")
    home.start("worker", "parity", "--config", config, "--display", "plain", log="worker")


@pytest.mark.parametrize("example", ["plain_loop", "hf_trainer", "accelerate_loop", "trl_grpo"])
def test_a_documented_trainer_learns_with_a_real_worker_and_goes_on_after_a_kill(home: Home, example: str) -> None:
    needs, where = {"plain_loop": ("torch", ""), "trl_grpo": ("trl", "make adapters-test")}.get(
        example, ("accelerate", "comes with PEFT")
    )
    if find_spec(needs) is None:
        assert needs != "trl" or os.environ.get("RLBUFFER_ADAPTERS") != "1", "trl must be there"
        pytest.skip(f"needs {needs}: {where}")
    ranks = 2
    begin(home)
    if needs == "trl":
        save_tokenizer(home.path / "model")
    with home.connect("own") as buffer:
        store = buffer.store

        places = store.server()["address"], "own", home.path / "model", home.path / "out", STEPS
        begun = started(home, example, *places, ranks=ranks)
        home.wait_until(lambda: store.trainer().trained >= KILLED_AFTER, seconds=100, why=f"step {KILLED_AFTER}")
        for process in begun:
            process.kill()
            process.wait()
        again = started(home, example, *places, ranks=ranks)
        assert [home.ended(process, 100) for process in again] == [0] * ranks, home.logs()
        attempt = store.trainer()
        assert attempt.trained == STEPS
        assert attempt.resume_step >= KILLED_AFTER // 10 * 10, "it went on from its checkpoint"
        assert buffer.policy.version == STEPS
        assert buffer.verify().ok, buffer.verify()
        earned = rewards(buffer)
        first, last = (sum(part) / len(part) for part in (earned[:5], earned[-5:]))
        assert first < FIRST
        assert last > LAST, earned


STREAM = CONFIG.replace("row_tokens = 64\nstep_groups = 6", 'feeds = "stream"')


def test_the_documented_trainer_that_packs_for_itself_learns_and_goes_on_after_a_kill(home: Home) -> None:
    begin(home, STREAM)
    with home.connect("own") as buffer:
        store, arguments = buffer.store, (home.path / "model", home.path / "out", STEPS)
        places = store.server()["address"], "own", *arguments
        (begun,) = train(home, "stream_loop", *places, ranks=1)
        home.wait_until(lambda: store.trainer().checkpoint > 0, seconds=100, why="a checkpoint")
        begun.kill()
        begun.wait()
        (again,) = train(home, "stream_loop", *places, ranks=1)
        assert home.ended(again, 100) == 0, home.logs()
        attempt = store.trainer()
        assert attempt.resume_step > 0, "it went on from its checkpoint"
        assert attempt.trained == attempt.checkpoint > attempt.resume_step
        assert buffer.verify().ok, buffer.verify()
        account = store.ledger().envs["parity"]
        assert account.trained[0] == 8 * attempt.trained
        earned = rewards(buffer)
        tenth = len(earned) // 10
        assert sum(earned[:tenth]) / tenth < sum(earned[-tenth:]) / tenth, earned


AROUND = """
import os, sys
import torch
import torch.distributed as dist
from plain_loop import loss_of as loss
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

rank, world_size, last = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), 3
model = AutoModelForCausalLM.from_pretrained("model", attn_implementation="eager")
ddp = model
if world_size > 1:
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
"""
"""Parts that the README leaves to the reader: a model, a loss, an optimizer."""
END = """
if dist.is_initialized():
    dist.destroy_process_group()
"""
"""And the end: threads of gloo outlive main otherwise, and may abort the process."""


def test_the_readmes_lines_train_as_they_are(home: Home) -> None:
    begin(home)
    readme = (EXAMPLES.parents[1] / "README.md").read_text()
    lines = readme.partition("## Your own trainer")[2].partition("```python\n")[2].partition("```")[0]
    with home.connect("own") as buffer:
        changes = {'"redis://host:6379"': repr(buffer.store.server()["address"]), '"math"': '"own"', '"cuda"': '"cpu"'}
        for theirs, ours in changes.items():
            assert lines.count(theirs) == 1
            lines = lines.replace(theirs, ours)
        (home.path / "readme.py").write_text(AROUND + lines + END)
        assert [home.ended(process, 60) for process in started(home, "readme", ranks=2)] == [0, 0], home.logs()
        assert (buffer.store.trainer().trained, buffer.policy.version) == (3, 3)
