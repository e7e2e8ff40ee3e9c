"""A server of 64 MB, steps of about 1 MB, and a trainer that would never write a checkpoint by itself."""

from __future__ import annotations

import json
from pathlib import Path

import homes
from homes import Home

STEPS = 150
CONFIG = f"""
run = "tiny"

[server]
appendfsync = "no"
maxmemory = "64mb"

[batcher]
row_tokens = 176
max_age = 2
advantage = "grpo"

[model.config]
model_type = "qwen3"
vocab_size = 16
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 16
max_position_embeddings = 64
tie_word_embeddings = true

[trainer]
steps = {STEPS}
timeout_seconds = 120.0

[trainer.checkpoint]
every = 1000

[worker.heavy]
env = "heavy_env:make"
group_size = 8
groups_per_batch = 2
"""


def test_150_steps_of_a_megabyte_fit_a_server_of_64_megabytes(home: Home) -> None:
    home.environment["PYTHONPATH"] = ":".join(
        filter(None, [home.environment.get("PYTHONPATH", ""), str(Path(homes.__file__).parent)])
    )
    config = home.path / "heavy.toml"
    config.write_text(CONFIG)
    run = home.call("run", config, "--display", "plain", timeout=400)
    said = run.stdout + run.stderr
    assert run.returncode == 0, said[-4000:]
    assert [record["step"] for record in home.metrics()] == list(range(1, STEPS + 1))
    assert "asks the trainer for a checkpoint" in said
    for word in ("OOM", "Error", "Traceback"):
        assert word not in said

    verified = home.call("verify", "--config", config, "--json")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    totals = home.call("top", "--once", "--config", config, "--json")
    server = json.loads(totals.stdout)["server"]
    assert server["memory_limit"] == 64 * 2**20
    assert 0 < server["memory"] < server["memory_limit"]
    with home.connect() as buffer:
        meta = buffer.store.meta()
        mean = sum(header.bytes for header in buffer.store.headers()) / (meta.step - meta.retired)
    assert meta.retired > 0
    assert 0.5 * 2**20 < mean < 1.5 * 2**20


def test_serve_refuses_what_cannot_fit_the_server(home: Home) -> None:
    config = home.path / "heavy.toml"
    config.write_text(CONFIG.replace("row_tokens = 176", "row_tokens = 2000000"))
    refused = home.call("serve", "--config", config, "--display", "plain")
    assert refused.returncode == 3, refused.stdout
    assert "the run does not fit the server's memory: a step takes 17.2 MiB" in refused.stderr
    assert "server.maxmemory" in refused.stderr
