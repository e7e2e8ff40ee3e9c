"""Every loss on a GPU, over packed rows: the gradients of one process on the CPU that packs nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gradient_ranks import COUNT, LOSSES, Trainee, packed_step, unpacked_step, work

from rlbuffer.config.trainer import TrainerSettings
from rlbuffer.process.ranks import Ranks

SMOOTH = ("clip", "dr_grpo", "ratio")
"""Losses that choose no tokens among all, and in which a rounding error moves no token far."""
ORDER = [int(i) for i in np.random.default_rng(3).permutation(COUNT)]
ROWS = [[[ORDER[i : i + 3]]] for i in range(0, COUNT, 3)]
"""Three rollouts to a row, one row to a micro-batch."""


def relative(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("dtype", "compute", "tolerance"),
    [("float64", None, 1e-6), ("float32", None, 1e-5), ("float32", torch.bfloat16, 5e-2)],
)
def test_gradients_on_a_gpu_are_those_of_a_process_on_the_cpu_that_packs_nothing(
    dtype: str, compute: torch.dtype | None, tolerance: float
) -> None:
    """In float64 rotary tables are still float32, and their cosines are not a CPU's to the bit."""
    plain = Trainee("float64", 1)
    packed = Trainee(dtype, 1, "cuda", compute=compute)
    packed.reset()
    found = {}
    for loss in LOSSES:
        if compute is not None and loss["name"] not in SMOOTH:
            continue
        terms = {"kl_beta": 0.1, "entropy_bonus": 0.01} if compute is None else {"kl_beta": 0.1}
        settings = TrainerSettings(loss=loss | terms)
        ours = work(packed, packed_step(ROWS, 0, 1), Ranks(0, 1, torch.device("cuda", 0)), settings)
        expected = work(plain, unpacked_step([range(COUNT)]), Ranks(0, 1, torch.device("cpu")), settings)
        assert ours["counts"] == expected["counts"]
        found[loss["name"]] = relative(ours["gradients"][0], expected["gradients"][0])
    print({name: f"{value:.1e}" for name, value in found.items()})
    assert max(found.values()) <= tolerance, found
