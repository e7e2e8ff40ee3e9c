"""A program whose main thread ends with open objects of rlbuffer ends, whatever their threads wait for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import sys, threading
import rlbuffer
from rlbuffer.config import BatcherConfig
from rlbuffer.daemon import Daemon
buffer = rlbuffer.connect({url!r}, run="open")
waits = threading.Event()
def behind(work):
    def run():
        waits.set()
        try:
            work()
        except rlbuffer.RlbufferError:
            pass  # its server may go before it
    threading.Thread(target=run, daemon=True).start()
    waits.wait()
def serve():
    daemon = Daemon(buffer, BatcherConfig(64, step_groups=1))
    threading.Thread(target=daemon.run, args=(threading.Event(),), daemon=True).start()
"""
PROGRAMS = {
    "buffer": "",
    "reader": "reader = buffer.reader(); reader.start()",
    "reader that waits": "reader = buffer.reader(); reader.start(); behind(lambda: reader.pull(1))",
    "reader that loops": "reader = buffer.reader(); behind(lambda: [step for step in reader.steps()])",
    "reader in the middle of its steps": (
        "serve(); writer = buffer.writer('w'); writer.push(rlbuffer.testing.make_group(env='a'))\n"
        "steps = buffer.reader().steps(); print(next(steps).number)"
    ),
    "writer that takes": "writer = buffer.writer('w'); behind(lambda: writer.take('a'))",
    "batcher": "serve()",
}


@pytest.mark.parametrize(
    ("name", "url", "closes"),
    [
        *((name, "memory://", False) for name in PROGRAMS),
        *((name, None, False) for name in ("reader that waits", "reader in the middle of its steps", "batcher")),
        ("reader that waits", None, True),
    ],
)
def test_a_program_that_closes_nothing_ends(
    name: str, url: str | None, closes: bool, tmp_path: Path, server_binary: object
) -> None:
    program = BEGIN.format(url=url) + PROGRAMS[name]
    program += "\nbuffer.close()" * closes + "\nprint('main ends', flush=True)"
    # A hang is what fails here: nothing that is closed in order takes a tenth of this.
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"RLBUFFER_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("main ends\n")
    assert "Traceback" not in done.stderr
    assert "Fatal" not in done.stderr
