"""A rank that raises, one that is killed, one that hangs in its data: the job ends in seconds, with one message."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from homes import Home

from rlbuffer.testing import make_group

CONFIG = """
run = "tiny"

[server]
appendfsync = "no"

[batcher]
row_tokens = 256
max_age = 100
step_groups = 4

[model.config]
model_type = "qwen3"
vocab_size = 32000
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 8
tie_word_embeddings = true

[trainer]
world_size = 2
steps = 1000
device = "cpu"

[trainer.loss]
name = "{loss}"
"""

LOSS = """
import os
from rlbuffer.config.losses import ClipOptions
from rlbuffer.trainer.losses.clipping import clipped

calls = 0

def loss(tokens, options):
    global calls
    calls += 1
    if calls == 3 and os.environ["RANK"] == "1":
        raise ValueError("rank 1 does not like step 3")
    return clipped(tokens, ClipOptions())
"""

END_SECONDS = 60.0
"""From the failure to the end of the job."""


def push(home: Home, first: int, count: int) -> None:
    """Groups of 4 rollouts; 4 groups are a step."""
    with home.connect() as buffer:
        writer = buffer.writer("test")
        for seed in range(first, first + count):
            writer.push(make_group(env="a", size=4, seed=seed))


def start(home: Home, *, loss: str = "clip", steps: int = 3) -> subprocess.Popen[str]:
    """The batcher, groups for `steps` steps, two ranks."""
    config = home.path / "tiny.toml"
    config.write_text(CONFIG.format(loss=loss))
    home.start("serve", "--config", config, log="serve")
    home.wait_until(lambda: list(home.path.glob("server/server.json")), seconds=60, why="the server's start")
    push(home, 1, 4 * steps)
    return home.start("train", "--config", config, "--display", "plain", "--max-restarts", "0", log="train")


def wait_for_steps(home: Home, trainer: subprocess.Popen[str], steps: int) -> None:
    home.wait_until(
        lambda: len(home.metrics()) >= steps or trainer.poll() is not None, seconds=180, why=f"{steps} trained steps"
    )
    assert len(home.metrics()) == steps, home.logs()
    time.sleep(1.0)  # all ranks wait for the next step by now; if not, the test is weaker, not wrong


def end_of(home: Home, trainer: subprocess.Popen[str], fail: Callable[[], None] = lambda: None) -> list[str]:
    """Makes it fail and waits. -> what the trainer printed, without what it says of steps."""
    began = time.monotonic()
    fail()
    trainer.wait(timeout=2 * END_SECONDS)
    assert time.monotonic() - began < END_SECONDS, home.logs()
    lines = (home.path / "train.log").read_text().splitlines()
    return [line for line in lines if not line.startswith(("step ", "training ", "checkpoint "))]


def nothing_is_acknowledged_but_what_was_trained(home: Home, steps: int) -> None:
    with home.connect() as buffer:
        assert buffer.store.trainer().trained == steps
        assert buffer.verify().findings == ()


def pid_of(home: Home, rank: int) -> int:
    import json

    return int(json.loads((home.path / "runs" / "tiny" / "ranks.json").read_text())[f"rank-{rank}"])


def test_a_rank_that_raises_ends_the_job_with_its_traceback_once(home: Home) -> None:
    Path(home.path / "failing.py").write_text(LOSS)
    trainer = start(home, loss="failing:loss")
    home.wait_until(lambda: len(home.metrics()) >= 2 or trainer.poll() is not None, seconds=180, why="two steps")
    text = "\n".join(end_of(home, trainer))
    assert trainer.returncode == 1, home.logs()
    assert text.startswith("Rank 1 failed:\nTraceback (most recent call last):\n")
    assert text.count("Traceback") == 1
    assert text.count("ValueError: rank 1 does not like step 3") == 1
    assert text.endswith("Giving up after 0 restarts.")
    nothing_is_acknowledged_but_what_was_trained(home, 2)


def test_a_rank_that_is_killed_ends_the_job(home: Home) -> None:
    trainer = start(home)
    wait_for_steps(home, trainer, 3)
    lines = end_of(home, trainer, lambda: os.kill(pid_of(home, 1), signal.SIGKILL))
    assert trainer.returncode == 1
    assert lines == ["Rank 1 was killed by SIGKILL.", "Giving up after 0 restarts."]
    nothing_is_acknowledged_but_what_was_trained(home, 3)


def test_a_rank_that_hangs_in_its_data_ends_the_job(home: Home) -> None:
    trainer = start(home)
    wait_for_steps(home, trainer, 3)

    def hang() -> None:
        os.kill(pid_of(home, 1), signal.SIGSTOP)
        push(home, 100, 4)  # the other rank gets a step

    lines = end_of(home, trainer, hang)
    assert trainer.returncode == 5, home.logs()
    assert "\n".join(lines) == (
        "Error: rank 0 has step 4, and rank 1 has been pulling it for 15 s more: rank 1 hangs in its data. Look at its "
        "host and its connection to the server"
    )
    nothing_is_acknowledged_but_what_was_trained(home, 3)
