"""A run on an agent with branches of verifiers: its trees are trained, each token once, and shown as trees."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from forked import Parent
from homes import Home, a_home
from transformers import AutoTokenizer

HERE = Path(__file__).parent
STEPS = 4
SETTINGS = """
run = "tiny"

[batcher]
row_tokens = 1024
step_groups = 0
max_age = 4

[model.config]
model_type = "qwen3"
vocab_size = {vocabulary}
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 16
initializer_range = 0.1
tie_word_embeddings = true
max_position_embeddings = 512

[trainer]
world_size = 2
steps = {steps}
timeout_seconds = 120.0

[trainer.checkpoint]
every = 50

[worker.branches]
env = "verifiers"
group_size = 4
groups_in_flight = 2
max_new_tokens = 12

[worker.branches.env_options]
taskset = "tiny_branches"
tokenizer = "{tokenizer}"
renderer = {{ name = "qwen3", enable_thinking = false }}
agent = {{ harness = {{ id = "tiny_branches" }} }}
name = "branches"
"""


@pytest.fixture
def home(parent: Parent) -> Iterator[Home]:
    with a_home(parent) as place:
        yield place


def test_an_agents_trees_are_trained_on_two_ranks_each_token_once_and_shown_as_trees(
    home: Home, tokenizer: Path
) -> None:
    vocabulary = len(AutoTokenizer.from_pretrained(str(tokenizer)))
    config = home.path / "tiny.toml"
    config.write_text(SETTINGS.format(vocabulary=vocabulary, steps=STEPS, tokenizer=tokenizer))
    shutil.copy(HERE / "tiny_branches.py", home.path)
    run = home.call("run", config, "--display", "plain", timeout=400)
    assert run.returncode == 0, run.stdout + run.stderr + home.logs()
    records = home.metrics()
    assert [record["step"] for record in records] == [*range(1, STEPS + 1)]
    with home.connect() as buffer:
        views = buffer.groups("state:trained", limit=10_000)
        details = [buffer.group(view.group_id) for view in views]
        rollouts = [member.rollout for detail in details for member in detail.members]
        trees = [rollout for rollout in rollouts if len(rollout.sequences) > 1]
        assert trees
        for rollout in trees:
            begun, other = rollout.sequences[:2]
            first = next(turn for turn in begun.turns if turn.role == "assistant")
            assert np.array_equal(begun.tokens[: first.end], other.tokens[: first.end])
            assert begun.loss_mask[first.start : first.end].any()
            assert not other.loss_mask[: first.end].any()
        trained = sum(int(sequence.loss_mask.sum()) for rollout in rollouts for sequence in rollout.sequences)
        assert sum(record["loss_tokens"] for record in records) == trained
    verified = home.call("verify", "--run", "tiny")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    detail = next(d for d in details if any(len(m.rollout.sequences) > 1 for m in d.members))
    tree = next(m for m in detail.members if len(m.rollout.sequences) > 1).rollout_id
    shown = home.call("inspect", detail.view.group_id, "--run", "tiny").stdout
    assert [line for line in shown.splitlines() if line.startswith(("├─ ", "└─ ")) and "trained before" in line], shown
    record = json.loads(home.call("inspect", tree, "--json", "--run", "tiny").stdout)
    second = record["sequences"][1]
    assert (second["shared_with"], second["shared_trained"] > 0) == (f"{tree}.0", True)
