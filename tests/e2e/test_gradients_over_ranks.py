"""Two gloo ranks, packed, accumulated, with dummies: the gradients of one process that packs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gradient_ranks
import numpy as np
from forked import Parent
from gradient_ranks import COUNT, LOSSES, Rows, Trainee, unpacked_step, work

TERMS = {"kl_beta": 0.1, "entropy_bonus": 0.01}
SEVERAL = {"passes": 2, "updates_per_pass": 2}
"""Two passes over two slices."""
Job = tuple[str, dict[str, Any], dict[str, int]]
"""Type, settings of the loss, and of the optimizer."""
WORLD_SIZE = 2
JOBS: list[Job] = [
    *[("float64", TERMS | loss, {}) for loss in LOSSES],
    ("float32", TERMS | {"name": "clip"}, {}),
    ("float64", TERMS | {"name": "decoupled"}, SEVERAL),
    ("float64", TERMS | {"name": "kl_cov"}, SEVERAL),
]
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


def rows_of_ranks() -> Rows:
    """Three micro-steps, the last one with a single row: everybody else has a dummy there."""
    order = [int(i) for i in np.random.default_rng(WORLD_SIZE).permutation(COUNT - 1)]
    full = [order[i :: 2 * WORLD_SIZE] for i in range(2 * WORLD_SIZE)]
    rows = [_split(full[:WORLD_SIZE]), _split(full[WORLD_SIZE:]), [[[]] for _ in range(WORLD_SIZE)]]
    rows[2][-1] = [[COUNT - 1]]
    return rows


def _split(parts: list[list[int]]) -> list[list[list[int]]]:
    """Rollouts of a rank as rows of at most two."""
    return [[part[i : i + 2] for i in range(0, len(part), 2)] or [[]] for part in parts]


def train(parent: Parent, folder: Path) -> list[list[dict[str, Any]]]:
    """Runs the ranks. -> what each of them tells of each job."""
    work = json.dumps([WORLD_SIZE, str(folder), JOBS, rows_of_ranks()])
    ranks = [
        parent.start([gradient_ranks.__file__, str(rank), work], environment=parent.environment, folder=folder)
        for rank in range(WORLD_SIZE)
    ]
    try:
        for rank in ranks:
            out, errors = rank.communicate(timeout=150)
            assert rank.returncode == 0, out + errors
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def slices(several: bool) -> list[list[int]]:
    """The rollouts of each update, as the ranks together train them."""
    steps = [sorted(i for rank in step for row in rank for i in row) for step in rows_of_ranks()]
    return [steps[0], steps[1] + steps[2]] if several else [steps[0] + steps[1] + steps[2]]


def relative(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))


def test_gradients_over_ranks_are_those_of_one_process_that_packs_nothing(parent: Parent, tmp_path: Path) -> None:
    from rlbuffer.config.trainer import TrainerSettings
    from rlbuffer.process.ranks import Ranks

    told = train(parent, tmp_path)
    import torch

    trainees = {dtype: Trainee(dtype, 1) for dtype in TOLERANCE}
    for number, (dtype, loss, optimizer) in enumerate(JOBS):
        name = f"{loss} {optimizer} {dtype}"
        several = bool(optimizer)
        everybody = [rank[number] for rank in told]
        assert all(rank["digests"] == everybody[0]["digests"] for rank in everybody), name  # equal to the bit
        step = unpacked_step(slices(several))
        expected = work(
            trainees[dtype], step, Ranks(0, 1, torch.device("cpu")), TrainerSettings(loss=loss, optimizer=optimizer)
        )
        assert everybody[0]["counts"] == expected["counts"], name
        ours = np.load(tmp_path / f"{number}.npz")
        assert relative(ours["gradient0"], expected["gradients"][0]) <= TOLERANCE[dtype], name
        # Every later update starts from parameters that Adam has moved: its quotient makes more of what is rounded.
        for i, gradient in enumerate(expected["gradients"][1:], 1):
            assert relative(ours[f"gradient{i}"], gradient) <= 1e-8, name
        if dtype == "float64":
            assert relative(ours["parameters"], expected["parameters"]) <= 1e-9, name
