"""Modules beside the config file are found by every process of a run, from whatever folder it is started."""

from __future__ import annotations

import shutil
from pathlib import Path

from homes import Home

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


def test_a_run_finds_the_modules_beside_its_config_in_every_process(home: Home) -> None:
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
        '[worker.repeat]\nenv = "of_the_run:make"\nenv_options = { name = "repeat" }\ngpus = [0]\n',
    )
    config = project / "own.toml"
    config.write_text(text)
    run = home.call("run", config, "--display", "plain", timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    assert [record["step"] for record in home.metrics()] == [1, 2]
