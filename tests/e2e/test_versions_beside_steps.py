"""Ranks that share a model train the next step while a version is written, which has the weights of its own step."""

from __future__ import annotations

from pathlib import Path

import late_publishing
import pytest
import torch
from homes import Home
from own_ranks import started
from safetensors.torch import load_file

from rlbuffer.weights.layout import versions

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_version_has_the_weights_of_its_step_bit_for_bit(home: Home, parallel: str, dtype: str) -> None:
    script = Path(late_publishing.__file__)
    (home.path / script.name).write_text(script.read_text())
    output = home.path / "out"
    output.mkdir()
    for process in started(home, script.stem, output, dtype, parallel, ranks=2):
        assert process.wait(600) == 0, "\n".join(file.read_text() for file in home.path.glob("*.log"))
    states = []
    for step in range(1, late_publishing.STEPS + 1):
        (directory,) = versions(output / "weights")[step]
        ours, theirs = load_file(directory / "model.safetensors"), load_file(output / f"step-{step}")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), f"version {step}"
        states.append(theirs)
    assert not all(torch.equal(states[0][name], states[1][name]) for name in states[0])
