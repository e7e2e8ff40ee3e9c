"""One rank of :mod:`test_drift_over_ranks`: trains one step several ways and leaves the table by age behind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from samples import sample_of

from rlbuffer.config.trainer import TrainerSettings
from rlbuffer.packing.assembly import PackItem, assemble
from rlbuffer.process.ranks import Ranks
from rlbuffer.records.micro_batch import Step
from rlbuffer.records.rollout import Rollout
from rlbuffer.records.spans import VersionSpan
from rlbuffer.records.step_plan import Normalizers
from rlbuffer.records.support import NO_TOKEN, SUPPORT
from rlbuffer.trainer.model.packed_policy import prepare
from rlbuffer.trainer.ranks.parallel import distribute
from rlbuffer.trainer.update.drift import Drift, drift_of
from rlbuffer.trainer.update.update import Updates, make_optimizer, take_step
from rlbuffer.weights.model import TINY_QWEN3, model_from_config

WORLD_SIZE, STEP, ROW_TOKENS, SIZE = 2, 9, 64, 13
ROWS = [[[(0, 1), (2,)], [(3, 4)]], [[(5, 6, 7)], [(8,), (9, 10)]], [[(11,)], [()]]]
"""``ROWS[micro_step][rank]``: rows of rollouts; rank 1 has a dummy at the end."""
LOSSES: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({"name": "clip"}, {}),
    ({"name": "icepop", "correction": {"icepop": {"low": 0.8, "high": 1.4}}}, {}),
    ({"name": "icepop", "correction": {"icepop": {"low": 0.8, "high": 1.4}}}, {"passes": 2}),
]
"""Of the loss, and of the optimizer."""


def rollouts() -> list[Rollout]:
    """Of several turns, each sampled by a version of its own: ages 0 to 8. Some have a record of restricted sampling,
    some of these not for every token."""
    rng, made = np.random.default_rng(3), []
    for i in range(12):
        length = int(rng.integers(8, 20))
        tokens, mask = rng.integers(0, SIZE, length), rng.random(length) < 0.7
        mask[0], mask[1] = False, True
        cut = int(rng.integers(3, length - 2))
        first, second = sorted(int(v) for v in rng.integers(0, STEP, 2))
        spans = (VersionSpan(first, 1, cut), VersionSpan(second, cut, length))
        columns = {}
        if i % 3 == 0:
            rows = np.argsort(rng.random((length, SIZE)), axis=1)[:, :5].astype(np.int32)
            rows[:, 0] = tokens
            rows[rng.random(length) < 0.2] = NO_TOKEN
            columns[SUPPORT] = rows
        made.append(
            Rollout(
                tokens=tokens,
                loss_mask=mask,
                logprobs=np.where(mask, rng.normal(-2.5, 0.4, length).clip(max=0), 0.0),
                version_spans=spans,
                reward=float(rng.random()),
                columns=columns,
            )
        )
    return made


def advantage_of(number: int) -> float:
    return (-1.0, 0.0, 1.5)[number % 3]


def step_of(rank: int, world_size: int) -> Step:
    """This rank's part; all of it for one rank."""
    made = rollouts()
    items = [
        PackItem(
            rollout=rollout,
            sample=sample_of(
                str(i),
                length=rollout.length,
                advantage=advantage_of(i),
                policy_versions=(rollout.min_policy_version, rollout.max_policy_version),
                rollout_loss_tokens=rollout.loss_tokens,
            ),
        )
        for i, rollout in enumerate(made)
    ]
    counts = Normalizers(loss_tokens=sum(r.loss_tokens for r in made), rollouts=len(made), groups=4)
    rows = [parts[rank] if world_size > 1 else [row for part in parts for row in part] for parts in ROWS]
    return Step(
        number=STEP,
        epoch=0,
        digest="",
        world_size=world_size,
        micro_batches=assemble(rows, items, row_tokens=ROW_TOKENS, normalizers=counts, pad_to_multiple_of=4),
        normalizers=counts,
        rollouts=len(made),
        groups=4,
    )


def tables(rank: int, world_size: int, way: Any = "ddp") -> list[dict[str, Any]]:
    """The table by age for each of :data:`LOSSES`."""
    told, ranks = [], Ranks(rank, world_size, torch.device("cpu"))
    for loss, optimizer in LOSSES:
        torch.manual_seed(0)
        policy = prepare(model_from_config(TINY_QWEN3, dtype=torch.float64))
        module = distribute(policy, ranks, parallel=way)
        settings, drift = TrainerSettings(loss=loss, optimizer=optimizer), Drift()
        updates = Updates(module, step_of(rank, world_size), settings, ranks, longest=ROW_TOKENS, drift=drift)
        steps = make_optimizer(policy, settings.optimizer)
        for part in updates.parts:
            updates.accumulate(part)
            take_step(policy, steps, learning_rate=1e-2, gradient_clip=1.0, step=STEP)
        told.append(drift_of(ranks.sum(drift.sums)))
    return told


def bfloat16_rms(rank: int, world_size: int, way: Any = "ddp") -> list[float | None]:
    """What bfloat16 changes in a model of float32, and in one of it that computes in bfloat16."""
    told, ranks = [], Ranks(rank, world_size, torch.device("cpu"))
    for compute in (None, torch.bfloat16):
        torch.manual_seed(0)
        policy = prepare(model_from_config(TINY_QWEN3), compute=compute)
        module = distribute(policy, ranks, parallel=way)
        updates = Updates(module, step_of(rank, world_size), TrainerSettings(), ranks, longest=ROW_TOKENS)
        told.append(updates.bfloat16_rms())
        assert policy.compute == compute
    return told


def run_rank(rank: int, folder: str) -> None:
    """What every rank leaves in `folder`: ``RANK.json``, under DDP and under FSDP2."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    ways = ("ddp", "fsdp")
    told = {way: [tables(rank, WORLD_SIZE, way), bfloat16_rms(rank, WORLD_SIZE, way)] for way in ways}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), sys.argv[2])
    os._exit(0)  # as a rank of the trainer ends: threads of gloo outlive main, and may abort the process
