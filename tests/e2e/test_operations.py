"""Operations on real processes: SIGHUP, a terminal that goes away, settings changed again and again under a leader."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

from homes import Home

SETTINGS = """
run = "ops"

[batcher]
row_tokens = 64
step_groups = 2
max_age = {max_age}
"""


def write(home: Home, text: str) -> Path:
    path = home.path / "ops.toml"
    path.write_text(text)
    return path


def test_hangup_gives_the_run_what_the_file_says_and_a_bad_file_changes_nothing(home: Home) -> None:
    config = write(home, SETTINGS.format(max_age=4))
    serve = home.start("serve", "--config", config, log="serve")
    said = home.path / "serve.log"
    home.wait_until(lambda: "waiting:" in said.read_text(), seconds=90, why="serving")
    write(home, SETTINGS.format(max_age=2))
    serve.send_signal(signal.SIGHUP)
    taken = "settings: revision 2 from step 1 on: batcher.max_age: 4 -> 2"
    home.wait_until(lambda: taken in said.read_text(), seconds=60, why="the new settings")
    write(home, SETTINGS.format(max_age=-1))
    serve.send_signal(signal.SIGHUP)
    home.wait_until(lambda: "ops.toml:7  batcher.max_age = -1" in said.read_text(), seconds=60, why="the refusal")
    assert "the old ones go on" in said.read_text()
    write(home, SETTINGS.format(max_age=2))
    serve.send_signal(signal.SIGHUP)
    home.wait_until(lambda: "settings: nothing is new" in said.read_text(), seconds=60, why="the same settings again")
    with home.connect("ops") as buffer:
        meta = buffer.store.meta()
        assert (meta.revision, meta.config["max_age"]) == (2, 2)
    assert serve.poll() is None
    serve.send_signal(signal.SIGTERM)
    assert home.ended(serve, 60) == 0, home.logs()


def test_a_serve_whose_terminal_is_gone_stops_instead_of_reading_its_file_again(home: Home) -> None:
    config = write(home, SETTINGS.format(max_age=1))
    master, slave = pty.openpty()
    with (home.path / "serve.log").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlbuffer_cli", "serve", "--config", str(config)],
            env=home.environment,
            cwd=home.path,
            stdin=slave,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    home.processes.append(process)
    os.close(slave)
    home.wait_until(
        lambda: "waiting:" in (home.path / "serve.log").read_text(), seconds=90, why="serving in a terminal"
    )
    os.close(master)
    process.send_signal(signal.SIGHUP)
    assert home.ended(process, 60) == 0, home.logs()
    assert "stopped; groups and steps stay on the server." in (home.path / "serve.log").read_text()
