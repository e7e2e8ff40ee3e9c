"""A reader that leaves (`rlbuffer inspect | head -1`): the command ends there, quietly, with one exit code. One that
works for a run goes on."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_runs import Run

from rlbuffer.records.policy_version import PolicyVersion
from rlbuffer_cli.options import EXIT_CLOSED_PIPE


@pytest.fixture(scope="module")
def run(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    made = Run(redis_url, tmp_path_factory.mktemp("run"))
    made.step("a.0", "b.0")
    made.push("a.1")
    yield made
    made.close()


def ended(arguments: list[str], folder: Path, *, closed: str) -> tuple[int, str]:
    """Runs `rlbuffer` with a pipe for the stream `closed` whose reader has left. -> exit code, the other stream."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {closed: writer}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLBUFFER_")}
    with subprocess.Popen(
        [sys.executable, "-m", "rlbuffer_cli", *arguments],
        cwd=folder,
        env={**environment, "RLBUFFER_HOME": str(folder / "home")},
        **streams,
    ) as process:
        os.close(writer)
        out, err = process.communicate(timeout=120)
    return process.returncode, ((out or b"") + (err or b"")).decode()


@pytest.mark.server
@pytest.mark.parametrize(
    "words",
    [["inspect"], ["inspect", "a.1", "--html", "-"], ["export", "-o", "-"]],
    ids=" ".join,
)
def test_a_command_without_a_reader_ends_quietly(run: Run, tmp_path: Path, words: list[str]) -> None:
    code, said = ended([*words, "--redis", run.url, "--run", run.store.run], tmp_path, closed="stdout")
    assert (code, said) == (EXIT_CLOSED_PIPE, "")


@pytest.mark.parametrize(
    ("words", "closed"), [("--help", "stdout"), ("inspect", "stderr"), ("inspect --nosuch", "stderr")]
)
def test_so_does_one_that_asks_no_server_and_one_that_cannot_say_its_error(
    tmp_path: Path, words: str, closed: str
) -> None:
    assert ended(words.split(), tmp_path, closed=closed) == (EXIT_CLOSED_PIPE, "")


@pytest.mark.server
def test_a_reader_that_takes_one_line_gets_it(run: Run, tmp_path: Path) -> None:
    """As `rlbuffer top --json | head -1`, which would go on for ever."""
    command = [sys.executable, "-m", "rlbuffer_cli", "top", "--json", "--every", "0.1", "--redis", run.url]
    with subprocess.Popen(
        [*command, "--run", run.store.run], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b'{"schema"')
        process.stdout.close()
        assert (process.wait(timeout=60), process.stderr.read()) == (EXIT_CLOSED_PIPE, b"")


@pytest.mark.server
def test_a_batcher_whose_reader_took_one_line_goes_on(redis_url: str, tmp_path: Path) -> None:
    made = Run(redis_url, tmp_path / "home")
    attempt = made.store.attempt(uuid="u", world_size=1, resume_step=0)
    made.store.announce(attempt.number, PolicyVersion(version=0))
    (tmp_path / "rlbuffer.toml").write_text("[batcher]\nrow_tokens = 64\nstep_groups = 1\nlookahead = 9\nmax_age = 9\n")
    command = [sys.executable, "-m", "rlbuffer_cli", "serve", "--redis", redis_url, "--run", made.store.run]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() != b""
        process.stdout.close()
        for number in range(3):
            made.push(f"a.{number}")
            deadline = time.monotonic() + 20
            while made.store.meta().step <= number and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        assert made.store.meta().step == 3
        process.send_signal(signal.SIGTERM)
        assert (process.wait(timeout=60), process.stderr.read()) == (0, b"")
    made.close()


@pytest.mark.parametrize(
    ("words", "closed", "said"),
    [
        (["--version"], ">&-", ""),
        (["inspect", "--nosuch"], "2>&-", ""),
        (["--version"], "<&- 2>&-", "rlbuffer "),
    ],
    ids=str,
)
def test_a_command_whose_streams_were_closed_before_it_began_does_its_work(
    tmp_path: Path, words: list[str], closed: str, said: str
) -> None:
    command = shlex.join([sys.executable, "-m", "rlbuffer_cli", *words])
    ended = subprocess.run(f"exec {command} {closed}", shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (2 if "--nosuch" in words else 0, "")
    assert ended.stdout.startswith(said)
    assert bool(ended.stdout) == bool(said)
