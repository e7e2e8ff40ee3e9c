"""The page docs/tutorial/your_trainer.md with a real `serve` and a real worker: the reward rises, also after a kill."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import waits
from homes import Home
from own_ranks import started
from tiny_tokenizer import save_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import rlbuffer
from rlbuffer.records.waiting import Wait, Waiting
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


def begin(home: Home, settings: str = CONFIG, *, worker: bool = True) -> Any:
    """The examples, a fresh model, a batcher and a worker. -> the worker's process; None without."""
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, home.path)
    config = home.path / "own.toml"
    config.write_text(settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_QWEN3))
    model.save_pretrained(home.path / "model")
    home.start("serve", "--config", config, "--display", "plain", log="serve")
    command = "worker", "parity", "--config", config, "--display", "plain"
    return home.start(*command, log="worker") if worker else None


@pytest.mark.parametrize("example", ["plain_loop", "hf_trainer", "accelerate_loop", "trl_grpo"])
def test_a_documented_trainer_learns_with_a_real_worker_and_goes_on_after_a_kill(home: Home, example: str) -> None:
    needs, where = {"plain_loop": ("torch", ""), "trl_grpo": ("trl", "make adapters-test")}.get(
        example, ("accelerate", "comes with PEFT")
    )
    if find_spec(needs) is None:
        assert needs != "trl" or os.environ.get("RLBUFFER_ADAPTERS") != "1", "trl must be there"
        pytest.skip(f"needs {needs}: {where}")
    ranks = 2
    worker = begin(home)
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
        assert home.ended(worker, 60) == 0, home.logs()
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
        (begun,) = started(home, "stream_loop", *places, ranks=1)
        home.wait_until(lambda: store.trainer().checkpoint > 0, seconds=100, why="a checkpoint")
        begun.kill()
        begun.wait()
        (again,) = started(home, "stream_loop", *places, ranks=1)
        assert home.ended(again, 100) == 0, home.logs()
        attempt = store.trainer()
        assert attempt.resume_step > 0, "it went on from its checkpoint"
        assert attempt.trained == attempt.checkpoint > attempt.resume_step
        assert buffer.verify().ok, buffer.verify()
        account = store.ledger().envs["parity"]
        assert account.trained[0] == 8 * attempt.trained
        earned = rewards(buffer)
        tenth = len(earned) // 10
        (through,) = started(home, "stream_loop", *places, ranks=1)
        assert home.ended(through, 100) == 0, "what is through ends when it is started again"
        assert sum(earned[:tenth]) / tenth < sum(earned[-tenth:]) / tenth, earned


TRAINER = """
import os, sys
import torch
import torch.distributed as dist
from plain_loop import loss_of as loss
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
model = AutoModelForCausalLM.from_pretrained("model", attn_implementation="eager")
dist.init_process_group("gloo")
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

def save(model, optimizer, place):
    if rank == 0:
        torch.save({"model": model.state_dict(), "place": place}, "saved.pt")
"""
"""Parts that the README leaves to the reader: a model, a loss, an optimizer, a checkpoint."""
END = """
dist.destroy_process_group()
"""
"""And the end: threads of gloo outlive main otherwise, and may abort the process."""
WORKER = """
import random

def sample(number, n):
    for _ in range(n):
        tokens = [random.randrange(10, 13) for _ in range(2)]
        yield [number % 10], tokens, [-1.1, -1.1], float(tokens[0] == 10 + number % 2)
"""
"""The engine, and the reward."""


def of_readme(heading: str, changes: Mapping[str, str]) -> str:
    """The lines below a heading, which are at most twelve, with other names in them."""
    readme = (EXAMPLES.parents[1] / "README.md").read_text()
    lines = readme.partition(heading)[2].partition("```python\n")[2].partition("```")[0]
    assert len([line for line in lines.splitlines() if line.strip()]) <= 12
    for theirs, ours in changes.items():
        assert lines.count(theirs) == 1
        lines = lines.replace(theirs, ours)
    return lines


def test_the_readmes_worker_and_trainer_run_as_they_are_to_the_end_of_the_run(home: Home) -> None:
    """Nobody is asked to stop: the trainer's end is heard by the worker, and by whoever looks."""
    begin(home, worker=False)
    with home.connect("own") as buffer:
        places = {'"redis://host:6379"': repr(buffer.store.server()["address"]), '"math"': '"own"'}
        trainer = of_readme("## Your own trainer", places | {'"cuda"': '"cpu"', "last=200": "last=3"})
        (home.path / "trainer.py").write_text(TRAINER + trainer + END)
        (home.path / "worker.py").write_text(WORKER + of_readme("## Your own worker", places))
        worker = home.start_python(str(home.path / "worker.py"), log="own-worker")
        ranks = started(home, "trainer", ranks=2)
        assert [home.ended(process, 100) for process in ranks] == [0, 0], home.logs()
        assert home.ended(worker, 60) == 0, home.logs()
        assert (buffer.store.trainer().trained, buffer.policy.version) == (3, 3)
        assert torch.load(home.path / "saved.pt")["place"]["step"] == 3
        home.wait_until(lambda: buffer.store.meta().retired == 3, seconds=30, why="what is saved is let go of")
        ended = Waiting(kind=Wait.ENDED, step=3)
        home.wait_until(lambda: waits.said(buffer.store) == ended, seconds=30, why="the run has ended")
