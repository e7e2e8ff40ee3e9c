"""A small run with an archive: batcher and worker in threads, and our trainer of one rank in this process."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rlbuffer
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon import Daemon
from rlbuffer.errors import RunEnded
from rlbuffer.testing import VOCABULARY, make_group
from rlbuffer.trainer.loop import train
from rlbuffer.weights.model import TINY_QWEN3

STEPS = 6
Work = Callable[[rlbuffer.Buffer, threading.Event], None]
"""What a worker does with a run until the event is set."""
SMALL = dict(TINY_QWEN3, hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=VOCABULARY)


def push_made_up(buffer: rlbuffer.Buffer, stop: threading.Event) -> None:
    """Pushes groups with made-up logprobs for tickets, until the run ends."""
    writer, number = buffer.writer("w"), 0
    while not stop.wait(0.01):
        try:
            tickets = writer.take("a", 2, timeout_seconds=0.0) if buffer.policy.version >= 0 else []
        except RunEnded:
            return
        for ticket in tickets:
            number += 1
            writer.push(make_group(seed=number, size=4, group_id=ticket.group_id, version=buffer.policy.version))


def record(
    home: Path, *, run: str = "recorded", work: Work = push_made_up, step_groups: int = 2, **trainer: Any
) -> RunSettings:
    """Trains STEPS steps; the archive is in `home`/archive, with a checkpoint of every second step beside the run."""
    url = f"memory://{uuid.uuid4().hex}"
    batcher = rlbuffer.BatcherConfig(64, step_groups=step_groups, max_age=3)
    settings = RunSettings(
        run=run,
        redis_url=url,
        home=home,
        batcher=batcher.as_dict(),
        archive={"dir": str(home / "archive")},
        model={"config": SMALL, "dtype": "float64"},
        trainer={
            "steps": STEPS,
            "device": "cpu",
            "timeout_seconds": 200.0,
            "loss": {"name": "dapo", "entropy_bonus": 0.01},
            "optimizer": {"schedule": "linear", "warmup_updates": 2},
            "checkpoint": {"every": 2, "keep": 9},
            "reports": {"check_ranks": True},
        }
        | trainer,
    )
    stop, errors = threading.Event(), list[BaseException]()

    def serve() -> None:
        with rlbuffer.connect(url, run=run, config=settings) as buffer:
            Daemon(buffer, batcher, lease_seconds=60.0).run(stop)

    def sample() -> None:
        with rlbuffer.connect(url, run=run) as buffer:
            work(buffer, stop)

    def guarded(what: Any) -> None:
        try:
            what()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(what,)) for what in (serve, sample)]
    for thread in threads:
        thread.start()
    try:
        assert train(settings, rank=0, world_size=1)
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=120)
    assert not errors, errors
    return settings
