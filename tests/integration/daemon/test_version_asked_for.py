"""A trainer that publishes seldom, and rules that need a version after every step: the headers ask for it."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import rlbuffer
from rlbuffer.config.settings import RunSettings
from rlbuffer.daemon import Daemon
from rlbuffer.errors import RunEnded
from rlbuffer.testing import VOCABULARY, make_group
from rlbuffer.trainer.loop import train
from rlbuffer.weights.model import TINY_QWEN3


class Together:
    """A batcher, and a worker that samples whatever version is published, in threads over one store."""

    def __init__(self, config: rlbuffer.BatcherConfig) -> None:
        self.url, self.run = f"memory://{uuid.uuid4().hex}", f"asked-{uuid.uuid4().hex[:8]}"
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(self._serve, config)),
            threading.Thread(target=self._guarded, args=(self._work,)),
        ]
        for thread in self._threads:
            thread.start()

    def _guarded(self, what: Any, *arguments: Any) -> None:
        try:
            with rlbuffer.connect(self.url, run=self.run) as buffer:
                what(buffer, *arguments)
        except BaseException as error:
            self.errors.append(error)

    def _serve(self, buffer: rlbuffer.Buffer, config: rlbuffer.BatcherConfig) -> None:
        Daemon(buffer, config, lease_seconds=60.0).run(self.stop)

    def _work(self, buffer: rlbuffer.Buffer) -> None:
        writer, number = buffer.writer("w"), 0
        while not self.stop.wait(0.02):
            version = buffer.policy.version
            if version < 0:
                continue
            try:
                tickets = writer.take("a", 1, timeout_seconds=0.0)
            except RunEnded:
                return
            for ticket in tickets:
                number += 1
                sizes = {"size": 2, "rewards": [0.0, 1.0], "lengths": [8, 8]}
                writer.push(make_group(seed=number, group_id=ticket.group_id, version=version, **sizes))

    def close(self) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(timeout=30)


def test_a_trainer_publishes_what_the_next_step_needs_though_it_publishes_seldom(tmp_path: Path) -> None:
    together = Together(rlbuffer.BatcherConfig(64, step_groups=1, lookahead=0, max_age=0))
    settings = RunSettings(
        run=together.run,
        redis_url=together.url,
        home=tmp_path,
        batcher={"row_tokens": 64},
        model={"config": {**TINY_QWEN3, "vocab_size": VOCABULARY}},
        trainer={"steps": 7, "publish": {"every": 100}, "timeout_seconds": 60.0, "checkpoint": {"every": 100}},
    )
    try:
        # Without the headers' word nothing but version 0 would be published, and step 2 would wait for ever.
        assert train(settings, rank=0, world_size=1)
        with rlbuffer.connect(together.url, run=together.run) as buffer:
            headers = {header.step: header for header in buffer.store.headers()}
            assert buffer.verify().ok
    finally:
        together.close()
    assert not together.errors
    assert all(header.max_age == 0 for header in headers.values())
    asked = {step: headers[step].waiting_for_version for step in range(1, 8)}
    assert asked == {step: step for step in range(1, 8)}
