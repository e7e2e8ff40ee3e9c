"""Commands that look import only what they use: each is a process of its own, and most of its time is imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_runs import Run

HEAVY = {"torch", "transformers", "safetensors", "textual", "jinja2", "matplotlib", "fakeredis"}
ROOMS = {f"rlbuffer.{room}" for room in ("batcher", "daemon", "scorer", "trainer", "weights", "worker")}
"""Rooms that decide, sample and train."""
PROGRAM = """
import sys
from rlbuffer_cli.main import main
assert main(sys.argv[1:]) == 0
print(*sorted({".".join(name.split(".")[:2]) for name in sys.modules}), file=sys.stderr)
"""


@pytest.mark.server
@pytest.mark.parametrize("command", [("inspect", "a.3/0"), ("top", "--once")], ids=" ".join)
def test_a_command_that_looks_loads_nothing_that_decides_samples_or_trains(
    command: tuple[str, ...], redis_url: str, tmp_path: Path
) -> None:
    run = Run(redis_url, tmp_path)
    run.step("a.0")
    run.push("a.3", version=1)
    named = (*command, "--run", run.store.run, "--redis", redis_url)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLBUFFER_")}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *named], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    run.close()
    assert result.returncode == 0, result.stderr
    loaded = set(result.stderr.splitlines()[-1].split())
    assert {"rlbuffer.store", "redis"} <= loaded
    assert loaded & (HEAVY | ROOMS) == set()


def test_settings_are_shown_without_a_server_and_without_the_rooms_that_they_are_for(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLBUFFER_")}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, "config", "show"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    loaded = set(result.stderr.splitlines()[-1].split())
    assert loaded & (HEAVY | ROOMS | {"redis", "msgpack", "rlbuffer.client", "rlbuffer.packing"}) == set()
