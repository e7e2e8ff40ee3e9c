"""What is added to a file begins a line of its own, whatever stands there: after a kill, and after a full disk."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_lenses import rollout
from test_trainer_reports import record

from rlbuffer.client.trainer_values import SAMPLES_FILE
from rlbuffer.packing.pack import pack
from rlbuffer.process.files import append_lines
from rlbuffer.run.run_log import RunLog
from rlbuffer.trainer.reports.debug_samples import keep
from rlbuffer.trainer.reports.sinks import MetricsFile
from rlbuffer_cli.live import MetricsTail


def to_metrics(folder: Path, number: int) -> Path:
    file = MetricsFile(folder)
    file.add(record(number))
    file.write()
    return file.path


def to_log(folder: Path, number: int) -> Path:
    log = RunLog(folder / "run.log", lambda name, line: None)
    log.open()
    log.write_line("serve", f"step {number}")
    log.close()
    return log.path


def to_samples(folder: Path, number: int) -> Path:
    tokens: Any = SimpleNamespace(logprobs=torch.tensor([-0.4, -0.9, -2.1]), entropy=torch.arange(3.0))
    keep(folder / SAMPLES_FILE, pack([rollout()], [0.25], row_tokens=16), tokens, number, 1)
    return folder / SAMPLES_FILE


WRITERS = [to_metrics, to_log, to_samples]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("torn", [b'{"step": 4, "lo', b"\xff\xc3", b"\n\n{"])
def test_a_line_that_was_cut_off_swallows_none(tmp_path: Path, write: Callable[[Path, int], Path], torn: bytes) -> None:
    path = write(tmp_path, 1)
    before = path.read_bytes()
    path.write_bytes(before + torn)
    write(tmp_path, 2)
    write(tmp_path, 3)
    whole = path.read_bytes()
    first, second, third = whole[len(before) + len(torn) :].split(b"\n")[:3]
    assert whole.startswith(before + torn)
    assert (first, bool(second), bool(third)) == (b"", True, True)
    assert whole.endswith(b"\n")


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes: a write that crosses it is cut there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, former)


@pytest.mark.parametrize("room", [0, 1, 5, 9])
def test_what_a_full_disk_cut_off_is_taken_back(tmp_path: Path, room: int) -> None:
    path = tmp_path / "lines"
    append_lines(path, "first\n")
    with file_limit(6 + room), pytest.raises(OSError):
        append_lines(path, "0123456789\n")
    append_lines(path, "second\n")
    assert path.read_text() == "first\nsecond\n"


def test_a_tail_reads_half_a_line_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    first, second, third = (json.dumps(record(step).as_object()) for step in (1, 2, 3))
    path.write_text(f"{first}\n{second[:20]}")
    assert [r.step for r in tail.new()] == [1]
    path.write_text(f"{first}\n{second}\n{third}\n")  # taken back, and written again
    assert [r.step for r in tail.new()] == [2, 3]
