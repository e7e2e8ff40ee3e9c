"""W&B breaks in each way that a package can: every step is trained, and is in ``metrics.jsonl``; the end comes."""

from __future__ import annotations

import builtins
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbuffer.config.settings import RunSettings
from rlbuffer.process.signals import StopRequest
from rlbuffer.trainer.fake import FakeRun
from rlbuffer.trainer.loop import train
from rlbuffer.trainer.reports import outlet, reports
from rlbuffer.weights.model import TINY_QWEN3

STEPS = 6
PATIENCE_SECONDS = 60.0
SMALL = dict(TINY_QWEN3, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
PACKAGE = """
import sys
def hang(): assert RELEASED.wait(60)
def fail(error): raise error
{on_import}
class Run:
    logged = 0
    def define_metric(self, *names, **options): pass
    def log(self, values):
        self.logged += 1
        {on_log}
        TAKEN.append(int(values["step"]))
    def finish(self):
        {on_finish}
def init(**options):
    {on_init}
    return Run()
"""
RAISES = 'fail(BrokenPipeError(32, "the service has gone"))'
HANGS = "hang()"
ROWS = {
    # where -> what it does there, and what is said
    "import raises": ("on_import", 'fail(ImportError("libcudart.so.11"))', "has failed at its start (ImportError"),
    "import hangs": ("on_import", HANGS, "has not come back from its start"),
    "import ends": ("on_import", "sys.exit(1)", "has failed at its start (SystemExit: 1)"),
    "init raises": ("on_init", RAISES, "has failed at its start (BrokenPipeError"),
    "init hangs": ("on_init", HANGS, "has not come back from its start"),
    "init ends": ("on_init", "sys.exit(1)", "has failed at its start (SystemExit: 1)"),
    "init asks": ("on_init", 'input("API key: ")', "has failed at its start ("),
    "init is interrupted": ("on_init", "fail(KeyboardInterrupt())", "has failed at its start (KeyboardInterrupt"),
    "log raises": ("on_log", f"if self.logged >= 3: {RAISES}", "has failed at step 3 (BrokenPipeError"),
    "log raises always": ("on_log", RAISES, "has failed at step 1 (BrokenPipeError"),
    "log hangs": ("on_log", "if self.logged == 3: hang()", "has not come back from step 3"),
    "finish raises": ("on_finish", RAISES, "has failed at its end (BrokenPipeError"),
    "finish hangs": ("on_finish", HANGS, "has not come back from its end"),
}


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What hangs does so until the end of the test."""
    event = threading.Event()
    monkeypatch.setattr(builtins, "RELEASED", event, raising=False)
    monkeypatch.setattr(builtins, "TAKEN", [], raising=False)
    monkeypatch.setattr(outlet, "HANG_SECONDS", 0.1)
    monkeypatch.setattr(outlet, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(reports, "CLOSE_SECONDS", 1.0)
    monkeypatch.setattr(reports, "HURRIED_SECONDS", 0.2)
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name == "report W&B":
            thread.join(PATIENCE_SECONDS)


def breaks(monkeypatch: pytest.MonkeyPatch, folder: Path, where: str, what: str) -> None:
    """Puts a package in W&B's place that does this there."""
    parts = dict.fromkeys(("on_import", "on_init", "on_log", "on_finish"), "pass") | {where: what}
    (folder / "site" / "wandb").mkdir(parents=True)
    (folder / "site" / "wandb" / "__init__.py").write_text(PACKAGE.format(**parts))
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(folder / "site"))


def wanted(folder: Path, *, steps: int = STEPS) -> RunSettings:
    return RunSettings(
        home=folder,
        batcher={"row_tokens": 64},
        model={"config": SMALL},
        trainer={"steps": steps, "output": folder, "device": "cpu", "reports": {"wandb_project": "p"}},
    )


def recorded(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("where", "what", "said"), ROWS.values(), ids=ROWS)
def test_the_run_makes_its_steps(
    released: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    where: str,
    what: str,
    said: str,
) -> None:
    breaks(monkeypatch, tmp_path, where, what)
    with caplog.at_level(logging.INFO, "rlbuffer"):
        assert train(wanted(tmp_path), rank=0, world_size=1, source=FakeRun)
    assert recorded(tmp_path) == list(range(1, STEPS + 1))
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "W&B" in r.getMessage()]
    assert f"W&B {said}" in warnings[0]
    assert all(line.endswith(". metrics.jsonl has every step") for line in warnings)
    assert len(warnings) <= 3


@pytest.mark.parametrize("where", ["on_init", "on_log", "on_finish", "on_import"])
def test_a_trainer_whose_report_hangs_stops_when_asked_and_goes_on_later(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    breaks(monkeypatch, tmp_path, where, HANGS)
    stop, ended = StopRequest(), threading.Event()

    def ask() -> None:
        while not ended.wait(0.02):
            if (tmp_path / "metrics.jsonl").exists() and len(recorded(tmp_path)) >= 3:
                stop.set()

    asking = threading.Thread(target=ask)
    asking.start()
    began = time.monotonic()
    try:
        assert not train(wanted(tmp_path, steps=10**6), rank=0, world_size=1, stop=stop, source=FakeRun)
    finally:
        ended.set()
        asking.join()
    assert time.monotonic() - began < PATIENCE_SECONDS
    made = recorded(tmp_path)
    released.set()
    assert train(wanted(tmp_path, steps=len(made) + 2), rank=0, world_size=1, source=FakeRun)
    assert recorded(tmp_path) == list(range(1, len(made) + 3)), "it went on from its last step"
