"""The trainer's disk is full for a while: it waits, says so, and goes on; every step is made, and recorded once.

The disk is a limit on the size of files (RLIMIT_FSIZE), which needs no rights: a write that crosses it is cut there,
and the next one fails, as on a full disk.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbuffer.config.settings import RunSettings
from rlbuffer.errors import CheckpointError, RlbufferError
from rlbuffer.process.ranks import Ranks
from rlbuffer.process.signals import StopRequest
from rlbuffer.records.waiting import Wait, Waiting
from rlbuffer.trainer.checkpoints.checkpoint import steps as checkpoints
from rlbuffer.trainer.fake import FakeRun
from rlbuffer.trainer.loop import train
from rlbuffer.trainer.ranks import room
from rlbuffer.trainer.ranks.room import when_there_is_room
from rlbuffer.trainer.reports import outlet
from rlbuffer.weights.model import TINY_QWEN3

STEPS = 9
PATIENCE_SECONDS = 60.0
SMALL = dict(TINY_QWEN3, hidden_size=32, intermediate_size=32, num_hidden_layers=1)


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Makes it full, or gives room again."""
    monkeypatch.setattr(room, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(outlet, "FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(outlet, "LONGEST_PAUSE_SECONDS", 0.02)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill(is_full: bool) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50 if is_full else before[0], before[1]))

    yield fill
    fill(False)
    signal.signal(signal.SIGXFSZ, handler)


def wanted(folder: Path, **trainer: Any) -> RunSettings:
    return RunSettings(
        home=folder,
        batcher={"row_tokens": 64},
        model={"config": SMALL},
        trainer={"steps": STEPS, "output": folder, "device": "cpu", **trainer},
    )


def recorded(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in list(caplog.records) if r.getMessage().startswith("The trainer has to write")]


class During:
    """Does something in a thread as soon as it may, and then something else."""

    def __init__(self, *moves: tuple[Callable[[], Any], Callable[[], Any]]) -> None:
        self._moves = moves
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        for may, move in self._moves:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not may() and time.monotonic() < deadline:
                time.sleep(0.005)
            move()

    def __enter__(self) -> During:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()


NEVER = 10**6
ROWS = {
    "versions": {"publish": {"every": 1}},
    "checkpoints": {"publish": {"every": NEVER}, "checkpoint": {"every": 4}},
    "records": {"publish": {"every": NEVER}, "checkpoint": {"every": NEVER}},
    "an adapter": {"publish": {"every": 1}, "lora": {"rank": 2}},
    "events": {"publish": {"every": 1}, "reports": {"tensorboard": True}},
}


# TensorBoard writes in a thread of its own, which dies of what its disk says.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("trainer", ROWS.values(), ids=ROWS)
def test_steps_go_on_when_there_is_room(
    disk: Callable[[bool], None], caplog: pytest.LogCaptureFixture, tmp_path: Path, trainer: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO, "rlbuffer")
    with During(
        (lambda: len(recorded(tmp_path)) >= 3, lambda: disk(True)),
        (lambda: waits(caplog), lambda: time.sleep(0.2)),
        (lambda: True, lambda: disk(False)),
    ):
        assert train(wanted(tmp_path, **trainer), rank=0, world_size=1, source=FakeRun)
    (said,) = waits(caplog)
    assert said == (
        f"The trainer has to write, and {tmp_path} cannot be written to (File too large). Make room there; it goes on "
        "by itself."
    )
    assert f"there is room in {tmp_path} again: training goes on" in caplog.messages
    assert recorded(tmp_path) == list(range(1, STEPS + 1)), "each once, in order, none of them torn"
    assert checkpoints(tmp_path / "checkpoints")[-1] == STEPS
    assert not [*tmp_path.glob("*/.tmp*")]
    if "reports" in trainer:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        assert {event.step for event in events.Scalars("loss")} >= set(range(5, STEPS + 1))


def test_a_disk_that_is_full_at_the_start_is_waited_for(
    disk: Callable[[bool], None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    disk(True)
    with During((lambda: waits(caplog), lambda: disk(False))):
        assert train(wanted(tmp_path, lora={"rank": 2}), rank=0, world_size=1, source=FakeRun)
    assert recorded(tmp_path) == list(range(1, STEPS + 1))


def test_a_trainer_that_waits_for_room_stops_when_asked_and_goes_on_later(
    disk: Callable[[bool], None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    stop = StopRequest()
    settings = wanted(tmp_path, checkpoint={"every": 2})
    with (
        During(
            (lambda: checkpoints(tmp_path / "checkpoints"), lambda: disk(True)),
            (lambda: waits(caplog), stop.set),
        ),
        pytest.raises(RlbufferError, match="asked to stop while something waited to be written: The trainer has to"),
    ):
        train(settings, rank=0, world_size=1, stop=stop, source=FakeRun)
    disk(False)
    assert train(settings, rank=0, world_size=1, source=FakeRun)
    assert set(recorded(tmp_path)) == set(range(1, STEPS + 1))


class SimulatedRanks(Ranks):
    """Ranks that are threads."""

    def __init__(self, rank: int, rows: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(rows), torch.device("cpu"))
        self._rows, self._barrier = rows, barrier

    def gather(self, values: torch.Tensor, **_: Any) -> torch.Tensor:
        self._rows[self.rank] = values
        self._barrier.wait(PATIENCE_SECONDS)
        everybody = torch.stack(self._rows)
        self._barrier.wait(PATIENCE_SECONDS)
        return everybody


class Said:
    """What a rank's heartbeat says."""

    def __init__(self) -> None:
        self.all: list[Waiting | None] = []

    def waits(self, waiting: Waiting | None) -> None:
        self.all.append(waiting)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), CheckpointError("x (os error 122)")])
def test_all_ranks_wait_for_the_one_that_has_no_room(tmp_path: Path, error: Exception) -> None:
    """Rank 1 has none twice: rank 0 writes again with it, and nobody goes on alone."""
    rows, barrier, tries = [None, None], threading.Barrier(2), [0, 0]
    said, given = [Said(), Said()], [0, 0]

    def write(rank: int) -> int:
        tries[rank] += 1
        if rank == 1 and tries[1] < 3:
            raise error
        return tries[rank]

    def run(rank: int) -> None:
        ranks = SimulatedRanks(rank, rows, barrier)
        given[rank] = when_there_is_room(
            lambda: write(rank), folder=tmp_path, ranks=ranks, stop=StopRequest(), reader=said[rank]
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tries, given) == ([3, 3], [3, 3])
    assert [waiting.kind for waiting in said[1].all if waiting is not None] == [Wait.DISK] * 2
    assert said[1].all[-1] is None
    assert not any(said[0].all)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), CheckpointError("of another model")])
def test_what_no_room_cures_is_raised_at_once(tmp_path: Path, error: Exception) -> None:
    def write() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        when_there_is_room(write, folder=tmp_path, ranks=Ranks(0, 1, torch.device("cpu")), stop=StopRequest())
    assert caught.value is error
