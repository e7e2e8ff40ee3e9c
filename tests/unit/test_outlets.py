"""TensorBoard and W&B as they break: what raises or hangs there costs them records, and the trainer nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rlbuffer.state.step_record import StepRecord
from rlbuffer.trainer.reports import outlet as outlets
from rlbuffer.trainer.reports.outlet import Outlet
from rlbuffer.trainer.reports.sinks import Write

STEPS = 6
PATIENCE_SECONDS = 30.0


class Tool:
    """A tool that breaks as it is told: part of its life (start, step, end) and how often -> what it does then."""

    def __init__(self, part: str, breaks: Callable[[], object], times: int = 10**9, step: int = 0) -> None:
        self._part, self._breaks, self._left, self._step = part, breaks, times, step
        self.took: list[int] = []
        self.starts = 0

    def _meets(self, part: str, step: int = 0) -> None:
        if part == self._part and step >= self._step and self._left:
            self._left -= 1
            self._breaks()

    @contextmanager
    def opened(self) -> Iterator[Write]:
        self.starts += 1
        self._meets("start")

        def write(record: StepRecord) -> None:
            self._meets("step", record.step)
            self.took.append(record.step)

        try:
            yield write
        finally:
            self._meets("end")


def raising(error: BaseException) -> Callable[[], object]:
    def raises() -> None:
        raise error

    return raises


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlets, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(outlets, "LONGEST_PAUSE_SECONDS", 0.01)


def handed_over(tool: Tool, *, steps: int = STEPS) -> None:
    """As a trainer that makes a step after the other, and ends."""
    outlet = Outlet("W&B", tool.opened)
    for step in range(1, steps + 1):
        outlet.add(StepRecord(step=step))
    outlet.close(PATIENCE_SECONDS)
    assert "report W&B" not in [thread.name for thread in threading.enumerate()]


EVERYTHING = [1, 2, 3, 4, 5, 6]
ERRORS = [
    BrokenPipeError(32, "the service has gone"),
    ImportError("libcudart.so.11"),
    EOFError("EOF when reading a line"),
    SystemExit(1),
    KeyboardInterrupt(),
    GeneratorExit(),
    BaseException("a panic"),
    OSError(28, "No space left on device"),
]
ROWS = [
    # part, times, from step on; what arrives
    ("start", 1, 0, EVERYTHING),
    ("start", 3, 0, EVERYTHING),
    ("start", 10**9, 0, []),
    ("step", 1, 3, EVERYTHING),
    ("step", 2, 3, [1, 2, 4, 5, 6]),  # the record may be the cause
    ("step", 10**9, 3, [1, 2]),
    ("end", 1, 0, EVERYTHING),
    ("end", 10**9, 0, EVERYTHING),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("part", "times", "step", "arrives"), ROWS)
def test_what_raises_is_said_and_tried_again(
    caplog: pytest.LogCaptureFixture, error: BaseException, part: str, times: int, step: int, arrives: list[int]
) -> None:
    tool = Tool(part, raising(error), times, step)
    with caplog.at_level(logging.INFO, "rlbuffer"):
        outlet = Outlet("W&B", tool.opened)
        for number in range(1, STEPS + 1):
            outlet.add(StepRecord(step=number))
        if times < 10**9:  # it gets all the time that it needs
            deadline = time.monotonic() + PATIENCE_SECONDS
            while tool.took != arrives and time.monotonic() < deadline:
                time.sleep(0.01)
        outlet.close(PATIENCE_SECONDS)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert tool.took == arrives
    where = {"start": "its start", "step": "step 3", "end": "its end"}[part]
    assert said[0].startswith(f"W&B has failed at {where} ({type(error).__name__}: {error}). It is tried again")
    assert len([line for line in said if "has failed" in line]) == 1, "once a minute at most"
    lacking = STEPS - len(arrives)
    assert [line for line in said[1:] if "lacks" in line] == (
        [f"W&B lacks {lacking} step{'s' * (lacking > 1)}. metrics.jsonl has every step"] if lacking else []
    )


@pytest.mark.parametrize("part", ["start", "step", "end"])
def test_what_hangs_holds_nobody_up_and_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(outlets, "HANG_SECONDS", 0.05)
    hangs, released = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert released.wait(PATIENCE_SECONDS)

    tool = Tool(part, hang, 1)
    outlet = Outlet("W&B", tool.opened)
    outlet.add(StepRecord(step=1))
    step = 1
    while part != "end" and not caplog.records:
        step += 1
        outlet.add(StepRecord(step=step))
        time.sleep(0.01)
    if part != "end":
        (record,) = caplog.records
        where = {"start": "its start", "step": "step 1"}[part]
        assert record.getMessage() == (
            f"W&B has not come back from {where} for 0 s: training goes on without it, now at step {step}. "
            "metrics.jsonl has every step"
        )
        outlet.add(StepRecord(step=step + 1))
        assert len(caplog.records) == 1
        outlet.close(0.0)  # the trainer ends
    else:
        outlet.close(0.3)
    assert hangs.is_set()
    last = caplog.records[-1].getMessage()
    assert last.endswith("the trainer ends without it. metrics.jsonl has every step")
    released.set()
    outlet._thread.join(PATIENCE_SECONDS)
    assert not outlet._thread.is_alive()
    assert tool.took == list(range(1, step + (part != "end") + 1)), "in their order, and none of them twice"


def test_the_newest_records_wait_for_what_hangs_and_the_others_are_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlets, "KEPT_RECORDS", 4)
    monkeypatch.setattr(outlets, "HANG_SECONDS", 0.0)
    hangs, released = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert released.wait(PATIENCE_SECONDS)

    tool = Tool("step", hang, 1)
    outlet = Outlet("W&B", tool.opened)
    outlet.add(StepRecord(step=1))
    assert hangs.wait(PATIENCE_SECONDS)
    with caplog.at_level(logging.INFO, "rlbuffer"):
        for step in range(2, 11):
            outlet.add(StepRecord(step=step))
        released.set()
        outlet.close(PATIENCE_SECONDS)
    assert tool.took == [1, 8, 9, 10]
    assert "W&B takes steps again, from step 1 on; it lacks 6 steps" in [r.getMessage() for r in caplog.records]


def test_a_tool_that_works_is_opened_once_and_closed_with_everything(caplog: pytest.LogCaptureFixture) -> None:
    tool = Tool("never", raising(AssertionError()))
    handed_over(tool, steps=100)
    assert (tool.took, tool.starts, caplog.records) == (list(range(1, 101)), 1, [])
