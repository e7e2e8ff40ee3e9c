"""`mb.backward(loss)` on two DDP ranks: the gradient of one process that knows of no ranks."""

from __future__ import annotations

import shutil

import backward_ranks
import torch
from homes import Home
from own_ranks import started

from rlbuffer.testing import make_group

CONFIG = """
run = "backward"

[batcher]
row_tokens = 64
step_groups = 1
"""


def test_two_ddp_ranks_have_the_gradient_of_one_process(home: Home) -> None:
    """Three rollouts of a row each on two ranks: one of these has a micro-batch in which nothing is trained."""
    shutil.copy(backward_ranks.__file__, home.path)
    config = home.path / "backward.toml"
    config.write_text(CONFIG)
    home.start("serve", "--config", config, "--display", "plain", log="serve")
    with home.connect("backward") as buffer:
        buffer.writer("w").push(make_group(env="math", lengths=[40] * 3))
        places = buffer.store.server()["address"], "backward", home.path
        ranks = started(home, "backward_ranks", *places, ranks=2)
        assert [home.ended(process, 100) for process in ranks] == [0, 0], home.logs()
        first, second = (torch.load(home.path / f"{rank}.pt") for rank in range(2))
        assert torch.equal(first["gradient"], second["gradient"])
        assert first["batches"] == second["batches"] == 2
        assert first["dummies"] + second["dummies"] == 1

        model, plain = backward_ranks.model(), backward_ranks.model()
        for step in buffer.reader(timeout_seconds=60.0).steps(1, last=1):
            for micro_batch in step:
                mb = micro_batch.to("cpu")
                backward_ranks.loss_of(plain, mb).backward()
                mb.backward(backward_ranks.loss_of(model, mb))
    expected = backward_ranks.gradient(plain)
    assert float(expected.abs().max()) > 1e-4
    assert torch.equal(backward_ranks.gradient(model), expected)
    assert torch.allclose(first["gradient"], expected, rtol=1e-9, atol=1e-12)
