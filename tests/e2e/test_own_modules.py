"""Modules beside the config file are found by every process of a run, from whatever folder it is started; and none of
them needs a reader of what it says."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from homes import Home

PIPE_BYTES = 4096

OWN_SAMPLER = 'sampler = "own_sampler:OwnSampler"\nself_check = "always"\n'
SAMPLER = Path(__file__).parents[2] / "docs" / "examples" / "own_sampler.py"
MODULE = """\
from rlbuffer.worker.envs import BUILT_IN


def make(**options):
    return BUILT_IN["vcopy"](**options)




def estimate(rewards, lengths, group):
    return rewards - rewards.mean()


def loss(tokens, options):
    return -tokens.advantages * tokens.ratio
"""


@pytest.fixture
def reader(home: Home) -> Iterator[int]:
    """Reader of the log "unread", a pipe that is full: it is there, and does not read."""
    os.mkfifo(home.path / "unread.log")
    reader = os.open(home.path / "unread.log", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(home.path / "unread.log", os.O_WRONLY)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.write(writer, bytes(PIPE_BYTES))
    yield reader
    os.close(writer)
    os.close(reader)


def test_a_run_that_nobody_reads_finds_the_modules_beside_its_config_in_every_process(home: Home, reader: int) -> None:
    project = home.path / "project"
    project.mkdir()
    (project / "of_the_run.py").write_text(MODULE)
    shutil.copy(SAMPLER, project)
    text = home.config(world_size=1, steps=2).read_text()
    text = text.replace('advantage = "grpo"', 'advantage = "of_the_run:estimate"')
    text = text.replace("[trainer]\n", '[trainer]\nloss = { name = "of_the_run:loss" }\n')
    text = text.replace('[worker.vcopy]\nenv = "vcopy"\n', '[worker.vcopy]\nenv = "of_the_run:make"\n' + OWN_SAMPLER)
    text = text.replace(
        '[worker.repeat]\nenv = "repeat"\n',
        '[worker.repeat]\nenv = "of_the_run:make"\nenv_options = { name = "repeat" }\n',
    )
    config = project / "own.toml"
    config.write_text(text)
    process = home.start("run", config, "--display", "plain", log="unread")
    (home.path / "unread.log").unlink()  # a test that fails reads every log
    code = home.ended(process, 200)
    said = (home.path / "runs" / "tiny" / "run.log").read_text()
    assert (code, [record["step"] for record in home.metrics()]) == (0, [1, 2]), said
    assert "starting it again" not in said
    assert os.read(reader, 2 * PIPE_BYTES) == bytes(PIPE_BYTES)
