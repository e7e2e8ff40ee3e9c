"""A reader that leaves (`rlbuffer inspect | head -1`): the command ends there, quietly, with one exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_runs import Run

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
    [
        *(["inspect"], ["inspect", "--json"], ["inspect", "a.1"], ["inspect", "--steps"], ["inspect", "--html", "-"]),
        *(["export", "-o", "-"], ["verify"], ["top", "--json"], ["runs"], ["plot", "fill"], ["doctor"]),
    ],
    ids=" ".join,
)
def test_a_command_without_a_reader_ends_quietly(run: Run, tmp_path: Path, words: list[str]) -> None:
    code, said = ended([*words, "--redis", run.url, "--run", run.store.run], tmp_path, closed="stdout")
    assert (code, said) == (EXIT_CLOSED_PIPE, "")


@pytest.mark.parametrize(
    "words", [["--help"], ["inspect", "--help"], ["--version"], ["config", "example"], ["config", "show"]], ids=" ".join
)
def test_so_does_one_that_asks_no_server(tmp_path: Path, words: list[str]) -> None:
    assert ended(words, tmp_path, closed="stdout") == (EXIT_CLOSED_PIPE, "")


@pytest.mark.parametrize("words", [["inspect"], ["inspect", "--nosuch"]], ids=" ".join)
def test_and_one_that_cannot_say_its_error(tmp_path: Path, words: list[str]) -> None:
    assert ended(words, tmp_path, closed="stderr") == (EXIT_CLOSED_PIPE, "")


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
