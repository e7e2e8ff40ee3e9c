"""A sampler of one's own, one file beside the config, samples what a run trains."""

from __future__ import annotations

import shutil
from pathlib import Path

from homes import Home

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "own_sampler.py"
CONFIG = """
run = "own"

[server]
appendfsync = "no"

[batcher]
row_tokens = 256
step_groups = 2

[model.config]
model_type = "qwen3"
vocab_size = 16
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 1
num_attention_heads = 4
num_key_value_heads = 4
head_dim = 16
tie_word_embeddings = true
max_position_embeddings = 64

[trainer]
steps = 2
world_size = 1
timeout_seconds = 120.0

[worker.w]
env = "vcopy"
sampler = "own_sampler:OwnSampler"
sampler_options = { threads = 1 }
self_check = "always"
group_size = 4
"""


def test_a_run_trains_what_a_sampler_from_outside_has_sampled(home: Home) -> None:
    shutil.copy(EXAMPLE, home.path)
    config = home.path / "own.toml"
    config.write_text(CONFIG)
    ran = home.call("run", config, "--display", "plain", timeout=240)
    assert ran.returncode == 0, home.logs()
    with home.connect("own") as buffer:
        total = buffer.ledger().total()
        assert buffer.store.meta().step >= 2
        assert total.trained[0] >= 2 * 2 * 4
    config.write_text(CONFIG.replace("threads", "thread"))
    refused = home.call("run", config, "--display", "plain", timeout=60)
    assert (refused.returncode, "own.toml:" in refused.stderr) == (3, True), refused
    assert "sampler_options.thread is not a setting" in refused.stderr
