"""A loss that draws random numbers is resumed exactly on two ranks, which draw different amounts."""

from __future__ import annotations

from homes import Home

LOSS = """\
import random

import numpy as np
import torch


def loss(tokens, options):
    noise = torch.rand_like(tokens.logprobs)
    for _ in range(len(noise)):
        random.random(), np.random.random()
    return -tokens.advantages * tokens.ratio * (noise + random.random() + np.random.random())
"""
COMPARED = ("loss", "grad_norm", "parameters_sha256")


def test_a_resumed_run_draws_on_every_rank_what_an_undisturbed_one_draws(home: Home) -> None:
    (home.path / "drawing.py").write_text(LOSS)
    config = home.config(world_size=2, checkpoint_every=2)
    config.write_text(config.read_text().replace("[trainer]\n", '[trainer]\nloss = { name = "drawing:loss" }\n'))

    def trained(output: str, *steps: int) -> list[tuple[object, ...]]:
        for last in steps:
            arguments = ("train", "--config", config, "--fake-data", "--steps", str(last), "--display", "none")
            ended = home.call(*arguments, "--output", home.path / output, timeout=240)
            assert ended.returncode == 0, ended.stdout + ended.stderr
        return [tuple(record[name] for name in COMPARED) for record in home.metrics(folder=home.path / output)]

    assert trained("halves", 2, 4) == trained("whole", 4)
