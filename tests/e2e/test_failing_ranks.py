"""A rank that hangs in its data: the job ends in seconds, with one message."""

from __future__ import annotations

import json
import os
import signal
import time

from homes import Home, model_section

from rlbuffer.testing import make_group

CONFIG = """
run = "tiny"

[server]
appendfsync = "no"

[batcher]
row_tokens = 256
max_age = 100
step_groups = 4

[trainer]
world_size = 2
steps = 1000
device = "cpu"
"""


def push(home: Home, first: int, count: int) -> None:
    """Groups of 4 rollouts; 4 groups are a step."""
    with home.connect() as buffer:
        writer = buffer.writer("test")
        for seed in range(first, first + count):
            writer.push(make_group(env="a", size=4, seed=seed))


def test_a_rank_that_hangs_in_its_data_ends_the_job(home: Home) -> None:
    config = home.path / "tiny.toml"
    config.write_text(CONFIG + model_section(vocab_size=32000))
    home.start("serve", "--config", config, log="serve")
    home.wait_until(lambda: list(home.path.glob("server/server.json")), seconds=60, why="the server's start")
    push(home, 1, 12)
    trainer = home.start("train", "--config", config, "--display", "plain", "--max-restarts", "0", log="train")
    home.wait_until(lambda: len(home.metrics()) >= 3 or trainer.poll() is not None, seconds=180, why="3 trained steps")
    assert len(home.metrics()) == 3, home.logs()
    time.sleep(1.0)  # all ranks wait for the next step by now; if not, the test is weaker, not wrong
    ranks = json.loads((home.path / "runs" / "tiny" / "ranks.json").read_text())
    os.kill(ranks["rank-1"], signal.SIGSTOP)
    push(home, 100, 4)  # the other rank gets a step
    assert home.ended(trainer, 60) == 5, home.logs()
    assert "rank 0 has step 4, and rank 1 has been pulling it for 15 s more" in home.printed()
    with home.connect() as buffer:
        assert buffer.store.trainer().trained == 3
        assert buffer.verify().findings == ()
