"""What TRL's door does by itself, without TRL: tickets that its loop has not begun, and places of checkpoints."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlbuffer
from rlbuffer.daemon import Daemon
from rlbuffer.doors import trl as door


def wait_for(fact: Callable[[], object]) -> None:
    """Waits until it is so."""
    until = time.monotonic() + 60.0
    while not fact():
        assert time.monotonic() < until, "it did not come to be within a minute"
        time.sleep(0.02)


class StillLoop(door.TicketLoop):
    """A rollout loop that has asked for a prompt, and begins none."""

    def __init__(self) -> None:
        self.dataset, self.num_generations, self.max_inflight_tasks = [{}], 2, 4
        self._loop, self._stop_event = asyncio.new_event_loop(), asyncio.Event()
        self._heartbeat_value = SimpleNamespace(value=0.0)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._stop_event.set)
        wait_for(lambda: not {t.name for t in threading.enumerate()} & {"rlbuffer-tickets", "rlbuffer-asks"})
        self._loop.close()
        self._buffer.close()


def test_a_ticket_stays_out_while_the_loop_has_not_begun_it(monkeypatch: pytest.MonkeyPatch) -> None:
    url, stop = f"memory://{uuid.uuid4().hex}", threading.Event()
    with rlbuffer.connect(url, run="trl") as buffer:
        buffer.reader().start()
        buffer.policy.announce(0, location="", size=0, checksum="")
        daemon = Daemon(buffer, rlbuffer.BatcherConfig(8192, step_groups=8), lease_seconds=60.0)
        batcher = threading.Thread(target=daemon.run, args=(stop,))
        batcher.start()
        monkeypatch.setattr(door, "RENEW_SECONDS", 0.05)
        loop = StillLoop()
        loop.begin(lambda: rlbuffer.connect(url, run="trl"), "a", 0, None)
        try:
            wait_for(loop.has_prompt)
            store = buffer.store

            def until() -> float:
                return float(store.look(lambda client: client.zscore(store.keys.tickets("a"), 0)))

            first = until()
            wait_for(lambda: until() > first)
        finally:
            loop.end()
            stop.set()
            batcher.join()


@dataclass
class Streamed:
    """The run's stream, as far as the door's callback sees it."""

    place: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    kept: list[int] = field(default_factory=list)
    """Places up to which groups may be removed."""

    def version(self, model_version: int) -> None:
        """Nobody samples."""

    def checkpointed(self, *, oldest_kept: int) -> None:
        self.kept.append(oldest_kept)


def test_groups_behind_the_checkpoint_that_a_run_goes_on_from_stay_until_it_is_gone(tmp_path: Path) -> None:
    stream = Streamed()

    def start(state: dict[str, int]) -> None:
        stream.place = state["place"]

    trainer = SimpleNamespace(model_version=3, _rollout_dataset=SimpleNamespace(max_staleness=1))
    given: Any = SimpleNamespace(start=start, stream=stream)
    callback = door._callback(trainer, given, door.MicroBatches(), None)
    (tmp_path / "checkpoint-3").mkdir()
    saved = {"stream": {"place": 7}, "places": {"checkpoint-2": 4}}  # as it was when checkpoint-3 was written
    arguments = SimpleNamespace(output_dir=str(tmp_path))
    state = SimpleNamespace(global_step=3, stateful_callbacks={"RlbufferStream": saved})
    callback.on_train_begin(arguments, state, None)

    def save(step: int, place: int) -> None:
        (tmp_path / f"checkpoint-{step}").mkdir()
        state.global_step, stream.place = step, place
        callback.on_save(arguments, state, None)

    save(4, 9)
    (tmp_path / "checkpoint-3").rmdir()
    save(5, 12)
    assert stream.kept == [7, 9]
